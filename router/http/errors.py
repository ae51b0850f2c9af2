"""core errors -> HTTP, in OpenAI's shape: `{"error": {message, type, param, code}}`, everywhere."""

import json
import logging
import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from core.errors import (
    AuthenticationError,
    NotFoundError,
    OverloadedError,
    PdserveError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

_INTERNAL = PdserveError("internal error, see the router's log")
_TYPE_OF_STATUS = {404: "invalid_request_error", 405: "invalid_request_error"}


def as_pdserve_error(error: Exception) -> PdserveError:
    """`error` itself, or, for a bug, one that tells the client nothing; the log has the rest."""
    if isinstance(error, PdserveError):
        return error
    logger.error("unexpected error while answering a request", exc_info=error)
    return _INTERNAL


def error_body(error: PdserveError) -> dict[str, Any]:
    return _body(error.message, error.error_type, error.param, error.code)


def error_event(error: PdserveError) -> bytes:
    """The server-sent event that ends a stream which cannot go on. No `[DONE]` follows it."""
    return b"data: " + json.dumps(error_body(error)).encode() + b"\n\n"


def error_response(error: PdserveError) -> JSONResponse:
    headers = {}
    if isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, OverloadedError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, UnavailableError):
        headers["retry-after"] = "1"
    return JSONResponse(error_body(error), error.http_status, headers)


def install_error_handlers(app: FastAPI) -> None:
    """Every failure of `app` answers in the one shape, whoever raised it."""

    @app.exception_handler(PdserveError)
    async def _own(request: Request, error: PdserveError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            return error_response(
                NotFoundError(f"unknown URL: {request.method} {request.url.path}", code="not_found")
            )
        kind = _TYPE_OF_STATUS.get(error.status_code, "api_error")
        message = str(error.detail)
        if error.status_code == 405:
            message = f"{request.method} is not allowed on {request.url.path}"
        body = _body(message, kind, None, None)
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        problem = error.errors()[0]
        param = ".".join(str(part) for part in problem["loc"][1:])
        return JSONResponse(_body(problem["msg"], "invalid_request_error", param, None), 400)

    @app.exception_handler(Exception)
    async def _bug(request: Request, error: Exception) -> Response:
        # Starlette raises it again after this answer, so that the server logs the traceback.
        return JSONResponse(error_body(_INTERNAL), 500)


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
