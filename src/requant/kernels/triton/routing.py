"""The choice of experts in one launch: scores, groups, the best of them, their weights.

Legend: T tokens, E experts, k experts a token, G groups of S experts (rows of a tile, with a power of two of columns).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant.kernels import routing_reference
from requant.kernels.routing_reference import RoutingRule

# Experts, padded, that one program holds.
_MOST_EXPERTS = 4096
_NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    experts_ptr,
    weights_ptr,
    scaling,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)
    member = tl.arange(0, BLOCK_S)
    ids = group[:, None] * SIZE + member[None, :]
    mask = (group[:, None] < GROUPS) & (member[None, :] < SIZE)
    logits = tl.load(logits_ptr + token * (GROUPS * SIZE) + ids, mask=mask, other=_NOTHING).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    choice = scores
    if BIAS:
        choice = choice + tl.load(bias_ptr + ids, mask=mask, other=0.0)
    # What is not a number is worse than any that is, and still an expert.
    choice = tl.where(mask & (choice == choice), choice, _NOTHING)
    free = mask
    if GROUPS > TOP_GROUPS:
        best = tl.max(choice, 1)
        if GROUP_SCORE > 1:
            rest = choice
            for _ in tl.static_range(GROUP_SCORE - 1):
                peak = tl.max(rest, 1)
                place = tl.min(tl.where(rest == peak[:, None], member[None, :], BLOCK_S), 1)
                rest = tl.where(member[None, :] == place[:, None], _NOTHING, rest)
                best += tl.max(rest, 1)
        best = tl.where((group < GROUPS) & (best == best), best, _NOTHING)
        open_groups = group < GROUPS
        for _ in tl.static_range(TOP_GROUPS):
            peak = tl.max(tl.where(open_groups, best, _NOTHING), 0)
            place = tl.min(tl.where(open_groups & (best == peak), group, BLOCK_G), 0)
            open_groups = open_groups & (group != place)
        free = mask & ~open_groups[:, None]

    slots = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    for slot in tl.static_range(TOP_K):
        peak = tl.max(tl.max(tl.where(free, choice, _NOTHING), 1), 0)
        expert = tl.min(tl.min(tl.where(free & (choice == peak), ids, GROUPS * SIZE), 1), 0)
        here = ids == expert
        free = free & ~here
        chosen = tl.where(slots == slot, expert, chosen)
        weights = tl.where(slots == slot, tl.sum(tl.sum(tl.where(here & mask, scores, 0.0), 1), 0), weights)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    out = token * TOP_K + slots
    tl.store(experts_ptr + out, chosen.to(tl.int64), mask=slots < TOP_K)
    tl.store(weights_ptr + out, weights * scaling, mask=slots < TOP_K)


def route(logits: Tensor, correction_bias: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """See :func:`requant.kernels.routing_reference.route`; of equal scores the first experts are chosen."""
    tokens, experts = logits.shape
    # Without a choice of groups all experts are one row.
    groups = rule.groups if rule.groups > rule.top_groups else 1
    size = experts // groups
    block_g, block_s = triton.next_power_of_2(groups), triton.next_power_of_2(size)
    if block_g * block_s > _MOST_EXPERTS:
        return routing_reference.route(logits, correction_bias, rule)
    chosen = torch.empty(tokens, rule.top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, rule.top_k, dtype=torch.float32, device=logits.device)
    logits = logits.contiguous()
    _route_kernel[(tokens,)](
        logits,
        logits if correction_bias is None else correction_bias,
        chosen,
        weights,
        rule.scaling,
        GROUPS=groups,
        SIZE=size,
        BLOCK_G=block_g,
        BLOCK_S=block_s,
        TOP_K=rule.top_k,
        TOP_GROUPS=rule.top_groups if groups > 1 else 1,
        GROUP_SCORE=rule.group_score,
        SIGMOID=rule.scoring == "sigmoid",
        BIAS=correction_bias is not None,
        RENORMALIZE=rule.renormalize,
        BLOCK_K=triton.next_power_of_2(rule.top_k),
        num_warps=1 if block_g * block_s <= 256 else 4,
    )
    return chosen, weights
