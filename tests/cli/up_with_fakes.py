"""`python up_with_fakes.py CONFIG`: `pdserve up` with a fake router and fake workers."""

import sys
from pathlib import Path

from cli.terminal import clear_errors
from cli.up import UpOptions, run_up

if __name__ == "__main__":
    workers = {role: "fake_worker:FakeWorker" for role in ("prefill", "decode", "colocated")}
    workers["prefill"] = f"fake_worker:{sys.argv[2] if len(sys.argv) > 2 else 'FakeWorker'}"
    try:
        with clear_errors():
            run_up(
                UpOptions(Path(sys.argv[1]), router_module="fake_router", worker_classes=workers)
            )
    except Exception as error:  # typer.Exit, which only a typer app turns into an exit code
        sys.exit(getattr(error, "exit_code", 99))
