"""Checkpoints of public models as headers alone: their real dimensions, and files without a byte of data.

The names, shapes and dtypes are written down here from the public checkpoints, not derived from our models.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 262144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_235B_A22B: dict[str, Any] = {
    **QWEN3_30B_A3B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 94,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
    "rope_theta": 5000000,
}
DEEPSEEK_R1: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
_SHARD = 1 << 36

Entry = tuple[str, str, list[int]]


def qwen3_moe(config: dict[str, Any]) -> Iterator[Entry]:
    """Name, dtype and shape of every tensor of a Qwen3-MoE checkpoint."""
    hidden, inner, head = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", "BF16", [config["vocab_size"], hidden]
    for i in range(config["num_hidden_layers"]):
        name = f"model.layers.{i}"
        for part, rows in (("q", query), ("k", key), ("v", key)):
            yield f"{name}.self_attn.{part}_proj.weight", "BF16", [rows, hidden]
        yield f"{name}.self_attn.o_proj.weight", "BF16", [hidden, query]
        yield f"{name}.self_attn.q_norm.weight", "BF16", [head]
        yield f"{name}.self_attn.k_norm.weight", "BF16", [head]
        yield f"{name}.mlp.gate.weight", "BF16", [config["num_experts"], hidden]
        for expert in range(config["num_experts"]):
            yield from _mlp(f"{name}.mlp.experts.{expert}", hidden, inner, fp8=False)
        yield f"{name}.input_layernorm.weight", "BF16", [hidden]
        yield f"{name}.post_attention_layernorm.weight", "BF16", [hidden]
    yield "model.norm.weight", "BF16", [hidden]
    yield "lm_head.weight", "BF16", [config["vocab_size"], hidden]


def deepseek_v3(config: dict[str, Any]) -> Iterator[Entry]:
    """Name, dtype and shape of every tensor of a DeepSeek-V3 checkpoint, its MTP layer included."""
    hidden, vocab, last = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    yield "model.embed_tokens.weight", "BF16", [vocab, hidden]
    for i in range(last + config["num_nextn_predict_layers"]):
        name = f"model.layers.{i}"
        yield from _mla(f"{name}.self_attn", config)
        if i < config["first_k_dense_replace"]:
            yield from _mlp(f"{name}.mlp", hidden, config["intermediate_size"], fp8=True)
        else:
            experts = config["n_routed_experts"]
            yield f"{name}.mlp.gate.weight", "BF16", [experts, hidden]
            yield f"{name}.mlp.gate.e_score_correction_bias", "F32", [experts]
            inner = config["moe_intermediate_size"]
            for expert in range(experts):
                yield from _mlp(f"{name}.mlp.experts.{expert}", hidden, inner, fp8=True)
            yield from _mlp(f"{name}.mlp.shared_experts", hidden, inner * config["n_shared_experts"], fp8=True)
        yield f"{name}.input_layernorm.weight", "BF16", [hidden]
        yield f"{name}.post_attention_layernorm.weight", "BF16", [hidden]
        if i >= last:
            yield f"{name}.embed_tokens.weight", "BF16", [vocab, hidden]
            yield f"{name}.enorm.weight", "BF16", [hidden]
            yield f"{name}.hnorm.weight", "BF16", [hidden]
            yield f"{name}.eh_proj.weight", "BF16", [hidden, 2 * hidden]
            yield f"{name}.shared_head.norm.weight", "BF16", [hidden]
            yield f"{name}.shared_head.head.weight", "BF16", [vocab, hidden]
    yield "model.norm.weight", "BF16", [hidden]
    yield "lm_head.weight", "BF16", [vocab, hidden]


def _mla(name: str, config: dict[str, Any]) -> Iterator[Entry]:
    hidden, heads, rope = config["hidden_size"], config["num_attention_heads"], config["qk_rope_head_dim"]
    query, latent = config["q_lora_rank"], config["kv_lora_rank"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    yield from _fp8(f"{name}.q_a_proj", query, hidden)
    yield f"{name}.q_a_layernorm.weight", "BF16", [query]
    yield from _fp8(f"{name}.q_b_proj", heads * (nope + rope), query)
    yield from _fp8(f"{name}.kv_a_proj_with_mqa", latent + rope, hidden)
    yield f"{name}.kv_a_layernorm.weight", "BF16", [latent]
    yield from _fp8(f"{name}.kv_b_proj", heads * (nope + value), latent)
    yield from _fp8(f"{name}.o_proj", hidden, heads * value)


def _mlp(name: str, hidden: int, inner: int, fp8: bool) -> Iterator[Entry]:
    for part, n, k in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        if fp8:
            yield from _fp8(f"{name}.{part}_proj", n, k)
        else:
            yield f"{name}.{part}_proj.weight", "BF16", [n, k]


def _fp8(name: str, n: int, k: int) -> Iterator[Entry]:
    yield f"{name}.weight", "F8_E4M3", [n, k]
    yield f"{name}.weight_scale_inv", "F32", [-(-n // 128), -(-k // 128)]


def write_headers(folder: Path, config: dict[str, Any]) -> Path:
    """``config.json``, an index, and shards that have a header and as many bytes as it says, none of them written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    entries = (qwen3_moe if config["model_type"] == "qwen3_moe" else deepseek_v3)(config)
    shards: list[dict[str, Any]] = [{}]
    weight_map, end = {}, 0
    for name, dtype, shape in entries:
        size = _BYTES[dtype]
        for extent in shape:
            size *= extent
        if end + size > _SHARD:
            shards.append({})
            end = 0
        shards[-1][name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        weight_map[name] = f"model-{len(shards):05}.safetensors"
        end += size
    for number, header in enumerate(shards, 1):
        content = json.dumps(header).encode()
        end = max(entry["data_offsets"][1] for entry in header.values())
        with (folder / f"model-{number:05}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(content)) + content)
            file.truncate(8 + len(content) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
