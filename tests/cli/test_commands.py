"""What each command says, and its one-line errors."""

import json
import socket
from pathlib import Path

import fake_router
import pytest

import cli.client
import cli.up
from cli.status import print_cluster
from core.config import load_config

ROOT = Path(__file__).parent.parent.parent


def assert_error(result, *expected: str) -> None:
    """One line on stderr with all of `expected`, exit code 1, no traceback."""
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("pdserve: error: ")
    assert result.stderr.count("\n") == 1
    for text in expected:
        assert text in result.stderr


# ---------------------------------------------------------------- up, before it starts anything


def test_up_names_a_missing_file(pdserve, tmp_path):
    assert_error(pdserve("up", tmp_path / "no.yaml"), "no.yaml", "No such file")


def test_up_names_the_line_of_an_unknown_key(pdserve, config_file):
    config_file.write_text("model: x\nengine:\n  blocksize: 16\n")
    assert_error(pdserve("up", config_file), f"{config_file}:3: engine.blocksize: unknown key")


def test_up_names_a_wrong_override(pdserve, config_file):
    result = pdserve("up", config_file, "--set", "pools.decode.replicas=many")
    assert_error(result, "pools.decode.replicas", "'many'")


@pytest.mark.parametrize("key", ["router.http", "router.grpc"])
def test_up_names_a_port_in_use_and_the_way_out(pdserve, config_file, key):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = pdserve("up", config_file, "--set", f"{key}='127.0.0.1:{port}'")
    assert_error(
        result, f"port {port} on 127.0.0.1 is in use", f"--set {key}=127.0.0.1:{port + 10}"
    )


def test_up_refuses_one_port_for_both_servers(pdserve, config_file):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = f"'127.0.0.1:{port}'"
    result = pdserve("up", config_file, "--set", f"router.http={address}",
                     "--set", f"router.grpc={address}")  # fmt: skip
    assert_error(result, f"127.0.0.1:{port}", "router.grpc")


def test_up_names_a_host_that_is_not_this_machine(pdserve, config_file):
    result = pdserve("up", config_file, "--set", "router.http='203.0.113.7:80'")
    assert_error(result, "router.http", "203.0.113.7:80")


def test_up_names_a_missing_model(pdserve, config_file, tmp_path):
    result = pdserve("up", config_file, "--set", f"model={tmp_path}/nothing.gguf")
    assert_error(result, "nothing.gguf", "no such file")


def test_up_says_what_too_little_memory_lacks(pdserve, config_file, monkeypatch):
    monkeypatch.setattr(cli.up, "available_memory", lambda: 1 << 30)
    assert_error(
        pdserve("up", config_file), "too little memory: 2 workers", "1.0 GiB are available"
    )


def test_an_unexpected_error_is_one_line_and_verbose_shows_where(pdserve, config_file, monkeypatch):
    def explode(*args, **kwargs):
        raise KeyError("surprise")

    monkeypatch.setattr(cli.up, "resolve_model", explode)
    assert_error(pdserve("up", config_file), "unexpected KeyError", "--verbose")
    result = pdserve("up", config_file, "--verbose")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr


def test_an_unexpected_error_shows_where_if_no_option_does(pdserve, monkeypatch):
    def explode(*args, **kwargs):
        raise KeyError("surprise")

    monkeypatch.setattr(cli.client, "find_url", explode)
    result = pdserve("status")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr and "unexpected KeyError" in result.stderr
    assert "--verbose" not in result.stderr


# ---------------------------------------------------------------- status


def test_status_is_a_table(pdserve, router_url):
    result = pdserve("status", "--url", router_url)
    assert result.exit_code == 0, result.output
    title, header, prefill, decode, why = result.stdout.splitlines()
    assert title == f"{router_url}: 1 of 2 workers ready"
    assert header.split()[:3] == ["worker", "role", "state"]
    assert prefill.split() == ["prefill-0", "prefill", "ready", "4242", "127.0.0.1:50051", "7/100",
                               "13", "3", "5", "12345", "0", "2.5", "MB", "out", "nixl",
                               "(cma)"]  # fmt: skip
    assert decode.split()[:3] == ["decode-0", "decode", "starting"]
    assert why == "decode-0: waiting for resources"


def test_status_says_that_the_controller_is_away(capsys):
    cluster = {"controller": "192.0.2.1:8002", "controller_reachable": False}
    print_cluster(cluster, "http://x")
    said = capsys.readouterr().out
    assert "the controller is away, last at 192.0.2.1:8002: requests go on" in said


def test_status_json_is_what_the_router_says(pdserve, router_url):
    result = pdserve("status", "--json", "--url", router_url)
    assert result.exit_code == 0
    assert json.loads(result.stdout) == fake_router.CLUSTER


@pytest.mark.parametrize("command", ["status", "chat"])
def test_nothing_running_is_one_clear_line(pdserve, command):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    arguments = ["hello"] if command == "chat" else []
    assert_error(pdserve(command, *arguments, "--url", url), f"nothing serves at {url}")


# ---------------------------------------------------------------- chat


def test_chat_prints_the_streamed_answer(pdserve, router_url):
    result = pdserve("chat", "hello", "--url", router_url)
    assert (result.exit_code, result.stdout) == (0, "You said hello\n")


def test_chat_takes_its_prompt_from_a_pipe(pdserve, router_url):
    result = pdserve("chat", "--url", router_url, input="piped\n")
    assert (result.exit_code, result.stdout) == (0, "You said piped\n")


def test_chat_shows_the_servers_own_words(pdserve, router_url):
    assert_error(pdserve("chat", "refuse", "--url", router_url), "400: max_tokens: too many")


@pytest.mark.parametrize(
    ("prompt", "reason"), [("fail", "the decode worker was lost"), ("break", "broke off")]
)
def test_chat_fails_when_the_stream_fails(pdserve, router_url, prompt, reason):
    result = pdserve("chat", prompt, "--url", router_url)
    assert_error(result, reason)
    assert "You said" in result.stdout  # what came before stays


# ---------------------------------------------------------------- the rest


def test_models_pull_says_where_it_is(pdserve, model):
    result = pdserve("models", "pull", model)
    assert result.exit_code == 0
    assert f"tiny is at {model}" in result.stdout


def test_models_pull_names_what_it_cannot_find(pdserve):
    assert_error(pdserve("models", "pull", "./nothing.gguf"), "nothing.gguf")


def test_models_list_knows_the_built_in_model(pdserve, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    result = pdserve("models", "list")
    assert result.exit_code == 0
    assert "smollm2-135m\tnot here yet" in result.stdout


def test_version_is_the_packages(pdserve):
    assert pdserve("version").stdout == "0.1.0\n"


@pytest.mark.parametrize(
    "command",
    [
        "up",
        "down",
        "status",
        "chat",
        "version",
        "models pull",
        "apply",
        "scale",
        "drain",
        "rollout",
        "logs",
        "top",
        "doctor",
    ],
)
def test_help_has_a_sentence_and_an_example(pdserve, command):
    result = pdserve(*command.split(), "--help")
    assert result.exit_code == 0
    assert f"Example: pdserve {command}" in result.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configs_are_valid(path):
    config = load_config(path)
    assert config.model


def test_the_local_config_teaches_the_defaults():
    """local.yaml says of itself that it holds the defaults."""
    taught = load_config(ROOT / "configs" / "local.yaml")
    assert taught == type(taught)(model="smollm2-135m")
