"""How every command line ends: 0, or one line on stderr and an exit code, without a traceback for the user's errors."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from requant.errors import ConfigError, RequantError

_INTERRUPTED = 130
_READER_GONE = 141


class EngineFailed(Exception):
    """An engine failed while it served, and not for anything in the command line; it has said more itself."""


class Parser(argparse.ArgumentParser):
    """argparse, with one-line errors, and dashes and underscores interchangeable in the flags' names."""

    def error(self, message: str) -> NoReturn:
        """Report a wrong command line as any other wrong input."""
        raise ConfigError(message)

    def parse_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Parse, with every long flag spelled with dashes; its value is left as it is."""
        given = sys.argv[1:] if args is None else args
        return super().parse_args([_dashed(arg) for arg in given], namespace)


def _dashed(arg: str) -> str:
    if not arg.startswith("--"):
        return arg
    flag, equals, value = arg.partition("=")
    return flag.replace("_", "-") + equals + value


def run(command: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        command: Takes the arguments (None: those of the process).
        argv: The arguments.

    Returns:
        The exit code: 2 for an error of the user's, 1 if the engine failed, 130 if interrupted,
        141 if the reader of its output is gone.
    """
    try:
        command(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output wants no more of it; nor does the interpreter, which flushes stdout once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE
    except RequantError as error:
        return _complain(str(error), 2)
    except EngineFailed as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _complain(message: str, code: int) -> int:
    print(f"requant: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code
