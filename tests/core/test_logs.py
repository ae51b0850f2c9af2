"""What a collector of logs gets."""

import json
import logging

from core.logs import about, formatter


def record(level: int, message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    logger = logging.getLogger("test")
    return logger.makeRecord("router.x", level, __file__, 1, message, arguments, None, extra=extra)


def test_a_json_line_has_the_message_and_the_ids_of_its_request():
    text = formatter("json").format(
        record(logging.WARNING, "attempt %s failed\nbadly", "a1",
               **about(request_id='r"1', attempt_id="a1", num_tokens=3, message="no"))
    )  # fmt: skip
    assert "\n" not in text
    line = json.loads(text)
    assert line.pop("time").endswith("+00:00")
    assert line == {"level": "warning", "logger": "router.x", "message": "attempt a1 failed\nbadly",
                    "request_id": 'r"1', "attempt_id": "a1", "num_tokens": 3}  # fmt: skip


def test_an_exception_is_one_field():
    try:
        raise ValueError("why")
    except ValueError as error:
        failed = record(logging.ERROR, "it failed")
        failed.exc_info = (ValueError, error, error.__traceback__)
    line = json.loads(formatter("json").format(failed))
    assert line["exception"].endswith("ValueError: why") and "\n" in line["exception"]


def test_a_line_for_people_has_the_message_alone():
    text = formatter("text").format(record(logging.INFO, "it runs", **about(request_id="r1")))
    assert text.endswith(" INFO router.x: it runs")
