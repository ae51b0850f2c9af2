"""What the routers say of their queues is load of the pools."""

from types import SimpleNamespace

import pytest

from cluster import load_watch
from cluster.autoscaler import RouterQueue
from cluster.load_watch import LoadWatch, QueueWatch
from cluster.service import ClusterService
from cluster.view import ViewPublisher
from rpc import cluster_pb2 as pb


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(load_watch.time, "monotonic", lambda: now[0])
    return now


def report(router: str, prompts: int, tokens: int, oldest: float = 0.0, **refused: int):
    return pb.QueueReport(
        router_id=router, prompts=prompts, prompt_tokens=tokens, oldest_seconds=oldest, **refused
    )


def test_router_processes_are_summed_and_one_that_is_gone_has_no_queue(clock) -> None:
    queues = QueueWatch()
    queues.note(report("a", 3, 300, 1.5))
    queues.note(report("b", 1, 50, 4.0))
    queues.note(report("a", 2, 200, 2.0))
    assert queues.look().queue == RouterQueue(3, 250, 4.0)
    clock[0] += 4
    queues.note(report("a", 1, 100, 6.0))
    clock[0] += 2
    assert queues.look().queue == RouterQueue(1, 100, 6.0)
    clock[0] += 6
    assert queues.look().queue == RouterQueue()


def test_what_came_to_a_router_has_arrived_once_refused_or_not(clock) -> None:
    loads = LoadWatch(ViewPublisher())
    loads.queues.note(report("a", 1, 100, refused_prompts_total=9, refused_prompt_tokens_total=900))
    assert loads.load("prefill").prompts == 0  # who knows when that was
    clock[0] += 2
    loads.queues.note(
        report("a", 4, 400, refused_prompts_total=11, refused_prompt_tokens_total=1100)
    )
    load = loads.load("prefill")
    assert (load.seconds, load.prompts, load.prompt_tokens) == (2.0, 5, 500)
    assert load.queue.prompts == 4
    clock[0] += 2
    loads.queues.note(report("a", 0, 0, refused_prompts_total=11, refused_prompt_tokens_total=1100))
    load = loads.load("prefill")  # they went to workers, which would say so
    assert (load.prompts, load.prompt_tokens, load.queue) == (0, 0, RouterQueue())


def test_routers_that_come_and_go_are_not_remembered_without_end(clock) -> None:
    queues = QueueWatch()
    for index in range(5000):
        queues.note(report(f"router {index}", 1, 10))
    assert queues.look().queue.prompts == load_watch._MAX_ROUTERS


async def test_the_controllers_service_takes_reports() -> None:
    queues = QueueWatch()
    service = ClusterService(SimpleNamespace(operations=None, queues=queues))
    await service.ReportQueue(report("a", 2, 20), None)
    assert queues.look().queue.tokens == 20
