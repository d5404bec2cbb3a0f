"""What loading asks of a model's modules; :mod:`requant.layers` satisfies it without being imported here."""

from typing import Protocol, runtime_checkable

import torch

from requant.formats.base import Format
from requant.parallel import Placement
from requant.recipe.layer import LayerNames


@runtime_checkable
class PlainModule(Protocol):
    """A module whose parameters are filled as the checkpoint has them (norms, embeddings)."""

    placements: tuple[Placement, ...]


@runtime_checkable
class QuantizableModule(Protocol):
    """A module that a recipe can reach. It owns no weight until :meth:`build` says in which format.

    ``placements`` with ``parameter == "weight"`` are the parts; each is a matrix [n, K] of the checkpoint, and
    they stack along N in the order of ``names.parts``. Others (``bias``) are filled as they are.
    """

    names: LayerNames
    placements: tuple[Placement, ...]

    def build(self, format: Format | None, dtype: torch.dtype, device: torch.device) -> None:
        """Create the parameters: ``weight`` and ``weight_scale`` in ``format``, or ``weight`` in ``dtype``."""

    def finish(self) -> None:
        """After the last byte is in place: the layout step, once."""
