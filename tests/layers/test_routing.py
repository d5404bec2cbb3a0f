"""Which experts are chosen, and with which weights; the models' tests compare the whole with transformers."""

import pytest
import torch

from requant.errors import ModelError
from requant.layers.routing import Routing


def logits(tokens=50, experts=12):
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("top_k", [1, 2, 5, 8])
@pytest.mark.parametrize("renormalize", [False, True])
def test_softmax(top_k, renormalize):
    x = logits()
    ids, weights = Routing(12, top_k, renormalize=renormalize, scaling=2.5)(x)
    probabilities = x.double().exp() / x.double().exp().sum(-1, keepdim=True)
    for token in range(50):
        best = sorted(range(12), key=lambda e: -probabilities[token, e])[:top_k]
        assert sorted(ids[token].tolist()) == sorted(best)
        total = sum(probabilities[token, e] for e in best) if renormalize else 1.0
        expected = torch.stack([2.5 * probabilities[token, e] / total for e in ids[token].tolist()])
        torch.testing.assert_close(weights[token].double(), expected, rtol=1e-5, atol=1e-6)
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)


# Where all biases are far below zero, so is what competes with the groups that are out.
@pytest.mark.parametrize("lowest", [-0.5, -3.0])
@pytest.mark.parametrize(("group_score", "scoring"), [(1, "softmax"), (2, "sigmoid")])
def test_only_the_best_groups_are_chosen_from(group_score, scoring, lowest):
    x, bias = logits(), torch.linspace(lowest, lowest + 1, 12)
    routing = Routing(12, 4, scoring, groups=4, top_groups=2, group_score=group_score)
    ids, weights = routing(x, bias)
    scores = x.softmax(-1) if scoring == "softmax" else x.sigmoid()
    for token in range(50):
        choice = (scores[token] + bias).tolist()
        value = {g: sum(sorted(choice[3 * g : 3 * g + 3])[-group_score:]) for g in range(4)}
        groups = sorted(value, key=value.get)[-2:]
        allowed = [e for e in range(12) if e // 3 in groups]
        assert sorted(ids[token].tolist()) == sorted(sorted(allowed, key=lambda e: choice[e])[-4:])
        torch.testing.assert_close(weights[token], scores[token][ids[token]])  # without the bias


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_token_that_overflowed_gets_experts_that_exist_and_changes_no_other(scoring, bad):
    routing = Routing(12, 4, scoring, renormalize=True, groups=4, top_groups=2, group_score=2)
    x = logits()
    want_ids, want_weights = routing(x)
    x[7] = bad
    ids, weights = routing(x)
    assert ids.min() >= 0
    assert ids.max() < 12
    others = torch.arange(50) != 7
    assert torch.equal(ids[others], want_ids[others])
    assert torch.equal(weights[others], want_weights[others])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_nothing_depends_on_values(scoring):
    """Tensors without values are enough: no shape comes from the data, and the device is never waited for."""
    routing = Routing(12, 4, scoring, renormalize=True, scaling=2.5, groups=4, top_groups=2, group_score=2)
    ids, weights = routing(torch.empty(50, 12, device="meta"), torch.empty(12, device="meta"))
    assert (ids.shape, weights.shape) == ((50, 4), (50, 4))


def test_scores_that_underflow_do_not_divide_by_zero():
    _, weights = Routing(12, 4, "sigmoid", renormalize=True)(torch.full((1, 12), -200.0))
    assert torch.equal(weights, torch.zeros(1, 4))


def test_unknown_scoring():
    with pytest.raises(ModelError, match="scoring_func 'sqrtsoftplus' is not known; accepted: softmax, sigmoid"):
        Routing(8, 2, "sqrtsoftplus")
