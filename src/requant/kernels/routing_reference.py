"""Which experts a token goes to, in plain torch.

Everything has static shapes and never waits for the device. Logits that are not finite, of a sequence that overflowed,
still give experts that exist.

Legend: T tokens, E experts, k experts a token, G groups of E / G experts.
"""

from typing import Protocol

import torch
from torch import Tensor


class RoutingRule(Protocol):
    """What a choice follows; :class:`requant.layers.routing.Routing` says it."""

    @property
    def top_k(self) -> int:
        """k."""
        ...

    @property
    def scoring(self) -> str:
        """``"softmax"`` or ``"sigmoid"``."""
        ...

    @property
    def renormalize(self) -> bool:
        """The chosen weights are divided by their sum."""
        ...

    @property
    def scaling(self) -> float:
        """Factor on the weights."""
        ...

    @property
    def groups(self) -> int:
        """G."""
        ...

    @property
    def top_groups(self) -> int:
        """How many of them experts are chosen from."""
        ...

    @property
    def group_score(self) -> int:
        """How many of a group's best scores count for it."""
        ...


def route(logits: Tensor, correction_bias: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """Choose.

    Args:
        logits: [T, E], floating point.
        correction_bias: float32 [E], added to the scores for the choice alone (DeepSeek-V3,
            https://arxiv.org/abs/2412.19437, §2.1.2); or None.
        rule: The rule.

    Returns:
        Experts int64 [T, k], best first, and their weights float32 [T, k].
    """
    logits = logits.float()
    scores = logits.softmax(-1) if rule.scoring == "softmax" else logits.sigmoid()
    choice = scores if correction_bias is None else scores + correction_bias
    if rule.groups > rule.top_groups:
        choice = choice.masked_fill(~_allowed(choice, rule), float("-inf"))
    experts = choice.topk(rule.top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if rule.renormalize:
        # The tiny summand keeps 0 / 0 away where every sigmoid has underflowed.
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * rule.scaling


def _allowed(choice: Tensor, rule: RoutingRule) -> Tensor:
    """Whether an expert's group is one of the best, bool [T, E]."""
    grouped = choice.unflatten(-1, (rule.groups, -1))
    best = grouped.topk(rule.group_score, dim=-1).values.sum(-1)
    chosen = torch.zeros_like(best, dtype=torch.bool)
    chosen.scatter_(-1, best.topk(rule.top_groups, dim=-1).indices, True)
    return chosen[..., None].expand_as(grouped).flatten(-2)
