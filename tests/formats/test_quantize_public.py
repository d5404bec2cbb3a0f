"""requant.quantize, the registry, and what holds for every format."""

import pytest
import torch

import requant
import requant.recipe
from requant.errors import CheckpointError, ConfigError, RecipeError
from requant.formats import FORMATS, QuantizedTensor, check_finite, get, per_block_fp8, ptpc_fp8, quantize, rows

NAMES = list(FORMATS)


def test_quantize_is_public() -> None:
    assert requant.quantize is quantize
    assert requant.QuantizedTensor is QuantizedTensor


@pytest.mark.parametrize("name", ["ptpc_fp8", "PTPC_FP8", "  Ptpc_Fp8\n"])
def test_names_ignore_case_and_blanks(name: str) -> None:
    assert get(name) is ptpc_fp8.FORMAT


def test_alias() -> None:
    assert get("Per_Block128_fp8") is per_block_fp8.FORMAT


@pytest.mark.parametrize("name", ["ptpc_i8", "mxi4", "mxfp8", "", "fp8"])
def test_unknown_format_lists_the_choices(name: str) -> None:
    with pytest.raises(RecipeError, match=f"unknown format {name!r}; accepted: ptpc_fp8, per_block_fp8, mxfp4"):
        quantize(torch.zeros(1, 1), name)


def test_every_name_of_the_recipe_is_a_format() -> None:
    assert tuple(FORMATS) == requant.recipe.FORMATS
    assert all(get(alias).name == name for alias, name in requant.recipe.FORMAT_ALIASES.items())


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4)], ids=str)
def test_wrong_rank(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="a matrix \\[N, K\\] is needed"):
        quantize(torch.zeros(shape), "mxfp4")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn], ids=str)
def test_wrong_dtype(dtype: torch.dtype) -> None:
    with pytest.raises(
        ConfigError, match=f"weight is {dtype}; accepted are torch.bfloat16, torch.float16, torch.float32"
    ):
        quantize(torch.zeros(2, 2).to(dtype), "mxfp4")


@pytest.mark.parametrize("name", NAMES)
def test_nonfinite_values_are_counted(name: str) -> None:
    weight = torch.zeros(700, 3000, dtype=torch.bfloat16)
    weight[0, 0], weight[699, 2999], weight[350, 7] = float("nan"), float("-inf"), float("inf")
    with pytest.raises(CheckpointError, match="weight: 3 of 2100000 values are NaN or Inf"):
        quantize(weight, name)


def test_nonfinite_names_the_tensor() -> None:
    with pytest.raises(CheckpointError, match=r"^layers\.0\.weight: 1 of 1 values"):
        check_finite(torch.tensor([[float("nan")]]), "layers.0.weight")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 0), (0, 7), (7, 0), (1, 1), (5, 1), (1, 33), (129, 130)], ids=str)
def test_shapes_are_the_descriptors(name: str, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    q = quantize(weight, name)
    assert q.data.shape == q.format.data_shape(*shape)
    assert q.data.dtype == q.format.data_dtype
    assert q.scale.shape == q.format.scale_shape(*shape)
    assert q.scale.dtype == q.format.scale_dtype
    assert q.nbytes == q.format.nbytes(*shape)
    back = q.dequantize(torch.bfloat16)
    assert back.shape == shape
    assert back.dtype == torch.bfloat16


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_narrow_source_gives_what_its_float32_values_give(name: str, dtype: torch.dtype) -> None:
    weight = torch.randn(130, 200, generator=torch.Generator().manual_seed(1)).to(dtype)
    narrow, wide = quantize(weight, name), quantize(weight.float(), name)
    assert torch.equal(narrow.data.view(torch.uint8), wide.data.view(torch.uint8))
    assert torch.equal(narrow.scale, wide.scale)


@pytest.mark.parametrize("name", NAMES)
def test_runs_of_rows_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounded temporaries of large matrices change nothing: one run, or many with a ragged end."""
    weight = torch.randn(300, 70, generator=torch.Generator().manual_seed(2))
    whole = quantize(weight, name)
    expected = whole.dequantize()
    monkeypatch.setattr(rows, "_RUN", 1000)
    assert len(list(rows.row_runs(300, 70))) == 22
    cut = quantize(weight, name)
    assert torch.equal(cut.data.view(torch.uint8), whole.data.view(torch.uint8))
    assert torch.equal(cut.scale, whole.scale)
    assert torch.equal(cut.dequantize(), expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_source_is_not_changed(name: str) -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
    before = weight.clone()
    quantize(weight, name)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("name", NAMES)
def test_a_transposed_view_is_accepted(name: str) -> None:
    weight = torch.randn(96, 40, generator=torch.Generator().manual_seed(4)).T
    view, copy = quantize(weight, name), quantize(weight.contiguous(), name)
    assert torch.equal(view.data.view(torch.uint8), copy.data.view(torch.uint8))
    assert torch.equal(view.scale, copy.scale)


@pytest.mark.parametrize("name", NAMES)
def test_parts_stack_and_split(name: str) -> None:
    """A fused layer is its parts, each with scales of its own, also where a part is no multiple of 128 rows."""
    generator = torch.Generator().manual_seed(5)
    parts = [quantize(torch.randn(n, 200, generator=generator), name) for n in (130, 5, 128)]
    data = torch.cat([p.data.view(torch.uint8) for p in parts]).view(parts[0].data.dtype)
    fused = QuantizedTensor(data, torch.cat([p.scale for p in parts]), parts[0].format, (263, 200), (130, 5, 128))
    assert torch.equal(fused.dequantize(), torch.cat([p.dequantize() for p in parts]))
    assert [p.shape for p in fused.split()] == [(130, 200), (5, 200), (128, 200)]


@pytest.mark.parametrize(("name", "error"), [("ptpc_fp8", 0.03), ("per_block_fp8", 0.03), ("mxfp4", 0.13)])
def test_relative_error_of_gaussian_weights(name: str, error: float) -> None:
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(6))
    difference = quantize(weight, name).dequantize() - weight
    relative = float(difference.norm() / weight.norm())
    assert error / 2 < relative < error
