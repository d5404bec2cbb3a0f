"""What the engine core asks of whatever computes the model: one call a step.

What there is of for each sequence of each step are named tuples: they are made in a third of a frozen dataclass's time.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from requant.engine.messages import TokenLogprobs
from requant.engine.request import Request


class ScheduledSequence(NamedTuple):
    """The tokens of one request that a step computes: ``request.tokens[start:stop]``.

    ``request.blocks`` already covers them: the KV of position p goes to slot ``p % block_size`` of block
    ``request.blocks[p // block_size]``, and that of every position before ``start`` is there or, for a prefix shared
    with another sequence of the same step, is stored by this very step.

    Attributes:
        request: Whose tokens they are; the runner changes nothing in it.
        start: Position of the first one.
        known: How many, at least 1.
        samples: Whether the next token is to be sampled from the logits of position ``stop - 1``, that is, whether
            all known tokens are covered; otherwise more of the prompt follows in a later step.
        prompt_positions: Positions within ``start:stop`` (maybe none) whose logits are wanted for the
            log-probability of the token after them, ``request.prompt[p + 1]``, with
            ``request.params.prompt_logprobs`` top entries.
        drafts: Guesses at the tokens behind, computed along with the known ones, to be accepted or rejected; only of
            a sequence that samples.
    """

    request: Request
    start: int
    known: int
    samples: bool = True
    prompt_positions: range = range(0)
    drafts: tuple[int, ...] = ()

    @property
    def stop(self) -> int:
        """Position after the last known token."""
        return self.start + self.known

    @property
    def length(self) -> int:
        """How many tokens are computed, drafts included."""
        return self.known + len(self.drafts)

    @property
    def tokens(self) -> list[int]:
        """The tokens that are computed."""
        return [*self.request.tokens[self.start : self.stop], *self.drafts]


class RunnerOutput(NamedTuple):
    """What a step gave for one scheduled sequence.

    Attributes:
        tokens: New tokens in order: none if the sequence doesn't sample in this step, else the drafts that are accepted
            and one more.
        logprobs: One for each of ``tokens`` if ``request.params.logprobs`` is not None, else none.
        prompt_logprobs: One for each of ``prompt_positions``, in order.
        drafts: What is expected to come behind ``tokens``.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    drafts: tuple[int, ...] = ()


class Runner(Protocol):
    """Computes steps over a paged KV cache that it owns.

    Sequences of one step may share leading blocks, and one may read what another writes in that same step: in each
    layer, the keys and values of all the step's tokens are stored before any query attends.
    """

    @property
    def num_blocks(self) -> int:
        """Blocks in the KV cache."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this; it is the width of the logits."""
        ...

    def run(self, sequences: Sequence[ScheduledSequence]) -> Sequence[RunnerOutput]:
        """Compute one step.

        Args:
            sequences: At least one, no request twice; decodes (one known token) come before longer ones, though a long
                prompt's last chunk may have one, too.

        Returns:
            One output for each of ``sequences``, in their order.
        """
        ...
