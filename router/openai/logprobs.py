"""Logprobs of tokens in OpenAI's two shapes."""

import codecs
from collections.abc import Sequence
from typing import Any

from core.types import TokenLogprobs
from router.request.generation import TextRequest
from router.text.tokenizer import Tokenizer

# JSON has no infinity; what vLLM's users see for a token that cannot be.
_LOWEST_LOGPROB = -9999.0


def token_text(raw: bytes) -> str:
    """How one token is shown in logprobs: as text, or byte by byte where it is no text of its
    own, so that two different tokens never look alike."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class CompletionLogprobs:
    """The completions format: parallel lists. `text_offset` is where a token starts in its
    choice's text, in characters; a token that starts inside a character has that one's offset."""

    def __init__(self, tokenizer: Tokenizer, request: TextRequest) -> None:
        self._tokenizer = tokenizer
        self._skip = request.skip_special_tokens
        self._num_top = request.sampling.logprobs or 0
        # The space before the first word of an echoed text is not shown.
        self._num_chars = -1 if request.echo and tokenizer.strips_leading_space else 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def render(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """None: of a prompt's first token, which nothing predicts."""
        texts, offsets, tops = [], [], []
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            texts.append(self._text(token_id))
            offsets.append(max(0, self._num_chars))
            if not (self._skip and self._tokenizer.is_special(token_id)):
                raw = self._tokenizer.id_to_bytes(token_id)
                self._num_chars += len(self._decoder.decode(raw))
            tops.append(None if entry is None else self._top(token_id, entry))
        return {
            "tokens": texts,
            "token_logprobs": [
                None if entry is None else finite(entry.logprob) for entry in logprobs
            ],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _text(self, token_id: int) -> str:
        return token_text(self._tokenizer.id_to_bytes(token_id))

    def _top(self, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
        best = {self._text(i): finite(value) for i, value in entry.top[: self._num_top]}
        best.setdefault(self._text(token_id), finite(entry.logprob))
        return best


class ChatLogprobs:
    """The chat format: one object for each token. No chat echoes its prompt: no entry is None."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def render(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        content = []
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            assert entry is not None
            content.append(
                {
                    **self._token(token_id, entry.logprob),
                    "top_logprobs": [self._token(i, value) for i, value in entry.top],
                }
            )
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.id_to_bytes(token_id)
        return {"token": token_text(raw), "logprob": finite(logprob), "bytes": list(raw)}


Logprobs = CompletionLogprobs | ChatLogprobs


def finite(logprob: float) -> float:
    return logprob if logprob > _LOWEST_LOGPROB else _LOWEST_LOGPROB  # NaN too
