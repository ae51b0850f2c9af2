"""Reads a JSON body under limits that hold before anything is parsed."""

import asyncio
import json
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect, Request

from core.errors import DeadlineError, PdserveError, RequestError, TooLargeError

READ_TIMEOUT_S = 60.0
DISCARD_TIMEOUT_S = 2.0


class UnsupportedMediaTypeError(RequestError):
    http_status = 415


class SlowBodyError(DeadlineError):
    http_status = 408


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object. Raises RequestError (400, 413 or 415) or SlowBodyError."""
    media_type = request.headers.get("content-type", "application/json").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise UnsupportedMediaTypeError(f"content-type must be application/json, got {media_type}")
    return parse_json(await _read(request, max_bytes))


def parse_json(body: bytes) -> dict[str, Any]:
    """Strict JSON: no NaN or Infinity, no lone surrogates, an object at the top."""
    try:
        data = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise RequestError("the JSON body is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, a 5000-digit number
        raise RequestError(f"could not parse the JSON body: {error}") from None
    if not isinstance(data, dict):
        raise RequestError("the JSON body must be an object")
    if b"\\u" in body:
        _refuse_lone_surrogates(data)
    return data


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    body = bytearray()
    try:
        if declared.isdigit() and int(declared) <= max_bytes:
            async with asyncio.timeout(READ_TIMEOUT_S):
                async for piece in request.stream():
                    body += piece
                    if len(body) > max_bytes:
                        break
                else:
                    return bytes(body)
        body.clear()
        await _discard_rest(request)
    except TimeoutError:
        raise SlowBodyError("the request body did not arrive in time") from None
    except ClientDisconnect:
        raise PdserveError("the client left before its request was complete") from None
    raise TooLargeError(f"the request body is larger than {max_bytes} bytes", code="too_large")


async def _discard_rest(request: Request) -> None:
    """Reads on for a moment: a client that is cut off while it sends sees a broken connection
    instead of the answer."""
    if request.headers.get("expect"):
        return  # it asks first
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_TIMEOUT_S):
            more = True
            while more:
                message = await request.receive()
                more = message["type"] == "http.request" and message.get("more_body", False)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


def _refuse_lone_surrogates(data: Any) -> None:
    """An escaped half of a surrogate pair parses, but is no text that UTF-8 could carry."""
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("the JSON body has a lone surrogate in a string") from None
    except RecursionError:
        raise RequestError("the JSON body is nested too deeply") from None
