"""How a process writes its log: lines for people, or a JSON object a line for a collector.

A line about one request carries names to join it by: `request_id` is the client's own, or what the
router made up, and what answers call x-request-id; `attempt_id` is what workers know one try as.
They are the same in both forms, and in the logs of router and workers.
"""

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_FIELDS = "pdserve"  # the attribute of a log record that `about` sets


def about(**fields: Any) -> dict[str, Any]:
    """Fields of a line, as `extra` of a logging call. They are in a JSON line alone: the message
    says to people what they need."""
    return {_FIELDS: fields}


def formatter(log_format: LogFormat) -> logging.Formatter:
    return _JsonFormatter() if log_format == "json" else logging.Formatter(_TEXT)


def use_format(log_format: LogFormat) -> None:
    """Of all that this process logs from now on, wherever it goes."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter(log_format))


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields: Mapping[str, Any] = getattr(record, _FIELDS, {})
        line.update({key: value for key, value in fields.items() if key not in line})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
