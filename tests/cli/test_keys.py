"""`pdserve keys`."""

import json
import stat

import yaml

from router.access.api_keys import KeyStore, hash_key


def test_a_new_key_is_printed_once_and_hashed_in_the_file(pdserve, tmp_path):
    path = tmp_path / "sub" / "keys.yaml"
    first = pdserve("keys", "new", "alice", "--file", path).stdout.strip()
    path.write_text("# ours\n" + path.read_text())
    second = pdserve(
        "keys", "new", "bob", "--file", path, "--concurrency", 2, "--tokens-per-minute", 1000
    ).stdout.strip()
    text = path.read_text()
    assert text.startswith("# ours\n") and first not in text and second not in text
    assert yaml.safe_load(text)[1] == {
        "name": "bob", "sha256": hash_key(second), "concurrency": 2, "tokens_per_minute": 1000.0,
    }  # fmt: skip
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert KeyStore(path).account(f"Bearer {first}").name == "alice"
    again = pdserve("keys", "new", "bob", "--file", path)
    assert again.exit_code == 1 and "'bob'" in again.stderr and path.read_text() == text


def test_json_stays_json(pdserve, tmp_path):
    path = tmp_path / "keys.json"
    for name in ("a", "b"):
        assert pdserve("keys", "new", name, "--file", path).exit_code == 0
    assert [entry["name"] for entry in json.loads(path.read_text())] == ["a", "b"]


def test_a_file_in_flow_style_is_not_broken(pdserve, tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(f'[{{"name": "a", "sha256": "{"0" * 64}"}}]')
    result = pdserve("keys", "new", "b", "--file", path)
    assert result.exit_code == 1 and list(tmp_path.iterdir()) == [path]
