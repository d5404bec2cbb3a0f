"""Logits equal transformers' on the same random weights, however the tokens are cut into steps."""

import pytest
import torch
from torch import Tensor

LENGTHS = (23, 9, 41)
SEQUENCES = [torch.randint(0, 67, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
_DECODE = [{b: 1 for b in range(3) if i < LENGTHS[b] - (3, 1, 6)[b]} for i in range(35)]

SCHEDULES: dict[str, list[dict[int, int]]] = {
    "prefill": [{0: 23, 1: 9, 2: 41}],
    "alone": [{1: 9}, {2: 41}, {0: 23}],
    "chunked": [{0: 7}, {0: 9, 1: 5}, {2: 20, 0: 7, 1: 4}, {2: 21}],
    "decode": [{0: 3, 1: 1, 2: 6}, *_DECODE],
    "mixed": [{2: 17}, {2: 1, 0: 11}, {0: 1, 1: 4, 2: 1}, {1: 1, 2: 20, 0: 1}, {0: 10, 1: 1, 2: 2}, {1: 3}],
}


def expected(model: torch.nn.Module) -> list[Tensor]:
    with torch.inference_mode():
        return [model(tokens[None]).logits[0].float() for tokens in SEQUENCES]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_logits_equal_transformers(pair, tiny, schedule):
    theirs, model = pair
    for logits, want in zip(tiny.stepper(model, SEQUENCES).run(SCHEDULES[schedule]), expected(theirs), strict=True):
        assert want.std() > 0.1
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-4)


def test_without_shared_experts(tiny):
    """Transformers always makes some: here they add nothing."""
    theirs = tiny.reference(tiny.cases["deepseek-v3"]())
    for name, parameter in theirs.named_parameters():
        if name.endswith("shared_experts.down_proj.weight"):
            parameter.data.zero_()
    theirs.config.n_shared_experts = 0
    model = tiny.ours(theirs)
    assert not [name for name, _ in model.named_parameters() if "shared_experts" in name]
    got = tiny.stepper(model, SEQUENCES).run(SCHEDULES["mixed"])
    torch.testing.assert_close(torch.cat(got), torch.cat(expected(theirs)), rtol=0, atol=1e-4)


BFLOAT16 = ["llama-biases", "mistral", "qwen2", "qwen3-tied", "qwen3-moe", "deepseek-v2", "deepseek-v3-yarn"]


@pytest.mark.parametrize("schedule", ["prefill", "mixed"])
@pytest.mark.parametrize("case", BFLOAT16)
def test_bfloat16_is_as_close_as_its_rounding(tiny, case, schedule):
    theirs = tiny.reference(tiny.cases[case](), torch.bfloat16)
    model = tiny.ours(theirs, torch.bfloat16)
    got = torch.cat(tiny.stepper(model, SEQUENCES).run(SCHEDULES[schedule]))
    rounded = torch.cat(expected(theirs))
    exact = torch.cat(expected(theirs.float()))
    # Of the tokens the middle one: where rounding sends a token to another expert, its error is no rounding any more.
    error, noise = ((logits - exact).norm(dim=-1).median() for logits in (got, rounded))
    assert 0 < error < 1.3 * noise
