"""Every kernel that quantizes compiles for an NVIDIA GPU, on a machine that has none."""

import importlib
from collections.abc import Callable

import pytest
import torch

from requant.formats import FORMATS
from requant.kernels import lookup
from requant.layers.routing import Routing

pytest.importorskip("triton")
for kernels in ("quantize_fp8", "quantize_mxfp4", "requantize", "norm", "rotary", "routing"):
    importlib.import_module(f"requant.kernels.triton.{kernels}")

from requant_compile import Launch, launches  # noqa: E402, F401
from triton.compiler.errors import CompilationError  # noqa: E402

SHAPES = [(256, 768), (128, 7168), (130, 100)]


def buffers(name: str, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    format = FORMATS[name]
    data = torch.empty(format.data_shape(n, k), dtype=torch.uint8).view(format.data_dtype)
    return data, torch.empty(format.scale_shape(n, k), dtype=format.scale_dtype)


def run(op: str, name: str, n: int, k: int, dtype: torch.dtype) -> None:
    """One call of the function that a GPU takes."""
    function: Callable[..., None] = lookup(op, name, "cuda")
    data, scale = buffers(name, n, k)
    bad = torch.zeros((), dtype=torch.int64)
    weight = torch.empty(n, k, dtype=dtype)
    if op == "quantize":
        function(FORMATS[name], weight, data, scale)
    elif op == "quantize_many":
        function(FORMATS[name], [weight], [data], [scale], [bad])
    else:
        codes, scales = buffers("per_block_fp8", n, k)
        function(FORMATS[name], [codes], [scales], [data], [scale], [bad])


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_from_bfloat16_and_from_block_fp8(name: str, n: int, k: int, launches: list[Launch]) -> None:  # noqa: F811
    ops = ["quantize"]
    if k % 32 == 0:
        ops.append("quantize_many")
    if name != "per_block_fp8":
        ops.append("requantize")
    for op in ops:
        run(op, name, n, k, torch.bfloat16)
    assert len(launches) == len(ops)
    for launch in launches:
        ptx = launch.compile().asm["ptx"]
        if name != "mxfp4":
            assert "cvt.rn.satfinite.e4m3x2.f32" in ptx, "the device's own cast"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_from_other_dtypes(name: str, dtype: torch.dtype, launches: list[Launch]) -> None:  # noqa: F811
    run("quantize_many", name, 256, 2048, dtype)
    launches[0].compile()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_between_products(dtype: torch.dtype, launches: list[Launch]) -> None:  # noqa: F811
    def empty(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=kind)

    norm, heads, route = (lookup(op, "*", "cuda") for op in ("rms_norm", "heads", "route"))
    norm(empty(3, 2048), empty(2048), 1e-6)
    norm(empty(3, 2048), empty(2048), 1e-6, empty(3, 2048))
    slots, rope = torch.zeros(3, dtype=torch.int64), (empty(3, 1, 64), empty(3, 1, 64))
    cache = empty(2, 9, 16, 4, 128)
    for norms in (None, (empty(128), empty(128))):
        heads(empty(3, 40, 128), 32, norms, 1e-6, rope, *cache.unbind(0), slots)
    route(empty(3, 128), None, Routing(128, 8, renormalize=True))
    groups = {"groups": 8, "top_groups": 4, "group_score": 2}
    bias = empty(256, kind=torch.float32)
    route(empty(3, 256), bias, Routing(256, 8, scoring="sigmoid", renormalize=True, scaling=2.5, **groups))
    assert len(launches) == 6
    for launch in launches:
        launch.compile()


def test_what_the_compiler_refuses_fails(launches: list[Launch]) -> None:  # noqa: F811
    run("quantize", "mxfp4", 256, 768, torch.bfloat16)
    launches[0].arguments["GROUPS"] = 100  # not a power of two
    with pytest.raises(CompilationError):
        launches[0].compile()
