"""One model, one KV cache, many sequences. Single-threaded: see `engine.loop` for its thread."""

import itertools
import logging
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from core.config import EngineConfig
from core.errors import EngineError, RankLostError, RequestError
from core.types import FinishReason, GenerationRequest, KVBlockCounts, Pooling, TokenLogprobs
from engine.block_pool import BlockPool
from engine.cuda_graphs import DecodeGraphs
from engine.draft import DraftProposer
from engine.grammar import Matcher
from engine.logprobs import logprobs_of
from engine.meter import StepMeter
from engine.model import host_memory
from engine.sampler import Sampler
from engine.scheduler import Scheduler, StepPlan
from engine.sequence import Sequence, SequenceState, check_request, check_token_ids
from engine.speculative import NgramProposer, Proposer, Speculation
from engine.staging import Staging
from engine.step import StepInputs, prepare
from engine.types import BeforeModel, EngineStats, Model, PooledModel, SequenceOutput

logger = logging.getLogger(__name__)

_Sample = tuple[int | None, TokenLogprobs | None]


@dataclass(slots=True)
class _StepResult:
    """What the model said: one sample for each row to sample from, and scores of prompts."""

    samples: list[_Sample] = field(default_factory=list)
    prompt_logprobs: list[tuple[Sequence, list[TokenLogprobs]]] = field(default_factory=list)
    # Of prompts to embed: the sum of this step's hidden states that count, and how many.
    pooled: list[tuple[Sequence, torch.Tensor, int]] = field(default_factory=list)


class Engine:
    """Owns the KV cache and every sequence in it; the life of a sequence is in `engine.sequence`.

    - `kv_cache` is allocated once and never moves: transports register its memory.
    - Between two calls every block is free, cached, or in exactly the tables of sequences that
      own it (`check_integrity`). Only AWAITING sequences' blocks are written by others, only
      HELD and AWAITING ones are known to others; both last until the caller says otherwise.
    - A sequence ends once: by a finish reason, an error, `release` or `abort`. All but the
      first two are silent, since the caller asked for them.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        num_kv_blocks: int,
        device: str = "cpu",
        draft: Model | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """`draft` is the model of `speculative.method: draft_model`; without it nothing is
        guessed, as on a worker that only prefills. `graphs`, of `model`, are captured here; their
        dummy block is `num_kv_blocks`."""
        block_shape = model.kv_block_shape(config.block_size)
        num_bound = num_kv_blocks + (graphs is not None)
        cache = host_memory.zeros((num_bound, *block_shape), model.kv_dtype, device)
        model.bind(cache)
        self.kv_cache = cache[:num_kv_blocks]  # nobody else hears of the dummy block
        self._graphs = graphs
        if graphs is not None:
            graphs.capture_all()
        self.max_model_len = min(
            config.max_model_len or model.config.max_model_len,
            model.config.max_model_len,
            num_kv_blocks * config.block_size,
        )
        self.pool = BlockPool(num_kv_blocks, config.enable_prefix_caching)
        self._vocab_size = model.config.vocab_size
        self._speculation = self._make_speculation(config, draft)
        propose = self._speculation.propose if self._speculation is not None else None
        self.scheduler = Scheduler(config, self.pool, propose)
        self.made_progress = False  # whether the last step did anything at all
        self.ran_model = False  # and whether the model was part of it
        self.has_fresh = False  # whether KV has come of a sequence that was in no step since
        self._sampler = Sampler()
        self._staging = Staging(
            self.kv_cache.device, torch.int64, 3 * config.max_num_batched_tokens
        )
        self._meter = StepMeter()
        self.model = model
        self._no_rows = torch.empty(0, 0, device=self.kv_cache.device)
        self._sequences: dict[str, Sequence] = {}
        self._arrivals = itertools.count()
        self._early: list[SequenceOutput] = []  # outputs of the next step, known before it
        self._num_prefilled = 0
        self._num_decoded = 0

    def set_limits(self, config: EngineConfig) -> None:
        """Changes `max_num_seqs` and `max_num_batched_tokens`, to what the engine was built with
        or less. Raises EngineError while sequences are here."""
        if self._sequences:
            raise EngineError(f"{len(self._sequences)} sequences are still here")
        self.scheduler.set_limits(config)

    def _make_speculation(self, config: EngineConfig, draft: Model | None) -> Speculation | None:
        setting = config.speculative
        if setting is None:
            return None
        proposer: Proposer
        if setting.method == "ngram":
            proposer = NgramProposer(setting)
        elif draft is None:
            return None
        else:
            proposer = DraftProposer(
                draft,
                self.pool.num_blocks,
                config.block_size,
                self._vocab_size,
                self.kv_cache.device,
                config.enable_prefix_caching,
            )
        return Speculation(proposer, setting.num_tokens, self.max_model_len)

    # ------------------------------------------------------------ requests in

    # A request with a grammar comes with a fresh matcher of it, and is refused without.

    def add(self, request: GenerationRequest, matcher: Matcher | None = None) -> None:
        """Prefills and decodes here. Raises RequestError."""
        self._add(request, matcher)

    def add_prefill(
        self, request: GenerationRequest, matcher: Matcher | None = None, *, hold: bool = True
    ) -> None:
        """Computes the prompt and samples one token. With `hold` all blocks then stay pinned
        until `release`; without, or if that token ends the sequence, they are given back at
        once. Raises RequestError."""
        self._add(request, matcher, prefill_only=True, hold=hold)

    def add_remote(self, request: GenerationRequest, matcher: Matcher | None = None) -> None:
        """Waits for blocks for all tokens of the request, whose KV a peer will send. They are
        announced by an output with `admitted`; the first `num_cached_tokens` tokens need no
        sending. Then comes `start_decode` or `abort`, in bounded time.

        Call it only once the peer has admitted the prefill: blocks are then reserved for KV
        that is certain to be computed, and two workers can never wait for each other's blocks.
        Raises RequestError."""
        self._add(request, matcher, wants_remote_kv=True)

    def start_decode(self, request_id: str, first_token: int, first_whole_block: int = 0) -> None:
        """The KV of all tokens is in place, but for layers with a sliding window in blocks before
        `first_whole_block`, which nothing will look at. `first_token`, which the peer has emitted
        already, becomes the first output here and is not emitted again."""
        seq = self._get(request_id, SequenceState.AWAITING)
        check_token_ids((first_token,), self._vocab_size, "first_token")
        self.scheduler.start_decode(seq, first_whole_block)
        self.has_fresh = True
        self._append(seq, first_token)

    def release(self, request_id: str) -> None:
        """Ends a HELD sequence; its blocks go to the prefix cache. Unknown ids are ignored."""
        if request_id in self._sequences:
            self._end(self._get(request_id, SequenceState.HELD))

    def abort(self, request_id: str) -> None:
        """Ends a sequence in any state without an output. Unknown ids are ignored. The blocks
        of an AWAITING sequence may be reused at once: end every copy into them first."""
        seq = self._sequences.get(request_id)
        if seq is not None:
            self._end(seq)

    # -------------------------------------------------------------- questions

    def has_work(self) -> bool:
        """Whether `step` may do something. False if all that is left waits for a caller."""
        return bool(self._early) or self.scheduler.has_work

    @property
    def num_sequences(self) -> int:
        """Of every kind, also those that only hold blocks."""
        return len(self._sequences)

    @property
    def has_prompts(self) -> bool:
        """Whether some of a prompt is to be computed here."""
        return self.scheduler.num_waiting_prefill_tokens > 0

    @property
    def num_running(self) -> int:
        """Sequences that every step must bring forward."""
        return len(self.scheduler.running)

    def stats(self) -> EngineStats:
        scheduler, speculation, meter = self.scheduler, self._speculation, self._meter
        decode_step_seconds, decode_sequence_seconds = meter.decode_line
        return EngineStats(
            requests_running=len(scheduler.running) + len(scheduler.awaiting),
            requests_waiting=len(scheduler.waiting) + len(scheduler.waiting_remote),
            waiting_prefill_tokens=scheduler.num_waiting_prefill_tokens,
            tokens_prefilled_total=self._num_prefilled,
            tokens_decoded_total=self._num_decoded,
            prefix_hit_tokens_total=scheduler.num_hit_tokens,
            preemptions_total=scheduler.num_preemptions,
            tokens_drafted_total=speculation.num_drafted if speculation else 0,
            tokens_draft_accepted_total=speculation.num_accepted if speculation else 0,
            draft_pauses_total=speculation.num_pauses if speculation else 0,
            prefill_tokens_per_second=meter.prefill_tokens_per_second,
            decode_step_seconds=decode_step_seconds,
            decode_sequence_seconds=decode_sequence_seconds,
        )

    def block_counts(self) -> KVBlockCounts:
        return self.pool.counts()

    def check_integrity(self) -> None:
        """Raises EngineError with what is wrong if the books disagree. Costs O(blocks)."""
        self.scheduler.check()
        scheduler = self.scheduler
        queues = (scheduler.waiting, scheduler.waiting_remote, scheduler.running)
        queued = [seq.request_id for queue in queues for seq in queue]
        queued += [*scheduler.awaiting, *scheduler.held]
        if sorted(queued) != sorted(self._sequences):
            raise EngineError(f"engine: queues have {queued}, the engine {[*self._sequences]}")

    # ------------------------------------------------------------------ a step

    def step(self, before_model: BeforeModel | None = None) -> list[SequenceOutput]:
        """Computes one batch. One output for every sequence that was admitted, advanced towards a
        hand-over, sampled or ended. `before_model` is called when a model is about to run, maybe
        more than once, with outputs that then are not returned: of what was admitted and a peer
        waits for, so that it can prepare meanwhile. If the model or the sampler raises, the
        sequences of the batch end with an `error`, and the engine can go on with the others. Raises
        RankLostError when a part of the model is gone, which ends the engine."""
        started = time.monotonic()
        if before_model is not None and self._speculation is not None:
            before_model([])  # scheduling may run its model
        plan = self.scheduler.schedule()
        self.ran_model = bool(plan.steps)
        self.has_fresh = self.has_fresh and not self.ran_model
        for seq in plan.admitted:
            seq.queue_seconds = started - seq.added_at
        num_prompt_tokens = sum(n for seq, n in plan.steps if seq.is_prefilling)
        num_decodes = sum(not seq.is_prefilling for seq, _ in plan.steps)
        admitted = [_admitted(seq) for seq in plan.admitted]
        if before_model is not None and plan.steps:
            before_model([output for output in admitted if output.block_table is not None])
            admitted = [output for output in admitted if output.block_table is None]
        result = self._run(plan)
        outputs = self._postprocess(plan, admitted, result)
        step_seconds = time.monotonic() - started
        self._meter.note(num_prompt_tokens, num_decodes, step_seconds)
        for output in outputs:
            output.step_seconds = step_seconds
        return outputs

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> "_StepResult | Exception":
        if not plan.steps:
            return _StepResult()
        try:
            inputs = prepare(plan)
            logits, hidden = self._forward(inputs)
            result, start = _StepResult(), len(inputs.sampled)
            if start:
                sampled = logits[:start]
                maxima = self.model.maxima if not inputs.pools else None
                output = self._sampler.sample(sampled, inputs.sampled, inputs.drafted, maxima)
                result.samples = list(zip(output.token_ids, output.logprobs, strict=True))
            for item in inputs.scores:
                end = start + len(item.token_ids)
                num_top = item.seq.sampling.prompt_logprobs or 0
                tops = [num_top] * len(item.token_ids)
                scored = logprobs_of(logits[start:end], item.token_ids, tops)
                result.prompt_logprobs.append((item.seq, scored))
                start = end
            start = 0
            for pool in inputs.pools:
                rows = hidden[start : start + pool.num_rows]
                result.pooled.append((pool.seq, rows.float().sum(0), pool.num_rows))
                start += pool.num_rows
            if self.kv_cache.is_cuda:
                # KV that this step announces is read by others, past any stream of ours.
                torch.cuda.current_stream().synchronize()
            return result
        except RankLostError:
            raise  # nothing can run here any more
        except Exception as error:
            logger.exception("a step with %d sequences failed", len(plan.steps))
            return error

    def _forward(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the rows that need them, and final hidden states of those that need these."""
        if inputs.pools:
            return self._forward_pooled(inputs)
        return self._forward_plain(inputs), self._no_rows

    def _forward_pooled(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(self.model, PooledModel)  # `_add` has seen to it
        num_logits = len(inputs.logits_rows)
        input_ids, positions, rows = self._staging.put(
            inputs.input_ids, inputs.positions, inputs.logits_rows + inputs.hidden_rows
        )
        hidden = self.model.hidden_states(input_ids, positions, inputs.batch, rows)
        logits = self.model.logits(hidden[:num_logits]) if num_logits else self._no_rows
        return logits, hidden[num_logits:]

    def _forward_plain(self, inputs: StepInputs) -> torch.Tensor:
        if self._graphs is not None and self._graphs.fits(inputs.batch):
            return self._graphs.run(inputs)
        input_ids, positions, rows = self._staging.put(
            inputs.input_ids, inputs.positions, inputs.logits_rows
        )
        return self.model.forward(input_ids, positions, inputs.batch, rows)

    def _postprocess(
        self, plan: StepPlan, admitted: list[SequenceOutput], result: "_StepResult | Exception"
    ) -> list[SequenceOutput]:
        self.made_progress = plan.made_progress or bool(self._early)
        early, self._early = self._early, []
        outputs = {output.request_id: output for output in admitted}
        if isinstance(result, Exception):
            for seq, _ in plan.steps:
                self._fail(seq, outputs, f"the engine failed in a step: {result}")
        else:
            for seq, scored in result.prompt_logprobs:
                seq.num_prompt_logprobs += len(scored)
                _output_of(seq, outputs).prompt_logprobs = scored
            for seq, total, count in result.pooled:
                seq.pooled = total if seq.pooled is None else seq.pooled + total
                seq.num_pooled += count
            self._advance(plan, result, outputs)
        return [*early, *outputs.values()]

    def _advance(
        self, plan: StepPlan, result: "_StepResult", outputs: dict[str, SequenceOutput]
    ) -> None:
        samples = iter(result.samples)
        for seq, num_tokens in plan.steps:
            if not seq.is_prefilling:
                self._advance_decode(seq, [next(samples) for _ in range(num_tokens)], outputs)
                continue
            self.scheduler.advance(seq, num_tokens)
            self._num_prefilled += num_tokens
            if seq.num_uncomputed_tokens == 0:
                if seq.sampling.max_tokens == 0:
                    self._finish_prompt(seq, outputs)
                else:
                    self._emit(seq, next(samples), outputs)
            elif seq.hold:
                _output_of(seq, outputs).num_computed_tokens = seq.num_computed_tokens

    def _finish_prompt(self, seq: Sequence, outputs: dict[str, SequenceOutput]) -> None:
        """The end of a sequence that is its prompt alone."""
        if seq.pooled is not None:
            divisor = seq.num_prompt_tokens if seq.sampling.pooling is Pooling.MEAN else 1
            embedding = (seq.pooled / divisor).cpu().numpy().astype("<f4")
            if not np.isfinite(embedding).all():
                self._fail(seq, outputs, "the model's hidden states are not finite")
                return
            _output_of(seq, outputs).embedding = embedding.tobytes()
        _output_of(seq, outputs).finish_reason = FinishReason.LENGTH
        self._end(seq)

    def _advance_decode(
        self, seq: Sequence, samples: list[_Sample], outputs: dict[str, SequenceOutput]
    ) -> None:
        """One sample for the last token and one for each that was guessed to follow it. They
        count as long as the guess before them was right."""
        draft, seq.draft = seq.draft, []
        num_accepted = 0
        for index, sample in enumerate(samples):
            self.scheduler.advance(seq, 1)  # of the last token, or of a right guess
            self._num_decoded += 1
            goes_on = self._emit(seq, sample, outputs)
            is_guessed = index < len(draft) and sample[0] == draft[index]
            num_accepted += is_guessed
            if not goes_on or not is_guessed:
                break
        if draft and self._speculation is not None:
            self._speculation.observe(seq, len(draft), num_accepted)

    def _emit(self, seq: Sequence, sample: _Sample, outputs: dict[str, SequenceOutput]) -> bool:
        """Adds one sampled token; False if the sequence computes nothing more."""
        token_id, logprobs = sample
        if token_id is None:
            self._fail(seq, outputs, "the model's logits are not finite")
            return False
        if not seq.append(token_id):
            self._fail(seq, outputs, "the sampled token is against the grammar")
            return False
        output = _output_of(seq, outputs)
        output.num_computed_tokens = seq.num_computed_tokens
        output.token_ids.append(token_id)
        if logprobs is not None:
            output.logprobs = [*(output.logprobs or ()), logprobs]
        output.finish_reason = seq.finish_reason(self.max_model_len)
        if output.finish_reason is not None:
            self._end(seq)
        elif seq.prefill_only:
            if seq.hold:
                self.scheduler.hold(seq)
            else:
                self._end(seq)
        else:
            return True
        return False

    # ---------------------------------------------------------------- helpers

    def _add(
        self,
        request: GenerationRequest,
        matcher: Matcher | None,
        *,
        prefill_only: bool = False,
        hold: bool = False,
        wants_remote_kv: bool = False,
    ) -> None:
        if request.request_id in self._sequences:
            raise RequestError(f"request {request.request_id} exists", param="request_id")
        check_request(request, self._vocab_size, self.max_model_len)
        if request.sampling.pooling is not None and not isinstance(self.model, PooledModel):
            raise RequestError("this worker's model gives no embeddings")
        seq = Sequence(
            request,
            arrival=next(self._arrivals),
            added_at=time.monotonic(),
            prefill_only=prefill_only,
            hold=hold,
            wants_remote_kv=wants_remote_kv,
            matcher=matcher,
        )
        if (request.sampling.grammar is None) != (matcher is None):
            raise RequestError("a grammar needs its matcher, and a matcher its grammar")
        if matcher is not None and not all(map(matcher.accept, request.output_token_ids)):
            raise RequestError("the output so far is against the grammar")
        if matcher is not None and matcher.is_terminated:
            raise RequestError("the output so far ends the grammar: nothing is left to generate")
        self._sequences[seq.request_id] = seq
        self.scheduler.add(seq)

    def _get(self, request_id: str, state: SequenceState | None = None) -> Sequence:
        seq = self._sequences.get(request_id)
        if seq is None:
            raise EngineError(f"request {request_id} is not known to the engine")
        if state is not None and seq.state is not state:
            raise EngineError(f"request {request_id} is {seq.state.value}, not {state.value}")
        return seq

    def _append(self, seq: Sequence, token_id: int) -> None:
        """Takes over a token that somebody else has emitted."""
        output = SequenceOutput(seq.request_id, num_computed_tokens=seq.num_computed_tokens)
        if not seq.append(token_id):
            output.error = "the first token is against the grammar"
        else:
            output.finish_reason = seq.finish_reason(self.max_model_len)
        if output.error is not None or output.finish_reason is not None:
            self._end(seq)
            self._early.append(output)

    def _fail(self, seq: Sequence, outputs: dict[str, SequenceOutput], message: str) -> None:
        _output_of(seq, outputs).error = message
        self._end(seq)

    def _end(self, seq: Sequence) -> None:
        self.scheduler.finish(seq)
        del self._sequences[seq.request_id]


def _admitted(seq: Sequence) -> SequenceOutput:
    is_known_to_peer = seq.prefill_only or seq.wants_remote_kv
    return SequenceOutput(
        seq.request_id,
        admitted=True,
        block_table=list(seq.block_table) if is_known_to_peer else None,
        num_cached_tokens=seq.num_cached_tokens,
        queue_seconds=seq.queue_seconds,
        num_computed_tokens=seq.num_computed_tokens,
    )


def _output_of(seq: Sequence, outputs: dict[str, SequenceOutput]) -> SequenceOutput:
    output = outputs.get(seq.request_id)
    if output is None:
        output = outputs[seq.request_id] = SequenceOutput(seq.request_id)
    return output
