"""Text to token ids and back, over the `tokenizers` package. No transformers, no torch.

Decoding works on raw bytes: a token stands for bytes, a text is all bytes together, read as UTF-8
with U+FFFD for what is no character. So streamed text (router.text.detokenizer), whole text and the
`bytes` of a logprob come from one table. For byte-level tokenizers this equals the `tokenizers`
package on every sequence of ids; for SentencePiece ones on every sequence that is valid UTF-8.

Strings of special tokens inside a text are read as those tokens, in completions and in the
content of chat messages alike, as in Hugging Face and vLLM: a prompt may be a whole rendered
chat, and clients of untrusted text must clean it themselves.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.processors import TemplateProcessing

from core.errors import ModelError, RequestError
from core.gguf_metadata import read_gguf_metadata
from core.model_files import ModelFiles
from core.tokenizer_files import (
    NAMED_TOKENS,
    byte_fallback,
    byte_level,
    generation_end_ids,
    read_json,
)
from router.chat.template import ChatTemplate
from router.text.gguf_tokenizer import tokenizer_from_gguf
from router.text.pieces import PIECE, PieceCache, cuts_between_words


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads; never changes after it is made.

    `eos_token_ids`: every id that ends a generation, the tokenizer's EOS first.
    `chat_template`: None for a model that has none.
    """

    def __init__(
        self,
        tokenizer: RustTokenizer,
        *,
        eos_token_ids: tuple[int, ...] = (),
        bos_token_id: int | None = None,
        chat_template: ChatTemplate | None = None,
        source: str = "tokenizer",
    ) -> None:
        self._tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.bos_token_id = bos_token_id
        self.chat_template = chat_template
        added = tokenizer.get_added_tokens_decoder()
        self._added = {index: token.content for index, token in added.items()}
        self._special = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size: int = max(
            tokenizer.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1
        )
        self._byte_level, self.strips_leading_space = _decoder_kind(tokenizer, source)
        self._bytes: dict[int, bytes] = {}
        self._around = self._find_around()
        cuts = self._byte_level and self._around is not None and cuts_between_words(tokenizer)
        self._pieces = PieceCache(self._encode_plainly) if cuts else None

    def encode(self, text: str, add_special_tokens: bool = True, cache_salt: str = "") -> list[int]:
        """Token ids of `text`; with `add_special_tokens` also what the model puts around a text
        (BOS). Linear in the text (1 MB: about a second, less for what came before with the same
        salt) and without the GIL: call it in a thread for long texts. Raises RequestError for a
        lone surrogate, which is no text."""
        try:
            if self._pieces is None or len(text) < 2 * PIECE:
                # encode() would compute offsets too.
                one = self._tokenizer.encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens
                )
                return one[0].ids
            ids = self._pieces.encode(text, cache_salt)
        except (TypeError, UnicodeEncodeError) as error:
            if isinstance(text, str) and _has_surrogate(text):
                raise RequestError("the text holds half of a surrogate pair") from error
            raise
        if add_special_tokens and self._around is not None:
            before, after = self._around
            return before + ids + after
        return ids

    def num_new_characters(self, text: str, cache_salt: str = "") -> int:
        """What `encode` has to do, in characters: those that it does not remember."""
        if self._pieces is None or len(text) < 2 * PIECE:
            return len(text)
        return self._pieces.num_new(text, cache_salt)

    def _encode_plainly(self, texts: list[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def _find_around(self) -> tuple[list[int], list[int]] | None:
        """What special tokens stand before and behind any text; None if that cannot be told."""
        (plain,) = self._encode_plainly(["a"])
        whole = self._tokenizer.encode_batch_fast(["a"], add_special_tokens=True)[0].ids
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start], whole[start + len(plain) :]
        return None

    def decode(
        self, ids: Iterable[int], skip_special_tokens: bool = True, *, continues: bool = False
    ) -> str:
        """Text of `ids`. `continues` says that other text stands before it, and keeps the leading
        space that SentencePiece tokenizers put before the first word of a text."""
        skipped = self._special if skip_special_tokens else ()
        data = b"".join(self.id_to_bytes(index) for index in ids if index not in skipped)
        text = data.decode("utf-8", "replace")
        if self.strips_leading_space and not continues:
            return text.removeprefix(" ")
        return text

    def id_to_bytes(self, index: int) -> bytes:
        """Raw bytes of one token, possibly a part of a character; b"" for an id that the
        tokenizer does not know (models pad their vocabulary)."""
        data = self._bytes.get(index)
        if data is None:
            data = self._bytes[index] = self._find_bytes(index)
        return data

    def _find_bytes(self, index: int) -> bytes:
        if not 0 <= index < self.vocab_size:
            return b""
        added = self._added.get(index)
        token = added if added is not None else self._tokenizer.id_to_token(index)
        if token is None:
            return b""
        if self._byte_level:
            return byte_level(token) if added is None else token.encode()
        return byte_fallback(token)

    def token_text(self, index: int) -> str:
        """How a token is shown alone; parts of a character become U+FFFD."""
        return self.id_to_bytes(index).decode("utf-8", "replace")

    def added_token_ids(self, contents: Iterable[str]) -> frozenset[int]:
        """Ids of the added tokens with these texts, as far as the vocabulary has them."""
        wanted = frozenset(contents)
        return frozenset(index for index, content in self._added.items() if content in wanted)

    def is_special(self, index: int) -> bool:
        return index in self._special


def load_tokenizer(files: ModelFiles, template_file: str | None = None) -> Tokenizer:
    """The tokenizer of a model, from tokenizer.json and its companions or from GGUF metadata.
    `template_file`: a chat template that takes the place of the model's own. Raises ModelError
    that names the file and what is wrong with it."""
    template = _read_template(Path(template_file)) if template_file is not None else None
    if files.format == "gguf":
        return _from_gguf(files.path, template)
    return _from_folder(files.path, template)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error


def _from_gguf(path: Path, given_template: str | None = None) -> Tokenizer:
    metadata = read_gguf_metadata(path, prefix="tokenizer.")
    found = tokenizer_from_gguf(metadata, source=path.name)
    rust = found.tokenizer
    named = {"bos_token": found.bos_token_id}
    named["eos_token"] = metadata.get("tokenizer.ggml.eos_token_id")
    tokens = {
        name: token
        for name, index in named.items()
        if index is not None and (token := rust.id_to_token(index)) is not None
    }
    template = None
    if given_template is not None:
        template = ChatTemplate(given_template, tokens)
    elif found.chat_template:
        template = ChatTemplate(
            found.chat_template, tokens, tool_use_source=found.tool_use_template
        )
    return Tokenizer(
        rust,
        eos_token_ids=found.eos_token_ids,
        bos_token_id=found.bos_token_id,
        chat_template=template,
        source=path.name,
    )


# ---------------------------------------------------------------- a Hugging Face folder


def _from_folder(folder: Path, given_template: str | None = None) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"model {folder}: the folder has no tokenizer.json")
    try:
        rust = RustTokenizer.from_file(str(path))
    # `tokenizers` raises bare Exceptions.
    except Exception as error:
        raise ModelError(f"{path}: not a readable tokenizer: {error}") from error
    rust.no_truncation()
    rust.no_padding()
    config = read_json(folder / "tokenizer_config.json")
    special_map = read_json(folder / "special_tokens_map.json")
    named = {
        name: token
        for name in NAMED_TOKENS
        if (token := _token(config.get(name, special_map.get(name))))
    }
    found = {name: rust.token_to_id(token) for name, token in named.items()}
    ids = {name: index for name, index in found.items() if index is not None}
    known = rust.get_added_tokens_decoder()  # these keep their own flags
    rust.add_special_tokens(
        [
            AddedToken(named[name], normalized=False)
            for name, index in ids.items()
            if index not in known
        ]
    )
    _honour_bos_and_eos_switches(rust, config, named, ids)
    ends = [ids.get("eos_token"), *generation_end_ids(folder)]
    return Tokenizer(
        rust,
        eos_token_ids=tuple(dict.fromkeys(index for index in ends if index is not None)),
        bos_token_id=ids.get("bos_token"),
        chat_template=_folder_template(folder, config, named)
        if given_template is None
        else ChatTemplate(given_template, named),
        source=str(path),
    )


def _token(value: Any) -> str | None:
    """A special token is written as a string or as an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _honour_bos_and_eos_switches(
    rust: RustTokenizer, config: dict[str, Any], named: dict[str, str], ids: dict[str, int]
) -> None:
    """tokenizer_config.json may say itself what stands around a text; it then wins over
    tokenizer.json, as in transformers."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    before = ["bos_token"] if config.get("add_bos_token") and "bos_token" in ids else []
    after = ["eos_token"] if config.get("add_eos_token") and "eos_token" in ids else []
    rust.post_processor = TemplateProcessing(
        single=[*(named[name] for name in before), "$A", *(named[name] for name in after)],
        special_tokens=[(named[name], ids[name]) for name in before + after],
    )


def _folder_template(
    folder: Path, config: dict[str, Any], named: dict[str, str]
) -> ChatTemplate | None:
    """chat_template.jinja wins over tokenizer_config.json, where a list may name several."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return ChatTemplate(_read_template(path), named)
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template}
        template = by_name.get("default")
        if template:
            return ChatTemplate(template, named, tool_use_source=by_name.get("tool_use"))
    return ChatTemplate(template, named) if isinstance(template, str) else None


def _decoder_kind(tokenizer: RustTokenizer, source: str) -> tuple[bool, bool]:
    """(byte-level?, strips the first space of a text?), from the tokenizer's decoder."""
    decoder = tokenizer.decoder
    state: dict[str, Any] = {"type": "none"}
    if decoder is not None:
        state = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return True, False
    if "ByteFallback" in kinds:
        return False, any(step["type"] == "Strip" and step["start"] for step in steps)
    if "Metaspace" in kinds:
        return False, any(step.get("prepend_scheme") in ("always", "first") for step in steps)
    raise ModelError(f"{source}: decoder {', '.join(sorted(kinds))} is not supported")


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)
