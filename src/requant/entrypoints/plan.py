"""``requant plan``: what a recipe will do to a model; no weight is read."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from requant.engine.logs import configure_logging
from requant.entrypoints.arguments import add_engine_flags, engine_config

if TYPE_CHECKING:
    from requant.engine.build import Planned

DESCRIPTION = "Show what a recipe will do to a model, and what that will take. No weight is read."


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The engine's flags, and the plan's own."""
    add_engine_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the report's JSON object instead of tables")
    parser.add_argument(
        "--every-layer", action="store_true", help="a row for each layer, also where only indices differ"
    )
    parser.add_argument("--explain", metavar="NAME", help="print how the recipe decides one layer or checkpoint matrix")


def plan(parsed: argparse.Namespace) -> None:
    """Print the plan to stdout.

    Raises:
        RequantError: Recipe, checkpoint or configuration are not acceptable.
    """
    config = engine_config(parsed)
    configure_logging("warning")
    # Imported now, so that help and a wrong flag are answered at once.
    from rich.console import Console

    from requant.engine.build import plan_rank, read_files
    from requant.parallel import Position, Ranks
    from requant.recipe import Recipe, explain
    from requant.tools.plan import WIDE, render
    from requant.tools.plan_ranks import render_ranks, replicated, survey_all, windows

    files = read_files(config, headers_only=True)
    size, expert_parallel = config.parallel.tensor_parallel_size, config.parallel.enable_expert_parallel

    def planned_rank(rank: int) -> "Planned":
        return plan_rank(files, config, Ranks(Position(rank, size), expert_parallel))

    planned = planned_rank(0)
    if parsed.explain is not None:
        recipe = Recipe.parse(config.quant.online_quant_config)
        kept = {layer.name: layer.storage.reason for layer in planned.plan.kept}
        names = [layer.names for layer in planned.model.quantizable()]
        absent = [layer for layer in planned.model.not_loaded if layer.module in kept]
        print(explain(recipe, [*names, *absent], parsed.explain, kept))
        return

    def plan_of(rank: int) -> "Planned":
        status.update(f"planning rank {rank} of {size}")
        return planned if rank == 0 else planned_rank(rank)

    with Console(stderr=True).status("") as status:  # shown on a terminal only
        ranks = survey_all(size, plan_of)
    if parsed.json:
        report = planned.plan.to_report()
        if size > 1:
            copies = [{"tensors": name, "ranks": copies} for name, copies in replicated(ranks)]
            report |= {"ranks": [r.to_dict() for r in ranks], "windows": windows(ranks), "replicated": copies}
        json.dump(report, sys.stdout, indent=2)
        print()
        return
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    render(planned.plan, console, parsed.every_layer)
    if size > 1:
        render_ranks(ranks, expert_parallel, console)
