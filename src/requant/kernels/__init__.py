"""What runs on a device: a table from (op, format, device type) to a function.

:mod:`requant.kernels.reference` is the plain-torch fallback and defines the numbers; :mod:`requant.kernels.triton`
holds the GPU kernels, imported only where the table picks one.
"""

from requant.kernels.table import layout_bytes, lookup

__all__ = ["layout_bytes", "lookup"]
