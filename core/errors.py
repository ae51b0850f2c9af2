"""The one error tree.

    PdserveError                      500 INTERNAL
    +- ConfigError                    exit code 1, never crosses a wire
    +- ModelError                     exit code 1, never crosses a wire
    +- AuthenticationError            401 UNAUTHENTICATED      no key, or a wrong one
    +- RequestError                   400 INVALID_ARGUMENT     the client's input is wrong
    |  +- NotFoundError               404 NOT_FOUND            unknown model or route
    |  +- TooLargeError               413 OUT_OF_RANGE         body over the limit
    +- OverloadedError                429 RESOURCE_EXHAUSTED   try again later
    |  +- RateLimitError              429 RESOURCE_EXHAUSTED   this client has used its share
    +- UnavailableError               503 UNAVAILABLE          no worker can serve, or it was lost
    |  +- HandoverError               503 ABORTED              KV did not arrive whole
    |  +- StalePeerError              503 FAILED_PRECONDITION  names an incarnation that is gone
    |  +- IncompatiblePeerError       503 FAILED_PRECONDITION  the two workers cannot share KV
    |  +- CorruptBlockError           503 DATA_LOSS            a checksum did not match
    +- DeadlineError                  504 DEADLINE_EXCEEDED    a bounded wait ran out
    +- CancelledByPeerError           499 CANCELLED            the caller went away
    +- EngineError                    500 INTERNAL             the engine failed
       +- RankLostError               500 INTERNAL             a part of a tensor-parallel worker

`rpc.status` maps the tree to gRPC and back, `router.http.errors` to HTTP, each in one place.
"""


class PdserveError(Exception):
    """Base of every error that pdserve raises on purpose."""

    http_status = 500
    grpc_status = "INTERNAL"
    error_type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class ConfigError(PdserveError):
    """The configuration is wrong; the message names file, line and key."""


class ModelError(PdserveError):
    """The model cannot be found, fetched or loaded."""


class RequestError(PdserveError):
    """The client's input is wrong; `param` names the field."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    error_type = "invalid_request_error"


class AuthenticationError(PdserveError):
    """A public call has no API key, or an unknown one."""

    http_status = 401
    grpc_status = "UNAUTHENTICATED"
    error_type = "invalid_request_error"
    code = "invalid_api_key"


class NotFoundError(RequestError):
    http_status = 404
    grpc_status = "NOT_FOUND"


class TooLargeError(RequestError):
    http_status = 413
    grpc_status = "OUT_OF_RANGE"


class OverloadedError(PdserveError):
    """The system is full; `retry_after_s` says when to come back."""

    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    error_type = "rate_limit_error"
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimitError(OverloadedError):
    """One client has used its share; others are served."""

    code = "rate_limit_exceeded"


class UnavailableError(PdserveError):
    """Nobody can serve this now, or the worker that did was lost. Worth a retry elsewhere."""

    http_status = 503
    grpc_status = "UNAVAILABLE"
    error_type = "service_unavailable_error"
    code = "unavailable"


class HandoverError(UnavailableError):
    """The KV of a request did not arrive whole, or was not pinned until it had."""

    grpc_status = "ABORTED"
    code = "handover_failed"


class StalePeerError(UnavailableError):
    """A call names an incarnation of this worker that is gone."""

    grpc_status = "FAILED_PRECONDITION"
    code = "stale_incarnation"


class IncompatiblePeerError(UnavailableError):
    """Two workers differ in something that their KV blocks depend on; the message names it."""

    grpc_status = "FAILED_PRECONDITION"
    code = "incompatible_peer"


class CorruptBlockError(UnavailableError):
    """A KV block's checksum differs from the commit record's."""

    grpc_status = "DATA_LOSS"
    code = "corrupt_block"


class DeadlineError(PdserveError):
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"
    error_type = "timeout_error"
    code = "timeout"


class CancelledByPeerError(PdserveError):
    http_status = 499
    grpc_status = "CANCELLED"
    code = "cancelled"


class EngineError(PdserveError):
    """The engine failed while running this request."""

    code = "engine_error"


class RankLostError(EngineError):
    """A process of a tensor-parallel worker is gone; the whole worker ends with it."""

    code = "rank_lost"
