"""What a fused-MoE forward needs to know of its weights.

Legend: E experts, H hidden size, I inner size of one expert.
"""

from dataclasses import dataclass

from torch import Tensor

from requant.formats.base import QuantizedStack

UNQUANTIZED = "none"
"""The format's name under which the table has ``experts`` for weights in the model's dtype."""


@dataclass(frozen=True)
class ExpertWeights:
    """The experts of one layer: down(act(gate(x)) · up(x)), or down(act(up(x))) without a gate.

    Attributes:
        w13: [E, 2I, H], each expert's gate rows and then its up rows; without a gate [E, I, H].
        w2: [E, H, I].
        w13_bias: [E, 2I] (or [E, I]) in the model's dtype, or None.
        w2_bias: [E, H] likewise.
        activation: Name of act in transformers' ``ACT2FN``.
        gated: Whether there is a gate.
        here: Which experts these are, of all that may be chosen; others that are chosen are passed over. None: they
            are all.
        lead: Columns of w2 before the first that takes an inner feature; they and those behind the last take zeros.
    """

    w13: Tensor | QuantizedStack
    w2: Tensor | QuantizedStack
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    activation: str
    gated: bool
    here: range | None = None
    lead: int = 0
