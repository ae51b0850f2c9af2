"""core errors <-> gRPC status, once each way.

A server wraps its handlers with `translated_errors`; a client maps what it catches with
`error_from_rpc`. The class of an error crosses in trailing metadata (`pdserve-error`), since one
status may stand for several classes.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from core import errors

logger = logging.getLogger(__name__)

_CLASSES = {
    cls.__name__: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, errors.PdserveError)
}
_BY_STATUS: dict[str, type[errors.PdserveError]] = {
    "INVALID_ARGUMENT": errors.RequestError,
    "NOT_FOUND": errors.NotFoundError,
    "OUT_OF_RANGE": errors.TooLargeError,
    "RESOURCE_EXHAUSTED": errors.OverloadedError,
    "UNAVAILABLE": errors.UnavailableError,
    "ABORTED": errors.HandoverError,
    "FAILED_PRECONDITION": errors.StalePeerError,
    "DATA_LOSS": errors.CorruptBlockError,
    "DEADLINE_EXCEEDED": errors.DeadlineError,
    "CANCELLED": errors.CancelledByPeerError,
    # Of the cluster token: the deployment is broken, the client is not to blame.
    "UNAUTHENTICATED": errors.UnavailableError,
}


@asynccontextmanager
async def translated_errors(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Ends the call with the status of whatever PdserveError the body raises. Anything else is
    a bug: it is logged with its traceback and becomes INTERNAL without details."""
    try:
        yield
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except errors.PdserveError as error:
        metadata = [("pdserve-error", type(error).__name__)]
        if error.param:
            metadata.append(("pdserve-param", error.param))
        if isinstance(error, errors.OverloadedError):
            metadata.append(("retry-after", f"{error.retry_after_s:g}"))
        status = grpc.StatusCode[error.grpc_status]
        await context.abort(status, error.message, trailing_metadata=tuple(metadata))
    except Exception:
        logger.exception("unexpected error in a gRPC handler")
        await context.abort(grpc.StatusCode.INTERNAL, "internal error, see the worker's log")


def error_from_rpc(error: grpc.aio.AioRpcError, who: str) -> errors.PdserveError:
    """The core error that an RPC's failure stands for; `who` names the peer in the message."""
    metadata = {str(k): str(v) for k, v in (error.trailing_metadata() or ())}
    cls = _CLASSES.get(metadata.get("pdserve-error", ""))
    if cls is None:
        cls = _BY_STATUS.get(error.code().name, errors.EngineError)
    message = f"{who}: {error.details() or error.code().name}"
    if issubclass(cls, errors.OverloadedError):
        return cls(message, retry_after_s=float(metadata.get("retry-after", "1")))
    return cls(message, param=metadata.get("pdserve-param"))
