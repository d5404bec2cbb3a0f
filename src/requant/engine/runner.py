"""Runs the model on a step's sequences: inputs, forward (eager or as a CUDA graph), logits, sampling."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from requant.engine.batch import ModelInput, Step, dummy_input, make_step, moved, to_device
from requant.engine.drafting import Drafter, DraftStep, accepted, make_draft_step
from requant.engine.graphs import DecodeGraphs, graph_sizes
from requant.engine.messages import CoreRequest, TokenLogprobs
from requant.engine.request import Request
from requant.engine.runner_protocol import RunnerOutput, ScheduledSequence
from requant.engine.sampler import Sampler, logprob_slices, sampling_rows, sliced_logprobs
from requant.engine.sampling_params import SamplingParams
from requant.kernels.attention_batch import AttentionBatch
from requant.models.base import CausalLM


class ModelRunner:
    """Owns the KV cache and everything that touches the device after loading.

    Args:
        model: A finished model (:mod:`requant.models`): its weights are final.
        device: Where the model lives.
        dtype: Of the KV cache.
        block_size: Tokens in a page of the KV cache.
        seed: For requests without a seed of their own.
        announce: Where ranks share the model: tells the others of each step, which they then :meth:`follow`.
        drafts: Most tokens that a sequence drafts; 0 unless the model drafts.
    """

    def __init__(
        self,
        model: CausalLM,
        device: torch.device,
        dtype: torch.dtype,
        block_size: int,
        seed: int = 0,
        announce: Callable[[object], None] = lambda step: None,
        drafts: int = 0,
    ) -> None:
        self.model = model
        self.device = device
        self.dtype = dtype
        self.block_size = block_size
        self.vocab_size = int(model.config.vocab_size)
        self.num_blocks = 0
        self._announce = announce
        self._graphs: DecodeGraphs | None = None
        self._sampler = Sampler(device, seed)
        self._drafts = drafts
        self._drafter = Drafter(model, device, block_size) if drafts else None
        self._last: tuple[ModelInput, Tensor] | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one page over all layers; the cache has one page more than is used, for what is written nowhere."""
        per_token = sum(a.kv_cache_bytes_per_token(self.dtype) for a in self.model.attention_layers())
        return per_token * self.block_size

    def allocate(self, num_blocks: int) -> None:
        """Give every attention layer its KV cache of ``num_blocks`` pages."""
        self.num_blocks = num_blocks
        for attention in self.model.attention_layers():
            shape = attention.kv_cache_shape(num_blocks, self.block_size)
            attention.kv_cache = _zeros(shape, self.dtype, self.device)

    @torch.inference_mode()
    def activation_bytes(self, max_tokens: int, max_seqs: int) -> int:
        """Peak device memory of the largest step beyond weights, measured by running it. GPU only."""
        self.allocate(1)
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        step = dummy_input(1, max_tokens, self.device)
        hidden = self.model(step.input_ids, step.positions, step.attention)
        if self._drafter:
            self._drafter.forward(step.input_ids, hidden, step.positions, step.attention)
        count = min(max_seqs * (1 + self._drafts), max_tokens)
        logits = self.model.compute_logits(hidden[torch.zeros(count, dtype=torch.int64, device=self.device)])
        costly = SamplingParams(top_p=0.5, max_tokens=None)  # sorts the vocabulary
        request = Request(CoreRequest("profile", (0,), costly), context=max_tokens)
        self._sampler.sample(logits, [request] * count)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        del step, hidden, logits
        torch.cuda.empty_cache()
        return peak - before

    @torch.inference_mode()
    def capture(self, max_seqs: int, max_context: int) -> None:
        """Capture the decode step, and that of the layer that drafts, as CUDA graphs. GPU only."""
        sizes = graph_sizes(max_seqs * (1 + self._drafts))

        def forward(ids: Tensor, states: Tensor | None, positions: Tensor, batch: AttentionBatch) -> Tensor:
            return self.model(ids, positions, batch)

        self._graphs = DecodeGraphs(forward, sizes, max_context, self.block_size, self.device)
        if self._drafter:
            self._drafter.capture(sizes, max_context, self.dtype)

    @torch.inference_mode()
    def run(self, sequences: Sequence[ScheduledSequence]) -> list[RunnerOutput]:
        """One step; see :class:`requant.engine.runner_protocol.Runner`."""
        step = make_step(sequences, self.block_size)
        self._announce(step)
        hidden, inputs = self._forward(step)
        prompt = [self._prompt_logprobs(s, hidden, rows) for s, rows in zip(sequences, step.prompt_rows, strict=True)]
        sampled = iter(self._sample(step, hidden, [s for s in sequences if s.samples]))
        outputs = [
            RunnerOutput(*(next(sampled) if s.samples else ((), ())), p) for s, p in zip(sequences, prompt, strict=True)
        ]
        return self._with_drafts(sequences, outputs, inputs, hidden) if self._drafter else outputs

    def _sample(
        self, step: Step, hidden: Tensor, sequences: Sequence[ScheduledSequence]
    ) -> Iterable[tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]]:
        """What each sequence has got: its new tokens, and their log-probabilities if they are wanted."""
        if not sequences:
            return ()
        logits = self._sampled_logits(step, hidden)
        rows = [row for sequence in sequences for row in sampling_rows(sequence)]
        tokens = self._sampler.sample(logits, rows)
        entries = self._sampler.logprobs(logits, tokens, rows)
        if len(rows) == len(sequences):  # nothing was drafted
            return (
                ((token,), (entry,) if entry else ()) for token, entry in zip(tokens.tolist(), entries, strict=True)
            )
        return self._checked(sequences, tokens.tolist(), entries)

    @staticmethod
    def _checked(
        sequences: Sequence[ScheduledSequence], values: list[int], entries: list[TokenLogprobs | None]
    ) -> Iterator[tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]]:
        """The drafts that are accepted, and one token more."""
        first = 0
        for sequence in sequences:
            end = first + 1 + len(sequence.drafts)
            new = accepted(values[first:end], sequence.drafts)
            yield new, tuple(entry for entry in entries[first : first + len(new)] if entry)
            first = end

    def _with_drafts(
        self, sequences: Sequence[ScheduledSequence], outputs: list[RunnerOutput], inputs: ModelInput, hidden: Tensor
    ) -> list[RunnerOutput]:
        """The outputs of a step, with what is expected to come behind them."""
        assert self._drafter is not None
        step, drafting = make_draft_step(sequences, [out.tokens for out in outputs], self.block_size, self._drafts)
        self._announce(step)
        drafts = self._drafter.draft(inputs, hidden, step)
        if drafts is not None:
            for index, count, tokens in zip(drafting, step.counts.tolist(), drafts.tolist(), strict=True):
                outputs[index] = outputs[index]._replace(drafts=tuple(tokens[:count]))
        return outputs

    @torch.inference_mode()
    def follow(self, step: Step | DraftStep) -> None:
        """Compute what another rank's :meth:`run` announced, as far as all ranks do: everything but the sampling."""
        if isinstance(step, DraftStep):
            assert self._drafter is not None
            assert self._last is not None
            self._drafter.draft(*self._last, step)
            return
        hidden, inputs = self._forward(step)
        self._last = inputs, hidden
        for rows in step.prompt_rows:
            for first, end in logprob_slices(len(rows)):
                self.model.compute_logits(hidden[rows.start + first : rows.start + end])
        if step.sampled_rows.size:
            self._sampled_logits(step, hidden)

    def _sampled_logits(self, step: Step, hidden: Tensor) -> Tensor:
        if len(step.sampled_rows) == len(hidden):  # all of them, in their order
            return self.model.compute_logits(hidden)
        return self.model.compute_logits(hidden[moved(step.sampled_rows, torch.int64, self.device)])

    def _forward(self, step: Step) -> tuple[Tensor, ModelInput]:
        """Hidden states of a step, and the step on the device."""
        if self._graphs is not None and self._graphs.takes_step(step):
            return self._graphs.run(step)
        inputs = to_device(step, self.device)
        return self.model(inputs.input_ids, inputs.positions, inputs.attention), inputs

    def _prompt_logprobs(self, sequence: ScheduledSequence, hidden: Tensor, rows: range) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt tokens that this chunk's hidden states predict."""
        positions = sequence.prompt_positions
        wanted = sequence.request.params.prompt_logprobs
        if wanted is None or not rows:
            return ()
        states = hidden[rows.start : rows.stop]
        following = sequence.request.prompt[positions.start + 1 : positions.stop + 1]
        return tuple(sliced_logprobs(lambda a, b: self.model.compute_logits(states[a:b]), following, wanted))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take memory on a CPU only where they are written: numpy's come as untouched pages of the system."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
