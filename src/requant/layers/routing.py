"""Which experts a token goes to, and with which weights, from the router's logits.

Legend: T tokens, E experts, k experts a token, G groups of E / G experts.
"""

from dataclasses import dataclass

from torch import Tensor

from requant.errors import ModelError
from requant.kernels.table import lookup


@dataclass(frozen=True)
class Routing:
    """The rule of one family.

    Attributes:
        num_experts: E.
        top_k: k.
        scoring: ``"softmax"`` over all experts, or ``"sigmoid"`` of each.
        renormalize: The chosen weights are divided by their sum.
        scaling: Factor on the weights.
        groups: G; 1: no groups.
        top_groups: Only experts of this many groups are chosen.
        group_score: How many of a group's best scores count for the group (1: its best; 2: the sum of two).

    Raises:
        ModelError: The numbers do not fit each other.
    """

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    renormalize: bool = False
    scaling: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: int = 1

    def __post_init__(self) -> None:
        if self.scoring not in ("softmax", "sigmoid"):
            raise ModelError(f"scoring_func {self.scoring!r} is not known; accepted: softmax, sigmoid")
        if self.groups < 1 or self.num_experts % self.groups:
            raise ModelError(f"n_group {self.groups} does not divide the {self.num_experts} experts")
        if not 1 <= self.top_groups <= self.groups:
            raise ModelError(f"topk_group is {self.top_groups}; accepted: 1 to n_group, {self.groups}")
        size = self.num_experts // self.groups
        if self.groups > 1 and size < self.group_score:
            raise ModelError(f"groups of {size} experts are too small: the best {self.group_score} of each are summed")
        available = size * self.top_groups
        if not 1 <= self.top_k <= available:
            raise ModelError(f"num_experts_per_tok is {self.top_k}; accepted: 1 to {available} experts to choose from")

    def __call__(self, logits: Tensor, correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose.

        Args:
            logits: [T, E], floating point.
            correction_bias: float32 [E], added to the scores for the choice alone (DeepSeek-V3,
                https://arxiv.org/abs/2412.19437, §2.1.2).

        Returns:
            Experts int64 [T, k], and their weights float32 [T, k].
        """
        return lookup("route", "*", logits.device.type)(logits, correction_bias, self)
