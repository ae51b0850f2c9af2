"""What a check of `pdserve doctor` says."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    GOOD = "ok"
    NOTE = "note"  # works, and could be better
    BAD = "bad"  # `pdserve up` would fail, or requests do


@dataclass(frozen=True, slots=True)
class Finding:
    verdict: Verdict
    what: str
    advice: str = ""
