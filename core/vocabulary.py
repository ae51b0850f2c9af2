"""What bytes each token id stands for, from the model's own files. Needs no tokenizer library.

Structured output is matched byte by byte against the vocabulary; this is all that a worker, which
never sees text, has to know of the tokenizer.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import ModelError
from core.gguf_metadata import read_gguf_metadata
from core.model_files import ModelFiles
from core.tokenizer_files import (
    NAMED_TOKENS,
    byte_fallback,
    byte_level,
    generation_end_ids,
    read_json,
)

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens[id]` are the bytes of a token; b"" for special tokens and ids without one."""

    tokens: list[bytes]
    eos_token_ids: tuple[int, ...]


def load_vocabulary(files: ModelFiles) -> Vocabulary:
    """Raises ModelError that names the file and what is wrong with it."""
    return _from_gguf(files.path) if files.format == "gguf" else _from_folder(files.path)


def _from_gguf(path: Path) -> Vocabulary:
    metadata = read_gguf_metadata(path, prefix="tokenizer.ggml.")

    def get(key: str) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}")

    texts, kind = get("tokens"), get("model")
    if not isinstance(texts, list) or kind not in ("gpt2", "llama"):
        raise ModelError(f"{path.name}: its vocabulary (tokenizer.ggml.model {kind!r}) is not read")
    types = get("token_type") or [1] * len(texts)
    decode = byte_level if kind == "gpt2" else byte_fallback
    tokens = []
    for text, type_ in zip(texts, types, strict=True):
        if type_ in (_UNKNOWN, _CONTROL, _UNUSED):
            tokens.append(b"")
        else:
            tokens.append(text.encode() if type_ == _USER_DEFINED else decode(text))
    return _vocabulary(tokens, [get("eos_token_id"), get("eot_token_id")])


def _from_folder(folder: Path) -> Vocabulary:
    path = folder / "tokenizer.json"
    data = read_json(path)
    if not data:
        raise ModelError(f"{path}: there is no tokenizer to read the vocabulary from")
    try:
        vocab, added = data["model"]["vocab"], data.get("added_tokens") or []
        # Unigram has [token, score] by id; the others have ids by token.
        ids = (
            {entry[0]: i for i, entry in enumerate(vocab)}
            if isinstance(vocab, list)
            else dict(vocab)
        )
        decode = byte_level if _is_byte_level(data.get("decoder")) else byte_fallback
        by_id = {index: decode(text) for text, index in ids.items()}
        for token in added:
            by_id[token["id"]] = b"" if token["special"] else token["content"].encode()
            ids[token["content"]] = token["id"]
        config = read_json(folder / "tokenizer_config.json")
        known = {token["content"] for token in added}
        named = {name: _content(config.get(name)) for name in NAMED_TOKENS}
        for text in named.values():
            if text in ids and text not in known:
                by_id[ids[text]] = b""
        tokens = [by_id.get(index, b"") for index in range(max(by_id) + 1)]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ModelError(f"{path}: not a readable vocabulary: {error!r}") from error
    return _vocabulary(tokens, [ids.get(named["eos_token"] or ""), *generation_end_ids(folder)])


def _vocabulary(tokens: list[bytes], ends: list[Any]) -> Vocabulary:
    eos = dict.fromkeys(i for i in ends if isinstance(i, int) and 0 <= i < len(tokens))
    for index in eos:
        tokens[index] = b""  # whatever its text, it is an end and never a part
    return Vocabulary(tokens, tuple(eos))


def _content(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    return any(step.get("type") == "ByteLevel" for step in decoder.get("decoders") or [decoder])
