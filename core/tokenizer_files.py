"""What router and workers both read in a model's tokenizer files: the router makes a tokenizer of
them, a worker only a table of bytes, and the two must agree."""

import json
import re
from pathlib import Path
from typing import Any

from core.errors import ModelError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} if there is no such file. Raises ModelError."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return data


def generation_end_ids(folder: Path) -> list[int]:
    """EOS ids of generation_config.json, or else of config.json: one or a list."""
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        if value is not None:
            values = value if isinstance(value, list) else [value]
            return [index for index in values if isinstance(index, int)]
    return []


def byte_level(token: str) -> bytes:
    """Bytes of a token written in GPT-2's alphabet; of any other token, its UTF-8."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def byte_fallback(token: str) -> bytes:
    """Bytes of a SentencePiece token: one byte as <0x..>, or text with spaces as U+2581."""
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the rest is moved past U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): b for i, b in enumerate(moved)}


_BYTE_OF = _byte_characters()
