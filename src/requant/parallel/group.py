"""What a rank asks of the others: three collectives, and who it is among them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """Some processes that run the same program, each on its own device. Every one of them makes the same calls."""

    @property
    def rank(self) -> int:
        """Which one this is, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def all_reduce_sum(self, x: Tensor, /) -> Tensor:
        """The sum of all ranks' ``x``, in its dtype; written into ``x``, which must be contiguous, and returned."""
        ...

    def all_reduce_max(self, x: Tensor, /) -> Tensor:
        """The elementwise maximum, likewise."""
        ...

    def all_gather(self, x: Tensor, sizes: Sequence[int], /) -> Tensor:
        """The ranks' ``x`` [M, n_r] beside each other, [M, Σ n_r].

        Args:
            x: This rank's.
            sizes: n_r of every rank.
        """
        ...


@dataclass(frozen=True)
class Position:
    """A place among the ranks without a way to the others: all that a plan needs, and all that a single rank has.

    The collectives of a single rank return what they are given.

    Attributes:
        rank: See :class:`Group`.
        size: See :class:`Group`.
    """

    rank: int = 0
    size: int = 1

    def all_reduce_sum(self, x: Tensor, /) -> Tensor:
        """See :class:`Group`."""
        return self._alone(x)

    def all_reduce_max(self, x: Tensor, /) -> Tensor:
        """See :class:`Group`."""
        return self._alone(x)

    def all_gather(self, x: Tensor, sizes: Sequence[int], /) -> Tensor:
        """See :class:`Group`."""
        return self._alone(x)

    def _alone(self, x: Tensor) -> Tensor:
        if self.size > 1:
            raise RuntimeError(f"rank {self.rank} of {self.size} has no way to the others: it is only planned with")
        return x
