import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError

import pytest

from core.config import EngineConfig
from core.errors import EngineError
from engine.engine import Engine
from engine.loop import EngineLoop
from engine.types import SequenceOutput
from support.mock_model import MockModel, make_request

WAIT = 30.0  # only ever reached by a bug


class Harness:
    def __init__(self, pace: float = 0.0) -> None:
        self.model = MockModel()
        self.engine = Engine(self.model, EngineConfig(block_size=4), num_kv_blocks=32)
        self.outputs: queue.Queue[list[SequenceOutput]] = queue.Queue()
        self.crash: queue.Queue[BaseException] = queue.Queue()
        self.num_steps = 0
        self.before_step = lambda: None
        step = self.engine.step

        def counted(before_model: Callable[[], None]) -> list[SequenceOutput]:
            self.num_steps += 1
            self.before_step()
            return step(before_model)

        self.engine.step = counted  # type: ignore[method-assign]
        self.prompt_is_read = False
        self.loop = EngineLoop(
            self.engine, self.outputs.put, self.crash.put, pace, lambda: self.prompt_is_read
        )

    def add(self, name: str, **sampling) -> None:
        request = make_request(name, [1, 2, 3], **sampling)
        self.loop.call(lambda engine: engine.add(request)).result(WAIT)

    def wait_until_idle(self) -> None:
        """A call's result is out a moment before the thread sleeps again."""
        deadline = time.monotonic() + WAIT
        while self.loop.seconds_since_progress() != 0:
            assert time.monotonic() < deadline, "the loop never became idle"
            time.sleep(0.001)

    def finish(self, name: str) -> list[int]:
        tokens: list[int] = []
        while True:
            for output in self.outputs.get(timeout=WAIT):
                if output.request_id == name:
                    tokens += output.token_ids
                    if output.finish_reason is not None:
                        return tokens


@pytest.fixture
def harness():
    harness = Harness()
    harness.loop.start()
    yield harness
    harness.before_step = lambda: None
    assert harness.loop.stop(WAIT)
    harness.engine.check_integrity()


def test_outputs_come_once_a_step_in_one_list(harness):
    names = ["a", "b"]
    requests = [make_request(name, [1, 2, 3], max_tokens=3) for name in names]
    harness.loop.call(lambda engine: [engine.add(r) for r in requests]).result(WAIT)
    steps = [harness.outputs.get(timeout=WAIT) for _ in range(3)]
    assert [[o.request_id for o in outputs] for outputs in steps] == [names] * 3
    assert [[o.admitted for o in outputs] for outputs in steps] == [[True] * 2] + [[False] * 2] * 2
    assert [[len(o.token_ids) for o in outputs] for outputs in steps] == [[1] * 2] * 3
    harness.loop.call(lambda engine: None).result(WAIT)
    assert harness.outputs.empty()


def test_an_admission_that_a_peer_waits_for_comes_when_the_model_begins(harness):
    forward, seen = harness.model.forward, []

    def watched(*args):
        seen.append(harness.outputs.qsize())
        return forward(*args)

    harness.model.forward = watched
    held, own = make_request("held", [1, 2, 3]), make_request("own", [1, 2, 3], max_tokens=1)
    harness.loop.call(lambda engine: (engine.add_prefill(held), engine.add(own))).result(WAIT)
    harness.loop.call(lambda engine: None).result(WAIT)  # behind the step
    (early,) = harness.outputs.get(timeout=WAIT)
    assert seen == [1] and early.admitted and early.request_id == "held" and early.block_table
    outputs = {output.request_id: output for output in harness.outputs.get(timeout=WAIT)}
    assert {name: output.admitted for name, output in outputs.items()} == {
        "held": False, "own": True,
    }  # fmt: skip
    harness.loop.call(lambda engine: engine.release("held")).result(WAIT)


def test_a_steps_outputs_come_when_the_model_begins_the_next_one(harness):
    forward, seen = harness.model.forward, []

    def watched(*args):
        seen.append(harness.outputs.qsize())
        return forward(*args)

    def at_the_start_of_a_step():
        seen.append(harness.outputs.qsize())

    harness.model.forward, harness.before_step = watched, at_the_start_of_a_step
    harness.add("r", max_tokens=3)
    harness.wait_until_idle()
    # Before each step, and when its model begins.
    assert seen == [0, 0, 0, 1, 1, 2]
    assert harness.outputs.qsize() == 3  # the last ones at once: no step follows


def test_a_steps_outputs_come_before_a_call_that_was_made_meanwhile(harness):
    seen = []

    def call() -> None:
        harness.before_step = lambda: None
        harness.loop.call(lambda engine: seen.append(harness.outputs.qsize()))

    harness.before_step = call
    harness.add("r", max_tokens=3)
    harness.wait_until_idle()
    assert seen == [1]  # the first token


def test_calls_run_on_the_engine_thread_in_order(harness):
    order: list[int] = []
    threads = [
        harness.loop.call(lambda engine, i=i: (order.append(i), threading.current_thread().name)[1])
        for i in range(20)
    ]
    assert {future.result(WAIT) for future in threads} == {"engine"}
    assert order == list(range(20))


def test_a_call_that_raises_fails_alone(harness):
    future = harness.loop.call(lambda engine: engine.start_decode("nobody", 1))
    with pytest.raises(EngineError, match="nobody"):
        future.result(WAIT)
    with pytest.raises(SystemExit):
        harness.loop.call(lambda engine: exit(3)).result(WAIT)
    harness.add("r", max_tokens=2)
    assert len(harness.finish("r")) == 2


def test_a_call_runs_between_the_steps_of_a_long_request(harness):
    entered, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        entered.set()
        assert go_on.wait(WAIT)

    harness.before_step = pause
    harness.add("r", max_tokens=50)
    assert entered.wait(WAIT)
    abort = harness.loop.call(lambda engine: engine.abort("r"))
    assert not abort.done()
    go_on.set()
    abort.result(WAIT)
    assert harness.num_steps == 1


def test_nothing_is_stepped_while_all_that_is_left_waits_for_a_caller(harness):
    request = make_request("r", [1, 2, 3])
    harness.loop.call(lambda engine: engine.add_prefill(request)).result(WAIT)
    harness.outputs.get(timeout=WAIT)
    for _ in range(5):
        harness.loop.call(lambda engine: None).result(WAIT)
    assert harness.num_steps == 1
    harness.wait_until_idle()


def test_a_step_that_changes_nothing_is_not_repeated_until_a_call_comes(harness):
    held = make_request("held", range(100))  # 25 of 32 blocks
    late = make_request("late", [7] * 40, max_tokens=3)  # wants 10
    harness.loop.call(lambda engine: engine.add_prefill(held)).result(WAIT)
    harness.outputs.get(timeout=WAIT)
    harness.loop.call(lambda engine: engine.add(late)).result(WAIT)
    for _ in range(5):
        harness.loop.call(lambda engine: None).result(WAIT)
    # One for each call; the retry, once a second, may add a few on a machine that is busy.
    assert harness.num_steps < 5 + 7 + WAIT
    harness.wait_until_idle()  # it waits for a peer, it does not hang
    harness.loop.call(lambda engine: engine.release("held")).result(WAIT)
    assert len(harness.finish("late")) == 3


def test_progress_is_tied_to_steps_and_an_idle_engine_is_fine(harness):
    """V45."""
    assert harness.loop.seconds_since_progress() == 0
    entered, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        assert go_on.wait(WAIT)

    harness.before_step = hang
    harness.add("r", max_tokens=3)
    assert entered.wait(WAIT)
    first = harness.loop.seconds_since_progress()
    time.sleep(0.01)
    assert harness.loop.seconds_since_progress() > first
    go_on.set()
    harness.finish("r")
    harness.loop.call(lambda engine: None).result(WAIT)
    harness.wait_until_idle()


@pytest.fixture
def paced():
    harness = Harness(pace=1e6)
    harness.loop.start()
    yield harness
    assert harness.loop.stop(WAIT)


def test_decoding_leaves_the_cores_while_a_prompt_is_read_elsewhere(paced):
    paced.add("free", max_tokens=9)
    assert len(paced.finish("free")) == 9  # nobody reads
    paced.prompt_is_read = True
    before = paced.num_steps
    paced.add("r", max_tokens=9)
    # Its own prompt does not wait; the step's output is not held back by the pause behind it.
    (output,) = paced.outputs.get(timeout=WAIT)
    assert output.admitted and len(output.token_ids) == 1
    for _ in range(5):  # calls do not wait either
        paced.loop.call(lambda engine: None).result(WAIT)
    assert paced.num_steps == before + 1
    paced.add("late", max_tokens=9)
    outputs = paced.outputs.get(timeout=WAIT)
    assert {output.request_id for output in outputs} == {"r", "late"}
    assert paced.num_steps == before + 2
    paced.prompt_is_read = False
    paced.loop.call(lambda engine: None).result(WAIT)
    rest = [output for _ in range(8) for output in paced.outputs.get(timeout=WAIT)]
    assert sum(len(o.token_ids) for o in rest if o.request_id == "late") == 8


def test_a_step_that_only_admits_starts_no_pause(paced):
    paced.prompt_is_read = True
    request = make_request("r", [1, 2, 3], max_tokens=9)
    paced.loop.call(lambda engine: engine.add_remote(request)).result(WAIT)
    (admitted,) = paced.outputs.get(timeout=WAIT)
    assert admitted.block_table
    paced.loop.call(lambda engine: engine.start_decode("r", 4)).result(WAIT)
    (output,) = paced.outputs.get(timeout=WAIT)
    assert len(output.token_ids) == 1


def test_a_sequence_whose_kv_has_come_waits_for_no_pause(paced):
    paced.prompt_is_read = True
    for i, name in enumerate(("first", "second")):
        request = make_request(name, [1, 2, 3 + i], max_tokens=9)
        paced.loop.call(lambda engine, r=request: engine.add_remote(r)).result(WAIT)
        (admitted,) = paced.outputs.get(timeout=WAIT)
        assert admitted.request_id == name and admitted.block_table
    for num_running, name in enumerate(("first", "second"), start=1):
        paced.loop.call(lambda engine, n=name: engine.start_decode(n, 4)).result(WAIT)
        assert len(paced.outputs.get(timeout=WAIT)) == num_running
    num_steps = paced.num_steps
    paced.loop.call(lambda engine: None).result(WAIT)
    assert paced.num_steps == num_steps and paced.outputs.empty()  # both have had their turn


def test_a_pause_ends_with_the_loop(paced):
    paced.prompt_is_read = True
    paced.add("r", max_tokens=9)
    paced.outputs.get(timeout=WAIT)
    assert paced.loop.stop(WAIT)
    assert paced.num_steps == 1


def test_a_failing_step_is_an_output_and_no_crash(harness):
    harness.model.next_error = RuntimeError("boom")
    harness.add("r")
    (output,) = harness.outputs.get(timeout=WAIT)
    assert output.admitted and "boom" in output.error
    harness.add("r", max_tokens=2)
    assert len(harness.finish("r")) == 2
    assert harness.crash.empty()


def test_a_crash_is_told_once_and_fails_what_is_queued():
    harness = Harness()
    entered, go_on = threading.Event(), threading.Event()

    def explode() -> None:
        entered.set()
        assert go_on.wait(WAIT)
        raise MemoryError("scheduler")

    harness.before_step = explode
    harness.loop.start()
    harness.add("r")
    assert entered.wait(WAIT)
    queued = harness.loop.call(lambda engine: 1)
    go_on.set()
    assert isinstance(harness.crash.get(timeout=WAIT), MemoryError)
    with pytest.raises(EngineError, match="stopped"):
        queued.result(WAIT)
    with pytest.raises(EngineError, match="stopped"):
        harness.loop.call(lambda engine: 1).result(WAIT)
    assert harness.loop.stop(WAIT)
    assert harness.crash.empty()


def test_books_that_are_wrong_end_an_idle_engine_in_debug_mode(harness):
    harness.add("r", max_tokens=2)
    harness.finish("r")
    harness.wait_until_idle()
    harness.loop.call(lambda engine: engine.pool._empty.append(0)).result(WAIT)
    assert "twice in the free queue" in str(harness.crash.get(timeout=WAIT))
    harness.engine.pool._empty.pop()


def test_stop_ends_after_the_step_and_fails_queued_calls():
    harness = Harness()
    entered, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        assert go_on.wait(WAIT)

    harness.before_step = hang
    harness.loop.start()
    harness.add("r")
    assert entered.wait(WAIT)
    queued = harness.loop.call(lambda engine: 1)
    assert not harness.loop.stop(0.01)  # the step goes on
    with pytest.raises(EngineError, match="stopped"):
        queued.result(WAIT)
    go_on.set()
    assert harness.loop.stop(WAIT)
    assert harness.crash.empty()


def test_a_call_that_is_cancelled_before_its_turn_does_not_run(harness):
    entered, go_on = threading.Event(), threading.Event()
    ran: list[int] = []

    def hang(engine: Engine) -> None:
        entered.set()
        assert go_on.wait(WAIT)

    first = harness.loop.call(hang)
    assert entered.wait(WAIT)
    second = harness.loop.call(lambda engine: ran.append(1))
    assert second.cancel()
    go_on.set()
    first.result(WAIT)
    harness.loop.call(lambda engine: None).result(WAIT)
    assert ran == []
    with pytest.raises(CancelledError):
        second.result(WAIT)


def test_a_loop_that_never_started_stops():
    harness = Harness()
    queued = harness.loop.call(lambda engine: 1)
    assert harness.loop.stop(WAIT)
    with pytest.raises(EngineError):
        queued.result(WAIT)
