"""Logging of the programs: the server's and the engine's process write to stderr in one format."""

import logging
import sys

LEVELS = ("debug", "info", "warning", "error")

logger = logging.getLogger("requant")


def configure_logging(level: str = "info", who: str = "") -> None:
    """Send log records to stderr: requant's from ``level`` up, other libraries' from WARNING up.

    For programs only; a library user's own logging configuration is left alone. ``who`` stands before each message.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(levelname)s %(asctime)s %(name)s: {who}%(message)s", "%m-%d %H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logger.setLevel(level.upper())
