"""``python -m requant.entrypoints.openai_server --model M``: the OpenAI server."""

import sys
from collections.abc import Sequence

from requant.console import Parser, run
from requant.engine.interface import BUILD_CORE, CoreFactory
from requant.entrypoints.serve import DESCRIPTION, add_flags, serve


def main(argv: Sequence[str] | None = None, core_factory: CoreFactory = BUILD_CORE) -> int:
    """Serve as the arguments say; returns the exit code."""

    def command(argv: Sequence[str] | None) -> None:
        parser = Parser(prog="requant.entrypoints.openai_server", description=DESCRIPTION, allow_abbrev=False)
        add_flags(parser)
        serve(parser.parse_args(argv), core_factory)

    return run(command, argv)


if __name__ == "__main__":
    sys.exit(main())
