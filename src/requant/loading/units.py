"""Sizes for people."""


def show_bytes(nbytes: float) -> str:
    """``nbytes`` in decimal units: ``"999 bytes"``, ``"28 MB"``, ``"61.07 GB"``."""
    for unit in ("bytes", "KB", "MB"):
        if nbytes < 999.5:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"
