"""What cannot be honoured is one line that names it, before a weight is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from requant_models import BLOCK_FP8, quantize_checkpoint
from requant_transformers import load, make_checkpoint, rewrite, tensors_of
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3ForCausalLM

from requant.errors import CheckpointError, ConfigError, RecipeError
from requant.integrations.transformers import OnlineQuantConfig, OnlineQuantizer
from requant.integrations.transformers.load import Loader

PTPC = {"global_quant_config": "ptpc_fp8"}
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(Loader, "load", refuse)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"global_quant_config": "ptpc_i8"}, "global_quant_config is the unknown format 'ptpc_i8'; accepted: ptpc_fp8"),
        ({"layer_quant_config": {"*": "mxi4"}}, "the unknown format 'mxi4'"),
        ({"global_quant": "mxfp4"}, "unknown field 'global_quant'; accepted fields: global_quant_config"),
        ({"exclude_layer": [3]}, "exclude_layer has a pattern that is 3"),
    ],
)
def test_a_bad_recipe_is_refused_when_it_is_made(recipe: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message.replace("*", r"\*")):
        OnlineQuantConfig(**recipe)


@pytest.mark.usefixtures("reads_nothing")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"*.self_atn.*": "mxfp4"},
            r"'\*.self_atn.\*' matches no layer that .*nearest names: .*self_attn",
        ),
        ({"*.q_proj": "mxfp4"}, r"layers.0.self_attn.qkv_proj is one fused layer.*q_proj mxfp4.*k_proj ptpc_fp8"),
        (
            {"*.experts.3.*": "mxfp4"},
            r"mlp.experts is one fused layer.*by layer_quant_config '\*.experts.3.\*'",
        ),
        ({"*head*": "mxfp4"}, "matches only protected layers .lm_head.*accepted: 'lm_head'"),
    ],
)
def test_a_recipe_that_does_not_fit_the_model(tmp_path: Path, overrides: dict[str, str], message: str) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    with pytest.raises(RecipeError, match=message) as error:
        load(tmp_path, layer_quant_config=overrides, **PTPC)
    assert "\n" not in str(error.value)


def without_scale(folder: Path) -> None:
    quantize_checkpoint(folder, BLOCK_FP8, "per_block_fp8", lambda name: name == Q)
    rewrite(folder, {name: value for name, value in tensors_of(folder).items() if not name.endswith("_inv")})


def wrong_scale(folder: Path) -> None:
    quantize_checkpoint(folder, BLOCK_FP8, "per_block_fp8", lambda name: name == Q)
    rewrite(folder, {**tensors_of(folder), f"{Q}.weight_scale_inv": torch.ones(3, 1)})


def wrong_shape(folder: Path) -> None:
    rewrite(folder, {**tensors_of(folder), f"{Q}.weight": torch.ones(96, 95)})


def integers(folder: Path) -> None:
    rewrite(folder, {**tensors_of(folder), f"{Q}.weight": torch.ones(96, 96, dtype=torch.int32)})


def fp8_embedding(folder: Path) -> None:
    quantize_checkpoint(folder, BLOCK_FP8, "per_block_fp8", lambda name: name.endswith("embed_tokens"))


def experts_missing(folder: Path) -> None:
    gone = "model.layers.1.mlp.experts.7.up_proj.weight"
    rewrite(folder, {name: value for name, value in tensors_of(folder).items() if name != gone})


@pytest.mark.usefixtures("reads_nothing")
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            without_scale,
            f"tensor {Q}.weight of .* is F8_E4M3 without scales beside it; accepted: BF16",
        ),
        (wrong_scale, r"of shape \[3, 1\] instead of \[1, 1\]"),
        (wrong_shape, rf"{Q}.weight .* has shape \[96, 95\]; the model's configuration needs \[96, 96\]"),
        (integers, f"{Q}.weight of .* is I32, which is neither a float"),
        (fp8_embedding, "embed_tokens.weight of .* is F8_E4M3 and feeds model.embed_tokens.weight"),
        (experts_missing, "model.layers.1.mlp.experts.gate_up_proj is made of 15 tensors .*needs 16"),
    ],
)
def test_a_checkpoint_that_does_not_fit(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    spoil(tmp_path)
    with pytest.raises(CheckpointError, match=message) as error:
        load(tmp_path, **PTPC)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("reads_nothing")
@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "quant_method 'compressed-tensors'"),
        ({"quant_method": "awq", "bits": 4}, "quant_method 'awq'"),
        ({"quant_method": "fp8"}, "quant_method 'fp8' without weight_block_size"),
    ],
)
def test_a_source_in_another_format_is_named(tmp_path: Path, section: dict[str, object], named: str) -> None:
    make_checkpoint(tmp_path, "qwen3")
    rewrite(tmp_path, tensors_of(tmp_path), section)
    with pytest.raises(CheckpointError, match=f"quantized already: quantization_config has {named}"):
        load(tmp_path, **PTPC)


@pytest.mark.parametrize("name", ["ptpc_fp8", "per_block_fp8", "mxfp4"])
@pytest.mark.parametrize("tensor", [f"{Q}.weight", "model.layers.1.mlp.experts.5.up_proj.weight"])
def test_nan_and_inf_are_counted(tmp_path: Path, tensor: str, name: str) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    tensors = tensors_of(tmp_path)
    tensors[tensor][3, 5], tensors[tensor][7, 2:4] = float("nan"), float("-inf")
    rewrite(tmp_path, tensors)
    size = tensors[tensor].numel()
    with pytest.raises(CheckpointError, match=f"tensor {tensor} of .*: 3 of {size} values are NaN or Inf"):
        load(tmp_path, global_quant_config=name)


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        ("model.embed_tokens.weight", "tensor model.embed_tokens.weight of "),
        ("model.layers.1.mlp.gate.weight", "tensor model.layers.1.mlp.gate.weight of "),
        ("model.layers.1.input_layernorm.weight", "tensor model.layers.1.input_layernorm.weight of "),
        (f"{Q}.weight", f"tensor {Q}.weight of "),
        ("model.layers.1.mlp.experts.5.up_proj.weight", "parameter model.layers.1.mlp.experts.gate_up_proj .of 16 ten"),
    ],
)
def test_nan_is_counted_in_what_is_kept_too(tmp_path: Path, tensor: str, named: str) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    tensors = tensors_of(tmp_path)
    tensors[tensor].view(-1)[7:9] = float("nan")
    rewrite(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=f"{named}.*: 2 of .* values are NaN or Inf .as bfloat16"):
        load(tmp_path, torch.bfloat16)


@pytest.mark.parametrize("recipe", [{"global_quant_config": "mxfp4"}, {}])
def test_nan_in_block_fp8_is_counted(tmp_path: Path, recipe: dict[str, str]) -> None:
    make_checkpoint(tmp_path, "qwen3")
    quantize_checkpoint(tmp_path, BLOCK_FP8, "per_block_fp8", lambda name: name == Q)
    tensors = tensors_of(tmp_path)
    tensors[f"{Q}.weight"].view(torch.uint8)[1, :2] = 0x7F
    rewrite(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=f"tensor {Q}.weight of .* values are NaN or Inf"):
        load(tmp_path, **recipe)


@pytest.mark.parametrize("recipe", [{"global_quant_config": "mxfp4"}, {}])
def test_the_nan_of_e8m0_scales_is_refused(tmp_path: Path, recipe: dict[str, str]) -> None:
    make_checkpoint(tmp_path, "qwen3")
    quantize_checkpoint(tmp_path, BLOCK_FP8, "per_block_fp8", lambda name: name == Q)
    scale = torch.full((1, 1), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    rewrite(tmp_path, {**tensors_of(tmp_path), f"{Q}.weight_scale_inv": scale})
    with pytest.raises(CheckpointError, match=f"tensor {Q}.weight of .* values are NaN or Inf"):
        load(tmp_path, **recipe)


def test_what_from_pretrained_cannot_be_given(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    config = OnlineQuantConfig(**PTPC)

    def refused(match: str, **more: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, **more)

    refused("accepted: no key_mapping", key_mapping={"^foo": "bar"})
    own, state = AutoConfig.from_pretrained(tmp_path), {"model.norm.weight": torch.ones(96)}
    with pytest.raises(ConfigError, match="a state_dict alone is not accepted"):
        Qwen3ForCausalLM.from_pretrained(None, config=own, state_dict=state, quantization_config=config)
    torch.save(tensors_of(tmp_path), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    refused("reads safetensors files only; .*pytorch_model.bin is none")


def test_layers_that_would_be_fetched_for_every_step_are_refused() -> None:
    quantizer = OnlineQuantizer(OnlineQuantConfig(**PTPC))
    quantizer.validate_environment(device_map={"": "cpu"})
    quantizer.validate_environment(device_map={"model": 0, "lm_head": 1})
    for devices in ({"model": "cuda:0", "lm_head": "disk"}, {"model": 0, "lm_head": "cpu"}):
        with pytest.raises(ConfigError, match="accepted: GPUs only, or the CPU only"):
            quantizer.validate_environment(device_map=devices)


def test_saving_is_refused(tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path, "qwen3"), **PTPC)
    with pytest.raises(ValueError, match="quantized with requant and is not serializable"):
        model.save_pretrained(tmp_path / "out")
    assert json.loads(model.config.to_json_string())["quantization_config"] == {**PTPC, "quant_method": "requant"}
