"""What a start is spent on, stage by stage."""

import logging
import time

logger = logging.getLogger(__name__)


class Stages:
    """A clock that is stopped after each stage, from the moment it is made.

    Attributes:
        seconds: (name, seconds) of the stages that are over.
    """

    def __init__(self) -> None:
        self._begin = self._last = time.perf_counter()
        self.seconds: list[tuple[str, float]] = []

    def done(self, name: str) -> None:
        """A stage is over; what comes now is the next."""
        now = time.perf_counter()
        self.seconds.append((name, now - self._last))
        self._last = now

    def log(self) -> None:
        """One line that says what the start was spent on."""
        stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds)
        logger.info("engine built in %.2f seconds: %s", time.perf_counter() - self._begin, stages)
