"""Speculative decoding in a benchmark's figures, from a server's counters before and after."""

from typing import Any

import pytest

from requant.benchmarks.config import BenchConfig
from requant.benchmarks.drafts import DraftCounts, draft_figures, parse
from requant.benchmarks.metrics import figures
from requant.benchmarks.report import lines
from requant.engine.messages import CoreStats, SpeculationCounts
from requant.server.metrics import Metrics

VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 1.0
"""


def test_vllms_counters_over_all_engines() -> None:
    assert parse(VLLM) == DraftCounts(15, 30, 12, (9, 4))


def test_our_own() -> None:
    stats = CoreStats(speculation=SpeculationCounts(7, 21, 9, (5, 3, 1)))
    assert parse(Metrics().render(stats).decode()) == DraftCounts(7, 21, 9, (5, 3, 1))


@pytest.mark.parametrize("text", ["", Metrics().render(CoreStats()).decode()])
def test_a_server_that_does_not_draft(text: str) -> None:
    assert parse(text) is None


def test_what_came_between() -> None:
    told = draft_figures(DraftCounts(10, 20, 5, (5,)), DraftCounts(14, 32, 11, (8, 2, 1)))
    assert told == {
        "spec_decode_num_drafts": 4,
        "spec_decode_draft_tokens": 12,
        "spec_decode_accepted_tokens": 6,
        "spec_decode_acceptance_rate": 50.0,
        "spec_decode_acceptance_length": 2.5,
        "spec_decode_per_position_acceptance_rates": [0.75, 0.5, 0.25],
    }


@pytest.mark.parametrize("counts", [None, DraftCounts(10, 20, 5, (5,))])
def test_nothing_came_between(counts: DraftCounts | None) -> None:
    assert draft_figures(counts, counts) == {}


def test_the_figures_are_printed() -> None:
    told: dict[str, Any] = figures([], 1.0, (), (), {})
    config = BenchConfig(model="m", percentile_metrics="")
    assert not [line for line in lines(config, told, []) if "drafted" in line]
    told |= draft_figures(DraftCounts(0, 0, 0, ()), DraftCounts(4, 12, 6, (3, 2, 1)))
    printed = {line.partition(":")[0].strip(): line.rpartition(" ")[2] for line in lines(config, told, [])}
    assert printed["Tokens drafted"] == "12"
    assert printed["Acceptance (%)"] == "50.00"
    assert printed["Tokens a step"] == "2.50"
    assert printed["Acceptance at position 2 (%)"] == "25.00"
