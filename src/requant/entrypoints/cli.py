"""The ``requant`` command."""

import sys
from collections.abc import Sequence

from requant import __version__
from requant.benchmarks import benchmark_serving
from requant.console import Parser, run
from requant.entrypoints import cache, plan, serve

_COMMANDS = {
    "serve": (serve.DESCRIPTION, serve.add_flags, serve.serve),
    "plan": (plan.DESCRIPTION, plan.add_flags, plan.plan),
    "bench": (benchmark_serving.DESCRIPTION, benchmark_serving.add_flags, benchmark_serving.bench),
    "cache": (cache.DESCRIPTION, cache.add_flags, cache.cache),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    return run(_command, argv)


def _command(argv: Sequence[str] | None) -> None:
    parser = Parser(prog="requant", description="Quantize a model's weights while loading them.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"requant {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for name, (description, add_flags, _) in _COMMANDS.items():
        add_flags(commands.add_parser(name, help=description, description=description, allow_abbrev=False))
    parsed = parser.parse_args(argv)
    _COMMANDS[parsed.command][2](parsed)


if __name__ == "__main__":
    sys.exit(main())
