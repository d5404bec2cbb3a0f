"""How a model is cut over ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from requant.parallel.group import Group, Position
from requant.parallel.split import split


@dataclass(frozen=True)
class Ranks:
    """One rank among all, and the way in which they share the model.

    Attributes:
        group: The ranks.
        expert_parallel: Each rank has whole experts, and not a share of every expert.
        deterministic: The scale of an activation that is spread over the ranks is that of the whole row.
    """

    group: Group = field(default_factory=Position)
    expert_parallel: bool = False
    deterministic: bool = False

    @property
    def rank(self) -> int:
        """Which one this is."""
        return self.group.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self.group.size

    def split(self, size: int) -> range:
        """This rank's share; see :func:`requant.parallel.split.split`."""
        return split(size, self.size, self.rank)

    def shares(self, size: int) -> Sequence[range]:
        """Every rank's share."""
        return [split(size, self.size, rank) for rank in range(self.size)]


ALONE = Ranks()
"""A single rank, which has everything."""
