"""What HTTP costs: the server, and the same engine without it, on the same requests arriving at the same moments.

    python benchmarks/served.py --model models/SmolLM2-135M-Instruct-q4_1 --concurrency 1 4 --num-prompts 16
    python benchmarks/served.py --model M --tokenizer T --recipe ptpc_fp8 --concurrency 1 16 128 --cache-dir cache

For each concurrency the engine core runs the requests of ``requant bench`` in this process, that many at a time, each
as soon as another has ended; then the same requests go to a server in the same way. Figures and their definitions are
those of ``requant bench``. With --cache-dir the engine is also started from the cache of quantized weights that the
first start has written: quantizing at load costs nothing at run time. Prints one table and writes the same as JSON.
"""

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import requant
from perplexity import device_name, parse_recipe
from requant.benchmarks.config import BenchConfig
from requant.benchmarks.metrics import Record, figures
from requant.benchmarks.run import run
from requant.benchmarks.workload import Lengths, Sample, random_samples
from requant.engine.build import build_core
from requant.engine.config import EngineConfig, ModelConfig
from requant.engine.core import EngineCore
from requant.engine.messages import CoreRequest
from requant.engine.sampling_params import SamplingParams
from requant.engine.tokenizer import Tokenizer, load_tokenizer
from requant.errors import RequantError

METRICS = ("ttft", "tpot", "itl", "e2el")
NAME = "served"
_START = 600


@dataclass(frozen=True)
class Load:
    """Requests, and how many of them run at a time."""

    samples: Sequence[Sample]
    concurrency: int


def drive(core: EngineCore, tokenizer: Tokenizer, load: Load) -> dict[str, Any]:
    """Run the requests without HTTP, each as soon as there is room, and time every piece of their answers."""
    prompts = [tuple(tokenizer.encode(sample.prompt)) for sample in load.samples]
    records = [Record(sample.prompt_len) for sample in load.samples]
    waiting, last = list(range(len(prompts)))[::-1], dict[int, float]()
    begin, open_ = time.perf_counter(), 0
    while waiting or core.has_unfinished():
        while waiting and open_ < load.concurrency:
            index = waiting.pop()
            params = SamplingParams(temperature=0.0, max_tokens=load.samples[index].output_len, ignore_eos=True)
            records[index].start = last[index] = time.perf_counter()
            core.add_request(CoreRequest(str(index), prompts[index], params))
            open_ += 1
        outputs, now = core.step().outputs, time.perf_counter()
        for out in outputs:
            index = int(out.request_id)
            record = records[index]
            if record.output_len == 0:
                record.ttft = now - record.start
            else:
                record.itl.append(now - last[index])
            last[index], record.latency = now, now - record.start
            record.output_len += len(out.tokens)
            open_ -= out.finish_reason is not None
    return figures(records, time.perf_counter() - begin, METRICS, (50.0, 99.0), {})


@contextlib.contextmanager
def server(options: dict[str, Any], recipe: Any) -> Iterator[str]:
    """A server of its own, until the context is left; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "requant.entrypoints.openai_server",
        "--host",
        "127.0.0.1",
        "--log-level",
        "warning",
    ]
    command += ["--server-port", str(port), "--served-model-name", NAME]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    if recipe:
        command += ["--online-quant-config", recipe if isinstance(recipe, str) else json.dumps(recipe)]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + _START
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit("the server did not start")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def through_http(url: str, load: Load) -> dict[str, Any]:
    """Run the requests over HTTP."""
    config = BenchConfig(
        model=NAME, backend="vllm", base_url=url, max_concurrency=load.concurrency, num_prompts=len(load.samples),
        ignore_eos=True,
    )  # fmt: skip
    outcome = run(config, load.samples, [0.0] * len(load.samples))
    return figures(outcome.records, outcome.duration, METRICS, (50.0, 99.0), {})


def warm(load: Load) -> Load:
    """A few of the requests, to run before any is timed: what is compiled or allocated at first use."""
    return Load(load.samples[: max(load.concurrency, 2)], load.concurrency)


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {
        "model": arguments.model,
        "max_model_len": arguments.input + arguments.output + 64,
        "max_num_seqs": max(arguments.concurrency),
        "online_quant_info_dir": str(arguments.output_file.parent),
        "no_enable_prefix_caching": True,
    }
    if arguments.tokenizer:
        options["tokenizer"] = arguments.tokenizer
    return options | ({"online_quant_cache": str(arguments.cache_dir)} if arguments.cache_dir else {})


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every way with every concurrency."""
    options, recipe = engine_options(arguments), parse_recipe(arguments.recipe)[1]
    config = EngineConfig.create(**options, online_quant_config=recipe)
    source = ModelConfig(model=arguments.tokenizer or arguments.model)
    tokenizer = load_tokenizer(source)
    rng = np.random.default_rng(0)
    lengths = Lengths(0, arguments.input, arguments.output, 0.0)
    words = tokenizer.plain_token_ids()
    loads = [
        Load(random_samples(tokenizer, words, lengths, max(arguments.num_prompts, 2 * count), rng), count)
        for count in arguments.concurrency
    ]
    rows = []
    # The cache is written beside the first engine, and there before the second one starts.
    for weights in ("checkpoint", "cache") if arguments.cache_dir and recipe else ("checkpoint",):
        built = build_core(config)
        if built.cache_writer:
            built.cache_writer.wait()
        for load in loads:
            drive(built.core, tokenizer, warm(load))
            rows.append({"way": "engine", "weights": weights, "concurrency": load.concurrency})
            rows[-1] |= drive(built.core, tokenizer, load)
        del built
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    with server(options, recipe) as url:
        for load in loads:
            through_http(url, warm(load))
            rows.append({"way": "http", "weights": rows[-1]["weights"], "concurrency": load.concurrency})
            rows[-1] |= through_http(url, load)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a local folder or a Hugging Face id")
    parser.add_argument("--tokenizer", help="folder or id of the tokenizer (default: the model's)")
    parser.add_argument("--recipe", default="none", help="none, a format, JSON or a file")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1], help="numbers of simultaneous requests")
    parser.add_argument("--num-prompts", type=int, default=16, help="requests, at least twice the concurrency")
    parser.add_argument("--input", type=int, default=128, help="prompt tokens a request")
    parser.add_argument("--output", type=int, default=64, help="new tokens a request, at least 2")
    parser.add_argument(
        "--cache-dir", type=Path, help="also start from a cache of quantized weights, which is kept here"
    )
    parser.add_argument("--output-file", type=Path, default=Path("out/served.json"))
    arguments = parser.parse_args()
    arguments.output_file.parent.mkdir(parents=True, exist_ok=True)
    try:
        rows = measure(arguments)
    except RequantError as error:
        parser.exit(2, f"error: {error}\n")
    table = Table(title=f"{arguments.input} in, {arguments.output} out, {device_name()}, torch {torch.__version__}")
    shown = [f"{kind} {metric.upper()} ms" for metric in METRICS for kind in ("mean", "p99")]
    for name in (
        "way",
        "weights from",
        "requests at a time",
        *shown,
        "TPOT, to engine's",
        "TTFT, to engine's",
        "failed",
    ):
        table.add_column(name, justify="left" if name in ("way", "weights from") else "right")
    base = {row["concurrency"]: row for row in rows if row["way"] == "engine" and row["weights"] == "checkpoint"}
    for row in rows:
        first = base[row["concurrency"]]
        ratios = [row[f"mean_{metric}_ms"] / max(first[f"mean_{metric}_ms"], 1e-9) for metric in ("tpot", "ttft")]
        row["tpot_ratio"], row["ttft_ratio"] = ratios
        times = [f"{row[f'{kind}_{metric}_ms']:.2f}" for metric in METRICS for kind in ("mean", "p99")]
        table.add_row(
            row["way"],
            row["weights"],
            str(row["concurrency"]),
            *times,
            *(f"{r:.2f} x" for r in ratios),
            str(row["failed"]),
        )
    Console(width=190).print(table)
    versions = {"requant": requant.__version__, "torch": torch.__version__}
    facts = {"device": device_name(), "versions": versions, "model": arguments.model, "recipe": arguments.recipe}
    arguments.output_file.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
