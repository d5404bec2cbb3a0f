"""How a model is cut over ranks."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from requant.errors import ConfigError
from requant.parallel.group import Group, Position
from requant.parallel.split import split


@dataclass(frozen=True)
class Ranks:
    """One rank among all, and the way in which they share the model.

    Attributes:
        group: The ranks.
        expert_parallel: Each rank has whole experts, and not a share of every expert.
        deterministic: The scale of an activation that is spread over the ranks is that of the whole row, and a float32
            model's sums over the ranks are float64 until they are complete: their number changes no rounding.
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

    def split(self, size: int, what: str) -> range:
        """This rank's share; see :func:`requant.parallel.split.split`.

        Args:
            size: How many there are to share.
            what: What they are called in config.json, for the message.

        Raises:
            ConfigError: There are fewer than ranks.
        """
        return self.shares(size, what)[self.rank]

    def shares(self, size: int, what: str) -> tuple[range, ...]:
        """Every rank's share; see :meth:`split`."""
        if size < self.size:
            raise ConfigError(f"-tp is {self.size}; accepted for this model: at most {size}, its {what}")
        return tuple(split(size, self.size, rank) for rank in range(self.size))

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What sums over the ranks are made in, for a model in ``dtype``; a single rank's own sums as well."""
        return torch.float64 if self.deterministic and dtype == torch.float32 else dtype

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``, which is overwritten."""
        return self.group.all_reduce_sum(x.contiguous()) if self.size > 1 else x


ALONE = Ranks()
"""A single rank, which has everything."""
