"""The two kinds of layer that own parameters: those that a recipe can reach, and all others.

Neither owns a parameter before ``build``: a model is constructed on no device, and the plan is made from the
placements alone. Both satisfy the protocols of :mod:`requant.loading.protocols`.
"""

from abc import abstractmethod
from collections.abc import Container

import torch
from torch import Tensor, nn

from requant.formats.base import Format
from requant.parallel import Placement
from requant.recipe.layer import LayerNames


def empty_parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialized parameter of any dtype, without a gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class PlainLayer(nn.Module):
    """A layer whose parameters are filled as the checkpoint has them.

    Attributes:
        placements: The checkpoint tensors that fill it; ``()`` for a layer that only needs to know its device.
    """

    placements: tuple[Placement, ...] = ()

    @abstractmethod
    def build(self, dtype: torch.dtype, device: torch.device) -> None:
        """Create the parameters in ``dtype`` on ``device``, for loading to fill."""


class QuantizableLayer(nn.Module):
    """A layer that a recipe can reach.

    Attributes:
        names: What a recipe sees of it.
        placements: The checkpoint tensors that fill it.
        tied: Kept unquantized, it shares the parameter of a plain layer: nothing is created or read for it.
            Quantized, it is a separate copy, read like any other.
    """

    names: LayerNames
    placements: tuple[Placement, ...]
    tied: bool = False

    def match_checkpoint(self, tensors: Container[str]) -> None:
        """Before anything else: choose names and placements where checkpoints come in several layouts.

        Args:
            tensors: Names of the checkpoint's tensors.
        """

    def activation(self, format: Format | None) -> str | None:
        """How the layer quantizes its input (``Format.activation``); None: it takes the model's dtype."""
        return format.activation if format else None

    @abstractmethod
    def layout_bytes(self, format: Format | None, dtype: torch.dtype, device: torch.device) -> int:
        """Bytes that :meth:`finish` adds to the parameters."""

    @abstractmethod
    def build(self, format: Format | None, dtype: torch.dtype, device: torch.device) -> None:
        """Create the parameters: quantized in ``format``, or unquantized in ``dtype``, for loading to fill."""

    @abstractmethod
    def finish(self) -> None:
        """Once all bytes are in place: the layout step that the GEMM needs."""


def not_finished(*inputs: Tensor) -> Tensor:
    """The forward of a layer that is not loaded.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError("the layer has no weights yet: build(), fill its placements, then finish()")
