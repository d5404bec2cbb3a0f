"""What a benchmark tells: lines on stdout, and a JSON object with vLLM's keys."""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from requant.benchmarks.config import BenchConfig
from requant.benchmarks.metrics import Record, percentile_name
from requant.errors import ConfigError

_TITLES = {
    "ttft": ("Time to first token", "TTFT"),
    "tpot": ("Time per output token, without the first", "TPOT"),
    "itl": ("Time between pieces of an answer", "ITL"),
    "e2el": ("Time of a whole request", "E2EL"),
}
_WIDTH = 56
_SHOWN_ERRORS = 5


def lines(config: BenchConfig, figures: dict[str, Any], records: Sequence[Record]) -> Iterator[str]:
    """The figures, for people to read."""
    yield f"{' Serving benchmark ':=^{_WIDTH}}"
    yield _line("Successful requests", figures["completed"])
    yield _line("Failed requests", figures["failed"])
    if config.max_concurrency:
        yield _line("Most requests at a time (as asked)", config.max_concurrency)
    if not math.isinf(config.request_rate):
        yield _line("Requests a second (as asked)", config.request_rate)
    yield _line("Duration (s)", figures["duration"])
    yield _line("Input tokens", figures["total_input_tokens"])
    yield _line("Generated tokens", figures["total_output_tokens"])
    yield _line("Requests a second", figures["request_throughput"])
    if figures["request_goodput"] is not None:
        yield _line("Good requests a second", figures["request_goodput"])
    yield _line("Generated tokens a second", figures["output_throughput"])
    yield _line("Most generated tokens in a second", figures["max_output_tokens_per_s"])
    yield _line("Most requests in a second", figures["max_concurrent_requests"])
    yield _line("Tokens a second, input included", figures["total_token_throughput"])
    for metric in config.metrics:
        title, short = _TITLES[metric]
        yield f"{f' {title} ':-^{_WIDTH}}"
        for name in ("mean", "median", *map(percentile_name, config.percentiles)):
            yield _line(f"{name.capitalize()} {short} (ms)", figures[f"{name}_{metric}_ms"])
    yield from _draft_lines(figures)
    yield "=" * _WIDTH
    errors = Counter(record.error for record in records if record.error)
    for error, count in errors.most_common(_SHOWN_ERRORS):
        yield f"{count} failed: {error}"


def result(
    config: BenchConfig, tokenizer: str, figures: dict[str, Any], records: Sequence[Record], now: datetime
) -> dict[str, Any]:
    """The figures and how they came about, as a JSON object."""
    about = {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": config.backend,
        "backend": config.backend,
        "label": None,
        "model_id": config.name,
        "tokenizer_id": tokenizer,
        "num_prompts": config.num_prompts,
        "request_rate": "inf" if math.isinf(config.request_rate) else config.request_rate,
        "burstiness": config.burstiness,
        "max_concurrency": config.max_concurrency,
    }
    if not config.save_detailed:
        return about | figures
    return (
        about
        | figures
        | {
            "input_lens": [record.prompt_len for record in records],
            "output_lens": [record.output_len for record in records],
            "start_times": [record.start for record in records],
            "ttfts": [record.ttft for record in records],
            "itls": [record.itl for record in records],
            "generated_texts": [record.text for record in records],
            "errors": [record.error or "" for record in records],
        }
    )


def result_file(config: BenchConfig, now: datetime) -> Path:
    """Where the result goes; its folder is made.

    Raises:
        ConfigError: The folder cannot be made, or nothing can be written there.
    """
    limit = f"-concurrency{config.max_concurrency}" if config.max_concurrency else ""
    model = config.name.rstrip("/").rpartition("/")[2]
    made_up = f"{config.backend}-{config.request_rate}qps{limit}-{model}-{now.strftime('%Y%m%d-%H%M%S')}.json"
    file = Path(config.result_dir or ".") / (config.result_filename or made_up)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write the result to {file}: {error.strerror or error}") from error
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"cannot write the result to {file}: it is a folder, or not writable")
    return file


def write(file: Path, document: dict[str, Any]) -> None:
    """Write the result."""
    file.write_text(json.dumps(document) + "\n")


def _draft_lines(figures: dict[str, Any]) -> Iterator[str]:
    if "spec_decode_num_drafts" not in figures:
        return
    yield f"{' Speculative decoding ':-^{_WIDTH}}"
    yield _line("Drafts", figures["spec_decode_num_drafts"])
    yield _line("Tokens drafted", figures["spec_decode_draft_tokens"])
    yield _line("Tokens accepted", figures["spec_decode_accepted_tokens"])
    yield _line("Acceptance (%)", figures["spec_decode_acceptance_rate"])
    yield _line("Tokens a step", figures["spec_decode_acceptance_length"])
    for place, rate in enumerate(figures["spec_decode_per_position_acceptance_rates"]):
        yield _line(f"  Acceptance at position {place} (%)", 100 * rate)


def _line(label: str, value: float) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label + ':':<42}{shown:>{_WIDTH - 42}}"
