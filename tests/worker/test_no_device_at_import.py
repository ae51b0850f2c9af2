"""Ray says which device a process sees when it makes an actor of it: nobody may look before."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = (
    "cluster.worker_actor", "cluster.worker_slot", "prefill_worker", "decode_worker",
    "worker.follower", "worker.engine_setup", "kv_transfer.nixl_transport",
    "kv_transfer.cuda_stage",
)  # fmt: skip
SCRIPT = """
import sys
import torch

def looked(*arguments, **options):
    raise SystemExit("a device was looked for at import")

for name in ("_lazy_init", "init", "device_count", "is_available", "current_device"):
    setattr(torch.cuda, name, looked)
for name in sys.argv[1:]:
    __import__(name)
"""


def imported(*modules: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *modules], cwd=ROOT, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip


def test_no_import_of_a_worker_looks_for_a_device():
    """V58: what Ray sets afterwards is what counts, whatever was imported in which order."""
    done = imported(*MODULES)
    assert done.returncode == 0, done.stderr
