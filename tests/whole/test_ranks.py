"""Several ranks as processes: the server's tokens are those of one rank, and no failure leaves anything hanging."""

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from requant_models import check_same_tokens, make_checkpoint
from requant_ranked_server import ranked

from requant import LLM, SamplingParams
from requant.engine.interface import EngineDeadError
from requant.errors import RequantError

RECIPE = '{"global_quant_config": "ptpc_fp8", "layer_quant_config": {"*expert*": "mxfp4"}}'
SETTINGS = ["--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", "8000000"]
PROMPTS = [[11, 12, 13, 14, 15, 16] * 5, [40, 50, 60], [7, 300, 20, 41, 90, 100, 101]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("ranks"), "qwen3_moe")


def arguments(reports: Path, *more: str) -> list[str]:
    return [*SETTINGS, "--online_quant_config", RECIPE, "--online-quant-info-dir", str(reports), *more]


def engine(checkpoint: Path, reports: Path, **options: Any) -> LLM:
    settings = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 8_000_000, "device": "cpu"}
    return LLM(str(checkpoint), RECIPE, online_quant_info_dir=str(reports), **{**settings, **options})


def test_the_tokens_are_those_of_one_rank(checkpoint: Path, tmp_path: Path) -> None:
    """Of the server with 2 ranks and whole experts, and of ``LLM`` with 2; logprobs and those of prompts too."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    with engine(checkpoint, tmp_path, deterministic_tp=True) as llm:
        alone = llm.generate(PROMPTS, params, progress=False)
    expected = [output.outputs[0] for output in alone]
    with engine(checkpoint, tmp_path, tensor_parallel_size=2, deterministic_tp=True) as llm:
        outputs = llm.generate(PROMPTS, params, progress=False)
        check_same_tokens(expected, [output.outputs[0] for output in outputs])
        for one, two in zip(alone, outputs, strict=True):
            assert one.prompt_logprobs is not None
            assert two.prompt_logprobs is not None
            values = [[entry.logprob for entry in out.prompt_logprobs[1:] if entry] for out in (one, two)]
            assert len(values[0]) == len(one.prompt_token_ids) - 1
            assert values[0] == pytest.approx(values[1], abs=1e-3)
        with pytest.raises(RequantError, match="token id 600"):
            llm.generate([[600]], params, progress=False)
        again = llm.generate(PROMPTS[:1], params, progress=False)
        check_same_tokens(expected[:1], [again[0].outputs[0]])

    args = arguments(tmp_path, "-tp", "2", "--enable-expert-parallel", "--deterministic-tp")
    with ranked(checkpoint, args) as server:
        client = openai.OpenAI(base_url=f"{server.url()}/v1", api_key="none", max_retries=0)
        answer = client.completions.create(
            model="tiny", prompt=PROMPTS, temperature=0.0, max_tokens=12, extra_body={"ignore_eos": True}
        )
        for choice, out in zip(answer.choices, expected, strict=True):
            assert choice.text == out.text
        server.ranks(2)
        server.process.terminate()
        assert server.end(within=10) == 0
    assert len(list(tmp_path.glob("online_quant_info_*.json"))) == 3, "each start writes one report, of rank 0"


def test_the_command_for_qwen3_235b(checkpoint: Path, tmp_path: Path) -> None:
    recipe = '{"global_quant_config":"mxfp4","exclude_layer":["lm_head","*.gate.*"]}'
    flags = ["-tp", "2", "--enable-expert-parallel", "--online_quant_config", recipe]
    with ranked(checkpoint, [*flags, *SETTINGS, "--online-quant-info-dir", str(tmp_path)]) as server:
        client = openai.OpenAI(base_url=f"{server.url()}/v1", api_key="none", max_retries=0)
        answer = client.completions.create(model="tiny", prompt="fox", max_tokens=9, extra_body={"ignore_eos": True})
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 9
        server.process.terminate()
        assert server.end(within=10) == 0


def break_one(pid: int, how: signal.Signals) -> float:
    time.sleep(0.5)
    os.kill(pid, how)
    return time.monotonic()


@pytest.mark.parametrize(
    ("rank", "how", "says"),
    [
        (1, signal.SIGKILL, "rank 1: the engine's process was ended by SIGKILL"),
        (0, signal.SIGKILL, "rank 0: the engine's process was ended by SIGKILL"),
        (1, signal.SIGSTOP, "rank 1: no sign of life"),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_server(
    checkpoint: Path, tmp_path: Path, rank: int, how: signal.Signals, says: str
) -> None:
    patience, within = ("4", 20) if how == signal.SIGSTOP else ("60", 10)
    with ranked(checkpoint, arguments(tmp_path, "-tp", "2", "--worker-timeout", patience)) as server:
        url = server.url()
        pids = server.ranks(2)
        began: list[float] = []
        body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 220, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            threading.Thread(target=lambda: began.append(break_one(pids[rank], how))).start()
            rest = "\n".join(lines)
        assert '"error"' in rest
        assert '"length"' not in rest, "it was finished before it was broken"
        assert server.end(within) == 1
        assert time.monotonic() - began[0] < within
    assert says in server.stderr
    assert server.stderr.splitlines()[-1].startswith("requant: error: the engine failed: rank ")


def test_a_signal_while_loading_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    with ranked(checkpoint, arguments(tmp_path, "-tp", "2")) as server:
        server.ranks(2)
        server.process.send_signal(signal.SIGINT)
        assert server.end(within=10) == 130


def test_what_cannot_be_is_one_line(checkpoint: Path, tmp_path: Path) -> None:
    with ranked(checkpoint, arguments(tmp_path, "-tp", "5")) as server:
        assert server.end(within=60) == 2
    (line,) = server.stderr.splitlines()
    assert line == "requant: error: -tp is 5; accepted for 6 heads on 2 key/value heads: 1 to 2, 4, 6"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with ranked(checkpoint, arguments(tmp_path, "-tp", "2", "--port", str(port))) as server:
            assert server.end(within=60) == 2
        (line,) = server.stderr.splitlines()
        assert line.startswith(f"requant: error: the ranks cannot meet at port {port} of this host: ")
        assert line.endswith("choose another --port, or none for a free one")


def test_an_llm_tells_of_a_rank_that_failed(checkpoint: Path, tmp_path: Path) -> None:
    with engine(checkpoint, tmp_path, tensor_parallel_size=2) as llm:
        core: Any = llm._core
        os.kill(core._process.pids[1], signal.SIGKILL)
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="rank 1: the engine's process was ended by SIGKILL"):
                llm.generate(PROMPTS, params, progress=False)
