"""How well drafts do: counted for the metrics, and told in the log."""

import logging
import time
from collections.abc import Callable

from requant.engine.messages import SpeculationCounts

logger = logging.getLogger(__name__)

_INTERVAL = 10.0  # Seconds between two lines of the log.


class Speculation:
    """Counts drafts.

    Args:
        most: Most tokens in a draft; 0: there is none.
        clock: Returns seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told = SpeculationCounts(by_position=(0,) * most)
        self._last = clock()
        self.counts = self._told

    def note(self, drafted: int, accepted: int) -> None:
        """A sequence's drafts were checked, unless it had none."""
        if not drafted:
            return
        now = self.counts
        self.counts = SpeculationCounts(
            now.drafts + 1,
            now.tokens + drafted,
            now.accepted + accepted,
            tuple(count + (place < accepted) for place, count in enumerate(now.by_position)),
        )

    def log(self) -> None:
        """Tell of what was drafted since the last line, if that was some seconds ago."""
        if self.counts.drafts == self._told.drafts or self._clock() - self._last < _INTERVAL:
            return
        logger.info("speculative decoding: %s", describe(self._told, self.counts))
        self._told, self._last = self.counts, self._clock()


def describe(before: SpeculationCounts, now: SpeculationCounts) -> str:
    """What came between two counts, in words; ``now`` has more drafts."""
    drafts, tokens, accepted = now.drafts - before.drafts, now.tokens - before.tokens, now.accepted - before.accepted
    shares = (f"{100 * (b - a) / drafts:.1f}" for a, b in zip(before.by_position, now.by_position, strict=True))
    return (
        f"{tokens} tokens drafted, {accepted} accepted ({100 * accepted / tokens:.1f} %; by position "
        f"{', '.join(shares)} %), {1 + accepted / drafts:.2f} tokens a step"
    )
