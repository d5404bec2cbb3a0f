"""``requant cache``: what a cache of quantized weights holds, and removing what is of no use."""

import argparse
import json
import sys
from pathlib import Path

from requant.errors import ConfigError

DESCRIPTION = "Show or clean a folder of quantized weights (--online-quant-cache)."

_LIST = "Show the entries of a cache, most recently used first, and whether they can still be used."
_PRUNE = (
    "Remove entries that can never be used again: their checkpoint has changed or is gone, another version of requant "
    "made them, they are damaged, or the process that wrote them was ended. Entries in use stay."
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The commands ``list`` and ``prune``."""
    commands = parser.add_subparsers(title="commands", dest="action", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help=_LIST, description=_LIST, allow_abbrev=False)
    pruning = commands.add_parser("prune", help=_PRUNE, description=_PRUNE, allow_abbrev=False)
    for command in (listing, pruning):
        command.add_argument("folder", metavar="DIR", help="the cache")
    listing.add_argument("--json", action="store_true", help="print JSON instead of a table")
    limits = pruning.add_mutually_exclusive_group()
    limits.add_argument("--all", action="store_true", help="remove every entry that is not in use")
    limits.add_argument(
        "--max-gb", type=float, metavar="GB", help="also remove the least recently used, until what is left is smaller"
    )
    pruning.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def cache(parsed: argparse.Namespace) -> None:
    """Run one of the commands.

    Raises:
        ConfigError: The folder cannot be read, or a number makes no sense.
    """
    folder = Path(parsed.folder).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"no such folder: {folder}")
    # Imported now, so that help and a wrong flag are answered at once.
    from rich.console import Console

    from requant.loading.cache import Store
    from requant.loading.units import show_bytes
    from requant.tools.cache import WIDE, describe, listing, to_json, unwanted

    store = Store(folder)
    states = store.states()
    if parsed.action == "list":
        if parsed.json:
            json.dump([to_json(state) for state in states], sys.stdout, indent=2)
            print()
        else:
            listing(states, Console(width=None if sys.stdout.isatty() else WIDE))
        return
    if parsed.max_gb is not None and not parsed.max_gb >= 0:
        raise ConfigError(f"--max-gb is {parsed.max_gb}; accepted: 0 or more")
    freed = 0
    for state in unwanted(states, parsed.all, parsed.max_gb):
        if not parsed.dry_run and not store.remove(state.folder):
            print(f"in use, stays: {describe(state)}")
            continue
        freed += state.nbytes
        print(f"{'would be removed' if parsed.dry_run else 'removed'}: {describe(state)}")
    print(f"{show_bytes(freed)} {'would be' if parsed.dry_run else ''} freed".replace("  ", " "))
