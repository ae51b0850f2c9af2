"""The router's process, as its owner keeps it. A file server stands for it."""

import os
from pathlib import Path

from cluster.router_process import RouterProcess
from support.ports import free_port


async def test_shares_its_owner_s_session_but_not_its_signals(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "health").write_text("well")
    arguments = ["http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    router = RouterProcess(arguments, f"http://127.0.0.1:{port}", tmp_path / "log" / "router.log")
    await router.start()
    try:
        assert router._process is not None
        pid = router._process.pid
        assert os.getsid(pid) == os.getsid(0)
        assert os.getpgid(pid) == pid
    finally:
        await router.stop(grace_s=5)
