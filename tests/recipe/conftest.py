"""Layer names of real models, as their model files give them."""

import pytest

from requant.recipe import LayerNames


def plain(module, **kind):
    return LayerNames(module, (module,), **kind)


def fused(parent, module, *parts, **kind):
    return LayerNames(f"{parent}.{module}", tuple(f"{parent}.{part}" for part in parts), **kind)


def experts(mlp, count, **kind):
    parts = (f"experts.{e}.{name}" for e in range(count) for name in ("gate_proj", "up_proj", "down_proj"))
    return fused(mlp, "experts", *parts, **kind)


@pytest.fixture(scope="session")
def llama():
    layers = []
    for i in range(2):
        layer = f"model.layers.{i}"
        layers += [
            fused(f"{layer}.self_attn", "qkv_proj", "q_proj", "k_proj", "v_proj"),
            plain(f"{layer}.self_attn.o_proj"),
            fused(f"{layer}.mlp", "gate_up_proj", "gate_proj", "up_proj"),
            plain(f"{layer}.mlp.down_proj"),
        ]
    return [*layers, plain("lm_head", protected="lm_head")]


@pytest.fixture(scope="session")
def qwen3_moe():
    """Qwen3-30B-A3B: 48 layers, 128 experts."""
    layers = []
    for i in range(48):
        layer = f"model.layers.{i}"
        layers += [
            fused(f"{layer}.self_attn", "qkv_proj", "q_proj", "k_proj", "v_proj"),
            plain(f"{layer}.self_attn.o_proj"),
            plain(f"{layer}.mlp.gate", protected="MoE router"),
            experts(f"{layer}.mlp", 128),
        ]
    return [*layers, plain("lm_head", protected="lm_head")]


def _deepseek(*, mtp):
    layers = []
    for i in range(62):
        layer = f"model.layers.{i}"
        kind = {} if i < 61 or mtp else {"not_loaded": "MTP layer, needs --method mtp"}
        attention = f"{layer}.self_attn"
        layers += [
            fused(attention, "fused_qkv_a_proj", "q_a_proj", "kv_a_proj_with_mqa", **kind),
            *(plain(f"{attention}.{name}", **kind) for name in ("q_b_proj", "kv_b_proj", "o_proj")),
        ]
        if i < 3:
            layers += [
                fused(f"{layer}.mlp", "gate_up_proj", "gate_proj", "up_proj"),
                plain(f"{layer}.mlp.down_proj"),
            ]
        else:
            layers += [
                plain(f"{layer}.mlp.gate", protected="MoE router", **kind),
                experts(f"{layer}.mlp", 256, **kind),
                fused(f"{layer}.mlp.shared_experts", "gate_up_proj", "gate_proj", "up_proj", **kind),
                plain(f"{layer}.mlp.shared_experts.down_proj", **kind),
            ]
        if i == 61:
            layers += [
                plain(f"{layer}.eh_proj", protected="MTP eh_proj", **kind),
                plain(f"{layer}.shared_head.head", protected="MTP shared_head.head", **kind),
            ]
    return [*layers, plain("lm_head", protected="lm_head")]


@pytest.fixture(scope="session")
def deepseek_r1():
    """DeepSeek-R1: 3 dense and 58 MoE layers of 256 experts, the MTP layer 61 not loaded."""
    return _deepseek(mtp=False)


@pytest.fixture(scope="session")
def deepseek_r1_mtp():
    """DeepSeek-R1 with its MTP layer."""
    return _deepseek(mtp=True)


@pytest.fixture(scope="session")
def deepseek_v4():
    """DeepSeek-V4's kinds of layers: checkpoint names differ from module names, some are never quantized."""
    layers = []
    for i in range(3):
        module, own = f"model.layers.{i}", f"layers.{i}"
        parts = tuple(f"{own}.ffn.experts.{e}.{w}" for e in range(4) for w in ("w1", "w2", "w3"))
        layers += [
            LayerNames(f"{module}.attn.wq_b", (f"{own}.attn.wq_b",)),
            LayerNames(f"{module}.attn.wo_a", (f"{own}.attn.wo_a",), fixed="its grouped einsum has no FP8 form"),
            LayerNames(f"{module}.ffn.gate", (f"{own}.ffn.gate",), protected="MoE router"),
            LayerNames(f"{module}.ffn.experts", parts),
        ]
    return [*layers, LayerNames("lm_head", ("head",), protected="lm_head")]
