"""Checkpoints that are quantized already: block FP8 and MXFP4 on their way into every target."""

import pytest
import requant_models
import torch
from requant_tensors import bits

import requant
from requant.errors import CheckpointError
from requant.formats import FORMATS
from requant.loading import Staging, load
from requant.loading.plan import BUDGET

FP8, MXFP4, QUARK = (
    {"quantization_config": section}
    for section in (requant_models.BLOCK_FP8, requant_models.MXFP4, requant_models.QUARK)
)
ATTN = "model.layers.0.self_attn"
QKV, O_PROJ, PARTS = f"{ATTN}.qkv_proj", f"{ATTN}.o_proj", [f"{ATTN}.{part}_proj" for part in "qkv"]
SMALL = Staging(slab_bytes=1 << 10, slabs=3, threads=2)
SCALES = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E8M0": torch.float8_e8m0fnu}


def to_block_fp8(tiny, names, scale="F32", suffix="weight_scale_inv"):
    """Put block FP8 in the place of some weights; returns what they are once they are dequantized to bfloat16."""
    dequantized = {}
    for name in names:
        q = requant.quantize(tiny.tensors.pop(f"{name}.weight"), "per_block_fp8")
        if scale == "F8_E8M0":  # powers of two: from here on these are the scales
            scales = torch.exp2(q.scale.log2().round()).to(torch.float8_e8m0fnu)
        else:
            scales = q.scale.to(SCALES[scale])
        tiny.tensors[f"{name}.weight"] = q.data
        tiny.tensors[f"{name}.{suffix}"] = scales
        n, k = q.shape
        factors = scales.float().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        dequantized[name] = (q.data.float() * factors).to(torch.bfloat16)
    return dequantized


def to_mxfp4(tiny, names, scale=torch.uint8):
    stored = {}
    for name in names:
        q = stored[name] = requant.quantize(tiny.tensors[f"{name}.weight"], "mxfp4")
        tiny.tensors[f"{name}.weight"] = q.data
        tiny.tensors[f"{name}.weight_scale"] = q.scale.view(scale)
    return stored


def layer(plan, name):
    return next(row for row in plan.layers if row.name == name)


def module(tiny, name):
    return tiny.model.get_submodule(name)


@pytest.mark.parametrize("staging", [None, SMALL])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("target", ["ptpc_fp8", "mxfp4"])
def test_block_fp8_to_another_target(tiny, target, scale, staging):
    """Every part is dequantized, rounded to bfloat16 and quantized; ragged edges included (200, 72 and 40 rows)."""
    sources = to_block_fp8(tiny, [*PARTS, O_PROJ], scale)
    plan = tiny.plan({"global_quant_config": target}, config=FP8)
    load(plan, tiny.model, staging=staging)
    expected = [requant.quantize(sources[part], target) for part in PARTS]
    qkv, o_proj = module(tiny, QKV), module(tiny, O_PROJ)
    assert torch.equal(bits(qkv.weight), bits(torch.cat([q.data for q in expected])))
    assert torch.equal(bits(qkv.weight_scale), bits(torch.cat([q.scale for q in expected])))
    assert torch.equal(bits(o_proj.weight), bits(requant.quantize(sources[O_PROJ], target).data))
    row = layer(plan, QKV)
    assert (row.source, row.storage.quantized, row.format.name) == ("per_block_fp8", True, target)
    itemsize = {"F32": 4, "BF16": 2, "F8_E8M0": 1}[scale]
    assert row.bytes_before == 312 * 96 + (2 + 1 + 1) * itemsize


@pytest.mark.parametrize("recipe", [None, {"global_quant_config": "mxfp4"}])
def test_scales_may_lie_in_another_file_than_their_weight(make_tiny, recipe):
    tiny = make_tiny(layers=2)
    to_block_fp8(tiny, [*PARTS, O_PROJ])
    names = list(tiny.tensors)
    assert len({names.index(f"{O_PROJ}.{end}") % 3 for end in ("weight", "weight_scale_inv")}) == 2
    load(tiny.plan(recipe, tiny.save(shards=3), config=FP8), tiny.model, staging=SMALL)
    spread = [module(tiny, name) for name in (QKV, O_PROJ)]
    together = make_tiny(layers=2)
    together.tensors = tiny.tensors
    load(together.plan(recipe, together.save(), config=FP8), together.model)
    for one, name in zip(spread, (QKV, O_PROJ), strict=True):
        assert torch.equal(bits(one.weight), bits(module(together, name).weight))
        assert torch.equal(bits(one.weight_scale), bits(module(together, name).weight_scale))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("suffix", ["weight_scale_inv", "scale"])
@pytest.mark.parametrize("recipe", [None, {"global_quant_config": "per_block_fp8"}, {"exclude_layer": "*"}])
def test_block_fp8_that_stays_is_kept_bit_for_bit(tiny, recipe, scale, suffix):
    to_block_fp8(tiny, [*PARTS, O_PROJ], scale, suffix)
    plan = tiny.plan(recipe, config=FP8)
    load(plan, tiny.model, staging=SMALL)
    qkv = module(tiny, QKV)
    codes = torch.cat([bits(tiny.tensors[f"{part}.weight"]) for part in PARTS])
    scales = torch.cat([tiny.tensors[f"{part}.{suffix}"].float() for part in PARTS])
    assert torch.equal(bits(qkv.weight), codes)
    assert torch.equal(bits(qkv.weight_scale), bits(scales))
    row = layer(plan, QKV)
    assert (row.format.name, row.storage.quantized, row.activation) == ("per_block_fp8", False, "fp8_1x128")
    assert row.layout_bytes == 312 * 96 * 4
    reasons = {entry["layer"]: entry["reason"] for entry in plan.to_report()["kept"]}
    wanted = {"exclude_layer": "excluded by '*'", "global_quant_config": "already, which is its target"}
    assert wanted.get(next(iter(recipe or {}), ""), "no rule matches") in reasons[QKV]
    assert plan.to_report()["num_layers"] == 0


@pytest.mark.parametrize("target", FORMATS)
def test_a_checkpoint_that_mixes_bf16_and_fp8_layers(tiny, target):
    original = tiny.tensors[f"{O_PROJ}.weight"]
    sources = to_block_fp8(tiny, [PARTS[1]])  # within one fused layer, too
    plan = tiny.plan({"global_quant_config": target}, config=FP8)
    load(plan, tiny.model)
    sources = {part: sources.get(part, tiny.tensors[f"{part}.weight"]) for part in PARTS}
    expected = [requant.quantize(sources[part], target) for part in PARTS]
    if target == "per_block_fp8":
        codes, scale = tiny.tensors[f"{PARTS[1]}.weight"], tiny.tensors[f"{PARTS[1]}.weight_scale_inv"]
        data = [expected[0].data, codes, expected[2].data]
        scales = [expected[0].scale, scale, expected[2].scale]
    else:
        data, scales = [q.data for q in expected], [q.scale for q in expected]
    qkv = module(tiny, QKV)
    assert torch.equal(bits(qkv.weight), torch.cat([bits(part) for part in data]))
    assert torch.equal(bits(qkv.weight_scale), torch.cat([bits(part) for part in scales]))
    assert torch.equal(bits(module(tiny, O_PROJ).weight), bits(requant.quantize(original, target).data))
    assert layer(plan, QKV).source == "BF16+per_block_fp8"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_kept_layer_of_mixed_parts_is_dequantized(tiny, dtype):
    sources = to_block_fp8(tiny, PARTS[:1])
    plan = tiny.plan(config=FP8, dtype=dtype)
    load(plan, tiny.model, staging=SMALL)
    qkv = module(tiny, QKV)
    expected = torch.cat([sources[PARTS[0]], *(tiny.tensors[f"{part}.weight"] for part in PARTS[1:])])
    assert torch.equal(qkv.weight, expected.to(dtype))
    assert any("1 layer: its parts are partly quantized" in w and QKV in w for w in plan.warnings)


@pytest.mark.parametrize("scale", [torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("section", [MXFP4, QUARK])
@pytest.mark.parametrize("recipe", [None, {"global_quant_config": "ptpc_fp8"}, {"global_quant_config": "mxfp4"}])
def test_mxfp4_passes_through(tiny, recipe, section, scale):
    stored = to_mxfp4(tiny, PARTS, scale)
    plan = tiny.plan(recipe, config=section)
    load(plan, tiny.model, staging=SMALL)
    qkv = module(tiny, QKV)
    assert torch.equal(qkv.weight, torch.cat([stored[part].data for part in PARTS]))
    assert torch.equal(qkv.weight_scale, torch.cat([stored[part].scale for part in PARTS]))
    row = layer(plan, QKV)
    assert (row.source, row.format.name, row.storage.quantized) == ("mxfp4", "mxfp4", False)
    assert any("1 layer: mxfp4 in the checkpoint, passed through unchanged" in w and QKV in w for w in plan.warnings)
    reasons = {entry["layer"]: entry["reason"] for entry in plan.to_report()["kept"]}
    assert "mxfp4 in the checkpoint" in reasons[QKV]
    assert layer(plan, O_PROJ).storage.quantized == bool(recipe)  # BF16 beside it


def test_an_mxfp4_checkpoint_must_say_so(tiny):
    to_mxfp4(tiny, PARTS)
    message = r"q_proj.weight of .* is U8{}; accepted: .* U8 with MXFP4 scales in a checkpoint that is declared as such"
    with pytest.raises(CheckpointError, match=message.format("")):
        tiny.plan()
    with pytest.raises(CheckpointError, match=message.format(" in a checkpoint with quant_method 'fp8'")):
        tiny.plan(config=FP8)


def test_fp8_needs_no_declaration(tiny):
    to_block_fp8(tiny, PARTS)
    assert layer(tiny.plan(), QKV).format.name == "per_block_fp8"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop(f"{O_PROJ}.weight_scale_inv"),
            r"o_proj.weight of .* is F8_E4M3 without its scales \(.*o_proj.weight_scale_inv \[1, 2\] or .*o_proj.scale "
            r"\[1, 2\]\) in a checkpoint with quant_method 'fp8'; accepted: BF16, F16, F32; of matrices F8_E4M3 with",
        ),
        (
            lambda t: t.update({f"{O_PROJ}.weight_scale_inv": torch.ones(96, 1)}),
            r"o_proj.weight_scale_inv of .* has shape \[96, 1\]; the model's configuration needs \[1, 2\]",
        ),
        (
            lambda t: t.update({f"{O_PROJ}.weight_scale_inv": torch.ones(1, 2, dtype=torch.float16)}),
            r"o_proj.weight_scale_inv of .* is F16; accepted: F32, BF16, F8_E8M0",
        ),
        (
            lambda t: t.update({f"{O_PROJ}.input_scale": torch.ones(1)}),
            r"the model takes no such tensor as .*o_proj.input_scale",
        ),
        (
            lambda t: t.update({"model.layers.0.norm.weight": torch.ones(96).to(torch.float8_e4m3fn)}),
            r"norm.weight of .* is F8_E4M3 in a checkpoint with quant_method 'fp8'; accepted: BF16",
        ),
        (
            lambda t: t.update({f"{O_PROJ}.weight": torch.ones(96, 200).to(torch.float8_e5m2)}),
            r"o_proj.weight of .* is F8_E5M2 in a checkpoint with quant_method 'fp8'; accepted: BF16",
        ),
    ],
)
def test_refusals(tiny, change, message):
    to_block_fp8(tiny, [*PARTS, O_PROJ])
    change(tiny.tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        tiny.plan({"global_quant_config": "ptpc_fp8"}, config=FP8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("target", [None, "ptpc_fp8", "per_block_fp8", "mxfp4"])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("code", r"o_proj.weight of .*: 2 of 19200 values are NaN or Inf \(as (bfloat16|float8_e4m3fn)\)"),
        ("scale", r"o_proj.weight_scale_inv of .*: 1 of 2 values are NaN or Inf \(as scales\)"),
        ("e8m0", r"o_proj.weight_scale_inv of .*: 1 of 2 values are NaN or Inf \(as scales\)"),
    ],
)
def test_nan_in_an_fp8_source(tiny, target, what, message):
    to_block_fp8(tiny, [*PARTS, O_PROJ], "F8_E8M0" if what == "e8m0" else "F32")
    if what == "code":
        bits(tiny.tensors[f"{O_PROJ}.weight"])[5, 7] = 0x7F
        bits(tiny.tensors[f"{O_PROJ}.weight"])[90, 199] = 0xFF
    elif what == "scale":
        tiny.tensors[f"{O_PROJ}.weight_scale_inv"][0, 1] = torch.inf
    else:
        bits(tiny.tensors[f"{O_PROJ}.weight_scale_inv"])[0, 1] = 0xFF
    plan = tiny.plan({"global_quant_config": target} if target else None, config=FP8)
    with pytest.raises(CheckpointError, match=message):
        load(plan, tiny.model, staging=SMALL)


def test_values_that_overflow_bfloat16_are_found_after_the_rounding(tiny):
    to_block_fp8(tiny, [*PARTS, O_PROJ])
    bits(tiny.tensors[f"{O_PROJ}.weight"])[:, :128] = 0x7E  # 448
    tiny.tensors[f"{O_PROJ}.weight_scale_inv"][0, 0] = 3.4e38 / 448  # finite in float32, Inf in bfloat16
    plan = tiny.plan({"global_quant_config": "ptpc_fp8"}, config=FP8)
    with pytest.raises(CheckpointError, match=rf"{96 * 128} of 19200 values are NaN or Inf \(as bfloat16\)"):
        load(plan, tiny.model)


def test_values_that_overflow_float16_are_found_where_they_are_dequantized(tiny):
    to_block_fp8(tiny, PARTS[:1])
    bits(tiny.tensors[f"{PARTS[0]}.weight"])[:128] = 0x7E  # 448
    tiny.tensors[f"{PARTS[0]}.weight_scale_inv"][0, 0] = 200
    load(tiny.plan(config=FP8), tiny.model)
    plan = tiny.plan(config=FP8, dtype=torch.float16)
    with pytest.raises(CheckpointError, match=rf"q_proj.weight of .*: {128 * 96} of 19200 values .* \(as float16\)"):
        load(plan, tiny.model)


def test_nan_in_an_mxfp4_scale(tiny):
    to_mxfp4(tiny, PARTS)
    tiny.tensors[f"{PARTS[2]}.weight_scale"][3, 1] = 0xFF
    with pytest.raises(
        CheckpointError, match=r"v_proj.weight_scale of .*: 1 of 120 values are NaN or Inf \(as scales\)"
    ):
        load(tiny.plan(config=MXFP4), tiny.model)


def test_what_is_read_and_held_is_counted(tiny):
    to_block_fp8(tiny, [*PARTS, O_PROJ])
    plan = tiny.plan({"global_quant_config": "mxfp4"}, config=FP8)
    seen = []

    class Progress:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def advance(self, nbytes, what):
            seen.append((nbytes, what))

    result = load(plan, tiny.model, progress=Progress(), staging=SMALL)
    assert result.bytes_read == plan.bytes_to_read == sum(nbytes for nbytes, _ in seen)
    assert plan.bytes_to_read == sum(tensor.nbytes for tensor in tiny.tensors.values())
    first_weight = next(i for i, (_, name) in enumerate(seen) if not name.endswith("_scale_inv"))
    assert {name for _, name in seen[:first_weight]} == {n for n in tiny.tensors if n.endswith("_scale_inv")}
    assert plan.loading_bytes <= BUDGET
