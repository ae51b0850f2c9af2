"""Hardware and model as they were measured, and the file in which that travels."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError
from planner.fit import DecodePoint, Fit, PrefillPoint, fit
from planner.shared_host import Slowdown
from planner.step_model import FittedModel

if TYPE_CHECKING:
    from planner.measure import Samples

_LEAST_PULL_BYTES = 1 << 20  # a smaller pull's time is its latency


@dataclass(frozen=True, slots=True)
class Profile:
    """All that a simulation needs. `steps` and `kv_tokens` (a worker's room) by tensor-parallel
    degree. Seconds and bytes.

    `hand_over_s`: from the first token to the first decode step, the last bytes left out.
    `dispatch_s`: from the client through the router to a worker, and back. `slowdown`: the n-th
    prefill and the n-th decode worker share a host; None: every worker has its own.
    """

    model: str
    steps: Mapping[int, FittedModel]
    kv_tokens: Mapping[int, int]
    kv_bytes_per_token: float
    link_bytes_per_s: float
    hand_over_s: float = 0.002
    dispatch_s: float = 0.0
    slowdown: Slowdown | None = None
    max_num_seqs: int = 256


def profile_of(samples: "Samples") -> tuple[Profile, Fit]:
    """From what `planner.measure` found on one host, with one worker of each pool. Raises
    ConfigError when that is not enough."""
    found = fit(
        [PrefillPoint(1, one.num_prompt, 0, one.prefill) for one in samples.lone],
        [DecodePoint(one.num_seqs, one.context, one.seconds) for one in samples.batches],
    )
    pulls = [one for one in samples.lone if one.kv_bytes >= _LEAST_PULL_BYTES and one.pull_s > 0]
    if not pulls:
        raise ConfigError("the measurement has no hand-over: was the decode worker's cache warm?")
    bytes_per_s = median(one.kv_bytes / one.pull_s for one in pulls)
    tails = [one.hand_over - one.kv_bytes / bytes_per_s for one in samples.lone]
    profile = Profile(
        samples.model,
        {1: found.model},
        {1: samples.kv_tokens},
        samples.kv_bytes_per_token,
        bytes_per_s,
        max(0.0, median(tails)),
        max(0.0, median(one.ttft - one.prefill for one in samples.lone)),
        _slowdown(samples, found.model),
        samples.max_num_seqs,
    )
    return profile, found


def _slowdown(samples: "Samples", model: FittedModel) -> Slowdown | None:
    if not samples.beside:
        return None
    prefill, decode = [], []
    for one in samples.beside:
        alone = model.step(one.num_prompt, one.num_prompt * one.num_prompt / 2, 0, 0)
        prefill.append(one.prefill / alone)
        decode.append(one.decode / one.decode_alone)
    return Slowdown(max(1.0, median(prefill)), max(1.0, median(decode)))


def save_profile(path: str | Path, profile: Profile) -> None:
    """Times of steps in milliseconds, all else in seconds and bytes. Raises ConfigError."""
    content = asdict(profile)
    content["steps_ms"] = content.pop("steps")
    try:
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def load_profile(path: str | Path) -> Profile:
    """What `save_profile` wrote. Raises ConfigError."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        steps = {int(tp): _steps(entry) for tp, entry in content.pop("steps_ms").items()}
        kv_tokens = {int(tp): int(tokens) for tp, tokens in content.pop("kv_tokens").items()}
        slowdown = content.pop("slowdown", None)
        profile = Profile(
            steps=steps,
            kv_tokens=kv_tokens,
            slowdown=Slowdown(**slowdown) if slowdown else None,
            **content,
        )
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: not a performance profile: {error}") from error
    if not steps or set(steps) != set(kv_tokens):
        raise ConfigError(
            f"{path}: steps_ms and kv_tokens must name the same degrees, one at least"
        )
    if not profile.link_bytes_per_s > 0 or not profile.kv_bytes_per_token > 0:
        raise ConfigError(f"{path}: link_bytes_per_s and kv_bytes_per_token must be above 0")
    return profile


def _steps(entry: dict[str, Any]) -> FittedModel:
    large = entry.pop("large", None)
    return FittedModel(**entry, large=tuple(large) if large else None)
