"""A model that is spread over ranks gives the tokens that one rank gives; the ranks are threads here."""

import random
from pathlib import Path

import pytest
import torch
from requant_models import KINDS, check_same_tokens, make_checkpoint
from requant_ranks import run_ranks

from requant.engine.build import plan_model
from requant.engine.config import EngineConfig
from requant.engine.core import EngineCore
from requant.engine.messages import CoreRequest, TokenLogprobs
from requant.engine.request_output import CompletionOutput
from requant.engine.runner import ModelRunner
from requant.engine.sampling_params import SamplingParams
from requant.engine.scheduler import SchedulerConfig
from requant.errors import ConfigError
from requant.loading import load
from requant.parallel import Ranks
from requant.recipe import FORMATS

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    changes = {"qwen2": {"tie_word_embeddings": True, "vocab_size": 517}, "llama": {"attention_bias": True}}
    changes["llama"]["mlp_bias"] = True
    return {kind: make_checkpoint(tmp_path_factory.mktemp(kind), kind, **changes.get(kind, {})) for kind in KINDS}


def generate(folder: Path, recipe: dict[str, object], ranks: Ranks, device: str) -> list[CompletionOutput]:
    config = EngineConfig.create(model=str(folder), online_quant_config=recipe, dtype="float32", device=device)
    planned = plan_model(config, ranks)
    load(planned.plan, planned.model)
    runner = ModelRunner(planned.model, planned.plan.device, torch.float32, 16)
    runner.allocate(64)
    core = EngineCore(runner, SchedulerConfig(8, 40, 256, 16, 64, True))
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(10, 500) for _ in range(n)) for n in (1, 5, 17, 60, 33)]
    tokens: dict[str, list[int]] = {}
    logprobs: dict[str, list[TokenLogprobs]] = {}
    for i, prompt in enumerate(prompts):
        core.add_request(CoreRequest(str(i), prompt, GREEDY))
    while core.has_unfinished():
        for output in core.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.tokens)
            logprobs.setdefault(output.request_id, []).extend(output.logprobs)
    return [_Output(tuple(tokens[str(i)]), tuple(logprobs[str(i)])) for i in range(len(prompts))]  # type: ignore[misc]


class _Output:
    def __init__(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> None:
        self.token_ids = token_ids
        self.logprobs = [_Entry(entry) for entry in logprobs]


class _Entry:
    def __init__(self, entry: TokenLogprobs) -> None:
        self.top = [_Value(logprob) for _, logprob in entry.top]


class _Value:
    def __init__(self, logprob: float) -> None:
        self.logprob = logprob


# The numbers of ranks, and whether each has whole experts: between them every way in which a model is cut.
LAYOUTS = {
    "llama": [(6, False)],
    "qwen2": [(2, False)],
    "qwen3": [(4, False)],
    "qwen3_moe": [(4, False), (2, True)],
    "deepseek_v3": [(2, False), (3, True)],
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fmt", [None, *FORMATS])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_one_rank(checkpoints: dict[str, Path], kind: str, fmt: str | None, device: str) -> None:
    recipe = {"global_quant_config": fmt, "layer_quant_config": {"lm_head": fmt}} if fmt else {}
    alone = generate(checkpoints[kind], recipe, Ranks(deterministic=True), device)
    assert len({out.token_ids for out in alone}) > 3
    for size, expert_parallel in LAYOUTS[kind]:

        def run(ranks: Ranks) -> list[CompletionOutput]:
            return generate(checkpoints[kind], recipe, ranks, device)

        outputs, sent = run_ranks(size, run, expert_parallel, deterministic=True)
        for output in outputs:
            if device == "cpu":
                assert [out.token_ids for out in output] == [out.token_ids for out in alone]
            else:  # few heads are attended to in another order than many
                check_same_tokens(alone, output)
        assert sent["sum"]
        assert sent["gather"]


def test_a_number_of_ranks_that_does_not_fit(checkpoints: dict[str, Path]) -> None:
    def plan(kind: str, size: int, expert_parallel: bool = False) -> None:
        config = EngineConfig.create(model=str(checkpoints[kind]), device="cpu")
        run_ranks(size, lambda ranks: plan_model(config, ranks), expert_parallel)

    with pytest.raises(ConfigError, match="-tp is 3; accepted for 6 heads on 2 key/value heads: 1 to 2, 4, 6"):
        plan("llama", 3)
    with pytest.raises(ConfigError, match="-tp is 7; accepted for this model: at most 6, its num_attention_heads"):
        plan("deepseek_v3", 7)
