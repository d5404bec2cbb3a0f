"""The MLP of a mixture-of-experts layer: router, routed experts, and experts that every token goes to.

Legend: T tokens, H hidden size.
"""

from torch import Tensor, nn

from requant.layers.experts import Experts
from requant.layers.router import Router
from requant.layers.routing import Routing
from requant.models.mlp import Mlp
from requant.parallel import ALONE, Ranks


class SparseMlp(nn.Module):
    """The weighted sum of each token's experts, plus the shared ones.

    Args:
        gate: The router.
        routing: How its scores choose.
        experts: The routed experts.
        shared_experts: The experts of every token, as one MLP; None if there are none.
        ranks: The ranks. Both kinds of experts give a part of the sum, which is made once, of both together.
    """

    def __init__(
        self,
        gate: Router,
        routing: Routing,
        experts: Experts,
        shared_experts: Mlp | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self._ranks = ranks
        self.gate = gate
        self.routing = routing
        self.experts = experts
        self.shared_experts = shared_experts

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, H] → [T, H]."""
        chosen, weights = self.routing(self.gate(hidden), self.gate.e_score_correction_bias)
        out = self.experts(hidden, chosen, weights)
        if self.shared_experts is not None:
            out = out + self.shared_experts(hidden)
        return self._ranks.sum(out).to(hidden.dtype)
