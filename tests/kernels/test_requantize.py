"""Block FP8 to other formats: the reference against the contract's own words, and Triton against the reference.

On a GPU every case runs; without one, the small cases run under Triton's interpreter, in a process of its own
(``TRITON_INTERPRET`` must be set before Triton is imported): this file is that process's program.
"""

import pytest
import torch
from requant_triton import check_small_cases
from torch import Tensor

from requant.errors import CheckpointError
from requant.formats import FORMATS, quantize
from requant.kernels import lookup, reference

gpu = pytest.mark.gpu

SMALL = [(1, 1), (3, 31), (9, 130), (130, 65), (128, 128), (129, 300)]
LARGE = [(2048, 7168), (7168, 2048), (576, 7168), (1000, 1537), (0, 128)]
SCALES = ("normal", "tiny", "huge", "signed", "special")


def make(n: int, k: int, scales: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Every code, NaN among them only where scales are special, and scales of one kind."""
    generator = torch.Generator().manual_seed((n * 10007 + k) * 31 + seed)
    codes = torch.randint(0, 256, (n, k), generator=generator, dtype=torch.uint8)
    if scales != "special":
        codes[(codes & 0x7F) == 0x7F] = 0x7E
    shape = -(-n // 128), -(-k // 128)
    scale = torch.rand(shape, generator=generator) * 2.0**-8 + 2.0**-10
    if scales == "tiny":  # products far into the subnormal numbers
        scale *= 2.0**-128
    elif scales == "huge" and n:  # some products overflow float32, others bfloat16 only
        scale = scale / scale.max() * (torch.finfo(torch.float32).max / 448 * 1.001)
    elif scales == "signed":
        scale *= torch.randint(-1, 2, shape, generator=generator)
    elif scales == "special":
        pool = torch.tensor([torch.inf, torch.nan, 0.0, 1.0, -torch.inf])
        scale = pool[torch.randint(len(pool), shape, generator=generator)]
    return codes.view(torch.float8_e4m3fn), scale


def by_hand(codes: Tensor, scale: Tensor) -> Tensor:
    """float(q) · s of its block in float32, rounded to bfloat16."""
    n, k = codes.shape
    factors = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return (codes.float() * factors).to(torch.bfloat16)


Weight = tuple[Tensor, Tensor]


def run(function, target: str, weights: list[Weight], device: str) -> list[tuple[Tensor, Tensor, int]]:
    """Into poisoned buffers, with counts that are not zero before."""
    format, (n, k) = FORMATS[target], weights[0][0].shape
    shape = format.scale_shape(n, k)
    data, scale = [], []
    for _ in weights:
        out = torch.full(format.data_shape(n, k), 0xFF, dtype=torch.uint8, device=device)
        out_scale = torch.full((*shape, format.scale_dtype.itemsize), 0xFF, dtype=torch.uint8, device=device)
        data.append(out.view(format.data_dtype))
        scale.append(out_scale.view(format.scale_dtype).view(shape))
    bad = torch.full((len(weights),), 5, device=device)
    sources = [[tensor.to(device) for tensor in column] for column in zip(*weights, strict=True)]
    function(format, *sources, data, scale, bad.unbind())
    rows = zip(data, scale, (bad - 5).tolist(), strict=True)
    return [(codes.cpu().view(torch.uint8), scales.cpu(), count) for codes, scales, count in rows]


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize(("n", "k"), [*SMALL, (1100, 1300), (0, 5)])
def test_the_reference_is_dequantize_round_quantize(n: int, k: int, target: str, scales: str) -> None:
    codes, scale = make(n, k, scales)
    weight = by_hand(codes, scale)
    data, out_scale, bad = run(reference.requantize, target, [(codes, scale)], "cpu")[0]
    assert bad == (~weight.isfinite()).sum()
    if bad:
        with pytest.raises(CheckpointError):
            quantize(weight, target)
        return
    wanted = quantize(weight, target)
    assert torch.equal(data, wanted.data.view(torch.uint8))
    assert torch.equal(out_scale, wanted.scale)


def check(n: int, k: int, target: str, scales: str, device: str, many: int = 3) -> None:
    """The kernel that a GPU takes, against the reference; what holds no number that is finite is only counted."""
    kinds = [scales, *("normal" for _ in range(many - 2)), scales][:many]
    weights = [make(n, k, kind, seed) for seed, kind in enumerate(kinds)]
    got = run(lookup("requantize", target, "cuda"), target, weights, device)
    wanted = run(reference.requantize, target, weights, "cpu")
    for one, other in zip(got, wanted, strict=True):
        assert one[2] == other[2], f"{n} x {k}, {target}, {scales}: {one[2]} not finite, {other[2]} are"
        if other[2]:
            continue
        for name, here, there in zip(("data", "scale"), one[:2], other[:2], strict=True):
            same = torch.equal(here.view(torch.uint8), there.view(torch.uint8))
            assert same, f"{n} x {k}, {target}, {scales}: {name} differs"


def test_small_cases_under_the_interpreter() -> None:
    check_small_cases(__file__)


@gpu
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize(("n", "k"), SMALL + LARGE)
def test_a_kernel_equals_the_reference(n: int, k: int, target: str, scales: str) -> None:
    check(n, k, target, scales, "cuda")


@pytest.mark.parametrize("target", ["ptpc_fp8", "mxfp4"])
def test_buffers_of_another_shape_are_refused(target: str) -> None:
    pytest.importorskip("triton")
    codes, scale = make(130, 65, "normal")
    with pytest.raises(ValueError, match="codes_scale is"):
        run(lookup("requantize", target, "cuda"), target, [(codes, scale[:1])], "cpu")


if __name__ == "__main__":
    for small in SMALL:
        for small_target in ("ptpc_fp8", "mxfp4"):
            for small_scales in SCALES:
                check(*small, small_target, small_scales, "cpu")
    print("all passed")
