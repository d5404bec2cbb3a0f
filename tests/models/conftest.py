"""Tiny random transformers models, the same weights in ours, and a loop that steps ours over a paged cache."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from requant.formats.base import Format
from requant.kernels.attention_batch import AttentionBatch
from requant.models.base import CausalLM
from requant.models.registry import model_class
from requant.parallel import Placement

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def _config(cls: type[PreTrainedConfig], **changes: object) -> PreTrainedConfig:
    size = {
        "vocab_size": 67,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
    return cls(**{**size, **changes})


def _rope(kind: str, **parameters: object) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 1000.0, **parameters}


LLAMA3 = _rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
LONGROPE = _rope(
    "longrope",
    factor=8.0,
    original_max_position_embeddings=8,
    short_factor=[1.0] * 4,
    long_factor=[1.0, 1.5, 3.0, 6.0],
)


def _qwen3_moe(**changes: object) -> PreTrainedConfig:
    size = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
    return _config(Qwen3MoeConfig, **{**size, "norm_topk_prob": True, "num_hidden_layers": 3, **changes})


def _deepseek(cls: type[PreTrainedConfig], **changes: object) -> PreTrainedConfig:
    size = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "routed_scaling_factor": 1.7,
        "rms_norm_eps": 1e-6,
        "head_dim": 8,
    }
    return _config(cls, **{**size, **changes})


DEEPSEEK_YARN = _rope(
    "yarn",
    factor=8.0,
    mscale=1.0,
    mscale_all_dim=0.7,
    beta_fast=32,
    beta_slow=1,
    original_max_position_embeddings=16,
)

# As the public DeepSeek-V3 and R1 have it, but for the lengths.
DEEPSEEK_R1_ROPE = {
    "type": "yarn",
    "factor": 4,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 16,
}

CASES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: _config(LlamaConfig),
    "llama-tied": lambda: _config(LlamaConfig, tie_word_embeddings=True),
    "llama-biases": lambda: _config(LlamaConfig, attention_bias=True, mlp_bias=True),
    "llama-head-dim": lambda: _config(LlamaConfig, head_dim=20, hidden_act="gelu_pytorch_tanh"),
    "llama-multi-head": lambda: _config(LlamaConfig, num_key_value_heads=6),
    "llama-old-keys": lambda: _config(LlamaConfig, rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0}),
    "llama-rope-linear": lambda: _config(LlamaConfig, rope_parameters=_rope("linear", factor=4.0)),
    "llama-rope-dynamic": lambda: _config(LlamaConfig, rope_parameters=_rope("dynamic", factor=4.0)),
    "llama-rope-llama3": lambda: _config(LlamaConfig, rope_parameters=LLAMA3),
    "llama-rope-longrope": lambda: _config(LlamaConfig, rope_parameters=LONGROPE),
    "mistral": lambda: _config(MistralConfig, sliding_window=6),
    "mistral-full": lambda: _config(MistralConfig, sliding_window=None),
    "qwen2": lambda: _config(Qwen2Config),
    "qwen2-window": lambda: _config(Qwen2Config, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": lambda: _config(Qwen3Config, head_dim=16),
    "qwen3-tied": lambda: _config(Qwen3Config, head_dim=16, tie_word_embeddings=True, attention_bias=True),
    "qwen3-yarn": lambda: _config(
        Qwen3Config,
        head_dim=16,
        rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "qwen3-moe": lambda: _qwen3_moe(),
    "qwen3-moe-one-expert": lambda: _qwen3_moe(num_experts_per_tok=1, norm_topk_prob=False),
    "qwen3-moe-mlp-only": lambda: _qwen3_moe(mlp_only_layers=[1], norm_topk_prob=False, attention_bias=True),
    "qwen3-moe-sparse-step": lambda: _qwen3_moe(decoder_sparse_step=2, tie_word_embeddings=True),
    "qwen3-moe-window": lambda: _qwen3_moe(use_sliding_window=True, sliding_window=5, hidden_act="gelu"),
    "deepseek-v2": lambda: _deepseek(DeepseekV2Config, topk_method="group_limited_greedy"),
    "deepseek-v2-lite": lambda: _deepseek(
        DeepseekV2Config, topk_method="greedy", q_lora_rank=None, n_group=None, rope_parameters=DEEPSEEK_YARN
    ),
    "deepseek-v2-biases": lambda: _deepseek(
        DeepseekV2Config, topk_method="greedy", attention_bias=True, mlp_bias=True, rms_norm_eps=1e-2
    ),
    "deepseek-v3": lambda: _deepseek(DeepseekV3Config),
    "deepseek-v3-biases": lambda: _deepseek(
        DeepseekV3Config, attention_bias=True, rope_interleave=False, first_k_dense_replace=2, rms_norm_eps=1e-2
    ),
    "deepseek-v3-old-keys": lambda: _deepseek(DeepseekV3Config, rope_theta=500.0, rope_scaling=DEEPSEEK_R1_ROPE),
    "deepseek-v3-yarn": lambda: _deepseek(DeepseekV3Config, rope_parameters=DEEPSEEK_YARN, n_shared_experts=1),
    "deepseek-v3-plain-queries": lambda: _deepseek(
        DeepseekV3Config, q_lora_rank=None, rope_interleave=False, attention_bias=True, norm_topk_prob=False
    ),
    "deepseek-v3-one-group": lambda: _deepseek(
        DeepseekV3Config, n_group=1, topk_group=1, first_k_dense_replace=0, num_experts_per_tok=8
    ),
}


def reference(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A transformers model whose every parameter (biases and norms too) is random, and makes a difference."""
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 1.0 if parameter.ndim == 1 else parameter.shape[1] ** -0.5
            parameter.copy_(1 + 0.3 * noise if "norm" in name else scale * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model.to(dtype)


def per_expert(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of public checkpoints: a tensor for each matrix of each expert, where transformers has one for all."""
    out = {}
    for name, tensor in state.items():
        owner, _, last = name.rpartition(".")
        if not owner.endswith(".experts"):
            out[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                out[f"{owner}.{expert}.{part}.weight"] = rows
    return out


def piece(placement: Placement, state: dict[str, Tensor]) -> Tensor:
    """What a placement takes from its tensor."""
    source = state[placement.tensor]
    assert tuple(source.shape) == (placement.whole or placement.shape), placement
    return source.reshape(-1, *placement.shape[1:])[placement.start :][: placement.shape[0]]


def rows_of(parameter: Tensor, placement: Placement) -> Tensor:
    """Where a placement puts it."""
    return parameter.data.view(-1, *parameter.shape[parameter.ndim - len(placement.shape) + 1 :])[placement.offset :]


def fill(module: torch.nn.Module, state: dict[str, Tensor]) -> None:
    """Copy checkpoint tensors into a built module's parameters, as its placements say."""
    for placement in module.placements:
        source = piece(placement, state)
        rows_of(getattr(module, placement.parameter), placement)[: source.shape[0]].copy_(source)


def ours(
    theirs: PreTrainedModel,
    dtype: torch.dtype = torch.float32,
    formats: dict[str, Format] | None = None,
    state: dict[str, Tensor] | None = None,
) -> CausalLM:
    """Our model with their weights, some layers quantized by the formats' references."""
    model = model_class(theirs.config.architectures)(theirs.config)
    state = state or theirs.state_dict()
    for layer in model.plain():
        layer.build(dtype, CPU)
        fill(layer, state)
    for layer in model.quantizable():
        layer.match_checkpoint(state)
        format = (formats or {}).get(layer.names.module)
        layer.build(format, dtype, CPU)
        if format is not None:
            quantize(layer, format, state)
        elif not layer.tied:
            fill(layer, state)
        layer.finish()
    return model


def quantize(layer: torch.nn.Module, format: Format, state: dict[str, Tensor]) -> None:
    """Fill a built quantized layer, part by part."""
    scale_row: dict[str, int] = defaultdict(int)
    for placement in layer.placements:
        source, name = piece(placement, state), placement.parameter
        target = rows_of(getattr(layer, name), placement)
        if len(placement.shape) != 2:
            target[: source.shape[0]].copy_(source)
            continue
        data, scale = format.quantize(source)
        target[: data.shape[0]].copy_(data)
        scales = getattr(layer, f"{name}_scale").data
        scales.view(-1, scales.shape[-1])[scale_row[name] :][: scale.shape[0]].copy_(scale)
        scale_row[name] += scale.shape[0]


@dataclass
class Stepper:
    """Runs sequences through our model in any pieces, over pages that lie scattered and interleaved."""

    model: CausalLM
    sequences: Sequence[Tensor]

    def __post_init__(self) -> None:
        pages = [-(-len(tokens) // BLOCK_SIZE) for tokens in self.sequences]
        order = (torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)) + 1).tolist()
        self.tables = torch.zeros(len(pages), max(pages) + 2, dtype=torch.int32)
        for row, count in zip(self.tables, pages, strict=True):
            row[:count] = torch.tensor([order.pop() for _ in range(count)])
        self.done = [0] * len(pages)
        dtype = next(self.model.parameters()).dtype
        for layer in self.model.attention_layers():
            # Slots that were never written hold something that would show if it were seen.
            layer.kv_cache = torch.full(layer.kv_cache_shape(sum(pages) + 1, BLOCK_SIZE), 1e4, dtype=dtype)

    @torch.inference_mode()
    def step(self, work: dict[int, int]) -> dict[int, Tensor]:
        """Process the next ``n`` tokens of sequence ``b`` for each (b, n); logits of those tokens, [n, V] each."""
        ids, positions, slots, lens = [], [], [], []
        for b, n in work.items():
            where = torch.arange(self.done[b], self.done[b] + n)
            ids.append(self.sequences[b][where])
            positions.append(where)
            slots.append(self.tables[b][where // BLOCK_SIZE].long() * BLOCK_SIZE + where % BLOCK_SIZE)
            self.done[b] += n
            lens.append(self.done[b])
        counts = list(work.values())
        batch = AttentionBatch(
            query_start=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
            context_lens=torch.tensor(lens, dtype=torch.int32),
            block_tables=self.tables[list(work)],
            slots=torch.cat(slots),
            max_query=max(counts),
            max_context=max(lens),
        )
        hidden = self.model(torch.cat(ids), torch.cat(positions), batch)
        logits = self.model.compute_logits(hidden)
        assert logits.dtype == torch.float32
        return dict(zip(work, logits.split(counts), strict=True))

    def run(self, steps: Iterator[dict[int, int]] | list[dict[int, int]]) -> list[Tensor]:
        """All logits of every sequence, [length, V] each, however its tokens were cut into steps."""
        pieces: list[list[Tensor]] = [[] for _ in self.sequences]
        for work in steps:
            for b, logits in self.step(work).items():
                pieces[b].append(logits)
        return [torch.cat(p) for p in pieces]


@dataclass(frozen=True)
class TinyModels:
    """The helpers above, for tests to take as one fixture."""

    cases = CASES
    reference = staticmethod(reference)
    ours = staticmethod(ours)
    per_expert = staticmethod(per_expert)
    stepper = Stepper


@pytest.fixture(scope="session")
def tiny() -> TinyModels:
    return TinyModels()


@pytest.fixture(scope="session", params=list(CASES))
def pair(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, CausalLM]:
    theirs = reference(CASES[request.param]())
    return theirs, ours(theirs)
