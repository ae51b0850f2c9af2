"""The sending side of `DecodeService.Steps`: tokens of many requests in one message a step."""

import asyncio

import grpc

from core.errors import UnavailableError
from rpc import worker_pb2 as pb

_MAX_SEQUENCES = 1024  # in one message


class StepStream:
    """What one router has not been sent yet, in order. Bounded by what its requests may say."""

    def __init__(self) -> None:
        self.is_open = True
        self._waiting: list[pb.SequenceTokens] = []
        self._has_more = asyncio.Event()

    def put(self, request_id: str, tokens: pb.Tokens) -> None:
        """Raises UnavailableError if the router has ended the stream."""
        if not self.is_open:
            raise UnavailableError("the stream of tokens to the router has broken")
        self._waiting.append(pb.SequenceTokens(request_id=request_id, tokens=tokens))
        self._has_more.set()

    async def take(self) -> pb.StepTokens:
        """What all requests have said since the last call: a step's tokens, or more."""
        await self._has_more.wait()
        taken, self._waiting = self._waiting[:_MAX_SEQUENCES], self._waiting[_MAX_SEQUENCES:]
        if not self._waiting:
            self._has_more.clear()
        return pb.StepTokens(sequences=taken)


class StepStreams:
    """The open streams of one worker, by the id that their router gave them."""

    def __init__(self) -> None:
        self._open: dict[str, StepStream] = {}

    def get(self, stream_id: str) -> StepStream | None:
        return self._open.get(stream_id)

    async def serve(self, stream_id: str, context: grpc.aio.ServicerContext) -> None:
        """Until the router leaves."""
        stream = self._open[stream_id] = StepStream()
        try:
            await context.write(pb.StepTokens())
            while True:
                await context.write(await stream.take())
        finally:
            stream.is_open = False
            del self._open[stream_id]
