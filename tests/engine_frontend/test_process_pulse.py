"""What the front end makes of the ranks' signs of life, without waiting for any."""

import pytest

from requant.engine import process
from requant.engine.process import _PulseReader


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Ranks:
    """Three ranks; those in ``still`` give no signs of life, those in ``stuck`` begin no more collectives."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.alive, self.begun = [1, 1, 1], [0, 0, 0]
        self.still: set[int] = set()
        self.stuck: set[int] = set()
        self.reader = _PulseReader(3, lambda rank: self.alive[rank], lambda rank: self.begun[rank])

    def run(self, seconds: int, busy: bool = True) -> str | None:
        """Time goes on; the message of the first failure, with its rank."""
        for _ in range(seconds):
            self.clock.now += 1
            for rank in range(3):
                self.alive[rank] += rank not in self.still
                # Nobody gets further than one collective beyond the one that is stuck.
                limit = min((self.begun[other] + 1 for other in self.stuck), default=10**9)
                if busy and rank not in self.stuck and self.begun[rank] < limit:
                    self.begun[rank] += 1
            missed = self.reader.missed(10)
            if missed is not None:
                return f"rank {missed[0]}: {missed[1].message}"
        return None


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    clock = Clock()
    monkeypatch.setattr(process.time, "monotonic", clock.monotonic)
    return Ranks(clock)


def test_all_is_well_busy_and_idle(ranks: Ranks) -> None:
    assert ranks.run(100) is None
    assert ranks.run(100, busy=False) is None
    assert ranks.run(100) is None


def test_a_rank_without_signs_of_life(ranks: Ranks) -> None:
    assert ranks.run(20, busy=False) is None
    ranks.still = {1}
    assert ranks.run(9, busy=False) is None
    assert ranks.run(5, busy=False) == "rank 1: no sign of life for 11 seconds"


def test_a_rank_that_is_alive_but_behind(ranks: Ranks) -> None:
    assert ranks.run(20) is None
    ranks.stuck = {2}
    assert ranks.run(9) is None
    assert ranks.run(5) == "rank 2: hangs: 11 seconds behind the others"


def test_a_rank_that_catches_up(ranks: Ranks) -> None:
    for _ in range(5):
        ranks.stuck = {0}
        assert ranks.run(9) is None
        ranks.stuck = set()
        assert ranks.run(2) is None


def test_a_process_that_has_not_started_yet(ranks: Ranks) -> None:
    ranks.alive, ranks.still = [1, 0, 1], {1}
    assert ranks.run(100, busy=False) is None
