"""Builds a `tokenizers.Tokenizer` from the metadata of a GGUF file.

GGUF keeps the vocabulary and the merges, but only the name of the pre-tokenizer
(`tokenizer.ggml.pre`), and nothing of the normalizer. Both decide the ids, so they are rebuilt
here from that name as the original `tokenizer.json` of each family has them. A name that is not
in the table is an error: a guess gives ids that the model was never trained on.
"""

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from core.errors import ModelError

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

# Names under which families end a chat turn, for files that lack tokenizer.ggml.eot_token_id.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How a family splits text before BPE. Patterns apply one after the other; then bytes."""

    patterns: tuple[str, ...] = ()
    gpt2_split: bool = False  # GPT-2's own pattern, built into ByteLevel
    single_digits: bool = False  # every digit apart, before all else
    nfc: bool = False  # Unicode composition first
    ignore_merges: bool = False  # a word that is a token needs no merges
    adds_bos: bool = False  # when the file does not say


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_GPT2_DIGITS = _PreTokenizer(gpt2_split=True, single_digits=True)
_LLAMA3_STYLE = _PreTokenizer(patterns=(_LLAMA3,), ignore_merges=True, adds_bos=True)
_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(gpt2_split=True),
    "smollm": _GPT2_DIGITS,
    "starcoder": _GPT2_DIGITS,
    "llama-bpe": _LLAMA3_STYLE,
    "llama3": _LLAMA3_STYLE,
    "llama-v3": _LLAMA3_STYLE,
    "qwen2": _PreTokenizer(patterns=(_QWEN2,), nfc=True),
    "deepseek-v3": _PreTokenizer(patterns=_DEEPSEEK_V3, adds_bos=True),
}


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """What the metadata says, in the terms of the `tokenizers` package."""

    tokenizer: Tokenizer
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    tool_use_template: str | None


def tokenizer_from_gguf(metadata: dict[str, Any], source: str) -> GgufTokenizer:
    """Raises ModelError, naming `source`, when the metadata holds no tokenizer that is known."""

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    kind, tokens = get("model"), get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{source}: the file has no tokenizer (tokenizer.ggml.tokens)")
    types = get("token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{source}: {len(types)} token types for {len(tokens)} tokens")
    adds_bos = False
    if kind == "gpt2":
        pre = _pre_tokenizer(get("pre"), source)
        tokenizer = _byte_level(tokens, get("merges"), pre, source)
        adds_bos = pre.adds_bos
    elif kind == "llama":
        tokenizer = _sentencepiece(tokens, types, get("scores"), get("add_space_prefix", True))
        adds_bos = True
    else:
        raise ModelError(
            f"{source}: tokenizer.ggml.model {kind!r} is not supported (gpt2 and llama are)"
        )
    _add_tokens(tokenizer, tokens, types)
    bos, eos = get("bos_token_id"), get("eos_token_id")
    _add_template(
        tokenizer,
        tokens,
        bos if get("add_bos_token", adds_bos) else None,
        eos if get("add_eos_token", False) else None,
    )
    return GgufTokenizer(
        tokenizer=tokenizer,
        bos_token_id=bos,
        eos_token_ids=_ends(tokens, types, eos, get("eot_token_id")),
        chat_template=metadata.get("tokenizer.chat_template"),
        tool_use_template=metadata.get("tokenizer.chat_template.tool_use"),
    )


def _pre_tokenizer(name: str | None, source: str) -> _PreTokenizer:
    if name in _PRE_TOKENIZERS:
        return _PRE_TOKENIZERS[name]
    known = ", ".join(_PRE_TOKENIZERS)
    raise ModelError(
        f"{source}: tokenizer.ggml.pre {name!r} is not known ({known} are); token ids would be "
        "wrong. Use the model's safetensors folder, which has its own tokenizer.json"
    )


def _byte_level(
    tokens: list[str], merges: list[str] | None, pre: _PreTokenizer, source: str
) -> Tokenizer:
    """BPE over bytes, each byte written as one printable character (GPT-2)."""
    if not merges:
        raise ModelError(f"{source}: the file has no merges (tokenizer.ggml.merges)")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        model = BPE(vocab=vocab, merges=pairs, ignore_merges=pre.ignore_merges)
    # `tokenizers` raises bare Exceptions.
    except Exception as error:
        raise ModelError(f"{source}: vocabulary and merges do not fit: {error}") from error
    tokenizer = Tokenizer(model)
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.single_digits else []
    steps += [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in pre.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.gpt2_split))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(
    tokens: list[str], types: list[int], scores: list[float] | None, prefix_space: bool
) -> Tokenizer:
    """SentencePiece BPE: the best scored pair merges first; unknown characters become bytes.

    Merges are not in the file. Each token of two or more characters is the result of merging
    every pair of tokens that spells it, at a rank given by its own score."""
    scores = scores or [-float(index) for index in range(len(tokens))]
    vocab = {token: index for index, token in enumerate(tokens)}
    # Control and byte tokens never come out of text by merging.
    ordinary = {
        token: index for token, index in vocab.items() if types[index] not in (_CONTROL, _BYTE)
    }
    ranked = []
    for token, index in ordinary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ordinary and right in ordinary:
                ranked.append((-scores[index], ordinary[left], ordinary[right], left, right))
    ranked.sort()
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == 2), None)
    model = BPE(
        vocab=vocab,
        merges=[(left, right) for *_, left, right in ranked],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace(" ", "▁")
    decode: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        decode.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(decode)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens are special; user-defined ones are whole but shown. Those that spell spaces
    (Gemma) are found by merging: as added tokens they would match a literal U+2581."""
    for special, wanted in ((True, (_CONTROL, _UNKNOWN)), (False, (_USER_DEFINED,))):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, kind in zip(tokens, types, strict=True)
            if kind in wanted and (special or "▁" not in token)
        ]
        if special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)


def _add_template(
    tokenizer: Tokenizer, tokens: list[str], bos: int | None, eos: int | None
) -> None:
    """What `encode(add_special_tokens=True)` puts around a text."""
    ends = [(tokens[i], i) for i in (bos, eos) if i is not None]
    if not ends:
        return
    single = ([tokens[bos]] if bos is not None else []) + ["$A"]
    single += [tokens[eos]] if eos is not None else []
    tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=ends)


def _ends(
    tokens: list[str], types: list[int], eos: int | None, end_of_turn: int | None
) -> tuple[int, ...]:
    """EOS and the end of a chat turn, without duplicates."""
    if end_of_turn is None:
        control = {t: i for i, t in enumerate(tokens) if types[i] == _CONTROL}
        end_of_turn = next((control[name] for name in _END_OF_TURN if name in control), None)
    return tuple(dict.fromkeys(i for i in (eos, end_of_turn) if i is not None))
