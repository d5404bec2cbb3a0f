"""Continuous batching: which tokens of which sequences the next step computes.

First come, first served. Running sequences go first, then waiting ones are admitted while the step's token budget,
the number of sequences and the KV blocks allow; a prompt larger than what is left of the budget is cut into chunks.
When a running sequence needs a block and none is free, the last arrived one gives up all of its blocks and waits to
be computed again. Running sequences are therefore always older than waiting ones, and all but the last one decode.
"""

from collections import OrderedDict
from dataclasses import dataclass

from requant.engine.block_pool import ROOT_KEY, BlockPool, chain_key
from requant.engine.request import Request, RequestStatus
from requant.engine.runner_protocol import ScheduledSequence
from requant.errors import ConfigError


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of the scheduler.

    Attributes:
        max_num_seqs: Most sequences in a step.
        max_num_batched_tokens: Most tokens in a step; at least ``max_num_seqs``, so that every running sequence
            decodes in every step.
        max_model_len: Most tokens in a sequence, prompt included.
        block_size: Tokens in a KV block.
        num_blocks: KV blocks.
        enable_prefix_caching: Reuse the KV of equal prefixes.
        drafts: Most tokens that a sequence drafts; pages for them are taken where some are free.

    Raises:
        ConfigError: A limit is not a positive number, or the limits contradict each other.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    enable_prefix_caching: bool = True
    drafts: int = 0

    def __post_init__(self) -> None:
        """Check the limits."""
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: 1 or more")
        if self.max_model_len < 2:
            raise ConfigError(f"max_model_len is {self.max_model_len}; accepted: 2 or more (a prompt and a new token)")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; "
                f"accepted: at least max_num_seqs, {self.max_num_seqs}"
            )

    @property
    def context(self) -> int:
        """Most tokens a sequence can have: the model's length, or what the whole KV cache holds if that is less."""
        return min(self.max_model_len, self.block_size * self.num_blocks)


@dataclass(frozen=True)
class ScheduledStep:
    """The work of one step; empty when there is nothing to do."""

    sequences: tuple[ScheduledSequence, ...] = ()


class Scheduler:
    """Keeps the queues and hands out KV blocks.

    :meth:`schedule` already moves ``Request.computed`` over what it schedules; the caller appends sampled tokens to
    the request afterwards, and ends it with :meth:`finish`.

    Attributes:
        pool: The KV blocks.
        preemptions: Total times a running sequence lost its blocks.
        prefix_queries: Total prompt tokens looked up in the prefix cache.
        prefix_hits: Total prompt tokens found there.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.enable_prefix_caching)
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: list[Request] = []

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences with blocks."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Queue a new request behind all others. It must be able to fit: ``max_length`` ≤ ``config.context``."""
        self._waiting[request.id] = request

    def finish(self, request: Request) -> None:
        """Forget a request, wherever it stands, and free its blocks."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._release(request)
        else:
            del self._waiting[request.id]
        request.status = RequestStatus.FINISHED

    def schedule(self) -> ScheduledStep:
        """Choose the next step's work."""
        budget = self.config.max_num_batched_tokens
        sequences: list[ScheduledSequence] = []
        # Preemption takes from the end of the list, which this loop has not reached.
        while budget and len(sequences) < len(self._running):
            request = self._running[len(sequences)]
            count = min(request.uncomputed, budget)
            # Drafts take what the sequences behind leave of the budget, and never a page from any of them.
            spare = min(budget - count, budget - len(self._running) + len(sequences))
            drafts = request.drafts[: max(spare, 0)] if count == request.uncomputed else ()
            if self._grow(request, request.computed + count):
                if self.config.drafts:
                    drafts = self._grow_for_drafts(request, request.computed + count, drafts)
                sequences.append(self._take(request, count, drafts))
                budget -= count + len(drafts)
        while budget and self._waiting and self._admit_next():
            request = self._running[-1]
            count = min(request.uncomputed, budget)
            if self.config.drafts:
                self._grow_for_drafts(request, request.computed + count, ())
            sequences.append(self._take(request, count))
            budget -= count
        return ScheduledStep(tuple(sequences))

    def _admit_next(self) -> bool:
        """Give the first waiting request the blocks for all its known tokens and let it run, if that is possible.

        Holding the blocks of the whole prompt from its first chunk on means that no prompt is thrown out half-way.
        """
        if len(self._running) >= self.config.max_num_seqs:
            return False
        request = next(iter(self._waiting.values()))
        found = self._find_prefix(request)
        new = self._blocks_for(len(request.tokens)) - len(found)
        # Every running sequence needs another block soon; without one each, the newcomer would be thrown out again.
        # For the same reason a sequence that was preempted in this step is not admitted in it.
        if not self.pool.can_serve(found, new, len(self._running)):
            return False
        self.pool.hold(found)
        request.blocks = found + self.pool.allocate(new)
        request.published = len(found)
        request.computed = len(found) * self.config.block_size
        if request.cached_tokens is None:
            request.cached_tokens = request.computed
            if self.pool.caching and request.cacheable:
                self.prefix_queries += len(request.prompt)
                self.prefix_hits += request.computed
        del self._waiting[request.id]
        self._running.append(request)
        request.status = RequestStatus.RUNNING
        return True

    def _find_prefix(self, request: Request) -> list[int]:
        if not self.pool.caching:
            return []
        full = request.cacheable // self.config.block_size
        self._extend_keys(request, full)
        return self.pool.find(request.keys[:full])

    def _take(self, request: Request, count: int, drafts: tuple[int, ...] = ()) -> ScheduledSequence:
        start, stop = request.computed, request.computed + count
        request.computed = stop
        self._publish(request)
        return ScheduledSequence(
            request,
            start,
            count,
            samples=stop == len(request.tokens),
            prompt_positions=request.prompt_logprob_positions(start, stop),
            drafts=drafts,
        )

    def _publish(self, request: Request) -> None:
        """Make the full blocks findable at once: a sequence of the same step may already share them."""
        if not self.pool.caching:
            return
        full = request.computed // self.config.block_size
        if full <= request.published:
            return
        self._extend_keys(request, full)
        for index in range(request.published, full):
            self.pool.publish(request.blocks[index], request.keys[index])
        request.published = full

    def _extend_keys(self, request: Request, full: int) -> None:
        size = self.config.block_size
        for index in range(len(request.keys), full):
            parent = request.keys[-1] if index else ROOT_KEY
            request.keys.append(chain_key(parent, request.tokens[index * size : (index + 1) * size]))

    def _grow(self, request: Request, length: int) -> bool:
        """Give a running request blocks for ``length`` tokens, preempting younger ones; False if it went itself."""
        missing = self._blocks_for(length) - len(request.blocks)
        if missing <= 0:
            return True
        while missing > self.pool.num_free:
            victim = self._running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        request.blocks += self.pool.allocate(missing)
        return True

    def _grow_for_drafts(self, request: Request, known: int, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Give a running request blocks for drafts and what may be drafted behind them, as far as free ones reach.

        Returns:
            The drafts that there is room for.
        """
        # The newest token and all drafts behind it but the last have keys and values of the layer that drafts.
        wanted = min(known + len(drafts) + self.config.drafts, request.max_length)
        missing = max(self._blocks_for(wanted) - len(request.blocks), 0)
        request.blocks += self.pool.allocate(min(missing, max(self.pool.num_free - len(self._running), 0)))
        return drafts[: len(request.blocks) * self.config.block_size - known]

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.status = RequestStatus.WAITING
        self._waiting[request.id] = request
        self._waiting.move_to_end(request.id, last=False)
        self.preemptions += 1

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.computed = 0
        request.drafts = ()

    def _blocks_for(self, length: int) -> int:
        return -(-length // self.config.block_size)
