"""What a CUDA graph is given: inputs at fixed addresses, padded to its size, some of them left from earlier steps.

A graph itself needs a GPU. Here what one would do is done anew at each replay, on the very tensors that it was captured
with, so that everything around it runs: the tokens must be those of an engine without graphs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from requant_models import add_mtp_layer, check_same_tokens, make_checkpoint
from torch import Tensor

from requant import LLM, SamplingParams
from requant.engine import drafting, graphs, runner
from requant.engine.graphs import DecodeGraphs
from requant.engine.request_output import CompletionOutput

SETTINGS = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 4_000_000, "max_num_seqs": 13}
PROMPTS = [[20 + i, 30, 40 + i][: 1 + i % 3] * (1 + i) for i in range(9)]


class Repeated(DecodeGraphs):
    """Repeats a computation instead of replaying its graph, into the same memory."""

    replays = 0

    def _capturer(self, device: torch.device) -> Callable[[Callable[[], Tensor]], Any]:
        def capture(compute: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
            hidden = torch.full_like(compute(), float("nan"))

            def replay() -> None:
                Repeated.replays += 1
                hidden.copy_(compute())

            return replay, hidden

        return capture


@pytest.fixture
def with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine on the CPU that captures as one on a GPU does."""
    Repeated.replays = 0
    for module in (runner, drafting):
        monkeypatch.setattr(module, "DecodeGraphs", Repeated)
    allocate = runner.ModelRunner.allocate

    def allocate_and_capture(self: runner.ModelRunner, blocks: int) -> None:
        allocate(self, blocks)
        self.capture(SETTINGS["max_num_seqs"], SETTINGS["max_model_len"])

    monkeypatch.setattr(runner.ModelRunner, "allocate", allocate_and_capture)


def generate(checkpoint: Path, reports: Path, **more: Any) -> list[CompletionOutput]:
    params = [SamplingParams(temperature=0, max_tokens=3 + 4 * i, ignore_eos=True, logprobs=2) for i in range(9)]
    with LLM(str(checkpoint), None, device="cpu", online_quant_info_dir=str(reports), **SETTINGS, **more) as llm:
        return [out.outputs[0] for out in llm.generate(PROMPTS, params, progress=False)]


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_replays_give_the_tokens_of_an_engine_without_graphs(
    kind: str, drafts: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Requests end one by one, so that graphs of several sizes run, with what larger ones left behind their rows."""
    checkpoint = make_checkpoint(tmp_path / "model", kind)
    if kind == "deepseek_v3":
        add_mtp_layer(checkpoint)
    elif drafts:
        pytest.skip("a model without an MTP layer")
    more = {"method": "mtp", "num_speculative_tokens": drafts} if drafts else {}
    expected = generate(checkpoint, tmp_path, **more)
    request.getfixturevalue("with_graphs")
    check_same_tokens(expected, generate(checkpoint, tmp_path, **more))
    assert Repeated.replays > 20 * (1 + drafts)


def test_sizes_cover_every_batch() -> None:
    for most in (1, 3, 13, 256, 700):
        sizes = graphs.graph_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[0] == 1
        assert sizes[-1] == min(most, 512)
