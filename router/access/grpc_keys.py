"""API keys on the public gRPC server."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from core.errors import AuthenticationError
from router.access.api_keys import KeyStore
from rpc.cluster_token import denial

# Load balancers ask for it without a key.
_OPEN = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})

Metadata = Any  # pairs of a key and a value


def authorization_of(metadata: Metadata) -> str | None:
    values = [value for key, value in metadata or () if key == "authorization"]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Denies every call without a key, to methods that do not exist too, except for health."""

    def __init__(self, keys: KeyStore) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if handler_call_details.method not in _OPEN:
            try:
                self._keys.account(authorization_of(handler_call_details.invocation_metadata))
            except AuthenticationError as error:
                return denial(await continuation(handler_call_details), error.message)
        return await continuation(handler_call_details)
