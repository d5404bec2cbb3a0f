"""The arithmetic: from what happened to each request to a benchmark's figures. Definitions and names are vLLM's."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Record:
    """What happened to one request.

    Attributes:
        prompt_len: Tokens of the prompt.
        start: When it was sent, in seconds of some clock.
        ttft: Seconds from then to the first piece of the answer.
        itl: Seconds between two pieces.
        latency: Seconds from the start to the last piece.
        output_len: Tokens of the answer.
        text: The answer.
        error: Why it failed, or None.
    """

    prompt_len: int
    start: float = 0.0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    output_len: int = 0
    text: str = ""
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Seconds a token behind the first: (latency − TTFT) / (tokens − 1); None if there is only one."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else None


def figures(
    records: Sequence[Record],
    duration: float,
    metrics: Iterable[str],
    percentiles: Sequence[float],
    goals: Mapping[str, float],
) -> dict[str, Any]:
    """The figures of a benchmark, under vLLM's names: times in ms, throughput a second.

    Args:
        records: One a request; those that failed count as such and for nothing else.
        duration: Seconds from the first request to the last answer.
        metrics: Which of ttft, tpot, itl and e2el.
        percentiles: Of those, from 0 to 100.
        goals: Seconds that a good request may take at most, by metric; empty: no goodput.
    """
    done = [record for record in records if record.error is None]
    prompt, output = sum(record.prompt_len for record in done), sum(record.output_len for record in done)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(done) / duration,
        "request_goodput": sum(_good(record, goals) for record in done) / duration if goals else None,
        "output_throughput": output / duration,
        "total_token_throughput": (prompt + output) / duration,
        **_peaks(done),
    }
    seconds: dict[str, list[float]] = {
        "ttft": [record.ttft for record in done],
        "tpot": [record.tpot for record in done if record.tpot is not None],
        "itl": [gap for record in done for gap in record.itl],
        "e2el": [record.latency for record in done],
    }
    for metric in metrics:
        result |= _spread(metric, np.array(seconds[metric] or [0.0]) * 1000, percentiles)
    return result


def percentile_name(percentile: float) -> str:
    """99.0 → ``p99``, 99.9 → ``p99.9``."""
    return f"p{int(percentile) if percentile == int(percentile) else percentile}"


def _spread(metric: str, ms: np.ndarray, percentiles: Sequence[float]) -> dict[str, float]:
    spread = {"mean": np.mean(ms), "median": np.median(ms), "std": np.std(ms)}
    spread |= {percentile_name(p): np.percentile(ms, p) for p in percentiles}
    return {f"{name}_{metric}_ms": float(value) for name, value in spread.items()}


def _good(record: Record, goals: Mapping[str, float]) -> bool:
    seconds = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return all(seconds[metric] <= limit for metric, limit in goals.items())


def _peaks(done: Sequence[Record]) -> dict[str, float]:
    """The most pieces of answers in any second, and the most requests that are open in any second."""
    if not done:
        return {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0}
    begin = min(record.start for record in done)
    seconds = math.ceil(max(record.start + record.latency for record in done) - begin) + 1
    pieces, open_ = np.zeros(seconds), np.zeros(seconds, dtype=int)
    for record in done:
        moment = record.start + record.ttft - begin
        for gap in (0.0, *record.itl):
            moment += gap
            pieces[int(moment)] += 1
        first, last = int(record.start - begin), int(record.start + record.latency - begin)
        open_[first : last + 1] += 1
    return {"max_output_tokens_per_s": float(pieces.max()), "max_concurrent_requests": int(open_.max())}
