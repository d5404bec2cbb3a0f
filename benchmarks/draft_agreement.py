"""How often the MTP layer drafts what the model itself would say: its first token, teacher forced.

    python benchmarks/draft_agreement.py --model M --text val.txt
    python benchmarks/draft_agreement.py --model M --text val.txt --recipe none --recipe recipes/deepseek-r1.json

The text is cut into windows, each by itself. At every place where both say something of the same token, the draft's
most likely one (from the hidden state and the text's own next token) is compared with the model's. Prints one table and
writes the same as JSON.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import requant
from perplexity import cut_windows, device_name, parse_recipe, tokenize
from requant.engine.batch import make_step, to_device
from requant.engine.build import load_rank
from requant.engine.config import DTYPES, EngineConfig
from requant.engine.messages import CoreRequest
from requant.engine.request import Request
from requant.engine.runner import ModelRunner
from requant.engine.runner_protocol import ScheduledSequence
from requant.engine.sampling_params import SamplingParams
from requant.errors import RequantError


@dataclass(frozen=True)
class Agreement:
    """What was counted.

    Attributes:
        tokens: Places compared.
        same: Those at which the draft's most likely token is the model's.
    """

    tokens: int
    same: int

    @property
    def share(self) -> float:
        """Part of the places, 0 to 1."""
        return self.same / self.tokens


@torch.inference_mode()
def draft_agreement(runner: ModelRunner, windows: Sequence[Sequence[int]]) -> Agreement:
    """Compare the draft with the model on windows of tokens, each by itself.

    Args:
        runner: Of a model with an MTP layer; its KV cache holds the longest window.
        windows: Tokens, 3 or more in each.
    """
    tokens = same = 0
    model = runner.model
    for window in windows:
        request = Request(CoreRequest("window", tuple(window), SamplingParams()), context=len(window) + 1)
        request.blocks = list(range(-(-len(window) // runner.block_size)))
        sequence = ScheduledSequence(request, 0, len(window))
        step = to_device(make_step([sequence], runner.block_size), runner.device)
        hidden = model(step.input_ids, step.positions, step.attention)
        # Token i + 1 behind token i; the last one has none, and what is said of it is not looked at.
        following = step.input_ids.roll(-1)
        drafted = model.draft(following, hidden, step.positions, step.attention)
        said = model.compute_logits(hidden[1:-1]).argmax(-1)
        foreseen = model.draft_logits(drafted[:-2]).argmax(-1)
        tokens += said.numel()
        same += int((said == foreseen).sum())
    return Agreement(tokens, same)


def measure(arguments: argparse.Namespace, recipe: str) -> dict[str, Any]:
    """Load under one recipe and compare."""
    windows = cut_windows(tokenize(arguments.model, arguments.text.read_text()), arguments.window, arguments.tokens)
    config = EngineConfig.create(
        model=arguments.model,
        online_quant_config=parse_recipe(recipe)[1],
        online_quant_info_dir=str(arguments.output_file.parent),
        dtype=arguments.dtype,
        method="mtp",
        max_model_len=arguments.window + 1,
        max_num_seqs=1,
        enforce_eager=True,
    )
    agreement = draft_agreement(load_rank(config).runner, windows)
    return {"recipe": recipe, "tokens": agreement.tokens, "same": agreement.same, "agreement": agreement.share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a local folder or a Hugging Face id, with an MTP layer")
    parser.add_argument("--text", type=Path, required=True, help="a file of text")
    parser.add_argument("--recipe", action="append", help="none, a format, JSON or a file (default: none)")
    parser.add_argument("--window", type=int, default=512, help="tokens in a window")
    parser.add_argument("--tokens", type=int, help="only so many tokens of the text (default: all)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--output-file", type=Path, default=Path("out/draft_agreement.json"))
    arguments = parser.parse_args()
    if arguments.window < 3:
        parser.error(f"--window is {arguments.window}; accepted: 3 or more")
    arguments.output_file.parent.mkdir(parents=True, exist_ok=True)
    try:
        rows = [measure(arguments, recipe) for recipe in arguments.recipe or ("none",)]
    except RequantError as error:
        parser.exit(2, f"error: {error}\n")
    table = Table(title=f"{arguments.model}, {device_name()}, torch {torch.__version__}")
    for title in ("recipe", "tokens", "draft = model"):
        table.add_column(title, justify="left" if title == "recipe" else "right")
    for row in rows:
        table.add_row(row["recipe"], str(row["tokens"]), f"{100 * row['agreement']:.2f} %")
    Console(width=120).print(table)
    versions = {"requant": requant.__version__, "torch": torch.__version__}
    facts = {"device": device_name(), "versions": versions, "model": arguments.model, "text": str(arguments.text)}
    arguments.output_file.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
