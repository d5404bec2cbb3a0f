"""Quantizing several matrices in one launch equals quantizing each, bit for bit, and counts what is not finite.

On a GPU every case runs; without one, the small cases run under Triton's interpreter, in a process of its own
(``TRITON_INTERPRET`` must be set before Triton is imported): this file is that process's program.
"""

import pytest
import torch
from requant_triton import check_small_cases

from requant.formats import FORMATS
from requant.kernels import lookup, reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(3, 32), (130, 96), (128, 256), (5, 1056)]
LARGE = [(768, 2048), (2048, 768), (300, 7168)]


def check_many(name: str, shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    format, (n, k) = FORMATS[name], shape
    # In one piece of memory each, as a slab and a fused parameter have them; the middle matrix is written elsewhere.
    weights = list((torch.randn(4, n, k) * torch.randn(4, n, 1).exp()).to(dtype).to(device))
    data = list(torch.full((4, *format.data_shape(n, k)), 7, dtype=torch.uint8, device=device).view(format.data_dtype))
    scales = torch.zeros((4, *format.scale_shape(n, k)), dtype=format.scale_dtype, device=device)
    scale, bad = list(scales), list(torch.zeros(4, dtype=torch.int64, device=device))
    order = [3, 0, 2]
    run = lookup("quantize_many", name, "cuda")
    run(format, *([column[i] for i in order] for column in (weights, data, scale, bad)))
    for i in order:
        codes, wanted = format.quantize(weights[i].cpu())
        assert torch.equal(data[i].cpu().view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(scale[i].cpu(), wanted)
    assert (data[1].view(torch.uint8) == 7).all(), "a matrix that was not asked for is left alone"
    assert not torch.stack(bad).any()
    weights[0][n // 2, 1::9], weights[3][-1, -1] = torch.nan, -torch.inf
    run(format, weights, data, scale, bad)
    counted = torch.stack(bad).cpu()
    assert counted.tolist() == [(~weight.isfinite()).sum().item() for weight in weights]


def test_small_cases_under_the_interpreter() -> None:
    check_small_cases(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_many_on_a_gpu(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_many(name, shape, dtype, "cuda")


@pytest.mark.parametrize("name", FORMATS)
def test_the_reference(name: str) -> None:
    format, weights = FORMATS[name], list(torch.randn(3, 40, 70))
    weights[1][5, 5] = torch.nan
    data = [torch.empty(format.data_shape(40, 70), dtype=format.data_dtype) for _ in weights]
    scale = [torch.empty(format.scale_shape(40, 70), dtype=format.scale_dtype) for _ in weights]
    bad = list(torch.zeros(3, dtype=torch.int64))
    reference.quantize_many(format, weights, data, scale, bad)
    assert torch.stack(bad).tolist() == [0, 1, 0]
    assert torch.equal(scale[2], format.quantize(weights[2])[1])


if __name__ == "__main__":
    # The interpreter computes with the bits of bfloat16, not its values, but where they are read as integers.
    for small_name in FORMATS:
        for small_dtype in DTYPES if small_name == "mxfp4" else DTYPES[1:]:
            for small_shape in [(3, 32), (130, 32) if small_name == "per_block_fp8" else (9, 96)]:
                check_many(small_name, small_shape, small_dtype, "cpu")
    print("all passed")
