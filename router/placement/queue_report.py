"""Tells the controller what waits in this process: its autoscaler cannot see it on any worker."""

import asyncio
import uuid
from collections.abc import Callable
from contextlib import suppress

import grpc

from router.placement.turnstile import Waiting
from rpc import cluster_pb2 as pb
from rpc import cluster_pb2_grpc
from rpc.channel import make_channel

_PERIOD_S = 1.0
_TIMEOUT_S = 2.0


async def report_queue(
    controller: str, waiting: Callable[[], Waiting], period_s: float = _PERIOD_S
) -> None:
    """Until cancelled: once a period, while something waits or is not what was said last. A
    controller that is away, or does not want to know, is told again later."""
    router_id, said = uuid.uuid4().hex, Waiting(0, 0, 0.0, 0, 0)
    async with make_channel(controller) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        while True:
            await asyncio.sleep(period_s)
            now = waiting()
            if not now.num_prompts and now == said:
                continue
            report = pb.QueueReport(
                router_id=router_id,
                prompts=now.num_prompts,
                prompt_tokens=now.num_tokens,
                oldest_seconds=now.oldest_s,
                refused_prompts_total=now.num_refused,
                refused_prompt_tokens_total=now.num_refused_tokens,
            )
            with suppress(grpc.aio.AioRpcError):
                await stub.ReportQueue(report, timeout=_TIMEOUT_S)
                said = now
