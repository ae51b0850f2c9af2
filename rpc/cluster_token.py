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
from collections.abc import Awaitable, Callable, Sequence
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


def new_cluster_token() -> str:
    return secrets.token_urlsafe(32)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every call that does not carry the token, to unknown methods too."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        metadata = handler_call_details.invocation_metadata or ()
        given = [value for key, value in metadata if key == _KEY]
        given = [value.encode() if isinstance(value, str) else value for value in given]
        if len(given) == 1 and hmac.compare_digest(given[0], self._token):
            return await continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(_deny)


async def _deny(request: Any, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing cluster token")


class _Sender:
    """Adds the token to the metadata of a call."""

    def __init__(self, token: str) -> None:
        self._pair = (_KEY, token)

    def _with_token(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        metadata.add(*self._pair)
        return grpc.aio.ClientCallDetails(
            method=details.method,
            timeout=details.timeout,
            metadata=metadata,
            credentials=details.credentials,
            wait_for_ready=details.wait_for_ready,
        )


class _UnarySender(_Sender, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(self._with_token(client_call_details), request)


class _StreamSender(_Sender, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(self._with_token(client_call_details), request)


def token_senders(token: str) -> Sequence[grpc.aio.ClientInterceptor]:
    """For a channel. Internal services have no method with a stream of requests."""
    return [_UnarySender(token), _StreamSender(token)]
