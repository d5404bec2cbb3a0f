"""A benchmark's arithmetic on a recorded trace, against the same figures from Python's own statistics."""

import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from requant.benchmarks.metrics import Record, figures, percentile_name

TRACE = Path(__file__).parents[1] / "data" / "serving_trace.json"
DURATION = 0.25
ALL = ("ttft", "tpot", "itl", "e2el")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return json.loads(TRACE.read_text())


@pytest.fixture(scope="module")
def records(rows: list[dict[str, Any]]) -> list[Record]:
    return [Record(**row, latency=row.get("ttft", 0.0) + sum(row.get("itl", []))) for row in rows]


def percentile(values: list[float], share: float) -> float:
    """Linear between the two nearest ranks, as numpy's default is."""
    values = sorted(values)
    place = (len(values) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def test_times(rows: list[dict[str, Any]], records: list[Record]) -> None:
    done = [row for row in rows if "error" not in row]
    seconds = {
        "ttft": [row["ttft"] for row in done],
        "tpot": [sum(row["itl"]) / (row["output_len"] - 1) for row in done if row["output_len"] > 1],
        "itl": [gap for row in done for gap in row["itl"]],
        "e2el": [row["ttft"] + sum(row["itl"]) for row in done],
    }
    assert [len(values) for values in seconds.values()] == [9, 8, 52, 9]
    result = figures(records, DURATION, ALL, (50.0, 90.0, 99.9), {})
    for metric, values in seconds.items():
        ms = [1000 * value for value in values]
        assert result[f"mean_{metric}_ms"] == pytest.approx(statistics.fmean(ms))
        assert result[f"median_{metric}_ms"] == pytest.approx(statistics.median(ms))
        assert result[f"std_{metric}_ms"] == pytest.approx(statistics.pstdev(ms))
        assert result[f"p50_{metric}_ms"] == pytest.approx(result[f"median_{metric}_ms"])
        assert result[f"p90_{metric}_ms"] == pytest.approx(percentile(ms, 90))
        assert result[f"p99.9_{metric}_ms"] == pytest.approx(percentile(ms, 99.9))


def test_one_value_by_hand(records: list[Record]) -> None:
    """(latency − TTFT) / (tokens − 1): the first request's 28.178 ms behind its first token, over 17 tokens."""
    assert records[0].tpot == pytest.approx((0.000013 + 0.000013 + 0.003717 + 0.013729 + 0.010706) / 17)
    assert records[8].tpot is None


def test_throughput_counts_what_succeeded(records: list[Record]) -> None:
    result = figures(records, DURATION, (), (99.0,), {})
    assert (result["completed"], result["failed"]) == (9, 1)
    assert result["total_input_tokens"] == 54 + 46 + 40 + 32 + 32 + 22 + 24 + 29 + 53
    assert result["total_output_tokens"] == 18 + 28 + 21 + 10 + 26 + 25 + 27 + 1 + 28
    assert result["request_throughput"] == pytest.approx(9 / DURATION)
    assert result["output_throughput"] == pytest.approx(184 / DURATION)
    assert result["total_token_throughput"] == pytest.approx((184 + 332) / DURATION)
    assert result["request_goodput"] is None
    assert not [key for key in result if key.endswith("_ms")]


def test_goodput(rows: list[dict[str, Any]], records: list[Record]) -> None:
    """A request is good if it meets every goal; one without a second token meets any of TPOT."""
    done = [row for row in rows if "error" not in row]
    good = [row for row in done if row["ttft"] <= 0.04 and sum(row["itl"]) <= 0.003 * max(row["output_len"] - 1, 1)]
    assert 0 < len(good) < len(done)
    result = figures(records, DURATION, (), (99.0,), {"ttft": 0.04, "tpot": 0.003})
    assert result["request_goodput"] == pytest.approx(len(good) / DURATION)
    assert figures(records, DURATION, (), (), {"e2el": 0.0})["request_goodput"] == 0


def test_peaks() -> None:
    records = [
        Record(1, start=10.0, ttft=0.5, itl=[0.4, 0.4], latency=1.3, output_len=3),
        Record(1, start=10.9, ttft=0.2, itl=[2.0], latency=2.2, output_len=2),
        Record(1, start=13.5, ttft=0.1, itl=[], latency=0.1, output_len=1),
        Record(1, start=10.9, error="lost"),
    ]
    pieces = Counter(int(t) for t in (0.5, 0.9, 1.3, 1.1, 3.1, 3.6))
    result = figures(records, 4.0, (), (), {})
    assert result["max_output_tokens_per_s"] == max(pieces.values()) == 2
    assert result["max_concurrent_requests"] == 2


def test_nothing_succeeded() -> None:
    result = figures([Record(5, error="refused")], 1.0, ALL, (99.0,), {"ttft": 1.0})
    assert (result["completed"], result["failed"], result["request_goodput"]) == (0, 1, 0)
    assert result["mean_tpot_ms"] == result["p99_itl_ms"] == result["max_output_tokens_per_s"] == 0


def test_names_of_percentiles() -> None:
    assert [percentile_name(p) for p in (0.0, 50.0, 99.0, 99.9)] == ["p0", "p50", "p99", "p99.9"]
