import asyncio
import contextlib

from cli.log_tail import _MAX_READ, tail_logs


async def test_new_lines_are_written_once_and_whole_with_their_file(tmp_path):
    written: list[str] = []
    (tmp_path / "controller.log").write_text("shown elsewhere\n")
    (tmp_path / "prefill-0.log").write_text("one\ntw")
    task = asyncio.create_task(tail_logs(tmp_path, written.append, frozenset({"controller.log"})))
    try:
        async with asyncio.timeout(10):
            while not written:
                await asyncio.sleep(0.01)
            assert written == ["[prefill-0] one"]
            with (tmp_path / "prefill-0.log").open("a") as file:
                file.write("o\n")
            (tmp_path / "router.log").write_text("x" * (_MAX_READ + 5) + "\n")
            while len(written) < 4:
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    expected = ["[prefill-0] two", "[router] xxxxx", "[router] " + "x" * _MAX_READ]
    assert sorted(written[1:]) == sorted(expected)
