"""Tiny random checkpoints of the models that only transformers runs, and helpers for what it loads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requant_models
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from requant.formats import quantize
from requant.integrations.transformers import OnlineQuantConfig

DEEPSEEK_V4 = {
    "vocab_size": 512,
    "hidden_size": 96,
    "moe_intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 40,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "max_position_embeddings": 256,
    "hc_mult": 2,
    "o_groups": 2,
    "o_lora_rank": 24,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 8,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "num_nextn_predict_layers": 0,
    "initializer_range": 0.2,
    "eos_token_id": 0,
    "bos_token_id": None,
    "partial_rotary_factor": 0.5,
}
GPT_OSS = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "sliding_window": 16,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": None,
}
SMALL = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
NEMOTRON_H = {
    "layers_block_type": ["attention", "moe"],
    "head_dim": 16,
    "n_routed_experts": 4,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
}
CONFIGS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "deepseek_v4": lambda: transformers.DeepseekV4Config(**DEEPSEEK_V4),
    "gpt_oss": lambda: transformers.GptOssConfig(**GPT_OSS),
    # Renamed experts, experts in one tensor, experts without a gate, and a model without a Linear.
    "mixtral": lambda: transformers.MixtralConfig(**SMALL),
    "granitemoe": lambda: transformers.GraniteMoeConfig(**SMALL),
    "nemotron_h": lambda: transformers.NemotronHConfig(**{**SMALL, **NEMOTRON_H}),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=512, n_embd=96, n_layer=2, n_head=6, n_positions=256),
}
PROMPT = torch.tensor([[5, 6, 7, 300, 21, 9]])


def make_checkpoint(folder: Path, kind: str, dtype: torch.dtype = torch.bfloat16, **changes: object) -> Path:
    """A random model of ``kind``, with every parameter making a difference."""
    if kind not in CONFIGS:
        return requant_models.make_checkpoint(folder, kind, dtype, **changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=dtype)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("tid2eid"):
                value.copy_(torch.randint(0, DEEPSEEK_V4["n_routed_experts"], value.shape))
            elif name.endswith("bias"):
                value.copy_(0.1 * torch.randn(value.shape))
    model.save_pretrained(folder)
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32, **recipe: Any) -> PreTrainedModel:
    """A checkpoint, loaded with a recipe."""
    config = OnlineQuantConfig(**recipe)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """What a checkpoint of one file has."""
    return load_file(folder / "model.safetensors")


def rewrite(folder: Path, tensors: dict[str, Tensor], section: dict[str, object] | None = None) -> None:
    """Replace a checkpoint's tensors, and declare how they are quantized."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    if section is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))


def blocks_of_gpt_oss(folder: Path) -> None:
    """Store the experts of gpt-oss as it is published: MXFP4, 32 codes a block."""
    tensors = tensors_of(folder)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        stack = [quantize(matrix.T.contiguous(), "mxfp4") for matrix in tensors.pop(name)]
        tensors[f"{name}_blocks"] = torch.stack([q.data.unflatten(1, (-1, 16)) for q in stack])
        tensors[f"{name}_scales"] = torch.stack([q.scale for q in stack])
    rewrite(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
