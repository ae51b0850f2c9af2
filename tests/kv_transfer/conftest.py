import pytest

from support.kv_peer import PeerProcess


@pytest.fixture(scope="session")
def source():
    """One process, `prefill-0`, that sends by NIXL and by gRPC. Tests leave it unharmed."""
    process = PeerProcess(num_blocks=96, size=64 * 1024)
    yield process
    process.close()
