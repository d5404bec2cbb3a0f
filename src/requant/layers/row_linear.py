"""A linear layer whose input is spread over the ranks, so that each rank's output is a part of a sum."""

from collections.abc import Sequence

import torch
from torch import Tensor

from requant.formats.base import Format
from requant.kernels.activation import GROUP_COLUMNS
from requant.kernels.table import RowMax
from requant.layers.linear import Linear, Part
from requant.parallel import Ranks


class RowLinear(Linear):
    """y = Σ over the ranks of x_r · W_rᵀ, + b, with the columns W_r of W [N, K] that belong to the rank's input.

    Args:
        name: The module's name.
        in_features: K of all ranks together.
        out_features: N.
        ranks: The ranks.
        shares: Every rank's columns.
        bias: Whether ``<name>.bias`` [N] lies beside it.
        reduce: Whether to sum; False: whoever adds other parts to this one does it, once.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        ranks: Ranks,
        shares: Sequence[range],
        bias: bool = False,
        reduce: bool = True,
    ) -> None:
        columns = shares[ranks.rank] if ranks.size > 1 else None
        super().__init__(name, in_features, [Part(name, out_features, bias)], columns=columns)
        self._ranks = ranks
        self._shares = shares
        self._reduce = reduce

    def forward(self, x: Tensor) -> Tensor:
        """This rank's x [..., K] → [..., N], the same on every rank; or, without ``reduce``, a part of the sum.

        That part is in :meth:`Ranks.sum_dtype <requant.parallel.Ranks.sum_dtype>`.
        """
        y = self._multiply(x.reshape(-1, self.in_features))
        if self._reduce:
            y = self._ranks.sum(y).to(self._dtype)
        if self.bias is not None and (self._reduce or self._ranks.rank == 0):
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)

    def _choose_sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._ranks.sum_dtype(dtype)

    def _row_max(self, format: Format) -> RowMax | None:
        assert self.weight is not None
        return row_max(format, self._ranks, self._shares, self.weight.device)


def row_max(format: Format, ranks: Ranks, shares: Sequence[range], device: torch.device) -> RowMax | None:
    """What makes the largest magnitudes of each rank's share of an input those of the whole input.

    Args:
        format: Of the weight, which decides how the input is quantized.
        ranks: The ranks.
        shares: Every rank's columns of the input.
        device: Where the magnitudes will be.

    Returns:
        float32 [M, G] → [M, G], one column for each run of columns that shares a scale, the first of which is the one
        that this rank's first column is in; None if there is nothing to compare: the input is not quantized, no run is
        shared, there is one rank, or scales are each rank's own by choice.
    """
    if ranks.size == 1 or not ranks.deterministic or format.activation is None:
        return None
    group = GROUP_COLUMNS[format.activation]
    if not group:
        return lambda amax: ranks.group.all_reduce_max(amax.contiguous())
    own = shares[ranks.rank]
    first, last = own.start // group, (own.stop - 1) // group
    # The runs that a border between two ranks lies in: all others are one rank's alone.
    split = sorted({share.start // group for share in shares if share.start % group})
    if not split:
        return None
    mine = [run for run in split if first <= run <= last]
    local = torch.tensor([run - first for run in mine], dtype=torch.int64, device=device)
    among = torch.tensor([split.index(run) for run in mine], dtype=torch.int64, device=device)

    def reduce(amax: Tensor) -> Tensor:
        together = amax.new_zeros(amax.shape[0], len(split))
        together[:, among] = amax[:, local]
        together = ranks.group.all_reduce_max(together)
        amax = amax.clone()
        amax[:, local] = together[:, among]
        return amax

    return reduce
