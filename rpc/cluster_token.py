"""The secret that the processes of one deployment share.

`pdserve up` makes it. It travels in the environment of child processes and in the settings of
remote workers, never on a command line. Every internal call carries it as metadata; a server that
has a token refuses calls without the same one, with UNAUTHENTICATED. Without a token nothing is
checked. It keeps other programs and deployments out; on an untrusted network it needs encryption
around it, since it travels in the clear.
"""

import hmac
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

VARIABLE = "PDSERVE_CLUSTER_TOKEN"
_KEY = "pdserve-cluster-token"


def cluster_token() -> str:
    """This process's token; "" if it has none."""
    return os.environ.get(VARIABLE, "")


def set_cluster_token(token: str) -> None:
    """For this process and its children. Before the first server or channel is made."""
    os.environ[VARIABLE] = token


@contextmanager
def fresh_cluster_token() -> Iterator[None]:
    """A token for this process and its children, as long as the body runs. One that the
    environment has already is kept: whoever starts parts by hand gives it to all."""
    if cluster_token():
        yield
        return
    set_cluster_token(secrets.token_urlsafe(32))
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def is_right(given: str | bytes, token: str) -> bool:
    """In the same time for any token that is wrong."""
    given = given.encode() if isinstance(given, str) else given
    return hmac.compare_digest(given, token.encode())


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every call that does not carry the token, to unknown methods too."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        metadata = handler_call_details.invocation_metadata or ()
        given = [value for key, value in metadata if key == _KEY]
        if len(given) == 1 and is_right(given[0], self._token):
            return await continuation(handler_call_details)
        handler = await continuation(handler_call_details)
        return denial(handler, "wrong or missing cluster token")


def denial(handler: grpc.RpcMethodHandler | None, reason: str) -> grpc.RpcMethodHandler:
    """Ends a call with UNAUTHENTICATED in the place of `handler`, without reading a message."""

    async def deny(request: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

    if handler is None or not handler.request_streaming:
        if handler is None or not handler.response_streaming:
            return grpc.unary_unary_rpc_method_handler(deny)
        return grpc.unary_stream_rpc_method_handler(deny)
    if not handler.response_streaming:
        return grpc.stream_unary_rpc_method_handler(deny)
    return grpc.stream_stream_rpc_method_handler(deny)


class TokenChannel:
    """A channel whose calls carry the token. Not a client interceptor: those wrap every message
    of a stream. Internal services have no method of many requests and one answer."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._pair = (_KEY, token)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def __aenter__(self) -> "TokenChannel":
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._channel.__aexit__(*error)

    def unary_unary(self, *args: Any, **options: Any) -> Callable[..., Any]:
        return self._with_token(self._channel.unary_unary(*args, **options))

    def unary_stream(self, *args: Any, **options: Any) -> Callable[..., Any]:
        return self._with_token(self._channel.unary_stream(*args, **options))

    def stream_stream(self, *args: Any, **options: Any) -> Callable[..., Any]:
        return self._with_token(self._channel.stream_stream(*args, **options))

    def _with_token(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*request: Any, metadata: Any = None, **options: Any) -> Any:
            return method(*request, metadata=(*(metadata or ()), self._pair), **options)

        return call
