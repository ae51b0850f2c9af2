"""Structured output: grammars are compiled once, and matched token by token in the sampler."""

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch

from core.errors import EngineError, ModelError, RequestError
from core.model_files import ModelFiles
from core.types import Grammar
from core.vocabulary import load_vocabulary
from engine.grammar_process import tokenizer_info

MAX_GRAMMAR_BYTES = 64 * 1024
_COMPILE_SECONDS = 5.0
_START_SECONDS = 60.0  # the process imports torch; the machine may be busy
_MAX_ANSWER_BYTES = 32 << 20
_MAX_CACHED = 256
_MAX_CACHED_BYTES = 64 << 20


class Matcher:
    """Where one sequence stands in its grammar. Made by a GrammarCompiler, then used by the
    engine's thread alone; every token of the output is accepted exactly once, wherever it was
    sampled."""

    def __init__(self, compiled: Any, stop_token_ids: Seq[int], vocab_size: int) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stop_token_ids))
        self._stops = [token for token in stop_token_ids if token < vocab_size]
        self._vocab_size = vocab_size

    def accept(self, token_id: int) -> bool:
        """False, and nothing has changed, if the grammar does not allow the token here."""
        return bool(self._matcher.accept_token(token_id))

    @property
    def is_terminated(self) -> bool:
        """It has accepted a stop token: nothing may be asked of it any more."""
        return bool(self._matcher.is_terminated())

    @property
    def is_finished(self) -> bool:
        """Nothing can follow but the end."""
        if self.is_terminated:
            return True
        if not self._matcher.is_completed():
            return False
        allowed = self.allowed()[0]
        allowed[self._stops] = False
        return not bool(allowed.any())

    def allowed(self, drafted: Seq[int] = ()) -> torch.Tensor:
        """bool [1 + len(drafted), vocab_size]: what may come next, and what after each of the
        drafted tokens. They must be a `valid_prefix`."""
        words = -(-self._vocab_size // 32)
        mask = torch.zeros((1 + len(drafted), words), dtype=torch.int32)
        for row, token_id in enumerate((*drafted, None)):
            self._matcher.fill_next_token_bitmask(mask, row)
            if token_id is not None and not self.accept(token_id):
                raise EngineError("a drafted token is against the grammar")
        if drafted:
            self._matcher.rollback(len(drafted))
        bits = np.unpackbits(mask.numpy().view(np.uint8), axis=-1, bitorder="little")
        return torch.from_numpy(bits[:, : self._vocab_size].astype(np.bool_))

    def valid_prefix(self, token_ids: Seq[int]) -> list[int]:
        """As many of the tokens as the grammar allows one after the other, up to an end."""
        count = 0
        for token_id in token_ids:
            if token_id in self._stops or not self.accept(token_id):
                break
            count += 1
        if count:
            self._matcher.rollback(count)
        return list(token_ids[:count])


class GrammarCompiler:
    """Compiles grammars for one model. Owns a process that does it, from the first use to
    `close`, and a cache of results, bounded in number and size.

    `compile` blocks, for `_START_SECONDS` at the first use and for `_COMPILE_SECONDS` after it;
    call it off the event loop. One grammar at a time; a process that is too slow or has died is
    replaced, and its grammar refused.
    """

    def __init__(self, files: ModelFiles, vocab_size: int) -> None:
        self._files = files
        self._vocab_size = vocab_size
        self._process: _Process | None = None
        self._info: Any = None
        self._eos_token_ids: tuple[int, ...] = ()
        self._is_closed = False
        self._busy = threading.Lock()
        self._cache: OrderedDict[Grammar, tuple[Any, int]] = OrderedDict()

    def matcher(self, grammar: Grammar, stop_token_ids: Seq[int]) -> Matcher:
        """A fresh matcher at the start of the grammar. Raises RequestError for a grammar that is
        broken, not supported or too expensive."""
        size = len(grammar.value.encode("utf-8", "replace"))
        if size > MAX_GRAMMAR_BYTES:
            raise _refused(f"it has {size} bytes, at most {MAX_GRAMMAR_BYTES} are allowed")
        with self._busy:
            compiled = self._compiled(grammar)
        stops = stop_token_ids or self._eos_token_ids
        if not stops:
            raise _refused("this model has no EOS to end it with; give stop_token_ids")
        return Matcher(compiled, stops, self._vocab_size)

    def close(self) -> None:
        """Ends the process at once; a compilation that runs is refused."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()  # whoever waits for it is refused, and lets go of the lock
        with self._busy:
            self._end_process()

    def _compiled(self, grammar: Grammar) -> Any:
        if grammar in self._cache:
            self._cache.move_to_end(grammar)
            return self._cache[grammar][0]
        self._prepare()
        assert self._process is not None
        question = json.dumps({"kind": grammar.kind.value, "value": grammar.value})
        try:
            answer = self._process.ask(question.encode() + b"\n", _COMPILE_SECONDS)
        except TimeoutError:
            self._end_process()
            raise _refused(f"it takes more than {_COMPILE_SECONDS:g} s to compile") from None
        except (OSError, EOFError, ValueError):
            self._end_process()
            raise _refused("it is too complex to compile") from None
        if "error" in answer:
            raise _refused(answer["error"])
        return self._keep(grammar, answer["compiled"])

    def _keep(self, grammar: Grammar, text: str) -> Any:
        import xgrammar

        compiled = xgrammar.CompiledGrammar.deserialize_json(text, self._info)
        self._cache[grammar] = (compiled, len(text))
        total = sum(size for _, size in self._cache.values())
        while len(self._cache) > _MAX_CACHED or (
            total > _MAX_CACHED_BYTES and len(self._cache) > 1
        ):
            total -= self._cache.popitem(last=False)[1][1]
        return compiled

    def _prepare(self) -> None:
        """Both processes' view of the vocabulary, and the other process."""
        try:
            if self._info is None:
                self._info = tokenizer_info(self._files, self._vocab_size)
                self._eos_token_ids = load_vocabulary(self._files).eos_token_ids
        except (ImportError, ModelError) as error:
            raise RequestError(
                f"structured output is not available on this worker: {error}",
                param="structured_outputs",
                code="unsupported_parameter",
            ) from error
        if self._process is not None and self._process.has_ended:
            self._end_process()
        if self._process is None:
            if self._is_closed:
                raise EngineError("the worker is stopping")
            self._process = _Process(self._files, self._vocab_size)
            try:
                self._process.read(_START_SECONDS)
            except (TimeoutError, OSError, EOFError, ValueError) as error:
                self._end_process()
                raise EngineError(f"the grammar process did not start: {error!r}") from error

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


class _Process:
    """`engine.grammar_process`: asked by lines, killed when it is late."""

    def __init__(self, files: ModelFiles, vocab_size: int) -> None:
        limit = str(int(2 * _COMPILE_SECONDS))
        command = [
            *(sys.executable, "-m", "engine.grammar_process"),
            *(str(files.path), files.format, str(vocab_size), limit),
        ]
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a client could fill the log
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            bufsize=0,
        )

    @property
    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    def ask(self, line: bytes, seconds: float) -> dict[str, str]:
        """Raises TimeoutError, and what `read` and a broken pipe raise."""
        assert self._popen.stdin is not None
        view = memoryview(line)  # an unbuffered pipe may take only a part
        while view:
            view = view[self._popen.stdin.write(view) or 0 :]
        return self.read(seconds)

    def read(self, seconds: float) -> dict[str, str]:
        """The next answer. Raises TimeoutError, EOFError, or ValueError for one too large."""
        assert self._popen.stdout is not None
        pieces, size = [], 0
        poll = select.poll()
        poll.register(self._popen.stdout, select.POLLIN)
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise TimeoutError
            piece = os.read(self._popen.stdout.fileno(), 1 << 20)
            if not piece:
                raise EOFError
            pieces.append(piece)
            size += len(piece)
            if piece.endswith(b"\n"):
                return json.loads(b"".join(pieces))
            if size > _MAX_ANSWER_BYTES:
                raise ValueError("the answer is too large")

    def kill(self) -> None:
        self._popen.kill()

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            pipe.close()


def _refused(reason: str) -> RequestError:
    return RequestError(f"the grammar is refused: {reason}", param="structured_outputs")
