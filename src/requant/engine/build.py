"""From a configuration to an engine that is ready to run: checkpoint, recipe, plan, load, KV cache, graphs."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from requant.engine import memory
from requant.engine.config import EngineConfig, ParallelConfig
from requant.engine.core import EngineCore
from requant.engine.quantized_cache import open_cache
from requant.engine.runner import ModelRunner
from requant.engine.scheduler import SchedulerConfig
from requant.engine.stages import Stages
from requant.engine.team import Team, alone
from requant.engine.tokenizer import eos_token_ids
from requant.errors import CheckpointError, ConfigError, ModelError, one_line
from requant.host import without_collections
from requant.loading import (
    CachedParts,
    Checkpoint,
    LoadResult,
    Plan,
    SlabPool,
    Staging,
    check_memory,
    inspect,
    load,
    locate,
    make_plan,
    make_progress,
    prepare_report,
    read_config,
    read_headers,
)
from requant.loading.cache import Writer
from requant.models.base import CausalLM
from requant.models.registry import model_class
from requant.parallel import ALONE, Ranks
from requant.recipe import Recipe, source_quantization

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Planned:
    """A model without weights, and the plan to load it."""

    model: CausalLM
    plan: Plan
    config: PreTrainedConfig
    folder: Path
    max_model_len: int


@dataclass(frozen=True)
class BuiltEngine:
    """A core that is ready to run, and what a front end must know of it.

    Attributes:
        core: The engine core.
        max_model_len: Longest prompt plus output, in tokens.
        vocab_size: Token ids are below it.
        eos_token_ids: Tokens that end a sequence.
        report_path: Where the report of online quantization was written, or None.
        cache_writer: Writes the quantized weights to the cache, meanwhile; None: nothing is to be written.
    """

    core: EngineCore
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    report_path: str | None
    cache_writer: Writer | None = None


@dataclass(frozen=True)
class ModelFiles:
    """What a plan is made from: the recipe, the checkpoint's headers and its configuration, which all ranks share.

    Attributes:
        recipe: What to quantize.
        checkpoint: The headers.
        raw: ``config.json``.
        config: The same as transformers reads it.
        model_type: The class that runs it.
    """

    recipe: Recipe
    checkpoint: Checkpoint
    raw: Mapping[str, Any]
    config: PreTrainedConfig
    model_type: type[CausalLM]


def read_files(config: EngineConfig, *, headers_only: bool = False) -> ModelFiles:
    """Read recipe, headers and configuration: no weight, and with ``headers_only`` none is downloaded either.

    Raises:
        RequantError: The recipe, the checkpoint or the configuration is not acceptable.
    """
    recipe = Recipe.parse(config.quant.online_quant_config)
    name, revision = config.model.model, config.model.revision
    checkpoint = inspect(name, revision) if headers_only else read_headers(locate(name, revision))
    raw = read_config(checkpoint.folder)
    source_quantization(raw)  # what is not accepted is refused here, before transformers takes offence at it
    model_type = model_class(raw.get("architectures"))
    return ModelFiles(recipe, checkpoint, raw, _hf_config(checkpoint, config.model.trust_remote_code), model_type)


def plan_rank(
    files: ModelFiles, config: EngineConfig, ranks: Ranks = ALONE, cached: CachedParts | None = None
) -> Planned:
    """The share of one rank, without weights, and the plan to load it.

    Args:
        files: From :func:`read_files`.
        config: What to build.
        ranks: The rank.
        cached: Matrices that have been quantized before.

    Raises:
        RequantError: Recipe, checkpoint and configuration do not fit each other, or not this number of ranks.
    """
    model = _model(files, ranks, mtp=config.speculative.method == "mtp")
    plan = make_plan(
        model,
        files.checkpoint,
        files.recipe,
        name=config.model.model,
        config=files.raw,
        dtype=_dtype(config.model.dtype, files.config),
        device=_device(config.parallel, ranks.rank),
        not_loaded=model.not_loaded,
        copies=model.copies,
        ranks=ranks,
        cached=cached,
    )
    return Planned(model, plan, files.config, files.checkpoint.folder, _max_model_len(config, files.config))


def plan_model(config: EngineConfig, ranks: Ranks = ALONE) -> Planned:
    """:func:`read_files` and :func:`plan_rank`."""
    return plan_rank(read_files(config), config, ranks)


@dataclass(frozen=True)
class LoadedRank:
    """A rank that is ready to run.

    Attributes:
        planned: Its share of the model, and the plan.
        runner: Runs steps, or follows another rank's.
        result: What loading cost.
        max_tokens: Most tokens in one step.
        max_seqs: Most sequences in one step.
        stop_tokens: Tokens that end a sequence.
        report_path: Where the report was written; None on all ranks but the first, and without a recipe.
        cache_writer: Writes the quantized weights to the cache, meanwhile; None: nothing is to be written.
    """

    planned: Planned
    runner: ModelRunner
    result: LoadResult
    max_tokens: int
    max_seqs: int
    stop_tokens: frozenset[int]
    report_path: str | None
    cache_writer: Writer | None


def build_core(config: EngineConfig, team: Team | None = None) -> BuiltEngine:
    """Load the model, quantized as the recipe says, and make the engine core.

    Args:
        config: What to build.
        team: The ranks, of which this is the first; None: it is alone.

    Raises:
        RequantError: Something the user gave cannot be satisfied; one line says what.
    """
    return make_core(load_rank(config, team), config)


def make_core(loaded: LoadedRank, config: EngineConfig) -> BuiltEngine:
    """The core of a rank that leads, or is alone."""
    runner, blocks = loaded.runner, loaded.runner.num_blocks
    logger.info(
        "KV cache: %.2f GB%s, %d tokens in pages of %d",
        blocks * runner.block_bytes / 1e9,
        " on each device" if loaded.planned.plan.ranks.size > 1 else "",
        blocks * config.cache.block_size,
        config.cache.block_size,
    )
    scheduler = SchedulerConfig(
        max_num_seqs=loaded.max_seqs,
        max_num_batched_tokens=loaded.max_tokens,
        max_model_len=loaded.planned.max_model_len,
        block_size=config.cache.block_size,
        num_blocks=blocks,
        enable_prefix_caching=not config.cache.no_enable_prefix_caching,
        drafts=config.speculative.drafts,
    )
    return BuiltEngine(
        core=EngineCore(runner, scheduler),
        max_model_len=loaded.planned.max_model_len,
        vocab_size=runner.vocab_size,
        eos_token_ids=loaded.stop_tokens,
        report_path=loaded.report_path,
        cache_writer=loaded.cache_writer,
    )


def load_rank(config: EngineConfig, team: Team | None = None) -> LoadedRank:
    """Load this rank's share of the model, quantized as the recipe says, and allocate its KV cache.

    The ranks of a team do so at the same time. The first one leads, with :func:`make_core`; the others' runners follow.

    Raises:
        RequantError: Something the user gave cannot be satisfied; one line says what.
    """
    team = team or alone(config.parallel)
    device = _device(config.parallel, team.ranks.rank)
    with SlabPool(Staging.of(device, team.ranks.size), device) as pool:
        return _load_rank(config, team, device, pool)


def _load_rank(config: EngineConfig, team: Team, device: torch.device, pool: SlabPool) -> LoadedRank:
    stages = Stages()
    with without_collections():
        files = read_files(config)
        pool.expect(sum(tensor.nbytes for tensor in files.checkpoint.tensors.values()))
        stages.done("headers")
        cache = open_cache(
            config.quant.online_quant_cache, files.checkpoint, files.recipe, config.model.model, team, device
        )
        planned = plan_rank(files, config, team.ranks, cache.entry if cache else None)
    plan, model = planned.plan, planned.model
    first = team.ranks.rank == 0
    max_tokens = config.batch.max_num_batched_tokens or (8192 if device.type == "cuda" else 1024)
    max_seqs = min(config.batch.max_num_seqs, max_tokens)

    drafts = config.speculative.drafts
    runner = ModelRunner(model, device, plan.dtype, config.cache.block_size, config.model.seed, team.announce, drafts)
    pages = -(-planned.max_model_len // config.cache.block_size)
    sharing = team.ranks.size if device.type == "cpu" else 1  # ranks of one host share its memory
    available = memory.available_bytes(device, config.cache.gpu_memory_utilization) // sharing
    check_memory(plan, available, cache_bytes=pages * runner.block_bytes)
    left = available - plan.weight_bytes - plan.layout_bytes

    def cache_blocks(left: int) -> int:
        return memory.kv_blocks(config.cache, device, left, runner.block_bytes, planned.max_model_len, max_seqs)

    cache_blocks(left)  # whatever it refuses is refused before anything is read
    stop_tokens = eos_token_ids(planned.folder, planned.config)
    entry = str(cache.entry.folder) if cache and cache.entry else None
    write_report = prepare_report(plan, config.quant.online_quant_info_dir, entry) if first else None
    stages.done("plan")

    with cache or nullcontext():
        result = load(plan, model, progress=make_progress(plan) if first else None, pool=pool)
    report_path = write_report(result) if write_report else None
    stages.done("load")

    if device.type == "cuda":
        left -= runner.activation_bytes(max_tokens, max_seqs)
        stages.done("largest step")
    blocks = cache_blocks(left)
    if team.ranks.size > 1:  # shares may differ in size, and what runs in step has one number of pages
        blocks = team.smallest(blocks, device)
    runner.allocate(blocks)
    stages.done("KV cache")
    if device.type == "cuda" and not config.model.enforce_eager:
        runner.capture(max_seqs, planned.max_model_len)
        stages.done("graphs")
    if first:
        stages.log()
    writer = cache.make_writer(plan, model) if cache else None
    if writer:
        writer.start()
    return LoadedRank(planned, runner, result, max_tokens, max_seqs, stop_tokens, report_path, writer)


def _hf_config(checkpoint: Checkpoint, trust_remote_code: bool) -> PreTrainedConfig:
    """The configuration, read by transformers; a class that the checkpoint brings is only used if that was allowed."""
    file = checkpoint.folder / "config.json"
    try:
        with _without_warnings():
            return AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # of any type: each field has its own validator, from one of several libraries
        raise CheckpointError(f"transformers cannot read {file}: {one_line(error)}") from error


def _model(files: ModelFiles, ranks: Ranks, mtp: bool) -> CausalLM:
    """The model without weights; sizes that make no sense show here."""
    model_type, file = files.model_type, files.checkpoint.folder / "config.json"
    if mtp and "mtp" not in signature(model_type).parameters:
        raise ModelError(f"--method is 'mtp', and {model_type.__name__} has no MTP layer; accepted here: no --method")
    try:
        model = model_type(files.config, ranks, **({"mtp": True} if mtp else {}))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"no model can be made as {file} says: {type(error).__name__}: {error}") from error
    layer = model.draft_layer
    if layer and not any(name.startswith(f"{layer}.") for name in files.checkpoint.tensors):
        raise CheckpointError(
            f"--method is 'mtp', and {files.checkpoint.folder} has no tensor of the MTP layer {layer}"
        )
    return model


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Keep transformers from warning of what requant refuses in a line of its own, or does not use."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _dtype(name: str, config: PreTrainedConfig) -> torch.dtype:
    if name != "auto":
        return getattr(torch, name)
    stated = getattr(config, "dtype", None)
    return stated if stated in (torch.bfloat16, torch.float16, torch.float32) else torch.bfloat16


def _device(config: ParallelConfig, rank: int) -> torch.device:
    """Where a rank runs, or would: a plan can be made for more GPUs than there are."""
    there = torch.cuda.device_count()
    if config.device == "cuda" and not there:
        raise ConfigError("--device is 'cuda', and torch sees no GPU; accepted here: auto, cpu")
    if config.device == "cpu" or not there:
        return torch.device("cpu")
    current = torch.cuda.current_device() if config.tensor_parallel_size == 1 else rank
    return torch.device("cuda", current)


def _max_model_len(config: EngineConfig, hf_config: PreTrainedConfig) -> int:
    limit: int | None = getattr(hf_config, "max_position_embeddings", None)
    wanted = config.model.max_model_len
    if limit is not None and limit < 2:
        raise ModelError(f"max_position_embeddings of the model's config.json is {limit}; accepted: 2 or more")
    if limit is None or wanted is None:
        length = limit or wanted
        if length is None:
            raise ConfigError("the model's config.json states no max_position_embeddings; give --max-model-len")
        return length
    if wanted > limit:
        raise ConfigError(f"--max-model-len is {wanted}; the model's positions end at {limit}")
    return wanted
