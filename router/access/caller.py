"""Who sent a request, and under which names it is known outside."""

import re
import secrets
import uuid
from dataclasses import dataclass

from router.access.api_keys import Account

_MAX_SESSION = 256
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)


@dataclass(frozen=True, slots=True)
class Caller:
    """`request_id` and `traceparent` (W3C Trace Context) go to the workers for their logs and
    never become ids inside the cluster. `account`: None where no API keys are asked for. `session`
    and `user` are what the client says of itself; `priority` is of this request, lower first."""

    request_id: str = ""
    traceparent: str = ""
    account: Account | None = None
    session: str = ""
    user: str = ""
    priority: int = 0

    @classmethod
    def of(
        cls,
        request_id: str,
        traceparent: str,
        account: Account | None = None,
        session: str = "",
    ) -> "Caller":
        """What the client sent, where it is well formed; fresh ids otherwise."""
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        if not _TRACEPARENT.fullmatch(traceparent):
            traceparent = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"
        return cls(request_id, traceparent, account, session[:_MAX_SESSION])

    @property
    def flow(self) -> str:
        """Whose requests share one place in the queue: a key's, whatever users it names; without
        keys, those of one user."""
        return f"key {self.account.name}" if self.account is not None else f"user {self.user}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """For calls to workers."""
        pairs = (("x-request-id", self.request_id), ("traceparent", self.traceparent))
        return tuple(pair for pair in pairs if pair[1])
