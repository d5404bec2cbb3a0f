"""Between the two products of a gated MLP, in plain torch."""

from torch import Tensor
from transformers.activations import ACT2FN


def gated(y: Tensor, activation: str) -> Tensor:
    """act(gate) · up of y [T, 2I], gate first.

    Args:
        y: What the first product gave.
        activation: Name of act in transformers' ``ACT2FN``.

    Returns:
        [T, I] in y's dtype.
    """
    gate, up = y.chunk(2, dim=-1)
    return ACT2FN[activation](gate) * up
