"""The programs around speculative decoding, on tiny random models that one of them writes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from requant_models import add_mtp_layer, make_checkpoint

PROGRAMS = Path(__file__).parents[2] / "benchmarks"
# Whatever makes a model large.
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "vocab_size": 500,
    "n_routed_experts": 16,
    "num_experts": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "eos_token_id": 1,
    "bos_token_id": 0,
}


def run(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(PROGRAMS / program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module", params=sorted(path.stem for path in (PROGRAMS / "configs").glob("*.json")))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    config = json.loads((PROGRAMS / "configs" / f"{request.param}.json").read_text())
    file = folder / "small.json"
    file.write_text(json.dumps(config | {key: value for key, value in SMALL.items() if key in config}))
    done = run("random_checkpoint.py", "--config", str(file), "--layers", "4", "--output-dir", str(folder / "model"))
    assert done.returncode == 0, done.stderr
    return folder / "model"


def test_what_is_written_is_a_checkpoint(checkpoint: Path) -> None:
    """Nothing is missing, and nothing is left over."""
    command = [sys.executable, "-m", "requant.entrypoints.cli", "plan", "--model", str(checkpoint), "--json"]
    command += ["--method", "mtp"] if "deepseek" in str(checkpoint) else []
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "passed over" not in done.stderr
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] > 0


def test_tpot_with_drafts(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(checkpoint), "--recipe", "ptpc_fp8", "--requests", "1", "3", "--drafts", "2"]
    arguments += ["--acceptance", "own", "0.5", "1", "--input", "9", "--output", "20"]
    done = run("speculative.py", *arguments, "--output-file", str(tmp_path / "out" / "s.json"))
    if "deepseek" not in str(checkpoint):
        assert done.returncode == 2
        assert "has no MTP layer" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out" / "s.json").read_text())["rows"]
    assert [(row["drafts"], row["acceptance"], row["requests"]) for row in rows] == [
        (0, None, 1),
        (0, None, 3),
        *[(2, acceptance, requests) for acceptance in ("own", "0.5", "1") for requests in (1, 3)],
    ]
    by = {(row["acceptance"], row["requests"]): row["tokens_per_step"] for row in rows}
    assert by[None, 1] == 1
    assert by["own", 3] < by["0.5", 3] < by["1", 3]
    assert by["1", 1] > 2.5
    assert all(row["tpot_ms"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--acceptance", "2"], "accepted: own, or a number from 0 to 1"), (["--output", "4"], "accepted: 6 or more")],
)
def test_bad_input(arguments: list[str], says: str) -> None:
    done = run("speculative.py", "--model", "m", *arguments)
    assert done.returncode == 2
    assert says in done.stderr.splitlines()[-1]


def test_draft_agreement(tmp_path: Path) -> None:
    model, text = add_mtp_layer(make_checkpoint(tmp_path / "model", "deepseek_v3")), tmp_path / "text"
    text.write_text("the lazy dog jumps over the quick brown fox " * 16)
    arguments = ["--model", str(model), "--text", str(text), "--window", "32", "--tokens", "96"]
    arguments += ["--recipe", "none", "--recipe", "mxfp4"]
    done = run("draft_agreement.py", *arguments, "--output-file", str(tmp_path / "a.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["recipe"] for row in rows] == ["none", "mxfp4"]
    assert all(row["tokens"] == 3 * 30 and 0 <= row["same"] <= 90 for row in rows)
    done = run("draft_agreement.py", "--model", str(model), "--text", str(text), "--window", "2")
    assert "--window is 2; accepted: 3 or more" in done.stderr
