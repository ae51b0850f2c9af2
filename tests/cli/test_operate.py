"""Commands on a running `pdserve up` with fake workers."""

import pytest
from test_up import PATIENCE_S, read_until

from cli.control import parse_replicas
from core.errors import PdserveError


def test_a_running_deployment_is_changed_by_the_command(start_up, pdserve, config_file):
    process = start_up()
    read_until(process, "Ctrl-C stops it")

    result = pdserve("scale", "prefill=2")
    assert result.exit_code == 0, result.output
    assert "prefill-1 is ready" in result.stdout
    assert "Nothing to change" in pdserve("scale", "prefill=2").stdout

    text = config_file.read_text()
    config_file.write_text(text + "pools: {prefill: {replicas: 1}, decode: {replicas: 2}}\n")
    result = pdserve("apply", config_file, "--dry-run")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "  pools.decode.replicas: 1 -> 2  (scale)",
        "  pools.prefill.replicas: 2 -> 1  (scale)",
    ]
    result = pdserve("apply", config_file)
    assert result.exit_code == 0, result.output
    assert "decode-1 is ready" in result.stdout
    assert "prefill-1 is gone" in result.stdout
    assert "Nothing to change" in pdserve("apply", config_file).stdout

    result = pdserve("apply", config_file, "--set", "dtype=float32")
    assert result.exit_code == 1
    assert "dtype: auto -> float32  (not while the deployment runs)" in result.stdout
    assert result.stderr.startswith(
        "pdserve: error: cannot change while the deployment runs: dtype"
    )

    result = pdserve("drain", "decode-0")
    assert result.exit_code == 0, result.output
    assert "decode-0 is gone" in result.stdout
    assert "decode-0 is ready" in result.stdout
    result = pdserve("drain", "decode-9")
    assert result.exit_code == 1
    assert "no worker 'decode-9'; there is prefill-0" in result.stderr

    result = pdserve("logs", "prefill-0")
    assert result.exit_code == 0, result.output
    assert "hello from prefill-0" in result.stdout
    result = pdserve("logs", "nobody")
    assert "no log of 'nobody'; there is controller, decode-0" in result.stderr

    assert pdserve("down").exit_code == 0
    assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("command", ["scale prefill=1", "drain prefill-0", "rollout"])
def test_without_a_deployment_the_way_to_name_one_is_said(pdserve, command):
    result = pdserve(*command.split())
    assert result.exit_code == 1
    assert result.stderr.startswith("pdserve: error: nothing runs here; name a controller")


@pytest.mark.parametrize("wish", ["prefill", "prefill=", "prefill=-1", "=2", "prefill=x"])
def test_a_wrong_size_is_named(wish):
    with pytest.raises(PdserveError, match="expected POOL=NUMBER"):
        parse_replicas([wish])
