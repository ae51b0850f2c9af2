"""`pdserve profile`: measures a deployment, so that `pdserve plan` can simulate larger ones."""

import os
from pathlib import Path

from cli.bench_options import run_async
from cli.terminal import Reporter
from core.errors import ConfigError
from loadgen.benchmark import Service, prepare
from planner.fit import Fit
from planner.measure import Measurer, Samples
from planner.profile import Profile, profile_of, save_profile

_WARM_UP = 3


def run_profile(url: str, out: Path) -> None:
    """Measures and writes the file. Raises PdserveError."""
    if out.suffix != ".json":
        raise ConfigError(f"--out {out}: by its .json `pdserve plan --hardware` knows a file")
    with Reporter() as reporter:

        async def measure() -> Samples:
            reporter.doing("warming up")
            service = Service(url, api_key=os.environ.get("PDSERVE_API_KEY"))
            return await Measurer(await prepare(service, _WARM_UP), reporter.doing).measure()

        profile, found = profile_of(run_async(measure()))
        save_profile(out, profile)
        reporter.rest()
    print(describe(profile, found))
    print(f"wrote {out}")


def describe(profile: Profile, found: Fit) -> str:
    model = found.model
    lines = [
        f"prefill step   {model.prefill_base:.2f} ms + {model.per_token:.4f} ms a token + "
        f"{model.per_pair:.3g} ms a pair of tokens",
        f"decode step    {model.decode_base:.2f} ms + {model.per_sequence:.3f} ms a sequence + "
        f"{model.per_kv_token:.3g} ms a token of KV",
        f"               {found.max_error:.0%} off at most, {found.median_error:.1%} in the median",
        f"hand-over      {profile.hand_over_s * 1e3:.1f} ms, "
        f"{profile.link_bytes_per_s / 1e9:.2f} GB/s",
        f"the way there  {profile.dispatch_s * 1e3:.1f} ms through the router and back",
    ]
    if profile.slowdown is not None:
        lines.append(
            f"both at work   prefill x{profile.slowdown.prefill:.2f}, "
            f"decode x{profile.slowdown.decode:.2f}"
        )
    return "\n".join(lines)
