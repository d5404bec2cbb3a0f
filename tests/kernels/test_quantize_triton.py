"""The Triton quantize kernels equal the reference bit for bit.

On a CUDA device directly; on the CPU under Triton's interpreter, which must be chosen before the kernels are
imported: this file, run as a program with TRITON_INTERPRET=1, checks every case and prints the outcomes as JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from requant.formats import FORMATS
from requant.kernels import lookup

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Ragged in N and K, odd K, K of one group or block, several rows a program, a row longer than one pass takes.
SHAPES = [(1, 1), (9, 1), (0, 64), (4, 0), (1, 31), (5, 32), (7, 33), (130, 127), (129, 128), (40, 258), (67, 576)]
SHAPES += [(2, 7168), (2, 16389)]


def scaled(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Every run of 16 columns and every row at an exponent of its own, over the whole range of the dtype."""
    low, high = (-26, 17) if dtype == torch.float16 else (-152, 129)
    exponent = torch.randint(low, high, (shape[0], shape[1] // 16 + 1), generator=generator)
    exponent[::3] = exponent[::3, :1]
    largest = torch.finfo(dtype).max
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    values *= torch.exp2(exponent.double()).repeat_interleave(16, 1)[:, : shape[1]]
    return values.clamp(-largest, largest).to(dtype)


def normal(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """What weights look like, with a few zeros of both signs."""
    values = torch.randn(shape, generator=generator) * 0.02
    values[:, ::13] = 0.0
    values[:, 5::17] = -0.0
    return values.to(dtype)


def special(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Rows of zeros of both signs, of subnormals, of the largest values, and of half-way cases of both formats."""
    info = torch.finfo(dtype)
    ties = [448.0, 1.0625, -1.1875, 2.0**-10, 3 * 2.0**-10, -(2.0**-7) * 1.9375, 463.0, 0.0, -0.0]
    pools = [
        [0.0, -0.0],
        [-0.0],
        [info.smallest_normal / 2, -info.smallest_normal / 4, info.smallest_normal, info.smallest_normal / 128, 0.0],
        [info.max, -info.max, info.max / 2, 1.0],
        [6.0, 0.25, -0.75, 1.25, 1.75, 2.5, -3.5, 5.0, 6.5, -0.125, -0.0],
        ties,
    ]
    rows = torch.zeros(shape, dtype=torch.float64)
    for row in range(shape[0]):
        pool = torch.tensor(pools[row % len(pools)], dtype=torch.float64)
        rows[row] = pool[torch.randint(len(pool), (shape[1],), generator=generator)]
    return rows.to(dtype)


def tiny(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Subnormals only: the smallest scales and exponents there are."""
    step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return (torch.randint(-9, 10, shape, generator=generator).double() * step).to(dtype)


VALUES: dict[str, Callable[..., Tensor]] = {f.__name__: f for f in (normal, scaled, special, tiny)}
CASES = [
    f"{format}-{values}-{dtype}-{n}x{k}-{offset}"
    for format in FORMATS
    for values in VALUES
    for dtype in DTYPES
    for n, k in SHAPES
    for offset in ((0, 1) if (n, k) in [(5, 32), (129, 128)] else (0,))
]
# The interpreter takes milliseconds a program: it sees every format, dtype and edge, not every mixture.
INTERPRETED = [case for case in CASES if "-normal-" in case or "-special-" in case or "67x576" in case]
INTERPRETED = [case for case in INTERPRETED if "130x127" not in case]


def interpretable(case: str) -> bool:
    """Triton's interpreter turns bfloat16 subnormals into zeros where it widens them to float32."""
    return "-bf16-" not in case or "-normal-" in case


GUARD = 0xA5


def poisoned(shape: tuple[int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """A buffer that holds nothing useful, in the middle of guard bytes; and all of the bytes."""
    size = shape[0] * shape[1] * dtype.itemsize
    raw = torch.full((256 + size + 256,), GUARD, dtype=torch.uint8, device=device)
    return raw[256 : 256 + size].view(dtype).view(shape), raw


def check(case: str, device: str) -> None:
    """Run the kernel of a case and compare all bytes, the guards around its outputs included."""
    format_name, values, dtype_name, size, offset = case.split("-")
    n, k = map(int, size.split("x"))
    format, dtype = FORMATS[format_name], DTYPES[dtype_name]
    weight = VALUES[values]((n, k), dtype, torch.Generator().manual_seed(len(case)))
    expected = format.quantize(weight)
    # offset: a weight that begins in the middle of an aligned word
    storage = torch.zeros(n * k + int(offset), dtype=dtype, device=device)
    source = storage[int(offset) :].view(n, k)
    source.copy_(weight)
    data, data_raw = poisoned(format.data_shape(n, k), format.data_dtype, device)
    scale, scale_raw = poisoned(format.scale_shape(n, k), format.scale_dtype, device)
    lookup("quantize", format_name, "cuda")(format, source, data, scale)
    for what, raw, reference in (("data", data_raw, expected[0]), ("scale", scale_raw, expected[1])):
        raw = raw.cpu()
        guards = torch.cat((raw[:256], raw[-256:]))
        assert (guards == GUARD).all(), f"{case}: {what} was written out of bounds"
        wrong = raw[256:-256] != reference.contiguous().view(-1).view(torch.uint8)
        assert not wrong.any(), f"{case}: {int(wrong.sum())} of {wrong.numel()} bytes of {what} differ"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case: str) -> None:
    check(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_reference_is_the_same_on_a_gpu(name: str) -> None:
    for dtype in DTYPES.values():
        weight = scaled((300, 1000), dtype, torch.Generator().manual_seed(1))
        for here, there in zip(FORMATS[name].quantize(weight), FORMATS[name].quantize(weight.cuda()), strict=True):
            assert torch.equal(here.view(torch.uint8), there.cpu().view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_offsets_beyond_32_bits(name: str) -> None:
    """A matrix of more than 2^32 elements: its last rows are right."""
    n, k = (1 << 20) + 130, 4096
    if torch.cuda.mem_get_info()[0] < 5 * n * k:
        pytest.skip("needs 21 GB of free device memory")
    format = FORMATS[name]
    weight = torch.zeros(n, k, dtype=torch.bfloat16, device="cuda")
    weight[-130:] = normal((130, k), torch.bfloat16, torch.Generator().manual_seed(2)).cuda()
    data = torch.empty(format.data_shape(n, k), dtype=format.data_dtype, device="cuda")
    scale = torch.empty(format.scale_shape(n, k), dtype=format.scale_dtype, device="cuda")
    lookup("quantize", name, "cuda")(format, weight, data, scale)
    expected, scales = format.quantize(weight[-130:])  # 2^20 is a multiple of 128: the blocks are the same
    assert torch.equal(data[-130:].view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale[-scales.shape[0] :], scales)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    """Case → "" or what went wrong, from one run under Triton's interpreter."""
    if find_spec("triton") is None:
        pytest.skip("needs Triton, for its interpreter")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", INTERPRETED)
def test_under_the_interpreter(case: str, interpreted: dict[str, str]) -> None:
    if not interpretable(case):
        pytest.skip("Triton's interpreter flushes bfloat16 subnormals")
    assert interpreted[case] == ""


@pytest.mark.parametrize("name", FORMATS)
def test_wrong_buffers_are_refused_before_a_launch(name: str) -> None:
    if find_spec("triton") is None:
        pytest.skip("needs Triton")
    format = FORMATS[name]
    weight = torch.zeros(256, 256)
    data, scale = format.quantize(weight)
    quantize = lookup("quantize", name, "cuda")
    with pytest.raises(ValueError, match=f"{name} of a weight \\[256, 256\\] on cpu needs"):
        quantize(format, weight, data[:-1], scale)
    with pytest.raises(ValueError, match=r"scale is torch\.float64"):
        quantize(format, weight, data, scale.double())
    with pytest.raises(ValueError, match=r"weight .* must be contiguous"):
        quantize(format, weight.T, data, scale)


def outcomes(cases: list[str]) -> dict[str, str]:
    """Case → "" or what went wrong, checked in this process on the CPU."""
    result = {}
    for case in cases:
        try:
            check(case, "cpu")
            result[case] = ""
        except Exception as error:
            result[case] = f"{type(error).__name__}: {error}"
    return result


if __name__ == "__main__":
    print(json.dumps(outcomes([case for case in INTERPRETED if interpretable(case)])))
