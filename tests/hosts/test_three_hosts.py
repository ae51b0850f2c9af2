"""Router, prefill and decode worker on three hosts: network namespaces, an address each, a link
between each two. The link from P to D is slowed, made to lose packets, cut and healed.

Needs root, `ip` and `tc`: `make test-hosts`. Slowing and losing are done by tc's token bucket
filter, which drops what does not fit into its queue; unlike netem every kernel has it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.pair import prompt

ROOT = Path(__file__).parents[2]
HOSTS = {"router": "10.77.0.1", "prefill": "10.77.0.2", "decode": "10.77.0.3"}
LINKS = (("router", "prefill"), ("router", "decode"), ("prefill", "decode"))
PATIENCE_S = 60  # a bound on a hang, not a measure


def _why_not() -> str:
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not found: install iproute2"
    name = f"pdserve-{os.getpid()}-probe"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if probe.returncode != 0:
        return f"no network namespaces here: {probe.stderr.strip()}"
    tbf = ["root", "tbf", "rate", "8mbit", "burst", "8k", "latency", "50ms"]
    result = subprocess.run(
        ["tc", "-n", name, "qdisc", "add", "dev", "lo", *tbf], capture_output=True, text=True
    )
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return "" if result.returncode == 0 else f"no tc tbf here: {result.stderr.strip()}"


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


class Network:
    """Owns the namespaces. Each host has its one address on `lo`; a host's interface towards
    another has that one's name."""

    def __init__(self) -> None:
        self._prefix = f"pds{os.getpid()}"

    def namespace(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def build(self) -> None:
        for host, address in HOSTS.items():
            run("ip", "netns", "add", self.namespace(host))
            self.ip(host, "link", "set", "lo", "up")
            self.ip(host, "address", "add", f"{address}/32", "dev", "lo")
        for a, b in LINKS:
            ends = ("name", b, "netns", self.namespace(a)), ("name", a, "netns", self.namespace(b))
            run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            self.up(a, b)
            self.up(b, a)

    def up(self, host: str, towards: str) -> None:
        self.ip(host, "link", "set", towards, "up")
        route = (f"{HOSTS[towards]}/32", "dev", towards, "src", HOSTS[host])
        self.ip(host, "route", "replace", *route)

    def ip(self, host: str, *arguments: str) -> None:
        run("ip", "-n", self.namespace(host), *arguments)

    def tc(self, *arguments: str) -> str:
        """On what P sends to D."""
        return run("tc", "-n", self.namespace("prefill"), *arguments)

    def slow(self) -> None:
        rate = ["rate", "4mbit", "burst", "16k", "latency", "1s"]
        self.tc("qdisc", "replace", "dev", "decode", "root", "tbf", *rate)

    def lose(self) -> None:
        rate = ["rate", "8mbit", "burst", "4k", "limit", "6000"]
        self.tc("qdisc", "replace", "dev", "decode", "root", "tbf", *rate)

    def num_lost(self) -> int:
        (qdisc,) = json.loads(self.tc("-s", "-j", "qdisc", "show", "dev", "decode"))
        return qdisc["drops"]

    def cut(self) -> None:
        self.ip("prefill", "link", "set", "decode", "down")

    def heal(self) -> None:
        self.up("prefill", "decode")
        if "tbf" in self.tc("qdisc", "show", "dev", "decode"):
            self.tc("qdisc", "del", "dev", "decode", "root")

    def destroy(self) -> None:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", self.namespace(host)], capture_output=True)


class Host:
    """A process in a host's namespace that is spoken to by lines."""

    def __init__(self, network: Network, role: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [
                *("ip", "netns", "exec", network.namespace(role)),
                *(sys.executable, "-m", "support.kv_host", role, *arguments),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        )

    def read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, "the process has ended"
        return line

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def ask(self, **command: Any) -> dict[str, Any]:
        self.send(**command)
        return json.loads(self.read())

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if why := _why_not():
        pytest.skip(why)
    network = Network()
    try:
        network.build()
        yield network
    finally:
        network.destroy()


@pytest.fixture(scope="module")
def hosts(network: Network, tiny_model_dir: Path) -> Iterator[dict[str, Host]]:
    workers = {
        role: Host(network, role, "--model", str(tiny_model_dir), "--host", HOSTS[role])
        for role in ("prefill", "decode")
    }
    router = Host(network, "router")
    try:
        router.ask(do="meet", workers=[worker.read() for worker in workers.values()])
        yield {**workers, "router": router}
    finally:
        router.close()
        for worker in workers.values():
            worker.close()


@pytest.fixture(scope="module")
def router(hosts: dict[str, Host]) -> Host:
    return hosts["router"]


def wait_idle(router: Host) -> None:
    deadline = time.monotonic() + 10
    while True:
        status = router.ask(do="status")
        if not any(count for side in status.values() for count in side.values()):
            return
        assert time.monotonic() < deadline, status
        time.sleep(0.1)


def generate(router: Host, seed: int, attempts: int = 1) -> dict[str, Any]:
    return router.ask(**_generate(seed, attempts))


def _generate(seed: int, attempts: int) -> dict[str, Any]:
    return {
        "do": "generate", "prompt": prompt(400, seed), "max_tokens": 24, "attempts": attempts,
        "salt": f"s{seed}", "timeout_s": PATIENCE_S,
    }  # fmt: skip


def oracle(router: Host, seed: int) -> list[int]:
    return router.ask(do="alone", prompt=prompt(400, seed), max_tokens=24)["tokens"]


@pytest.mark.slow
def test_good_link(router: Host) -> None:
    reply = generate(router, 1)
    assert reply["errors"] == []
    assert reply["tokens"] == oracle(router, 1)
    wait_idle(router)


@pytest.mark.slow
@pytest.mark.parametrize("disturbance", ["slow", "lose"])
def test_bad_link_is_only_slower(network: Network, router: Host, disturbance: str) -> None:
    good = generate(router, 2 if disturbance == "slow" else 3)
    getattr(network, disturbance)()
    try:
        reply = generate(router, 4 if disturbance == "slow" else 5)
        num_lost = network.num_lost()
    finally:
        network.heal()
    assert reply["errors"] == []
    assert reply["tokens"] == oracle(router, 4 if disturbance == "slow" else 5)
    assert reply["pull_seconds"] > 2 * good["pull_seconds"]
    assert num_lost > 0 or disturbance == "slow"
    wait_idle(router)


@pytest.mark.slow
def test_link_cut_in_the_middle_of_a_pull_and_healed(network: Network, router: Host) -> None:
    """The attempt ends within the transport's bound, both sides have their blocks back while the
    link is still down, and after it has healed the next attempt goes on."""
    network.slow()
    router.send(**_generate(6, 1))
    time.sleep(0.3)  # 200 KB at 4 Mbit/s take 0.4 s
    network.cut()
    try:
        failed = json.loads(router.read())
        assert len(failed["errors"]) == 1
        assert failed["tokens"] == oracle(router, 6)[: len(failed["tokens"])]
        wait_idle(router)
    finally:
        network.heal()
    healed = generate(router, 6, attempts=20)
    assert healed["tokens"] == oracle(router, 6)
    wait_idle(router)


@pytest.mark.slow
def test_stream_goes_on_after_a_short_cut(network: Network, router: Host) -> None:
    """TCP sends again what was lost: a cut shorter than every bound costs nothing but time."""
    network.slow()
    router.send(**_generate(7, 20))
    time.sleep(0.3)
    network.cut()
    time.sleep(0.5)
    network.heal()
    reply = json.loads(router.read())
    assert reply["tokens"] == oracle(router, 7)
    wait_idle(router)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["prefill", "decode"])
def test_worker_that_stops_running(hosts: dict[str, Host], stopped: str) -> None:
    """SIGSTOP: its kernel still answers, it does not. Keepalive ends the attempt within 15 s, on
    the side that still runs too, and a worker that runs again is as good as before."""
    router, worker = hosts["router"], hosts[stopped]
    seed = 8 if stopped == "prefill" else 9
    worker.process.send_signal(signal.SIGSTOP)
    try:
        failed = generate(router, seed)
    finally:
        worker.process.send_signal(signal.SIGCONT)
    assert len(failed["errors"]) == 1
    wait_idle(router)
    healed = generate(router, seed, attempts=20)
    assert healed["tokens"] == oracle(router, seed)
    wait_idle(router)
