"""``requant plan -tp N``: what a rank takes, computed by hand for real dimensions, and how the model is cut."""

import json
from pathlib import Path
from typing import Any

import pytest
import requant_headers

from requant.entrypoints.cli import main

# Qwen3-30B-A3B, but 5 layers of its 48: hidden 2048, 32 heads on 4 key/value heads of 128, 128 experts of 768.
LAYERS, HIDDEN, HEAD, EXPERTS, INNER, VOCAB = 5, 2048, 128, 128, 768, 151936


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return requant_headers.write_headers(
        tmp_path_factory.mktemp("qwen"), {**requant_headers.QWEN3_30B_A3B, "num_hidden_layers": LAYERS}
    )


def plan(folder: Path, capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    assert main(["plan", "--model", str(folder), "--device", "cpu", *args]) == 0
    return capsys.readouterr().out


def planned(folder: Path, capsys: pytest.CaptureFixture[str], fmt: str, *args: str) -> dict[str, Any]:
    return json.loads(plan(folder, capsys, "--json", "--online_quant_config", recipe(fmt), *args))


def recipe(fmt: str) -> str:
    return json.dumps({"global_quant_config": fmt})


def ptpc(n: int, k: int) -> int:
    return n * k + 4 * n


PLAIN = 2 * LAYERS * (2 * HIDDEN + 2 * HEAD) + 2 * HIDDEN + 2 * LAYERS * EXPERTS * HIDDEN  # norms, and the routers


def test_bytes_of_a_rank(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(folder, capsys, "ptpc_fp8", "-tp", "4")
    heads, inner = 8 * HEAD, INNER // 4
    qkv, o = ptpc(heads + 2 * HEAD, HIDDEN), ptpc(HIDDEN, heads)
    experts = EXPERTS * (ptpc(2 * inner, HIDDEN) + ptpc(HIDDEN, inner))
    vocabulary = 2 * (2 * VOCAB // 4 * HIDDEN)
    expected = LAYERS * (qkv + o + experts) + vocabulary + PLAIN
    assert [rank["weight_bytes"] for rank in report["ranks"]] == [expected] * 4
    assert report["num_layers"] == 3 * LAYERS
    assert (report["tensor_parallel_size"], report["expert_parallel"]) == (4, False)
    values = LAYERS * ((heads + 2 * HEAD) * HIDDEN + HIDDEN * heads + EXPERTS * 3 * inner * HIDDEN)
    assert [rank["bytes_wanted"] for rank in report["ranks"]] == [2 * values + vocabulary + PLAIN] * 4
    # Rows of o_proj and down_proj are short: they are read whole, and nothing is compared over the ranks.
    cut = LAYERS * (HIDDEN * heads * 3 + EXPERTS * HIDDEN * inner * 3)
    assert [rank["bytes_read"] for rank in report["ranks"]] == [2 * (values + cut) + vocabulary + PLAIN] * 4
    assert [rank["bytes_sent"] for rank in report["ranks"]] == [0] * 4
    assert report["windows"] == []
    assert {row["tensors"] for row in report["replicated"]} == {
        "model.norm",
        *(f"model.layers.*.{name}" for name in ("mlp.gate", "input_layernorm", "post_attention_layernorm")),
        *(f"model.layers.*.self_attn.{name}" for name in ("q_norm", "k_norm")),
    }


def test_whole_experts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(folder, capsys, "ptpc_fp8", "-tp", "3", "--enable-expert-parallel")
    assert report["expert_parallel"] is True
    shares = [(16, 2, 43, 50646), (8, 1, 43, 50645), (8, 1, 42, 50645)]  # query and key heads, experts, vocabulary
    for rank, (queries, keys, experts, vocabulary) in zip(report["ranks"], shares, strict=True):
        qkv, o = ptpc((queries + 2 * keys) * HEAD, HIDDEN), ptpc(HIDDEN, queries * HEAD)
        each = ptpc(2 * INNER, HIDDEN) + ptpc(HIDDEN, INNER)
        assert rank["weight_bytes"] == LAYERS * (qkv + o + experts * each) + 4 * vocabulary * HIDDEN + PLAIN
    assert not [row for row in report["replicated"] if "experts" in row["tensors"]]


def test_shards_within_a_block_and_shared_key_heads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(folder, capsys, "per_block_fp8", "-tp", "8")
    windows = {row["tensors"]: row for row in report["windows"]}
    experts = "model.layers.*.mlp.experts.*"
    assert set(windows) == {f"{experts}.{part}_proj" for part in ("gate", "up", "down")}
    assert windows[f"{experts}.down_proj"]["columns"] == [[96, 128], [96, 256]]
    assert windows[f"{experts}.up_proj"]["rows"] == [[96, 1], [96, 2]]
    assert {"tensors": "model.layers.*.self_attn.k_proj", "ranks": 2.0} in report["replicated"]
    bytes_of = [rank["weight_bytes"] for rank in report["ranks"]]
    assert bytes_of[0] == bytes_of[3] == bytes_of[4] == bytes_of[7] < bytes_of[1] == bytes_of[2] == bytes_of[5]
    text = plan(folder, capsys, "-tp", "8", "--online_quant_config", recipe("per_block_fp8"))
    assert "8 ranks, a share of each layer on each" in text
    (line,) = [line for line in text.splitlines() if "down_proj" in line and "→" in line]
    assert line.split() == [f"{experts}.down_proj", "per_block_fp8", "96", "→", "128,", "96", "→", "256", "-"]
    assert any(line.split()[:1] == ["0,3-4,7"] for line in text.splitlines())
    assert any(line.split() == ["model.layers.*.mlp.gate", "all"] for line in text.splitlines())


def test_a_number_of_ranks_that_does_not_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(folder), "-tp", "6", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    accepted = "1 to 4, 8, 12, 16, 20, 24, 28, 32"
    assert error == f"requant: error: -tp is 6; accepted for 32 heads on 4 key/value heads: {accepted}\n"
