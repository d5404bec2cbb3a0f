"""Tiny random checkpoints as transformers writes them, and what "the same tokens" means."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import requant_fakes
import torch
import transformers
from safetensors.torch import load_file, save_file

from requant.engine.request_output import CompletionOutput
from requant.formats import quantize

KINDS: dict[str, type[transformers.PreTrainedConfig]] = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "deepseek_v3": transformers.DeepseekV3Config,
}
SIZE = {
    "vocab_size": requant_fakes.VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,  # far from ties: random logits of the usual size are nearly equal
}
# What a kind has beside these, or instead.
SIZES: dict[str, dict[str, object]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 72, "norm_topk_prob": True},
    "deepseek_v3": {
        "num_key_value_heads": 6,
        "head_dim": 8,
        "q_lora_rank": 40,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 72,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "initializer_range": 0.2,
    },
}
LAYERS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def make_checkpoint(folder: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, **changes: object) -> Path:
    """A random model of ``kind`` with a tokenizer and a chat template in ``folder``."""
    requant_fakes.make_tokenizer(folder)
    config = KINDS[kind](**{**SIZE, **SIZES.get(kind, {}), "eos_token_id": 0, "bos_token_id": None, **changes})
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return folder


def add_mtp_layer(folder: Path) -> Path:
    """Give a DeepSeek-V3 model an MTP layer behind its last one: another decoder layer, a projection, norms, copies."""
    config = json.loads((folder / "config.json").read_text())
    last, hidden = config["num_hidden_layers"] - 1, config["hidden_size"]
    tensors = load_file(folder / "model.safetensors")
    old, new = f"model.layers.{last}.", f"model.layers.{last + 1}."
    torch.manual_seed(1)
    for name in [name for name in tensors if name.startswith(old)]:
        values = tensors[name]
        shuffled = values.flatten()[torch.randperm(values.numel())].view_as(values) if values.dim() > 1 else values
        tensors[new + name.removeprefix(old)] = shuffled.clone()
    like = tensors["model.norm.weight"]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{new}{name}.weight"] = like.clone()
    tensors[f"{new}eh_proj.weight"] = (0.1 * torch.randn(hidden, 2 * hidden)).to(like.dtype)
    tensors[f"{new}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{new}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return folder


def quantize_checkpoint(folder: Path, section: dict[str, object], format: str, owners: Callable[[str], bool]) -> None:
    """Store the matrices that ``owners`` says (by name, without ``.weight``) in ``format``, and declare ``section``."""
    suffix = "weight_scale_inv" if format == "per_block_fp8" else "weight_scale"
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".weight") and owners(name.removesuffix(".weight"))]:
        q = quantize(tensors[name], format)
        tensors[name] = q.data
        tensors[name.removesuffix("weight") + suffix] = q.scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))


BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["*.self_attn.*", "*.gate", "lm_head"]}
QUARK_WEIGHT = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}
QUARK = {"quant_method": "quark", "global_quant_config": {"weight": QUARK_WEIGHT}, "exclude": ["lm_head"]}


def check_same_tokens(one: Sequence[CompletionOutput], other: Sequence[CompletionOutput], tie: float = 1e-3) -> None:
    """Greedy outputs are equal, or part where the two best logits of ``one`` are closer than ``tie``.

    ``one`` was generated with ``logprobs=2``: a difference of log-probabilities is one of logits.
    """
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        if a.token_ids == b.token_ids:
            continue
        first = next(i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y)
        assert a.logprobs is not None
        best, second = a.logprobs[first].top[:2]
        assert best.logprob - second.logprob < tie, f"token {first}: {a.token_ids} against {b.token_ids}"
