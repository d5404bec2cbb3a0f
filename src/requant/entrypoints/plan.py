"""``requant plan``: what a recipe will do to a model; no weight is read."""

import argparse
import json
import sys

from requant.engine.logs import configure_logging
from requant.entrypoints.arguments import add_engine_flags, engine_config

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

    from requant.engine.build import plan_model
    from requant.recipe import Recipe, explain
    from requant.tools.plan import WIDE, render

    planned = plan_model(config, headers_only=True)
    if parsed.explain is not None:
        recipe = Recipe.parse(config.quant.online_quant_config)
        kept = {layer.name: layer.storage.reason for layer in planned.plan.kept}
        names = [layer.names for layer in planned.model.quantizable()]
        absent = [layer for layer in planned.model.not_loaded if layer.module in kept]
        print(explain(recipe, [*names, *absent], parsed.explain, kept))
    elif parsed.json:
        json.dump(planned.plan.to_report(), sys.stdout, indent=2)
        print()
    else:
        render(planned.plan, Console(width=None if sys.stdout.isatty() else WIDE), parsed.every_layer)
