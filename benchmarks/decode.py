"""Loading and decoding under several recipes: seconds to load, bytes, and time per output token (TPOT).

    python benchmarks/decode.py --model models/SmolLM2-135M-Instruct-q4_1 --requests 1 4
    python benchmarks/decode.py --model M --recipe none --recipe mxfp4 --requests 1 16 128 --input 1024 --output 256

With --profile a step of every number of requests is also taken apart: kernel by kernel its time, and beside kinds of
work that read much their bytes and the time that these take at least, at the speed of a device copy in the same run.

Drives the engine core directly, on random token ids, without tokenizer or HTTP. All requests of a row start together;
TPOT is (last token − the moment when every request has its first token) / (tokens − 1), prefill all prompts' tokens
over the time until that moment. Prints one table and writes the same as JSON.
"""

import argparse
import gc
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import requant
from decode_profile import PROFILED_STEPS, Work, by_kind, profile_step, show
from perplexity import device_name, parse_recipe
from requant.engine.build import build_core
from requant.engine.config import EngineConfig
from requant.engine.core import EngineCore
from requant.engine.messages import CoreRequest
from requant.engine.sampling_params import SamplingParams
from requant.recipe import FORMATS

if torch.cuda.is_available():
    from gpu import ceilings

Row = dict[str, Any]


def run(core: EngineCore, vocab: int, requests: int, prompt: int, output: int, seed: int) -> tuple[float, float]:
    """Seconds until every request has its first token, and seconds from there to the last token."""
    rng = random.Random(seed)
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    waiting = set()
    for i in range(requests):
        waiting.add(f"{seed}-{i}")
        core.add_request(CoreRequest(f"{seed}-{i}", tuple(rng.randrange(vocab) for _ in range(prompt)), params))
    start = first = time.perf_counter()
    while core.has_unfinished():
        outputs = core.step().outputs
        if waiting:
            waiting -= {out.request_id for out in outputs}
            first = time.perf_counter()
    return first - start, time.perf_counter() - first


def profiled(core: EngineCore, vocab: int, recipe: str, requests: int, arguments: argparse.Namespace) -> Row:
    """A decode step of ``requests`` sequences, taken apart and shown."""
    rng = random.Random(requests)
    params = SamplingParams(temperature=0.0, max_tokens=arguments.output, ignore_eos=True)
    for i in range(requests):
        prompt = tuple(rng.randrange(vocab) for _ in range(arguments.input))
        core.add_request(CoreRequest(f"profiled-{i}", prompt, params))
    waiting = {f"profiled-{i}" for i in range(requests)}
    while waiting:
        waiting -= {out.request_id for out in core.step().outputs}
    rows, seconds = profile_step(core.step)
    work = Work.of(core._runner, requests, arguments.input)
    kinds = by_kind(rows, work, ceilings()["bytes"] if torch.cuda.is_available() else float("inf"))
    core.abort([f"profiled-{i}" for i in range(requests)])
    while core.has_unfinished():
        core.step()
    show(f"{recipe}, {requests} requests of {arguments.input} tokens", rows, kinds, seconds, Console(width=120))
    return {"kernels": rows, "kinds": kinds, "step_seconds": seconds}


def measure(arguments: argparse.Namespace, recipe: str) -> list[Row]:
    """Load under one recipe, and run every number of requests."""
    length = arguments.input + arguments.output
    options = {"max_model_len": length, "max_num_seqs": max(arguments.requests), "no_enable_prefix_caching": True}
    config = EngineConfig.create(
        model=arguments.model,
        online_quant_config=parse_recipe(recipe)[1],
        online_quant_info_dir=str(arguments.output_file.parent),
        dtype=arguments.dtype,
        enforce_eager=arguments.enforce_eager,
        **options,
    )
    begin = time.perf_counter()
    built = build_core(config)
    ready = time.perf_counter() - begin
    report = json.loads(Path(built.report_path).read_text()) if built.report_path else {}
    rows = []
    run(built.core, built.vocab_size, 1, 8, 4, seed=-1)  # what is compiled or allocated at first use
    for requests in arguments.requests:
        prefill, decode = run(built.core, built.vocab_size, requests, arguments.input, arguments.output, seed=requests)
        rows.append(
            {
                "recipe": recipe,
                "requests": requests,
                "load_seconds": report.get("load_seconds"),
                "peak_device_memory_gb": report.get("peak_device_memory_gb"),
                "ready_seconds": ready,
                "prefill_tokens_per_second": requests * arguments.input / prefill,
                "tpot_ms": decode / (arguments.output - 1) * 1e3,
                "tokens_per_second": requests * (arguments.output - 1) / decode,
            }
        )
        if arguments.profile:
            rows[-1]["profile"] = profiled(built.core, built.vocab_size, recipe, requests, arguments)
    del built
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a local folder or a Hugging Face id")
    parser.add_argument("--recipe", action="append", help="none, a format, JSON or a file (default: each format)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1], help="numbers of simultaneous requests")
    parser.add_argument("--input", type=int, default=128, help="prompt tokens a request")
    parser.add_argument("--output", type=int, default=64, help="new tokens a request, at least 2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--profile", action="store_true", help="take a step apart, kernel by kernel")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--output-file", type=Path, default=Path("out/decode.json"))
    arguments = parser.parse_args()
    if arguments.profile and arguments.output < 2 * PROFILED_STEPS + 8:
        parser.error(f"--output is {arguments.output}; accepted with --profile: {2 * PROFILED_STEPS + 8} or more")
    arguments.output_file.parent.mkdir(parents=True, exist_ok=True)
    rows = [row for recipe in arguments.recipe or ("none", *FORMATS) for row in measure(arguments, recipe)]
    device = device_name()
    versions = {"requant": requant.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    table = Table(title=f"{arguments.input} in, {arguments.output} out, {device}, torch {torch.__version__}")
    for name in ("recipe", "requests", "load s", "peak GB", "ready s", "prefill tok/s", "TPOT ms", "tok/s"):
        table.add_column(name, justify="left" if name == "recipe" else "right")
    for row in rows:
        load, peak = row["load_seconds"], row["peak_device_memory_gb"]
        table.add_row(
            row["recipe"],
            str(row["requests"]),
            "-" if load is None else f"{load:.2f}",
            "-" if peak is None else f"{peak:.2f}",
            f"{row['ready_seconds']:.1f}",
            f"{row['prefill_tokens_per_second']:,.0f}",
            f"{row['tpot_ms']:.2f}",
            f"{row['tokens_per_second']:,.1f}",
        )
    Console(width=120).print(table)
    facts = {"device": device, "versions": versions, "model": arguments.model}
    arguments.output_file.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
