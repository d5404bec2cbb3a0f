"""Speculative decoding changes no token: whatever is drafted, and whatever else runs in the batch.

Random weights draft badly, so most tests replace the drafts by what will come, spoiled now and then: then drafts are
accepted in part, which is where mistakes would show.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from requant_models import BLOCK_FP8, add_mtp_layer, check_same_tokens, make_checkpoint, quantize_checkpoint
from requant_ranked_server import ranked
from requant_server import NAME, serve
from safetensors.torch import load_file, save_file

from requant import LLM, SamplingParams
from requant.engine.build import load_rank, plan_model
from requant.engine.config import EngineConfig
from requant.engine.request_output import CompletionOutput
from requant.engine.runner import ModelRunner
from requant.entrypoints import cli
from requant.errors import RequantError
from requant.loading import load

R1 = {
    "global_quant_config": "ptpc_fp8",
    "layer_quant_config": {"*expert*": "mxfp4"},
    "exclude_layer": ["lm_head", "*.gate.*"],
}
SETTINGS = {"dtype": "float32", "max_model_len": 160, "kv_cache_memory_bytes": 8_000_000}
LAYER = "model.layers.3"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_mtp_layer(make_checkpoint(tmp_path_factory.mktemp("mtp"), "deepseek_v3", num_hidden_layers=3))


@pytest.fixture(scope="module")
def block_fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("mtp-fp8"), "deepseek_v3", torch.bfloat16, num_hidden_layers=3)
    add_mtp_layer(folder)
    kept = ("norm", "embed_tokens", "lm_head", "gate", "eh_proj", "shared_head.head")
    quantize_checkpoint(folder, BLOCK_FP8, "per_block_fp8", lambda name: not name.endswith(kept))
    return folder


class Prophet:
    """Drafts what will come, as earlier outputs have it, but wrong one time in four."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.rng = random.Random(0)

    def learn(self, prompts: Sequence[Sequence[int]], outputs: Sequence[CompletionOutput]) -> None:
        for prompt, output in zip(prompts, outputs, strict=True):
            self.known[tuple(prompt)] = output.token_ids

    def drafts(self, prompt: Sequence[int], done: int, count: int) -> tuple[int, ...]:
        coming = self.known.get(tuple(prompt), ())[done : done + count]
        return tuple(token if self.rng.random() < 0.75 else (token + 1) % 500 for token in coming)


@pytest.fixture
def prophet(monkeypatch: pytest.MonkeyPatch) -> Prophet:
    prophet, with_drafts = Prophet(), ModelRunner._with_drafts

    def replaced(self: ModelRunner, sequences: Any, outputs: Any, *rest: Any) -> Any:
        outputs = with_drafts(self, sequences, outputs, *rest)
        for index, (sequence, output) in enumerate(zip(sequences, outputs, strict=True)):
            request, done = sequence.request, len(sequence.request.output) + len(output.tokens)
            drafts = prophet.drafts(request.prompt, done, len(output.drafts))
            outputs[index] = type(output)(output.tokens, output.logprobs, output.prompt_logprobs, drafts)
        return outputs

    monkeypatch.setattr(ModelRunner, "_with_drafts", replaced)
    return prophet


def engine(checkpoint: Path, reports: Path, drafts: int = 0, recipe: object = None, **more: Any) -> LLM:
    method = {"method": "mtp", "num_speculative_tokens": drafts} if drafts else {}
    settings = {**SETTINGS, "device": "cpu", "online_quant_info_dir": str(reports), **method, **more}
    return LLM(str(checkpoint), recipe, **settings)


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(10, 500) for _ in range(1 + 3 * i)] for i in range(count)]


def counts(llm: LLM) -> Any:
    return llm._core._speculation.counts


@pytest.mark.parametrize("recipe", [None, R1], ids=["none", "r1"])
@pytest.mark.parametrize("name", ["checkpoint", "block_fp8"])
def test_greedy_tokens(name: str, recipe: object, tmp_path: Path, prophet: Prophet, request: Any) -> None:
    folder = request.getfixturevalue(name)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
    for batch in (prompts(1), prompts(32)):
        with engine(folder, tmp_path, 0, recipe) as llm:
            expected = [out.outputs[0] for out in llm.generate(batch, params, progress=False)]
        prophet.learn(batch, expected)
        for drafts in (1, 2, 3):
            with engine(folder, tmp_path, drafts, recipe) as llm:
                got = [out.outputs[0] for out in llm.generate(batch, params, progress=False)]
                check_same_tokens(expected, got)
                told = counts(llm)
            assert 0.2 < told.accepted / told.tokens < 0.9
            for one, two in zip(expected, got, strict=True):
                if one.token_ids == two.token_ids:
                    assert two.finish_reason == "length"
                    assert [entry.logprob for entry in one.logprobs] == pytest.approx(
                        [entry.logprob for entry in two.logprobs], abs=1e-3
                    )


def mixed(count: int) -> list[SamplingParams]:
    """Every kind of request beside the others; those that sample have seeds, and so the same noise either way."""
    kinds = [
        {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True},
        {"temperature": 0.9, "seed": 5, "max_tokens": 25, "top_k": 20},
        {"temperature": 0.7, "seed": 6, "max_tokens": 33, "top_p": 0.8, "presence_penalty": 0.5, "min_tokens": 20},
        {"temperature": 0.0, "max_tokens": 28, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 1.0, "seed": 7, "max_tokens": 1},
        {"temperature": 0.0, "max_tokens": 40, "logit_bias": {77: 3.0}, "prompt_logprobs": 1},
        {"temperature": 0.8, "seed": 8, "max_tokens": 20, "min_p": 0.05, "n": 2},
    ]
    return [SamplingParams(**kinds[i % len(kinds)], logprobs=2) for i in range(count)]


@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 4, "max_num_batched_tokens": 24}, {"block_size": 8}])
def test_mixed_requests(checkpoint: Path, tmp_path: Path, prophet: Prophet, limits: dict[str, int]) -> None:
    batch, params = prompts(21), mixed(21)
    with engine(checkpoint, tmp_path, 0) as llm:
        expected = [out.outputs for out in llm.generate(batch, params, progress=False)]
    prophet.learn(batch, [outputs[0] for outputs in expected])
    with engine(checkpoint, tmp_path, 3, **limits) as llm:
        got = [out.outputs for out in llm.generate(batch, params, progress=False)]
        assert counts(llm).accepted > 50
    for one, two in zip(expected, got, strict=True):
        assert [out.finish_reason for out in one] == [out.finish_reason for out in two]
        check_same_tokens(one, two)


def test_stop_strings_and_stop_tokens(checkpoint: Path, tmp_path: Path, prophet: Prophet) -> None:
    batch = prompts(6)
    with engine(checkpoint, tmp_path, 0) as llm:
        plain = [
            out.outputs[0] for out in llm.generate(batch, SamplingParams(temperature=0, max_tokens=30), progress=False)
        ]
        params = [
            SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[out.token_ids[11]])
            if i % 2
            else SamplingParams(temperature=0, max_tokens=30, stop=[out.text[9:12]])
            for i, out in enumerate(plain)
        ]
        expected = [out.outputs[0] for out in llm.generate(batch, params, progress=False)]
    prophet.learn(batch, plain)
    with engine(checkpoint, tmp_path, 3) as llm:
        got = [out.outputs[0] for out in llm.generate(batch, params, progress=False)]
    for one, two in zip(expected, got, strict=True):
        assert (one.text, one.token_ids, one.finish_reason) == (two.text, two.token_ids, two.finish_reason)
        assert one.stop_reason == two.stop_reason
    assert {out.finish_reason for out in expected} == {"stop"}


def test_a_small_cache_and_shared_prefixes(checkpoint: Path, tmp_path: Path, prophet: Prophet) -> None:
    rng = random.Random(3)
    shared = [rng.randrange(10, 500) for _ in range(40)]
    batch = [[*shared, 20 + i, *[rng.randrange(10, 500) for _ in range(i)]] for i in range(12)]
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, logprobs=2)
    with engine(checkpoint, tmp_path, 0) as llm:
        expected = [out.outputs[0] for out in llm.generate(batch, params, progress=False)]
    prophet.learn(batch, expected)
    with engine(checkpoint, tmp_path, 3, kv_cache_memory_bytes=400_000) as llm:
        got = [out.outputs[0] for out in llm.generate(batch, params, progress=False)]
        stats = llm._core._stats()
        assert stats.preemptions > 0
        assert stats.prefix_hits > 0
        check_same_tokens(expected, got)
        check_same_tokens(expected, [out.outputs[0] for out in llm.generate(batch, params, progress=False)])


def test_the_end_of_the_context(checkpoint: Path, tmp_path: Path, prophet: Prophet) -> None:
    batch = prompts(4)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, logprobs=2)
    with engine(checkpoint, tmp_path, 0, max_model_len=48) as llm:
        expected = [out.outputs[0] for out in llm.generate(batch, params, progress=False)]
    prophet.learn(batch, expected)
    with engine(checkpoint, tmp_path, 8, max_model_len=48) as llm:
        got = [out.outputs[0] for out in llm.generate(batch, params, progress=False)]
    check_same_tokens(expected, got)
    assert [len(out.token_ids) for out in got] == [48 - len(prompt) for prompt in batch]


def test_two_ranks(checkpoint: Path, tmp_path: Path) -> None:
    """With the model's own drafts: over the network of ranks nothing can be replaced."""
    batch = prompts(8)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)
    more = {"deterministic_tp": True, "tensor_parallel_size": 2}
    with engine(checkpoint, tmp_path, 0, R1, deterministic_tp=True) as llm:
        expected = [out.outputs[0] for out in llm.generate(batch, params, progress=False)]
    with engine(checkpoint, tmp_path, 3, R1, **more) as llm:
        check_same_tokens(expected, [out.outputs[0] for out in llm.generate(batch, params, progress=False)])


def test_the_layer_is_quantized_by_the_same_recipe(checkpoint: Path, block_fp8: Path) -> None:
    for folder in (checkpoint, block_fp8):
        options = {"model": str(folder), "online_quant_config": R1, "device": "cpu"}
        rows = {
            row["layer"]: row["quant_type"]
            for row in plan_model(EngineConfig.create(**options, method="mtp")).plan.to_report()["layers"]
            if row["layer"].startswith(LAYER)
        }
        assert rows == {
            f"{LAYER}.self_attn.fused_qkv_a_proj": "per_Token",
            f"{LAYER}.self_attn.q_b_proj": "per_Token",
            f"{LAYER}.self_attn.kv_b_proj": "per_Token",
            f"{LAYER}.self_attn.o_proj": "per_Token",
            f"{LAYER}.mlp.experts": "per_1x32",
            f"{LAYER}.mlp.shared_experts.gate_up_proj": "per_1x32",
            f"{LAYER}.mlp.shared_experts.down_proj": "per_1x32",
        }
        planned = plan_model(EngineConfig.create(**options, method="mtp"))
        kept = {row["layer"]: row["reason"] for row in planned.plan.to_report()["kept"]}
        assert kept[f"{LAYER}.eh_proj"] == "protected: MTP eh_proj"
        assert kept[f"{LAYER}.shared_head.head"] == "protected: MTP shared_head.head"
        load(planned.plan, planned.model)
        assert sum(parameter.nbytes for parameter in planned.model.parameters()) == planned.plan.weight_bytes
        without = {
            row["layer"]: row["reason"] for row in plan_model(EngineConfig.create(**options)).plan.to_report()["kept"]
        }
        assert without[f"{LAYER}.mlp.experts"].startswith("not loaded: an MTP layer")


def test_a_head_of_its_own_only_where_a_recipe_says_so(checkpoint: Path, tmp_path: Path) -> None:
    recipe = {"layer_quant_config": {"*.shared_head.head": "ptpc_fp8", "*.eh_proj": "ptpc_fp8"}}
    names = []
    for given in (None, recipe):
        config = EngineConfig.create(model=str(checkpoint), online_quant_config=given, method="mtp", device="cpu")
        planned = plan_model(config)
        load(planned.plan, planned.model)
        names.append({name for name, _ in planned.model.named_parameters() if "shared_head.head" in name})
    assert names == [set(), {f"{LAYER}.shared_head.head.weight", f"{LAYER}.shared_head.head.weight_scale"}]
    with engine(checkpoint, tmp_path, 2, recipe) as llm:
        assert len(llm.generate([[20, 30]], SamplingParams(max_tokens=9, ignore_eos=True))[0].outputs[0].token_ids) == 9


def test_copies_that_a_checkpoint_leaves_out(checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    for name in ("embed_tokens.weight", "shared_head.head.weight"):
        del tensors[f"{LAYER}.{name}"]
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for recipe in (None, {"layer_quant_config": {"*.shared_head.head": "mxfp4"}}):
        planned = plan_model(
            EngineConfig.create(model=str(tmp_path), online_quant_config=recipe, method="mtp", device="cpu")
        )
        load(planned.plan, planned.model)


def test_the_cache_of_quantized_weights(checkpoint: Path, tmp_path: Path) -> None:
    """An entry that was written without the MTP layer serves all others."""

    def start(**more: object) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        loaded = load_rank(
            EngineConfig.create(
                model=str(checkpoint), online_quant_config=R1, online_quant_cache=str(tmp_path / "cache"), device="cpu",
                online_quant_info_dir=str(tmp_path), kv_cache_memory_bytes=1_000_000, max_model_len=64, **more,
            )
        )  # fmt: skip
        if loaded.cache_writer:
            loaded.cache_writer.wait()
        assert loaded.report_path is not None
        return dict(loaded.planned.model.named_parameters()), json.loads(Path(loaded.report_path).read_text())

    plain, first = start()
    drafting, second = start(method="mtp")
    assert first["cache_entry"] is None
    assert second["cache_entry"] is not None
    assert set(drafting) > set(plain)
    for name, value in plain.items():
        assert torch.equal(value.view(torch.uint8), drafting[name].view(torch.uint8))


def test_served(block_fp8: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "method": "mtp", "num_speculative_tokens": 3, "online_quant_cache": str(tmp_path / "cache")}
    with serve(block_fp8, R1, tmp_path / "reports", settings) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        stream = client.completions.create(
            model=NAME, prompt="the lazy dog", max_tokens=30, stream=True, extra_body={"ignore_eos": True}
        )
        assert [chunk.choices[0].finish_reason for chunk in stream if chunk.choices][-1] == "length"
        bench = ["bench", "--model", str(block_fp8), "--served-model-name", NAME, "--base-url", url, "--ignore-eos"]
        bench += ["--num-prompts=8", "--random-input-len=20", "--random-output-len=30", "--save-result"]
        assert cli.main([*bench, f"--result-dir={tmp_path}", "--result-filename=r.json"]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["total_output_tokens"] == 8 * 30
    assert result["spec_decode_draft_tokens"] > result["spec_decode_num_drafts"] > 0
    assert len(result["spec_decode_per_position_acceptance_rates"]) == 3


def test_the_r1_command_with_two_ranks(block_fp8: Path, tmp_path: Path) -> None:
    """Design's command line for DeepSeek-R1, with two ranks of a tiny model."""
    flags = ["--enforce-eager", "-tp", "2", "--method", "mtp", "--num-speculative-tokens", "3"]
    flags += ["--online_quant_config", json.dumps(R1), "--online-quant-info-dir", str(tmp_path)]
    with ranked(block_fp8, [*flags, "--max-model-len", "128", "--kv-cache-memory-bytes", "8000000"]) as server:
        client = openai.OpenAI(base_url=f"{server.url()}/v1", api_key="none", max_retries=0)
        answer = client.completions.create(model="tiny", prompt="fox", max_tokens=20, extra_body={"ignore_eos": True})
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 20
        server.process.terminate()
        assert server.end(within=10) == 0


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("qwen3_moe", "--method is 'mtp', and Qwen3MoeForCausalLM has no MTP layer"),
        ("deepseek_v3", "the model has no MTP layer: num_nextn_predict_layers in its config.json is 0"),
    ],
)
def test_a_model_without_an_mtp_layer(kind: str, says: str, tmp_path: Path, capsys: Any) -> None:
    folder = make_checkpoint(tmp_path / "model", kind)
    capsys.readouterr()
    with pytest.raises(RequantError, match=says):
        plan_model(EngineConfig.create(model=str(folder), method="mtp", device="cpu"))
    assert cli.main(["plan", "--model", str(folder), "--method", "mtp"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_checkpoint_that_lacks_the_layer(tmp_path: Path, capsys: Any) -> None:
    folder = make_checkpoint(tmp_path / "model", "deepseek_v3", num_nextn_predict_layers=1)
    capsys.readouterr()
    assert cli.main(["plan", "--model", str(folder), "--method", "mtp"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--method is 'mtp', and " in line
    assert line.endswith("has no tensor of the MTP layer model.layers.2")
