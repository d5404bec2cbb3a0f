"""The gated MLP that dense layers and shared experts are.

Legend: T tokens, H hidden size, I inner size.
"""

from torch import Tensor, nn
from transformers.activations import ACT2FN

from requant.errors import ModelError
from requant.kernels.table import lookup
from requant.layers.linear import column_linear
from requant.layers.row_linear import RowLinear
from requant.parallel import ALONE, Ranks


class Mlp(nn.Module):
    """down(act(gate(x)) · up(x)).

    Args:
        name: The module's name.
        hidden_size: H.
        inner_size: I.
        activation: Name of act in transformers' ``ACT2FN``.
        bias: Whether the three projections have a bias.
        ranks: The ranks, each of which has some of the I.
        reduce: Whether to sum over the ranks; False: the output is a part of a sum.
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        inner_size: int,
        activation: str,
        bias: bool = False,
        ranks: Ranks = ALONE,
        reduce: bool = True,
    ) -> None:
        super().__init__()
        check_activation(activation)
        what = "intermediate_size"
        rows = {"gate_proj": inner_size, "up_proj": inner_size}
        self.gate_up_proj = column_linear(f"{name}.gate_up_proj", hidden_size, rows, what, bias, ranks)
        shares = ranks.shares(inner_size, what)
        self.down_proj = RowLinear(f"{name}.down_proj", inner_size, hidden_size, ranks, shares, bias, reduce)
        self._activation = activation
        self._ranks = ranks

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, H] → [T, H]."""
        y = self.gate_up_proj(hidden)
        if self._ranks.sum_dtype(y.dtype) == y.dtype:
            return self.down_proj(lookup("gated", "*", y.device.type)(y, self._activation))
        # A processor takes some features of a row eight at a time and the last ones singly, with another last bit.
        gate, up = y.chunk(2, dim=-1)
        return self.down_proj(ACT2FN[self._activation](gate.to(self._ranks.sum_dtype(y.dtype))).to(up.dtype) * up)


def check_activation(name: str) -> None:
    """Refuse an activation that transformers does not know.

    Raises:
        ModelError: The message lists those that exist.
    """
    if name not in ACT2FN:
        raise ModelError(f"hidden_act {name!r} is not known; accepted: {', '.join(sorted(ACT2FN))}")
