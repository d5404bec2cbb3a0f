"""Configuration of one engine: frozen, nested, and the single source of the command line's flags.

Each field carries its help, and its choices where there are any; :mod:`requant.flags` makes the
flags, their types and their defaults from it. Names, meanings and defaults are vLLM's.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from requant.errors import ConfigError
from requant.flags import check, option

DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICES = ("auto", "cuda", "cpu")
METHODS = ("mtp",)


@dataclass(frozen=True)
class ModelConfig:
    """Which model, in which numbers."""

    model: str = option("", "a local folder or a Hugging Face id; always needed")
    tokenizer: str | None = option(None, "folder or id of the tokenizer (default: the model's)")
    revision: str | None = option(None, "branch, tag or commit of a Hugging Face id")
    trust_remote_code: bool = option(
        False, "allow a checkpoint's own config and tokenizer classes; model code is never executed"
    )
    dtype: str = option("auto", "activations and unquantized weights (auto: the checkpoint's)", choices=DTYPES)
    max_model_len: int | None = option(None, "longest prompt plus output, in tokens (default: the model's)")
    seed: int = option(0, "seed of sampling without a seed of its own")
    enforce_eager: bool = option(False, "no CUDA graphs")

    def __post_init__(self) -> None:
        """Refuse what no model can satisfy."""
        check(bool(self.model), "model", self.model, "a local folder or a Hugging Face id")
        seed = self.seed
        check(-(2**63) <= seed < 2**64, "seed", seed, "a whole number of 64 bits")
        check(self.dtype in DTYPES, "dtype", self.dtype, ", ".join(DTYPES))
        check(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", self.max_model_len, "2 or more")


@dataclass(frozen=True)
class QuantConfig:
    """What to quantize while loading, and where the report goes."""

    online_quant_config: Any = option(None, "the recipe: a JSON object, or the path of a JSON file", metavar="JSON")
    online_quant_info_dir: str | None = option(
        None, "folder of the report (default: $ATOM_TORCH_PROFILER_DIR, else the working directory)"
    )
    online_quant_cache: str | None = option(
        None,
        "folder that keeps quantized weights: what is quantized now is read from there the next time",
        metavar="DIR",
    )

    def __post_init__(self) -> None:
        """Refuse a cache that is nowhere."""
        folder = self.online_quant_cache
        check(folder is None or bool(folder.strip()), "online_quant_cache", folder, "a folder")


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = option(16, "tokens in one page of the KV cache")
    gpu_memory_utilization: float = option(0.9, "share of the GPU's memory that weights and KV cache may take")
    kv_cache_memory_bytes: int | None = option(None, "size of the KV cache in bytes (default: what is left)")
    no_enable_prefix_caching: bool = option(False, "don't reuse the KV cache of equal prompt beginnings")

    def __post_init__(self) -> None:
        """Refuse sizes that the attention kernels don't take."""
        size, share = self.block_size, self.gpu_memory_utilization
        check(size >= 8 and size & (size - 1) == 0, "block_size", size, "a power of two, 8 or more")
        check(0.0 < share <= 1.0, "gpu_memory_utilization", share, "above 0, at most 1")
        nbytes = self.kv_cache_memory_bytes
        check(nbytes is None or nbytes > 0, "kv_cache_memory_bytes", nbytes, "1 or more")


@dataclass(frozen=True)
class BatchConfig:
    """How much runs in one step."""

    max_num_seqs: int = option(256, "most sequences in one step")
    max_num_batched_tokens: int | None = option(None, "most tokens in one step (default: 8192 on a GPU, 1024 on a CPU)")

    def __post_init__(self) -> None:
        """Refuse empty batches."""
        check(self.max_num_seqs >= 1, "max_num_seqs", self.max_num_seqs, "1 or more")
        tokens = self.max_num_batched_tokens
        check(tokens is None or tokens >= 1, "max_num_batched_tokens", tokens, "1 or more")


@dataclass(frozen=True)
class ParallelConfig:
    """The devices that the engine runs on."""

    device: str = option("auto", "where to run (auto: a GPU if there is one)", choices=DEVICES)
    tensor_parallel_size: int = option(1, "devices (on a CPU: processes) that share each layer", short="tp")
    enable_expert_parallel: bool = option(False, "each device has whole experts, not a share of every expert")
    deterministic_tp: bool = option(
        False,
        "the number of devices changes no token (but for ties on GPUs), with --dtype float32: FP8 inputs that are "
        "spread over devices have the scales of the whole row, and sums over devices are float64 (slow)",
    )
    port: int | None = option(None, "rendezvous port of the tensor-parallel workers, not of HTTP (default: a free one)")
    worker_timeout: int = option(20, "seconds that one device may fall behind the others before the engine fails")

    def __post_init__(self) -> None:
        """Refuse what no machine has."""
        check(self.device in DEVICES, "device", self.device, ", ".join(DEVICES))
        size = self.tensor_parallel_size
        check(1 <= size <= 1024, "tensor_parallel_size", size, "1 to 1024")
        check(self.port is None or 1 <= self.port <= 65535, "port", self.port, "1 to 65535")
        check(self.worker_timeout >= 1, "worker_timeout", self.worker_timeout, "1 or more")


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding: tokens are drafted cheaply, and the model checks several in one step."""

    method: str | None = option(None, "how tokens are drafted: by the checkpoint's MTP layer", choices=METHODS)
    num_speculative_tokens: int | None = option(None, "tokens drafted for each step (default: 1)")

    def __post_init__(self) -> None:
        """Refuse other methods, and numbers that never pay."""
        check(self.method is None or self.method in METHODS, "method", self.method, ", ".join(METHODS))
        number = self.num_speculative_tokens
        check(number is None or 1 <= number <= 8, "num_speculative_tokens", number, "1 to 8")
        if number is not None and self.method is None:
            raise ConfigError(f"--num-speculative-tokens is {number}; accepted: none without --method mtp")

    @property
    def drafts(self) -> int:
        """Tokens drafted for each step, 0 without a method."""
        return (self.num_speculative_tokens or 1) if self.method else 0


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine needs to know; made by :meth:`create` from flat names."""

    model: ModelConfig
    quant: QuantConfig = field(default_factory=QuantConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)

    @classmethod
    def create(cls, **flat: Any) -> "EngineConfig":
        """Build from flat keyword arguments: ``EngineConfig.create(model="M", dtype="float32", max_num_seqs=8)``.

        Raises:
            ConfigError: A name is not an option (the message lists them), or a value is not accepted.
        """
        known = {name for part in PARTS.values() for name in (f.name for f in fields(part))}
        for name in flat:
            if name not in known:
                raise ConfigError(f"unknown option {name!r}; accepted: {', '.join(sorted(known))}")
        parts = {
            key: part(**{f.name: flat[f.name] for f in fields(part) if f.name in flat}) for key, part in PARTS.items()
        }
        return cls(**parts)


PARTS: dict[str, type] = {
    "model": ModelConfig,
    "quant": QuantConfig,
    "cache": CacheConfig,
    "batch": BatchConfig,
    "parallel": ParallelConfig,
    "speculative": SpeculativeConfig,
}
