"""What loading asks of a model's modules; :mod:`requant.layers` satisfies it without being imported here."""

from collections.abc import Container
from typing import Protocol, runtime_checkable

import torch

from requant.formats.base import Format
from requant.parallel import Placement
from requant.recipe.layer import LayerNames


@runtime_checkable
class PlainModule(Protocol):
    """A module whose parameters are filled as the checkpoint has them (norms, embeddings).

    Structurally a quantizable module looks like one too: tell them apart by ``names``, or take the model's own
    ``quantizable()`` and ``plain()``. A module may have no placements and still want :meth:`build` (rotary tables).
    """

    placements: tuple[Placement, ...]

    def build(self, dtype: torch.dtype, device: torch.device) -> None:
        """Create the parameters in ``dtype``."""


@runtime_checkable
class QuantizableModule(Protocol):
    """A module that a recipe can reach. It owns no weight until :meth:`build` says in which format.

    Of its ``placements`` the two-dimensional ones are the parts: matrices [n, K] of the checkpoint. Those of one
    parameter stack along N in the order in which they are listed, and their scales, which lie in the parameter's
    name with ``_scale`` behind, likewise. Others (``bias``) are filled as they are.

    ``tied``: kept unquantized, the module shares a plain module's parameter (``lm_head`` of a model with tied
    embeddings): it owns no parameter, takes no bytes, and its placements are not read. Quantized, it is a copy of
    its own, and its placements (which name the embedding's tensor) are read like any other's.
    """

    names: LayerNames
    placements: tuple[Placement, ...]
    tied: bool

    def match_checkpoint(self, tensors: Container[str]) -> None:
        """Choose names and placements for a checkpoint with these tensors; called before they are used."""

    def activation(self, format: Format | None) -> str | None:
        """How the module quantizes its input when its weight is stored in ``format``; None: it does not."""

    def layout_bytes(self, format: Format | None, dtype: torch.dtype, device: torch.device) -> int:
        """Bytes that :meth:`finish` adds on ``device``."""

    def build(self, format: Format | None, dtype: torch.dtype, device: torch.device) -> None:
        """Create the parameters: ``weight`` and ``weight_scale`` in ``format``, or ``weight`` in ``dtype``."""

    def finish(self) -> None:
        """After the last byte is in place: the layout step, once."""
