"""Perplexity of a text under several recipes: what each one costs in accuracy.

    python benchmarks/perplexity.py --model models/SmolLM2-135M-Instruct-q4_1
    python benchmarks/perplexity.py --model M --recipe none --recipe '{"layer_quant_config": {"*.mlp.*": "mxfp4"}}'

The text is tokenized as a whole, without special tokens, and cut into windows of equal length that don't overlap; what
is left at the end is not used unless ``--rest`` asks for it. Each window is a prompt of its own: its first token has
nothing before it and is not scored. The figure is exp(-mean log-probability) over all scored tokens of all windows. The
first recipe is the one that the others are compared with. Prints one table and writes the same as JSON.
"""

import argparse
import hashlib
import json
import math
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import requant
from requant.engine.config import DTYPES
from requant.engine.messages import TokenLogprobs
from requant.errors import ConfigError, RequantError

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct-q4_1"
TEXT = ROOT / "tests" / "data" / "english.txt"
UNQUANTIZED = "none"
RECIPES = (UNQUANTIZED, "ptpc_fp8", "per_block_fp8", "mxfp4")


def cut_windows(tokens: Sequence[int], size: int, limit: int | None = None, rest: bool = False) -> list[list[int]]:
    """Cut the first ``limit`` tokens (None: all) into consecutive windows of ``size``.

    What is left at the end is left out; with ``rest`` it is a shorter window, if it has two tokens at least.

    Raises:
        ConfigError: A window could not score anything, or there is not one whole window.
    """
    if size < 2:
        raise ConfigError(f"--window is {size}; accepted: 2 or more (a window's first token is not scored)")
    if limit is not None and limit < size:
        raise ConfigError(f"--tokens is {limit}; accepted: {size} (one window) or more")
    if len(tokens) < size:
        raise ConfigError(f"the text has {len(tokens)} tokens, which is less than one window of {size}")
    end = len(tokens) if limit is None else min(limit, len(tokens))
    windows = [list(tokens[start : min(start + size, end)]) for start in range(0, end, size)]
    return [window for window in windows if len(window) == size or (rest and len(window) > 1)]


def tokenize(model: str, text: str) -> list[int]:
    """The text's tokens under the model's tokenizer, no special token added.

    Raises:
        ConfigError: ``model`` has no tokenizer that transformers can load.
    """
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer for {model}: {str(error).splitlines()[0]}") from error
    # verbose=False: the whole text is longer than the model's context, and need not fit it.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def window_logprobs(window: Sequence[int], scores: Sequence[TokenLogprobs | None]) -> list[float]:
    """The log-probabilities of a window's tokens after the first, checked against the window.

    Raises:
        ValueError: The scores are not those of this window. A figure from them would look plausible.
    """
    if len(scores) != len(window) or scores[0] is not None:
        raise ValueError(f"{len(scores)} prompt logprobs for {len(window)} tokens; the first must be None, only it")
    values = []
    for token, score in zip(window[1:], scores[1:], strict=True):
        if score is None or score.token != token or not math.isfinite(score.logprob):
            raise ValueError(f"the prompt logprob of token {token} is {score}")
        values.append(score.logprob)
    return values


def perplexity(logprobs: Sequence[float]) -> float:
    """exp of the mean negative log-probability (natural logarithm)."""
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def parse_recipe(argument: str) -> tuple[str, dict[str, Any] | None]:
    """Name and recipe of one ``--recipe``: ``none``, a format as the global target, a JSON object or a file of one.

    Raises:
        ConfigError: Something that starts like JSON and is none, or a file that cannot be read.
    """
    if argument == UNQUANTIZED:
        return "as it is", None
    if argument.endswith(".json"):
        try:
            return argument, json.loads(Path(argument).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--recipe {argument} cannot be read: {error}") from error
    if not argument.lstrip().startswith("{"):
        return argument, {"global_quant_config": argument, "exclude_layer": ["lm_head"]}
    try:
        return argument, json.loads(argument)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--recipe {argument} is not JSON: {error}") from error


def measure(
    model: str, recipe: dict[str, Any] | None, windows: list[list[int]], dtype: str, report_folder: Path
) -> dict[str, Any]:
    """Load ``model`` with ``recipe`` and score every window.

    Returns:
        ``windows``, ``tokens`` (scored ones), ``ppl``, ``load_seconds`` and ``seconds`` (scoring alone).
    """
    begin = time.perf_counter()
    llm = requant.LLM(
        model,
        online_quant_config=recipe,
        online_quant_info_dir=str(report_folder),
        dtype=dtype,
        max_model_len=len(windows[0]) + 1,
    )
    try:
        loaded = time.perf_counter()
        outputs = llm.generate(windows, requant.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
        done = time.perf_counter()
    finally:
        llm.shutdown()
    pairs = zip(windows, outputs, strict=True)
    logprobs = [value for window, output in pairs for value in window_logprobs(window, output.prompt_logprobs)]
    return {
        "windows": len(windows),
        "tokens": len(logprobs),
        "ppl": perplexity(logprobs),
        "load_seconds": loaded - begin,
        "seconds": done - loaded,
    }


def device_name() -> str:
    """The device that the engine picks by default, in words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


def make_table(document: dict[str, Any]) -> Table:
    """One row a recipe, with its perplexity relative to the first one's."""
    results = document["results"]
    title = f"Perplexity of {Path(document['model']).name}, windows of {document['window']} tokens"
    table = Table(title=title, caption=f"dtype {document['dtype']}, {document['device']}")
    table.add_column("recipe", overflow="fold")
    for heading in ("perplexity", "relative", "tokens", "load s", "score s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        ratio = result["ppl"] / results[0]["ppl"]
        times = f"{result['load_seconds']:.1f}", f"{result['seconds']:.1f}"
        table.add_row(result["name"], f"{result['ppl']:.3f}", f"{ratio:.4f}", f"{result['tokens']:,}", *times)
    return table


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every recipe; the document that is written as JSON.

    Raises:
        RequantError: A bad argument, or an error of the engine.
    """
    recipes = [parse_recipe(argument) for argument in arguments.recipe or RECIPES]
    text = arguments.text.read_bytes()
    windows = cut_windows(
        tokenize(arguments.model, text.decode("utf-8")), arguments.window, arguments.tokens, arguments.rest
    )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    results = []
    for name, recipe in recipes:
        figures = measure(arguments.model, recipe, windows, arguments.dtype, arguments.output.parent)
        results.append({"name": name, "recipe": recipe, **figures})
    return {
        "model": arguments.model,
        "text": arguments.text.name,
        "text_sha256": hashlib.sha256(text).hexdigest(),
        "window": arguments.window,
        "dtype": arguments.dtype,
        "device": device_name(),
        "versions": {module.__name__: module.__version__ for module in (requant, torch, transformers)},
        "results": results,
    }


def main() -> int:
    """Parse the command line, measure, print and write; exit code 2 and one line on an error."""
    parser = argparse.ArgumentParser(description="Perplexity of a text under several recipes.")
    parser.add_argument(
        "--model", default=str(MODEL), help="a local folder or a Hugging Face id (default: %(default)s)"
    )
    parser.add_argument("--text", type=Path, default=TEXT, help="UTF-8 text (default: %(default)s)")
    parser.add_argument(
        "--recipe",
        action="append",
        help="'none', a format (global target, lm_head excluded), a JSON object or a file; may be repeated "
        f"(default: {', '.join(RECIPES)})",
    )
    parser.add_argument("--window", type=int, default=512, help="tokens in a window (default: %(default)s)")
    parser.add_argument("--tokens", type=int, help="use only this many of the text's first tokens (default: all)")
    parser.add_argument("--rest", action="store_true", help="score what is left at the end as a shorter window")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="as the engine's flag (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "out" / "perplexity.json", help="default: %(default)s")
    arguments = parser.parse_args()
    try:
        document = run(arguments)
    except (RequantError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Console().print(make_table(document))
    arguments.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"written: {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
