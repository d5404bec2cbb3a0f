"""Where weights go: which slice of which checkpoint tensor fills which rows of which parameter.

Pure data and slice arithmetic: nothing here reads a file or touches a device.
"""

from requant.parallel.placement import Placement

__all__ = ["Placement"]
