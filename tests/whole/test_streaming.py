"""A whole model streamed through a few small slabs equals the one that is read at once, bit for bit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from requant_models import BLOCK_FP8, make_checkpoint, quantize_checkpoint
from requant_tensors import bits
from torch import Tensor

from requant.engine.build import plan_model
from requant.engine.config import EngineConfig
from requant.loading import Staging, load
from requant.loading.chunks import weight_chunks

AT_ONCE = Staging(slab_bytes=1 << 28, slabs=1, threads=1)
STREAMED = Staging(slab_bytes=5000, slabs=3, threads=2)
MIXED = {"global_quant_config": "ptpc_fp8", "layer_quant_config": {"*.mlp.*": "mxfp4", "*o_proj": "per_block_fp8"}}
RECIPES: dict[str, object] = {
    "none": None,
    **{format: {"global_quant_config": format} for format in ("ptpc_fp8", "per_block_fp8", "mxfp4")},
    "mixed": MIXED,
}


def _block_fp8(folder: Path) -> Path:
    make_checkpoint(folder, "deepseek_v3", torch.bfloat16, hidden_size=160)
    kept = ("norm", "embed_tokens", "lm_head", "gate")
    quantize_checkpoint(folder, BLOCK_FP8, "per_block_fp8", lambda name: not name.endswith(kept))
    return folder


CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda folder: make_checkpoint(folder, "llama", torch.bfloat16),
    "qwen3_moe": lambda folder: make_checkpoint(folder, "qwen3_moe", torch.bfloat16),
    "deepseek_v3-fp8": _block_fp8,
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in CHECKPOINTS.items()}


def weights(checkpoint: Path, recipe: object, device: str, staging: Staging) -> dict[str, Tensor]:
    config = EngineConfig.create(model=str(checkpoint), online_quant_config=recipe, device=device)
    planned = plan_model(config)
    assert staging is AT_ONCE or len(weight_chunks(planned.plan, staging.slab_bytes)) > 30
    load(planned.plan, planned.model, staging=staging)
    return {name: bits(parameter) for name, parameter in planned.model.named_parameters()}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_streamed_equals_at_once(checkpoints: dict[str, Path], name: str, recipe: str, device: str) -> None:
    whole = weights(checkpoints[name], RECIPES[recipe], "cpu", AT_ONCE)
    streamed = weights(checkpoints[name], RECIPES[recipe], device, STREAMED)
    assert list(whole) == list(streamed)
    for parameter in whole:
        assert torch.equal(whole[parameter], streamed[parameter]), parameter
