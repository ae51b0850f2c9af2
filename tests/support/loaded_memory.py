"""What loading a checkpoint takes, each in a process of its own:

    python loaded_memory.py TINY PATH DTYPE QUANTIZATION [PATH DTYPE QUANTIZATION ...]

Prints one JSON object a line: `rss` of the loaded model and `peak` while it was loaded, in bytes
above what the process had before. Both count every resident page: the process's own memory, and
pages of mapped files as long as they are resident (VmRSS, VmHWM). The model TINY is loaded first,
in the same way, so that pages of libraries' code are there already.
"""

import json
import os
import sys
from pathlib import Path

import torch

from core.model_files import resolve_model
from engine.model.load import load_model


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":") for line in lines)
    return int(fields[name].split()[0]) * 1024


def measure(tiny: str, path: str, dtype: str, quantization: str) -> dict[str, int]:
    load_model(resolve_model(tiny), dtype, quantization=quantization)  # type: ignore[arg-type]
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    model = load_model(resolve_model(path), dtype, quantization=quantization)  # type: ignore[arg-type]
    assert model.config.num_layers
    return {"rss": memory("VmRSS") - before, "peak": memory("VmHWM") - before}


def main(tiny: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    for start in range(0, len(arguments), 3):
        child = os.fork()  # torch is imported once
        if not child:
            print(json.dumps(measure(tiny, *arguments[start : start + 3])), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"{arguments[start]}: {status}")


if __name__ == "__main__":
    main(*sys.argv[1:])
