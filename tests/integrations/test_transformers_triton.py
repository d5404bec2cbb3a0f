"""The GPU's kernels behind transformers, under Triton's interpreter: the same weights, the same logits."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requant_triton
import torch
from requant_models import BLOCK_FP8, quantize_checkpoint
from requant_tensors import bits
from requant_transformers import PROMPT, load, make_checkpoint
from transformers import PreTrainedModel

from requant.integrations.transformers import experts, fill, linear
from requant.kernels import lookup


def on_gpu_rows(run: Callable[[], Any]) -> Any:
    """Run with the table's rows of a GPU, whatever the device of the tensors."""
    modules = (experts, fill, linear)
    for module in modules:
        module.lookup = lambda op, format, device: lookup(op, format, "cuda")
    try:
        return run()
    finally:
        for module in modules:
            module.lookup = lookup


def check_same(folder: Path, name: str) -> None:
    expected = load(folder, global_quant_config=name)

    def run() -> tuple[PreTrainedModel, torch.Tensor]:
        model = load(folder, global_quant_config=name)
        return model, model(PROMPT).logits

    with torch.no_grad():
        model, logits = on_gpu_rows(run)
        others = expected(PROMPT).logits
    # Sums in another order move an activation across a rounding boundary now and then; mxfp4 rounds none.
    error, limit = ((logits - others).norm() / others.norm()).item(), 1e-4 if name == "mxfp4" else 0.03
    assert error < limit, f"{folder.name}, {name}: relative error {error:.1e}"
    want = expected.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(bits(value), bits(want[key])), key


def test_small_models_under_the_interpreter() -> None:
    requant_triton.check_small_cases(__file__)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        small = {"num_hidden_layers": 1, "num_experts": 4}  # the interpreter takes its time
        folder = make_checkpoint(Path(root) / "experts", "qwen3_moe", torch.float32, **small)
        for name in ("ptpc_fp8", "per_block_fp8", "mxfp4"):
            check_same(folder, name)
        check_same(make_checkpoint(Path(root) / "own gate", "gpt_oss", torch.float32), "per_block_fp8")
        folder = make_checkpoint(Path(root) / "block fp8", "qwen3_moe", **small)
        quantize_checkpoint(folder, BLOCK_FP8, "per_block_fp8", lambda name: name.endswith(("o_proj", "down_proj")))
        check_same(folder, "ptpc_fp8")
    print("all passed")
