"""State of one sequence between its arrival and its end."""

from enum import Enum

import numpy as np

from requant.engine.messages import CoreRequest, TokenLogprobs

_NOWHERE = range(0)


class RequestStatus(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One sequence: its tokens, how far their KV is computed, and the blocks that hold it.

    Attributes:
        id: Unique among unfinished requests.
        params: How to sample.
        prompt: The prompt's token ids.
        output: New token ids so far.
        tokens: ``prompt`` followed by ``output``; all known tokens.
        eos_token_ids: Tokens that end the sequence unless ``params.ignore_eos``.
        max_length: Number of tokens, prompt included, at which generation ends.
        computed: Leading tokens whose KV is stored, or will be by the steps already scheduled.
        drafts: Guesses at the tokens behind the known ones.
        blocks: Block numbers of the KV, in order.
        keys: Prefix-cache keys of the leading full blocks, as far as they were needed.
        published: Leading blocks that were made findable (or were found) in the prefix cache.
        cached_tokens: Prompt tokens found in the prefix cache when the request was first admitted.
        prompt_logprobs: Entries gathered so far, the first belonging to the prompt's second token.
        status: Where it stands.
    """

    def __init__(self, source: CoreRequest, context: int) -> None:
        """Start waiting.

        Args:
            source: What was asked for.
            context: Most tokens a sequence can have, prompt included.
        """
        self.id = source.request_id
        self.params = source.params
        self.prompt = source.prompt
        self.output: list[int] = []
        self.tokens = list(source.prompt)
        self.eos_token_ids = source.eos_token_ids
        wanted = context if source.params.max_tokens is None else len(source.prompt) + source.params.max_tokens
        self.max_length = min(wanted, context)
        self.computed = 0
        self.drafts: tuple[int, ...] = ()
        self.blocks: list[int] = []
        self._table = np.zeros(0, dtype=np.int32)
        self._table_of = self.blocks
        self.keys: list[bytes] = []
        self.published = 0
        self.cached_tokens: int | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.status = RequestStatus.WAITING

    @property
    def table(self) -> np.ndarray:
        """``blocks`` as an array, int32; made anew only when they have changed."""
        # Blocks that are given back leave their list behind; those that are added only make it longer.
        if self._table_of is not self.blocks or len(self._table) != len(self.blocks):
            self._table, self._table_of = np.array(self.blocks, dtype=np.int32), self.blocks
        return self._table

    @property
    def uncomputed(self) -> int:
        """Known tokens that no scheduled step has computed yet: 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def cacheable(self) -> int:
        """Leading tokens that the prefix cache may stand in for.

        The last known token is always computed, since sampling needs its logits; so is every prompt position
        whose log-probabilities are asked for and not yet gathered.
        """
        if self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt) - 1:
            return len(self.prompt_logprobs)
        return len(self.tokens) - 1

    def append(self, token: int) -> None:
        """Add a new token."""
        self.output.append(token)
        self.tokens.append(token)

    def prompt_logprob_positions(self, start: int, stop: int) -> range:
        """Positions in ``start:stop`` whose logits are wanted for the log-probability of the next prompt token."""
        if self.params.prompt_logprobs is None:
            return _NOWHERE
        return range(max(start, len(self.prompt_logprobs)), min(stop, len(self.prompt) - 1))
