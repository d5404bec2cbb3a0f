"""How a model is cut over ranks: which slice of which checkpoint tensor fills which rows of which parameter.

Slices are pure data: nothing here reads a file. Of the ranks' communication only the :class:`Group` is known to others.
"""

from requant.parallel.group import Group, Position
from requant.parallel.placement import Placement
from requant.parallel.ranks import ALONE, Ranks

__all__ = ["ALONE", "Group", "Placement", "Position", "Ranks"]
