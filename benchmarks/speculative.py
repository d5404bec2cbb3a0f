"""What speculative decoding makes of the time per output token (TPOT), against the same model without it.

    python benchmarks/speculative.py --model M --recipe recipes/deepseek-v3/all.json --requests 1 16 --drafts 3
    python benchmarks/speculative.py --model M --drafts 1 2 3 --acceptance own 0.5 0.75 0.9

"own": drafts are accepted as the model says, which random weights hardly ever do. A number: each draft is accepted with
that probability, and the first that is not ends the step, whatever the model says; the work is the same, the tokens
mean nothing. Drives the engine core directly, on random token ids; TPOT is the mean over requests of
(last token - first token) / (tokens - 1). Prints one table and writes the same as JSON.
"""

import argparse
import gc
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import requant
from perplexity import device_name, parse_recipe
from requant.engine import runner
from requant.engine.build import build_core
from requant.engine.config import EngineConfig
from requant.engine.core import EngineCore
from requant.engine.drafting import accepted
from requant.engine.messages import CoreRequest
from requant.engine.sampling_params import SamplingParams
from requant.errors import RequantError

Row = dict[str, Any]


def force(acceptance: str) -> None:
    """Accept drafts with a probability, or as the model says."""
    if acceptance == "own":
        runner.accepted = accepted
        return
    probability, rng = float(acceptance), random.Random(0)

    def forced(sampled: Sequence[int], drafts: Sequence[int]) -> tuple[int, ...]:
        count = 0
        while count < len(drafts) and rng.random() < probability:
            count += 1
        return tuple(sampled[: count + 1])

    runner.accepted = forced


def tpot(core: EngineCore, vocab: int, requests: int, prompt: int, output: int, seed: int) -> float:
    """Seconds a token, the mean over requests that start together."""
    rng = random.Random(seed)
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    for i in range(requests):
        core.add_request(CoreRequest(f"{seed}-{i}", tuple(rng.randrange(vocab) for _ in range(prompt)), params))
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    begun: dict[str, int] = {}
    while core.has_unfinished():
        outputs, now = core.step().outputs, time.perf_counter()
        for out in outputs:
            if out.request_id not in first:
                first[out.request_id], begun[out.request_id] = now, len(out.tokens)
            last[out.request_id] = now
    return sum((last[i] - first[i]) / (output - begun[i]) for i in first) / requests


def measure(arguments: argparse.Namespace, recipe: str, drafts: int) -> list[Row]:
    """Load once, and run every number of requests with every acceptance."""
    config = EngineConfig.create(
        model=arguments.model,
        online_quant_config=parse_recipe(recipe)[1],
        online_quant_info_dir=str(arguments.output_file.parent),
        max_model_len=arguments.input + arguments.output,
        max_num_seqs=max(arguments.requests),
        no_enable_prefix_caching=True,
        enforce_eager=arguments.enforce_eager,
        **({"method": "mtp", "num_speculative_tokens": drafts} if drafts else {}),
    )
    built = build_core(config)
    rows = []
    for acceptance in arguments.acceptance if drafts else ["own"]:
        force(acceptance)
        tpot(built.core, built.vocab_size, 1, 8, 8, seed=-1)  # what is compiled or allocated at first use
        for requests in arguments.requests:
            before = built.core.step().stats.speculation
            seconds = tpot(built.core, built.vocab_size, requests, arguments.input, arguments.output, seed=requests)
            after = built.core.step().stats.speculation
            count, taken = after.drafts - before.drafts, after.accepted - before.accepted
            row = {"recipe": recipe, "drafts": drafts, "acceptance": acceptance if drafts else None}
            length = 1 + taken / count if count else 1.0
            rows.append({**row, "requests": requests, "tpot_ms": seconds * 1e3, "tokens_per_step": length})
    del built
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a local folder or a Hugging Face id, with an MTP layer")
    parser.add_argument("--recipe", default="none", help="none, a format, JSON or a file")
    parser.add_argument("--drafts", type=int, nargs="+", default=[3], help="tokens drafted for each step")
    parser.add_argument("--acceptance", nargs="+", default=["own", "0.75"], help="own, or a probability from 0 to 1")
    parser.add_argument("--requests", type=int, nargs="+", default=[1], help="numbers of simultaneous requests")
    parser.add_argument("--input", type=int, default=128, help="prompt tokens a request")
    parser.add_argument("--output", type=int, default=64, help="new tokens a request, more than a step gives")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--output-file", type=Path, default=Path("out/speculative.json"))
    arguments = parser.parse_args()
    for acceptance in arguments.acceptance:
        if acceptance != "own" and not (acceptance.replace(".", "", 1).isdigit() and float(acceptance) <= 1):
            parser.error(f"--acceptance is {acceptance!r}; accepted: own, or a number from 0 to 1")
    if arguments.output < max(arguments.drafts) + 3:
        parser.error(f"--output is {arguments.output}; accepted: {max(arguments.drafts) + 3} or more")
    arguments.output_file.parent.mkdir(parents=True, exist_ok=True)
    try:
        rows = [row for drafts in (0, *arguments.drafts) for row in measure(arguments, arguments.recipe, drafts)]
    except RequantError as error:
        parser.exit(2, f"error: {error}\n")
    plain = {row["requests"]: row["tpot_ms"] for row in rows if not row["drafts"]}
    table = Table(title=f"{arguments.input} in, {arguments.output} out, {device_name()}, torch {torch.__version__}")
    for name in ("drafts", "acceptance", "requests", "TPOT ms", "tokens a step", "against none"):
        table.add_column(name, justify="right")
    for row in rows:
        row["against_none"] = row["tpot_ms"] / plain[row["requests"]]
        table.add_row(
            str(row["drafts"]),
            row["acceptance"] or "-",
            str(row["requests"]),
            f"{row['tpot_ms']:.2f}",
            f"{row['tokens_per_step']:.2f}",
            f"{row['against_none']:.2f} x",
        )
    Console(width=120).print(table)
    versions = {"requant": requant.__version__, "torch": torch.__version__}
    facts = {"device": device_name(), "versions": versions, "model": arguments.model, "recipe": arguments.recipe}
    arguments.output_file.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
