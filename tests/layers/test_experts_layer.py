"""The experts layer, from checkpoints in every layout to its forward."""

import pytest
import requant_models
import torch
from requant_tensors import bits
from safetensors.torch import save_file
from torch import nn

import requant
from requant.errors import CheckpointError
from requant.formats import FORMATS
from requant.layers.experts import Experts
from requant.loading import Staging, load, make_plan, read_headers
from requant.recipe import Recipe

E, H, INNER = 5, 80, 72  # neither is a multiple of 32 or 128
NAME = "mlp.experts"
SMALL = Staging(slab_bytes=1 << 12, slabs=3, threads=2)
FP8 = {"quantization_config": requant_models.BLOCK_FP8}
MXFP4 = {"quantization_config": requant_models.MXFP4}


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.mlp = nn.Module()
        sizes = {"num_experts": E, "hidden_size": H, "inner_size": INNER, "activation": "silu", **options}
        self.mlp.experts = Experts(NAME, **sizes)


def separate(gated=True, bias=False, inner=INNER, hidden=H, dtype=torch.bfloat16):
    """A checkpoint with a tensor for each matrix of each expert."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for expert in range(E):
        for part in ("gate_proj", "up_proj", "down_proj") if gated else ("up_proj", "down_proj"):
            n, k = (hidden, inner) if part == "down_proj" else (inner, hidden)
            owner = f"{NAME}.{expert}.{part}"
            tensors[f"{owner}.weight"] = torch.randn(n, k, generator=generator).to(dtype)
            if bias:
                tensors[f"{owner}.bias"] = torch.randn(n, generator=generator).to(dtype)
    return tensors


def together(tensors, gated=True, bias=False):
    """The same weights in one tensor for all experts."""

    def stacked(kind, parts):
        rows = [torch.cat([tensors[f"{NAME}.{e}.{part}.{kind}"] for part in parts]) for e in range(E)]
        return torch.stack(rows)

    inputs = ("gate_proj", "up_proj") if gated else ("up_proj",)
    first = f"{NAME}.gate_up_proj" if gated else f"{NAME}.up_proj"
    out = {first: stacked("weight", inputs), f"{NAME}.down_proj": stacked("weight", ["down_proj"])}
    if bias:
        out |= {f"{first}_bias": stacked("bias", inputs), f"{NAME}.down_proj_bias": stacked("bias", ["down_proj"])}
    return out


def loaded(folder, tensors, target=None, config=None, dtype=torch.bfloat16, device="cpu", **options):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    model = Model(**options)
    recipe = Recipe.parse({"global_quant_config": target} if target else None)
    plan = make_plan(
        model,
        read_headers(folder),
        recipe,
        name="m",
        config=config or {},
        dtype=dtype,
        device=torch.device(device),
    )
    load(plan, model, staging=SMALL)
    return model.mlp.experts, plan


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("layout", ["separate", "together"])
@pytest.mark.parametrize("target", FORMATS)
def test_every_experts_every_matrix_equals_its_own_quantization(tmp_path, target, layout, gated, device):
    tensors = separate(gated)
    stored = tensors if layout == "separate" else together(tensors, gated)
    experts, plan = loaded(tmp_path, stored, target, gated=gated, device=device)
    inputs = ("gate_proj", "up_proj") if gated else ("up_proj",)
    for expert in range(E):
        first = [requant.quantize(tensors[f"{NAME}.{expert}.{part}.weight"], target) for part in inputs]
        down = requant.quantize(tensors[f"{NAME}.{expert}.down_proj.weight"], target)
        assert torch.equal(bits(experts.w13_weight[expert]), bits(torch.cat([q.data for q in first])))
        assert torch.equal(bits(experts.w13_weight_scale[expert]), bits(torch.cat([q.scale for q in first])))
        assert torch.equal(bits(experts.w2_weight[expert]), bits(down.data))
        assert torch.equal(bits(experts.w2_weight_scale[expert]), bits(down.scale))
    (row,) = plan.layers
    parameters = (experts.w13_weight, experts.w2_weight, experts.w13_weight_scale, experts.w2_weight_scale)
    assert row.bytes_after == sum(parameter.nbytes for parameter in parameters)
    assert row.bytes_before == sum(tensor.nbytes for tensor in tensors.values())
    assert len(row.parts) == (E * (len(inputs) + 1) if layout == "separate" else 2)
    if device == "cpu":
        assert row.layout_bytes == 4 * sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize("layout", ["separate", "together"])
@pytest.mark.parametrize("gated", [True, False])
def test_unquantized_weights_and_biases(tmp_path, gated, layout):
    tensors = separate(gated, bias=True)
    stored = tensors if layout == "separate" else together(tensors, gated, bias=True)
    experts, plan = loaded(tmp_path, stored, gated=gated, bias=True)
    whole = together(tensors, gated, bias=True)
    first = f"{NAME}.gate_up_proj" if gated else f"{NAME}.up_proj"
    assert torch.equal(experts.w13_weight, whole[first])
    assert torch.equal(experts.w2_weight, whole[f"{NAME}.down_proj"])
    assert torch.equal(experts.w13_bias, whole[f"{first}_bias"])
    assert torch.equal(experts.w2_bias, whole[f"{NAME}.down_proj_bias"])
    assert experts.w13_weight.shape == (E, (2 if gated else 1) * INNER, H)
    assert plan.plain_bytes == experts.w13_bias.nbytes + experts.w2_bias.nbytes
    assert plan.layers[0].layout_bytes == 0


@pytest.mark.parametrize("layout", ["separate", "together"])
@pytest.mark.parametrize("target", [None, *FORMATS])
def test_block_fp8_experts(tmp_path, target, layout):
    """With 128 rows a matrix, so that the stacked layout's blocks do not cross from gate to up."""
    tensors = separate(inner=128)
    q = {name: requant.quantize(tensor, "per_block_fp8") for name, tensor in tensors.items()}
    if layout == "separate":
        stored = {name: x.data for name, x in q.items()} | {f"{name}_scale_inv": x.scale for name, x in q.items()}
    else:
        stored = together({name: x.data for name, x in q.items()})
        scales = together({name: x.scale for name, x in q.items()})
        stored |= {f"{name}_scale_inv": scale for name, scale in scales.items()}
    experts, plan = loaded(tmp_path, stored, target, FP8, inner_size=128)
    for expert in range(E):
        parts = [q[f"{NAME}.{expert}.{part}.weight"] for part in ("gate_proj", "up_proj")]
        if target in (None, "per_block_fp8"):
            expected = parts
        else:
            expected = [requant.quantize(part.dequantize(torch.bfloat16), target) for part in parts]
        assert torch.equal(bits(experts.w13_weight[expert]), bits(torch.cat([x.data for x in expected])))
        assert torch.equal(bits(experts.w13_weight_scale[expert]), bits(torch.cat([x.scale for x in expected])))
    assert plan.layers[0].storage.quantized == (target in ("ptpc_fp8", "mxfp4"))


def test_stacked_blocks_across_two_matrices_are_refused(tmp_path):
    tensors = together(separate())
    stored = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items()}
    stored |= {
        f"{NAME}.gate_up_proj_scale_inv": torch.ones(E, 2, 1),
        f"{NAME}.down_proj_scale_inv": torch.ones(E, 1, 1),
    }
    with pytest.raises(CheckpointError, match="blocks of 128 rows cross the border between matrices of 72 rows"):
        loaded(tmp_path, stored, "mxfp4", FP8)


@pytest.mark.parametrize("layout", ["separate", "together"])
def test_mxfp4_experts_pass_through(tmp_path, layout):
    tensors = separate(inner=64, hidden=96)
    q = {name: requant.quantize(tensor, "mxfp4") for name, tensor in tensors.items()}
    if layout == "separate":
        stored = {name: x.data for name, x in q.items()} | {f"{name}_scale": x.scale for name, x in q.items()}
    else:
        stored = together({name: x.data for name, x in q.items()})
        stored |= {f"{n}_scale": s for n, s in together({name: x.scale for name, x in q.items()}).items()}
    experts, plan = loaded(tmp_path, stored, "ptpc_fp8", MXFP4, inner_size=64, hidden_size=96)
    for expert in range(E):
        down = q[f"{NAME}.{expert}.down_proj.weight"]
        assert torch.equal(experts.w2_weight[expert], down.data)
        assert torch.equal(experts.w2_weight_scale[expert], down.scale)
    assert "passed through unchanged, not quantized to ptpc_fp8" in plan.layers[0].storage.reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{NAME}.3.up_proj.weight"), r"tensor mlp.experts.3.up_proj.weight is missing from"),
        (
            lambda t: t.update({f"{NAME}.0.down_proj.weight": torch.ones(INNER, H)}),
            r"mlp.experts.0.down_proj.weight of .* has shape \[72, 80\]; .* needs \[80, 72\]",
        ),
        (
            lambda t: t.update({f"{NAME}.5.up_proj.weight": torch.ones(INNER, H)}),
            r"no such tensor as mlp.experts.5.up_proj",
        ),
    ],
)
def test_refusals(tmp_path, change, message):
    tensors = separate()
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        loaded(tmp_path, tensors)


def test_a_stacked_tensor_of_another_orientation_is_refused(tmp_path):
    tensors = {name: tensor.transpose(1, 2) for name, tensor in together(separate()).items()}
    with pytest.raises(CheckpointError, match=r"gate_up_proj of .* has shape \[5, 80, 144\]; .* needs \[5, 144, 80\]"):
        loaded(tmp_path, tensors)


def test_nan_in_one_expert_of_a_stacked_tensor(tmp_path):
    tensors = together(separate())
    tensors[f"{NAME}.down_proj"][2, 3, 4] = torch.nan
    with pytest.raises(CheckpointError, match=r"mlp.experts.down_proj of .*: 1 of 5760 values are NaN or Inf"):
        loaded(tmp_path, tensors, "mxfp4")


def test_not_loaded_experts_say_so():
    with pytest.raises(RuntimeError, match="no weights yet"):
        Model().mlp.experts(torch.zeros(1, H), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [True, False])
def test_forward_is_the_sum_of_the_chosen_experts(tmp_path, gated, bias):
    tensors = separate(gated, bias, dtype=torch.float32)
    experts, _ = loaded(tmp_path, tensors, dtype=torch.float32, gated=gated, bias=bias)
    generator = torch.Generator().manual_seed(1)
    x, weights = torch.randn(7, H, generator=generator), torch.rand(7, 3, generator=generator)
    ids = torch.stack([torch.randperm(E, generator=generator)[:3] for _ in range(7)])
    out = experts(x, ids, weights)

    def linear(value, expert, part):
        owner = f"{NAME}.{expert}.{part}"
        return nn.functional.linear(value, tensors[f"{owner}.weight"].double(), _bias(tensors, owner, bias))

    for token in range(7):
        expected = torch.zeros(H, dtype=torch.float64)
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            value = x[token].double()
            up = linear(value, expert, "up_proj")
            inner = nn.functional.silu(linear(value, expert, "gate_proj")) * up if gated else nn.functional.silu(up)
            expected += weight * linear(inner, expert, "down_proj")
        assert (out[token] - expected).norm() < 1e-6 * expected.norm()


def _bias(tensors, owner, bias):
    return tensors[f"{owner}.bias"].double() if bias else None


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["BF16", "block FP8"])
def test_peak_is_the_finished_experts_and_a_few_chunks(tmp_path, source):
    """Never a BF16 copy of a layer: here that would be 800 MB."""
    experts, hidden, inner = 64, 2048, 1024
    tensors = {}
    for expert in range(experts):
        for part in ("gate_proj", "up_proj", "down_proj"):
            n, k = (hidden, inner) if part == "down_proj" else (inner, hidden)
            weight, name = torch.ones(n, k), f"{NAME}.{expert}.{part}.weight"
            tensors[name] = weight.to(torch.bfloat16 if source == "BF16" else torch.float8_e4m3fn)
            if source != "BF16":
                tensors[f"{name}_scale_inv"] = torch.ones(n // 128, k // 128)
    save_file(tensors, tmp_path / "model.safetensors")
    model = Model(num_experts=experts, hidden_size=hidden, inner_size=inner)
    plan = make_plan(
        model,
        read_headers(tmp_path),
        Recipe.parse({"global_quant_config": "mxfp4"}),
        name="m",
        config=FP8 if source != "BF16" else {},
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )
    torch.cuda.empty_cache()
    begin = torch.cuda.memory_allocated()
    peak = load(plan, model).peak_device_memory - begin
    assert plan.weight_bytes <= peak <= plan.weight_bytes + (96 << 20)
