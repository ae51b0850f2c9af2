"""The router as an HTTP client sees it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from cli.state import find_deployment
from core.errors import PdserveError, UnavailableError

DEFAULT_URL = "http://127.0.0.1:8000"
# Between two tokens a decode worker may wait for room; a stream that is silent for longer is dead.
_TIMEOUT = httpx.Timeout(10.0, read=300.0)


def find_url(url: str | None) -> str:
    """The URL to talk to: the one given, that of the deployment that runs here, the default."""
    if url is not None:
        return (url if "://" in url else f"http://{url}").rstrip("/")
    deployment = find_deployment(None)
    return deployment.url if deployment else DEFAULT_URL


def key_header() -> dict[str, str]:
    """Of the API key in the environment, if there is one."""
    key = os.environ.get("PDSERVE_API_KEY")
    return {"authorization": f"Bearer {key}"} if key else {}


@contextmanager
def router_client(url: str) -> Iterator[httpx.Client]:
    """A client whose failures are PdserveErrors of one line."""
    try:
        with httpx.Client(
            base_url=url, timeout=_TIMEOUT, trust_env=False, headers=key_header()
        ) as client:
            yield client
    except httpx.ConnectError as error:
        raise UnavailableError(
            f"nothing serves at {url}; start it with `pdserve up configs/local.yaml`, "
            "or name another with --url"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnavailableError(f"{url}: {str(error) or type(error).__name__}") from error


def get_json(client: httpx.Client, path: str) -> Any:
    response = client.get(path)
    raise_for_error(response)
    try:
        return response.json()
    except ValueError as error:
        raise UnavailableError(f"{response.url}: the answer is not JSON") from error


def raise_for_error(response: httpx.Response) -> None:
    """Raises PdserveError with the server's own words."""
    if response.is_success:
        return
    response.read()
    hint = " (PDSERVE_API_KEY is where the key goes)" if response.status_code == 401 else ""
    raise PdserveError(f"{response.url}: {response.status_code}: {_message(response.text)}{hint}")


def chat_stream(client: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    """The text of a streamed chat completion, piece by piece. Raises PdserveError for an error,
    before or within the stream, and for a stream that ends without [DONE]."""
    path = "/v1/chat/completions"
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        raise_for_error(response)
        for line in response.iter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            chunk = json.loads(data)
            if "error" in chunk:
                raise PdserveError(_message(data))
            for choice in chunk.get("choices", []):
                text = choice.get("delta", {}).get("content")
                if text:
                    yield text
    raise UnavailableError("the answer broke off")


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip()[:300] or "no reason given"
