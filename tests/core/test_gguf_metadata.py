"""Metadata of GGUF files: well formed, cut short and hostile."""

import struct

import pytest

from core.errors import ModelError
from core.gguf_metadata import read_gguf_metadata


def gguf_string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_file(path, *, version=3, pairs=(), magic=b"GGUF"):
    body = b"".join(gguf_string(key) + value for key, value in pairs)
    path.write_bytes(magic + struct.pack("<IQQ", version, 0, len(pairs)) + body)
    return path


ARRAY_OF_TWO = struct.pack("<IIQ", 9, 8, 2) + gguf_string("a") + gguf_string("bé")
PAIRS = [
    ("x.other", struct.pack("<IIQ3i", 9, 5, 3, 1, -2, 3)),
    ("t.flag", struct.pack("<I?", 7, True)),
    ("t.name", struct.pack("<I", 8) + gguf_string("你好")),
    ("t.list", ARRAY_OF_TWO),
    ("t.big", struct.pack("<IQ", 10, 2**60)),
    ("t.nested", struct.pack("<IIQIQ2B", 9, 9, 1, 0, 2, 7, 8)),
]


def test_gguf_metadata(tmp_path):
    path = gguf_file(tmp_path / "m.gguf", pairs=PAIRS)
    assert read_gguf_metadata(path, "t.") == {
        "t.flag": True,
        "t.name": "你好",
        "t.list": ["a", "bé"],
        "t.big": 2**60,
        "t.nested": [[7, 8]],
    }
    assert read_gguf_metadata(path)["x.other"] == [1, -2, 3]


def test_every_cut_of_a_gguf_file_is_an_error(tmp_path):
    path = gguf_file(tmp_path / "m.gguf", pairs=PAIRS)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="m.gguf"):
            read_gguf_metadata(path)


@pytest.mark.parametrize(
    "options",
    [
        {"version": 1},
        {"version": 3 << 24},
        {"magic": b"GGML"},
        {"pairs": [("a", struct.pack("<I", 99))]},
        {"pairs": [("a", struct.pack("<IIQ", 9, 4, 2**63))]},
        {"pairs": [("a", struct.pack("<IIQ", 9, 8, 2**63))]},
        {"pairs": [("a", struct.pack("<IQ", 8, 2**64 - 1))]},
        {"pairs": [("a", struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50)]},
    ],
)
def test_hostile_gguf_files_are_errors(tmp_path, options):
    with pytest.raises(ModelError, match="not a readable GGUF"):
        read_gguf_metadata(gguf_file(tmp_path / "m.gguf", **options))


def test_missing_file(tmp_path):
    with pytest.raises(ModelError, match="cannot read"):
        read_gguf_metadata(tmp_path / "no.gguf")
