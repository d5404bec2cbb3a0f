"""RMSNorm is transformers', bit for bit where the arithmetic is the same."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from requant.layers.norm import RMSNorm
from requant.parallel import Placement

CPU = torch.device("cpu")


def _pair(dtype: torch.dtype) -> tuple[RMSNorm, LlamaRMSNorm]:
    norm, theirs = RMSNorm("model.norm", 40, eps=1e-3), LlamaRMSNorm(40, eps=1e-3).to(dtype)
    norm.build(dtype, CPU)
    theirs.weight.data.normal_()
    norm.weight.data.copy_(theirs.weight)
    return norm, theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 40), (3, 4, 40), (0, 40)])
def test_equals_transformers(dtype, shape):
    norm, theirs = _pair(dtype)
    x = (5 * torch.randn(shape)).to(dtype)
    assert norm(x).dtype == dtype
    torch.testing.assert_close(norm(x), theirs(x), rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_normalizes_in_float32():
    """300² overflows float16: normalized in it, the result would be 0."""
    norm, _ = _pair(torch.float16)
    x = torch.full((1, 40), 300.0, dtype=torch.float16)
    torch.testing.assert_close(norm(x)[0], norm.weight.data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residual_is_added_first_and_returned(dtype):
    norm, _ = _pair(dtype)
    x, residual = torch.randn(2, 5, 40).to(dtype).unbind(0)
    kept = residual.clone()
    y, total = norm(x, residual)
    torch.testing.assert_close(total, x + residual, rtol=0, atol=0)
    torch.testing.assert_close(y, norm(x + residual), rtol=0, atol=0)
    torch.testing.assert_close(residual, kept, rtol=0, atol=0)


def test_names_and_parameters():
    norm = RMSNorm("model.layers.0.input_layernorm", 40, eps=1e-5)
    assert norm.placements == (Placement("model.layers.0.input_layernorm.weight", (40,)),)
    assert not list(norm.parameters())
    norm.build(torch.bfloat16, CPU)
    assert [(p.dtype, p.requires_grad) for p in norm.parameters()] == [(torch.bfloat16, False)]
