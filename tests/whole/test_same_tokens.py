"""The whole engine on tiny checkpoints: neither batch, chunks, graphs nor device change the greedy tokens."""

import math
import random
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from requant_models import KINDS, LAYERS, check_same_tokens, make_checkpoint
from safetensors.torch import load_file, save_file

import requant
from requant import LLM, SamplingParams
from requant.engine.build import plan_model
from requant.engine.config import EngineConfig
from requant.engine.request_output import CompletionOutput
from requant.formats import FORMATS as FORMAT_TABLE
from requant.loading import load
from requant.recipe import FORMATS

FORMAT_CHOICES = (None, *FORMATS)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)
OVERFLOWS = 7
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make_checkpoint(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(10, 500) for _ in range(rng.choice((1, 3, 17, 40, 100)))] for _ in range(12)]


def engine(model: Path, fmt: str | None, report_dir: Path, **options: object) -> LLM:
    recipe = {"global_quant_config": fmt} if fmt else None
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 8_000_000, "max_model_len": 256}
    return LLM(str(model), recipe, online_quant_info_dir=str(report_dir), **{**settings, **options})


def greedy(llm: LLM, tokens: list[list[int]], together: bool = True) -> list[CompletionOutput]:
    if together:
        return [out.outputs[0] for out in llm.generate(tokens, GREEDY, progress=False)]
    return [llm.generate([one], GREEDY, progress=False)[0].outputs[0] for one in tokens]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", FORMAT_CHOICES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_changes_nothing(
    checkpoints: dict[str, Path], kind: str, fmt: str | None, device: str, tmp_path: Path
) -> None:
    tokens = prompts()
    with engine(checkpoints[kind], fmt, tmp_path, device=device, no_enable_prefix_caching=True) as llm:
        alone = greedy(llm, tokens, together=False)
    small = {"max_num_batched_tokens": 24, "max_num_seqs": 5, "device": device}
    with engine(checkpoints[kind], fmt, tmp_path, **small) as llm:
        check_same_tokens(alone, greedy(llm, tokens))
        check_same_tokens(alone, greedy(llm, tokens))  # now from the prefix cache
    assert len({out.token_ids for out in alone}) > 6  # the prompts matter


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMAT_CHOICES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_gives_the_cpus_tokens(checkpoints: dict[str, Path], kind: str, fmt: str | None, tmp_path: Path) -> None:
    tokens = prompts()
    # Two devices add in different orders. Where activations are quantized, a last-bit difference can move one of them
    # to the next FP8 code, a sixteenth away, and these random weights pass that on undamped.
    tie = 0.1 if fmt is not None and FORMAT_TABLE[fmt].activation else 1e-3
    with engine(checkpoints[kind], fmt, tmp_path, device="cpu") as llm:
        expected = greedy(llm, tokens)
    for eager in (True, False):
        with engine(checkpoints[kind], fmt, tmp_path, device="cuda", enforce_eager=eager) as llm:
            check_same_tokens(expected, greedy(llm, tokens), tie=tie)


def test_the_reference_is_transformers(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoints["qwen3"], dtype=torch.float32)
    with engine(checkpoints["qwen3"], None, tmp_path) as llm:
        for tokens, out in zip(prompts(), greedy(llm, prompts()), strict=True):
            expected = model.generate(torch.tensor([tokens]), max_new_tokens=20, do_sample=False, eos_token_id=None)
            assert out.token_ids == tuple(expected[0, len(tokens) :].tolist())


PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_weights_are_those_of_quantize(checkpoints: dict[str, Path], fmt: str, device: str) -> None:
    source = safetensors.torch.load_file(checkpoints["llama"] / "model.safetensors")
    recipe = {"global_quant_config": fmt}
    config = EngineConfig.create(model=str(checkpoints["llama"]), online_quant_config=recipe, device=device)
    planned = plan_model(config)
    load(planned.plan, planned.model)
    parameters = dict(planned.model.named_parameters())
    for layer in LAYERS:
        parent, _, child = f"model.layers.1.{layer}".rpartition(".")
        parts = [f"{parent}.{part}.weight" for part in PARTS.get(child, (child,))]
        quantized = [requant.quantize(source[part], fmt) for part in parts]
        for parameter, field in (("weight", "data"), ("weight_scale", "scale")):
            expected = torch.cat([getattr(q, field).view(torch.uint8) for q in quantized])
            assert torch.equal(parameters[f"{parent}.{child}.{parameter}"].cpu().view(torch.uint8), expected)


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float16 model whose hidden states overflow behind one token."""
    folder = make_checkpoint(tmp_path_factory.mktemp("overflowing"), dtype=torch.float16)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][OVERFLOWS] = torch.finfo(torch.float16).max
    tensors["model.layers.0.mlp.down_proj.weight"] *= 30
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("caching", [True, False])
def test_a_sequence_that_overflows_spoils_no_other(overflowing: Path, caching: bool) -> None:
    """Neither one in its batch, nor one that takes over its pages or, by the prefix cache, shares them."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    short, plain, bad = list(range(20, 25)), list(range(20, 45)), [OVERFLOWS] * 12
    settings = {"dtype": "float16", "max_model_len": 64, "no_enable_prefix_caching": not caching, "device": "cpu"}
    with LLM(str(overflowing), kv_cache_memory_bytes=100_000, **settings) as llm:
        alone = llm.generate([short, plain], params, progress=False)
        tokens = [out.outputs[0].token_ids for out in alone]
    with LLM(str(overflowing), kv_cache_memory_bytes=100_000, **settings) as llm:
        for others in ([bad], [[*plain, *bad], bad], []):
            outputs = [out.outputs[0] for out in llm.generate([short, plain, *others], params, progress=False)]
            assert [out.token_ids for out in outputs[:2]] == tokens
            assert all(math.isnan(out.logprobs[0].logprob) for out in outputs[2:])
