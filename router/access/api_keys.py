"""API keys: who may call, and how much.

The file is a YAML or JSON list of entries with a name, the SHA-256 of the key in hex, and limits,
each optional: requests_per_minute, concurrency, tokens_per_minute. Limits hold over all router
processes of a deployment on one machine together. A key is 256 random bits, so a
plain hash cannot be turned back. The file is read again when it changes; a broken change is
logged and the last good set stands.
"""

import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from core.errors import AuthenticationError, ConfigError, RateLimitError
from router.access.usage import Kind, Usage, UsageFile

logger = logging.getLogger(__name__)

_PREFIX = "pd-"
_RELOAD_EVERY_S = 1.0


class KeyEntry(BaseModel):
    """One key as the file has it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, Field(min_length=1, max_length=64)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    requests_per_minute: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    concurrency: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


_ENTRIES = TypeAdapter(list[KeyEntry])


def new_key() -> str:
    return _PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def read_entries(path: Path) -> list[KeyEntry]:
    """Raises ConfigError that names the file and the entry."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        entries = _ENTRIES.validate_python(data if data is not None else [])
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML") from error
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise ConfigError(f"{path}: {where or 'top'}: {problem['msg']}") from error
    for what in ("name", "sha256"):
        values = [getattr(entry, what) for entry in entries]
        if len(set(values)) < len(values):
            raise ConfigError(f"{path}: two entries have the same {what}")
    return entries


class _Bucket:
    """So much a minute, the first minute's worth at once. May go into debt."""

    def __init__(
        self, usage: Usage, kind: Kind, per_minute: float, clock: Callable[[], float]
    ) -> None:
        self._usage = usage
        self._kind = kind
        self._per_second = per_minute / 60
        self._most = max(per_minute, 1.0)
        self._clock = clock

    def wait_s(self, least: float) -> float:
        """Seconds until the level is `least`."""
        return max(0.0, (least - self._level(self._clock())) / self._per_second)

    def spend(self, amount: float) -> None:
        now = self._clock()
        self._usage.set_level(self._kind, self._level(now) - amount, now)

    def _level(self, now: float) -> float:
        known = self._usage.level(self._kind)
        if known is None:
            return self._most
        level, at = known
        return min(self._most, level + (now - at) * self._per_second)


class Account:
    """What one key is using. Tokens are known only at the end of a request: an account in debt
    waits until it is paid off."""

    def __init__(
        self,
        entry: KeyEntry,
        clock: Callable[[], float] = monotonic,
        usage: Usage | None = None,
    ) -> None:
        """`usage`: where it is kept; None: in this process."""
        self.entry = entry
        self._usage = usage = usage if usage is not None else Usage()
        requests, tokens = entry.requests_per_minute, entry.tokens_per_minute
        self._requests = (
            _Bucket(usage, "requests", requests, clock) if requests is not None else None
        )
        self._tokens = _Bucket(usage, "tokens", tokens, clock) if tokens is not None else None

    @property
    def name(self) -> str:
        return self.entry.name

    @contextmanager
    def request(self) -> Iterator[None]:
        """One request, for as long as the body runs. Raises RateLimitError."""
        limit = self.entry.concurrency
        with self._usage.locked():
            if limit is not None and self._usage.in_flight() >= limit:
                raise RateLimitError(
                    f"this key may have {limit} requests at once", retry_after_s=1.0
                )
            self._check(self._requests, 1.0, "requests")
            self._check(self._tokens, 1.0, "tokens")
            if self._requests is not None:
                self._requests.spend(1)
            self._usage.add_in_flight(1)
        try:
            yield
        finally:
            with self._usage.locked():
                self._usage.add_in_flight(-1)

    @property
    def in_flight(self) -> int:
        with self._usage.locked():
            return self._usage.in_flight()

    def spend_tokens(self, count: int) -> None:
        if self._tokens is not None:
            with self._usage.locked():
                self._tokens.spend(count)

    def _check(self, bucket: _Bucket | None, least: float, what: str) -> None:
        wait_s = bucket.wait_s(least) if bucket is not None else 0.0
        if wait_s > 0:
            raise RateLimitError(
                f"this key has used its {what} per minute, try again in {wait_s:.0f} s",
                retry_after_s=wait_s,
            )


class KeyStore:
    """The accounts of one file. An account lives as long as its entry is unchanged."""

    def __init__(
        self,
        path: str | Path,
        clock: Callable[[], float] = monotonic,
        shared: UsageFile | None = None,
    ) -> None:
        """`shared`: with other processes. Raises ConfigError."""
        self._shared = shared
        self._path = Path(path)
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._version = self._stat()
        self._looked = clock()
        self._apply(read_entries(self._path))

    def account(self, authorization: str | None) -> Account:
        """Whose header this is. Raises AuthenticationError. Every hash is compared, each in
        constant time, so that the time says nothing about them."""
        self._refresh()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise AuthenticationError(
                "no API key: send the header `Authorization: Bearer KEY`", code="missing_api_key"
            )
        given = hash_key(key.strip())
        found = None
        for digest, account in self._accounts.items():
            if hmac.compare_digest(digest, given):
                found = account
        if found is None:
            raise AuthenticationError("incorrect API key", code="invalid_api_key")
        return found

    def _apply(self, entries: list[KeyEntry]) -> None:
        known = self._accounts
        self._accounts = {
            entry.sha256: old
            if (old := known.get(entry.sha256)) is not None and old.entry == entry
            else Account(entry, self._clock, self._usage_of(entry))
            for entry in entries
        }

    def _usage_of(self, entry: KeyEntry) -> Usage | None:
        return self._shared.of(entry.sha256) if self._shared is not None else None

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._looked < _RELOAD_EVERY_S:
            return
        self._looked = now
        version = self._stat()
        if version == self._version:
            return
        self._version = version
        try:
            self._apply(read_entries(self._path))
            logger.info("%s: %d API keys", self._path, len(self._accounts))
        except ConfigError as error:
            logger.error("the last good API keys stand: %s", error)

    def _stat(self) -> tuple[int, int, int]:
        try:
            stat = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return (stat.st_mtime_ns, stat.st_size, stat.st_ino)
