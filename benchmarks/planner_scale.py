"""How long `pdserve plan`'s simulator takes for a large deployment.

    python -m benchmarks.planner_scale [--requests 1000000] [--prefill 300] [--decode 700]

H100s with Llama-3.1-8B, prompts of 1000 tokens and answers of 130 in the median, at a rate that
keeps the prefill pool three quarters busy.
"""

import argparse
import random
import resource
import time
from collections.abc import Iterator

from planner.layout import Layout, Pool
from planner.machines import build
from planner.result import percentile
from planner.simulate import Options, run
from planner.trace import TraceRequest

_MEAN_PROMPT = 1000 * 1.38  # of the log-normal distribution below


def main() -> None:
    parser = argparse.ArgumentParser(description="the simulator at scale")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--prefill", type=int, default=300)
    parser.add_argument("--decode", type=int, default=700)
    options = parser.parse_args()
    machine = build("h100", "llama-3.1-8b", 1).machine
    step_s = machine.model_of("prefill", 1).step(2048, 2048.0 * 2048 / 2, 0, 0)
    rate = 0.75 * options.prefill * 2048 / step_s / _MEAN_PROMPT
    layout = Layout(Pool(options.prefill), Pool(options.decode))
    cpu = time.process_time()
    requests = _requests(options.requests, rate)
    result = run(layout, machine, requests, 0, Options())
    recorder, cpu_s = result.recorder, time.process_time() - cpu
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{recorder.num_finished} requests at {rate:.0f}/s on {layout}: {cpu_s:.0f} s of CPU time, "
        f"{result.num_events / 1e6:.1f} million events, {memory / 1e6:.0f} MB; TTFT p90 "
        f"{percentile(recorder.ttft, 90):.3f} s, TPOT p90 {percentile(recorder.tpot, 90):.4f} s; "
        + ", ".join(f"{name} busy {share:.0%}" for name, share in result.busy.items())
    )


def _requests(count: int, rate: float) -> Iterator[TraceRequest]:
    dice, now = random.Random("scale"), 0.0
    for _ in range(count):
        prompt = min(16_000, max(1, int(dice.lognormvariate(6.9, 0.8))))
        output = min(1_000, max(1, int(dice.lognormvariate(4.87, 0.8))))
        yield TraceRequest(now, prompt, output)
        now += dice.expovariate(rate)


if __name__ == "__main__":
    main()
