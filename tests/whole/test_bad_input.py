"""What is wrong with a checkpoint or a flag is said in one line with exit code 2, before any weight is read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from requant_models import make_checkpoint
from safetensors.torch import load_file, save_file

from requant import LLM
from requant.engine import build
from requant.entrypoints import cli
from requant.errors import CheckpointError, ConfigError, RequantError

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(pristine, tmp_path / "checkpoint"))


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs ``requant plan``, which must refuse, with nothing but one line; that line."""

    def run(*args: str) -> str:
        assert cli.main(["plan", "--device", "cpu", *args]) == 2
        captured = capfd.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("requant: error: ")
        assert captured.err.count("\n") == 1
        return captured.err

    return run


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("{", "online_quant_config is not valid JSON"),
        ("[]", "online_quant_config is [] (a list)"),
        ("null", "online_quant_config is null"),
        ("5", "online_quant_config is 5 (a number)"),
        ("/no/such/file", "it is no file"),
        ("/", "cannot be read: Is a directory"),
        ('{"layers": {}}', "unknown field 'layers'"),
        ('{"global_quant_config": "mxi4"}', "unknown format 'mxi4'"),
        ('{"global_quant_config": 4}', "global_quant_config is 4 (a number)"),
        ('{"layer_quant_config": {"*nope*": "mxfp4"}}', "'*nope*' matches no layer"),
        ('{"layer_quant_config": {"*.q_proj": "mxfp4"}}', "qkv_proj is one fused layer"),
    ],
)
def test_recipes(refused: Callable[..., str], pristine: Path, recipe: str, says: str) -> None:
    assert says in refused("--model", str(pristine), "--online_quant_config", recipe)


@pytest.mark.parametrize("model", ["/no/such/folder", "x" * 5000, "~nosuchuser/model", "bad id!"])
def test_models_that_are_not_there(refused: Callable[..., str], model: str) -> None:
    assert model in refused("--model", model)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "unknown architecture (GPT2LMHeadModel); known: DeepseekV2ForCausalLM",
        ),
        ({"architectures": 5}, "unknown architecture (5); known: DeepseekV2ForCausalLM"),
        ({"architectures": [["LlamaForCausalLM"]]}, "unknown architecture"),
        ({"architectures": None}, "unknown architecture (none given)"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq'"),
        ({"quantization_config": ["gptq"]}, "quantization_config of the checkpoint is a list; accepted: an object"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method 'fp8' without weight_block_size"),
        (
            {"hidden_size": "96"},
            "Validation error for field 'hidden_size': TypeError: Field 'hidden_size' expected int",
        ),
        ({"hidden_size": 95}, "is not a multiple of the number of attention heads"),
        ({"hidden_size": 192}, "tensor model.embed_tokens.weight"),
        ({"num_attention_heads": 0}, "transformers cannot read"),
        ({"num_key_value_heads": 0}, "no model can be made"),
        ({"head_dim": -1}, "no model can be made"),
        ({"num_hidden_layers": 10**30}, "no model can be made"),
        ({"num_hidden_layers": 3}, "tensor model.layers.2.input_layernorm.weight is missing"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"dtype": "nope"}, "transformers cannot read"),
        ({"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}, "rope type 'mrope' is not supported"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "no finite frequencies"),
        ({"max_position_embeddings": -1}, "max_position_embeddings of the model's config.json is -1"),
        ({"max_position_embeddings": 1}, "max_position_embeddings of the model's config.json is 1"),
    ],
)
def test_configurations(refused: Callable[..., str], checkpoint: Path, changes: dict[str, Any], says: str) -> None:
    edit_config(checkpoint, **changes)
    assert says in refused("--model", str(checkpoint))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no config.json"),
        (b"{", "is not JSON"),
        (b"\xff\xff{}", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "is not a JSON object"),
    ],
)
def test_config_files(refused: Callable[..., str], checkpoint: Path, content: bytes | None, says: str) -> None:
    file = checkpoint / "config.json"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    assert says in refused("--model", str(checkpoint))


def test_weights(refused: Callable[..., str], checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    content, tensors = file.read_bytes(), load_file(file)
    for damaged, says in (
        (content[:-1], "is truncated"),
        (content[:100], "is truncated"),
        (content + b"x", "is corrupt"),
        (content.replace(b"F32", b"F64", 1), "is corrupt"),
    ):
        file.write_bytes(damaged)
        assert says in refused("--model", str(checkpoint))
    save_file({name: tensor for name, tensor in tensors.items() if name != DOWN}, file)
    assert f"tensor {DOWN} is missing" in refused("--model", str(checkpoint))
    save_file({**tensors, DOWN: tensors[DOWN].T.contiguous()}, file)
    assert f"tensor {DOWN} of" in refused("--model", str(checkpoint))
    file.unlink()
    assert "no weights in" in refused("--model", str(checkpoint))


@pytest.mark.parametrize("shard", ["b.safetensors", "x" * 5000, "a\0b", "../x.safetensors"])
def test_shards(refused: Callable[..., str], checkpoint: Path, shard: str) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "a.safetensors")
    index = {"weight_map": {DOWN: shard}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert DOWN in refused("--model", str(checkpoint))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", [DOWN, "model.norm.weight"])
def test_weights_that_are_not_finite(checkpoint: Path, name: str, value: float) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors[name].view(-1)[7] = value
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} of .*: 1 of {tensors[name].numel()} values are NaN or Inf"):
        LLM(str(checkpoint), {"global_quant_config": "mxfp4"}, online_quant_info_dir=str(checkpoint), device="cpu")
    assert not list(checkpoint.glob("online_quant_info_*"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_cache_memory_bytes": 5000}, "one sequence of 256 tokens takes 131 KB and 5 KB are there"),
        ({"kv_cache_memory_bytes": 10**15}, "1000000.00 GB that was asked for does not fit"),
        ({"block_size": 2**40}, "not enough memory on cpu"),
    ],
)
def test_memory_is_refused_before_reading(
    monkeypatch: pytest.MonkeyPatch, pristine: Path, options: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr(build, "load", lambda *args, **more: pytest.fail("weights are read"))
    with pytest.raises(ConfigError, match=says):
        LLM(str(pristine), device="cpu", **options)


def test_stop_tokens_are_refused_before_reading(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    monkeypatch.setattr(build, "load", lambda *args, **more: pytest.fail("weights are read"))
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": ["end"]}')
    with pytest.raises(RequantError, match=r"eos_token_id in .* names 'end'"):
        LLM(str(checkpoint), device="cpu")
