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
        self._columns: list[tuple[int, int, int]] = []  # they go before those that wait
        self._waiting: list[pb.SequenceTokens] = []
        self._has_more = asyncio.Event()

    def put(self, request_id: str, tokens: pb.Tokens) -> None:
        """Raises UnavailableError if the router has ended the stream."""
        if not self.is_open:
            raise UnavailableError("the stream of tokens to the router has broken")
        self._waiting.append(pb.SequenceTokens(request_id=request_id, tokens=tokens))
        self._has_more.set()

    def put_token(self, request_id: str, step_number: int, index: int, token_id: int) -> None:
        """One token with nothing else to tell. Raises as `put`."""
        if self._waiting or not self.is_open:
            tokens = pb.Tokens(first_index=index, tokens=[pb.Token(id=token_id)])
            self.put(request_id, tokens)
            return
        self._columns.append((step_number, index, token_id))
        self._has_more.set()

    async def take(self) -> pb.StepTokens:
        """What all requests have said since the last call: a step's tokens, or more."""
        await self._has_more.wait()
        message = pb.StepTokens()
        columns, self._columns = self._columns[:_MAX_SEQUENCES], self._columns[_MAX_SEQUENCES:]
        if columns:
            numbers, indexes, token_ids = zip(*columns, strict=True)
            message = pb.StepTokens(step_numbers=numbers, indexes=indexes, token_ids=token_ids)
        if not self._columns:
            message.sequences.extend(self._waiting[:_MAX_SEQUENCES])
            self._waiting = self._waiting[_MAX_SEQUENCES:]
        if not self._columns and not self._waiting:
            self._has_more.clear()
        return message


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
