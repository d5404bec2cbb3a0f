"""The stream on a GPU: the same bits as the reference on the CPU, within the memory that was promised."""

import pytest
import torch
from requant_tensors import bits
from safetensors.torch import save_file
from torch import nn

import requant
from requant.errors import CheckpointError
from requant.formats import FORMATS, QuantizedTensor
from requant.loading import Staging, load, make_plan, read_headers
from requant.recipe import Recipe

pytestmark = pytest.mark.gpu

SMALL = Staging(slab_bytes=1 << 12, slabs=3, threads=2)
MIB = 1024**2


@pytest.mark.parametrize("staging", [None, SMALL])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("target", FORMATS)
def test_every_part_equals_the_reference(make_tiny, target, dtype, staging):
    tiny = make_tiny(dtype=dtype, layers=3)
    plan = tiny.plan({"global_quant_config": target}, tiny.save(shards=2), device=torch.device("cuda"))
    result = load(plan, tiny.model, staging=staging)
    assert 0 < result.elapsed_seconds < result.load_seconds
    for layer in tiny.model.model.layers:
        module = layer.self_attn.qkv_proj
        shape = (sum(module.rows), module.k)
        whole = QuantizedTensor(module.weight, module.weight_scale, FORMATS[target], shape, module.rows)
        for name, part in zip(module.names.parts, whole.split(), strict=True):
            expected = requant.quantize(tiny.tensors[f"{name}.weight"], target)
            assert torch.equal(bits(part.data), bits(expected.data))
            assert torch.equal(bits(part.scale), bits(expected.scale))
        expected = torch.cat([tiny.tensors[f"{name}.bias"] for name in module.names.parts]).bfloat16()
        assert torch.equal(module.bias.cpu(), expected)
    expected = tiny.tensors["model.embed_tokens.weight"].bfloat16()
    assert torch.equal(tiny.model.model.embed_tokens.weight.cpu(), expected)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_proj.weight", "model.embed_tokens.weight"])
def test_values_that_are_not_finite(tiny, name):
    tiny.tensors[name][[3, 40], 7] = float("nan")
    plan = tiny.plan({"global_quant_config": "mxfp4"}, device=torch.device("cuda"))
    with pytest.raises(CheckpointError, match=rf"tensor {name} of .*: 2 of \d+ values are NaN or Inf"):
        load(plan, tiny.model, staging=SMALL)


@pytest.mark.parametrize("damaged", [True, False])
def test_a_load_that_fails_leaves_nothing_on_the_device(make_tiny, damaged):
    tiny = make_tiny(layers=8)
    if damaged:
        tiny.tensors["model.layers.7.self_attn.k_proj.weight"][3, 7] = float("nan")
    plan = tiny.plan({"global_quant_config": "mxfp4"}, tiny.save(shards=2), device=torch.device("cuda"))
    if not damaged:
        last = plan.steps[-1].tensor
        with last.file.open("r+b") as file:
            file.truncate(last.start + 1)
    before = torch.cuda.memory_allocated()
    with pytest.raises(CheckpointError) as caught:
        load(plan, tiny.model, staging=SMALL)
    assert torch.cuda.memory_allocated() == before, f"while {caught.value!r} is held"


def test_peak_is_the_finished_weights_and_a_few_chunks(tmp_path, matrices):
    layers, n, k = 8, 8192, 4096
    save_file(
        {f"layers.{i}.weight": torch.ones(n, k).bfloat16() for i in range(layers)}, tmp_path / "model.safetensors"
    )
    model = nn.Module()
    model.layers = nn.ModuleList(matrices(f"layers.{i}", {f"layers.{i}": n}, k) for i in range(layers))
    plan = make_plan(
        model,
        read_headers(tmp_path),
        Recipe.parse({"global_quant_config": "mxfp4"}),
        name="m",
        config={},
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )
    torch.cuda.empty_cache()
    begin = torch.cuda.memory_allocated()
    result = load(plan, model)
    peak = result.peak_device_memory - begin
    assert result.staged_bytes <= 2048 * MIB
    assert plan.weight_bytes <= peak <= plan.weight_bytes + 256 * MIB < plan.bytes_to_read
