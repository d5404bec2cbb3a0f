"""Token embedding, and the output head that goes with it."""

from collections.abc import Callable, Container

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from requant.formats.base import Format
from requant.kernels.table import lookup
from requant.layers.base import PlainLayer, empty_parameter
from requant.layers.linear import Linear, Part
from requant.parallel import ALONE, Placement, Ranks


class Embedding(PlainLayer):
    """One row of ``weight`` [V, H] a token; each rank has some of the rows.

    Args:
        name: The module's name, which is its checkpoint name as well.
        rows: V, the size of the vocabulary.
        size: H.
        ranks: The ranks.
    """

    weight: nn.Parameter

    def __init__(self, name: str, rows: int, size: int, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.name = name
        self.size = size
        self.own = ranks.split(rows, "vocab_size")
        self.placements = (Placement(f"{name}.weight", (rows, size), rows=self.own if ranks.size > 1 else None),)
        self._ranks = ranks

    def build(self, dtype: torch.dtype, device: torch.device) -> None:
        """Create ``weight``, this rank's rows of [V, H]."""
        self.weight = empty_parameter((len(self.own), self.size), dtype, device)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [T] → rows [T, H]."""
        if self._ranks.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.own.start
        foreign = (local < 0) | (local >= len(self.own))
        rows = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return self._ranks.sum(rows.masked_fill(foreign[:, None], 0))  # one rank has each row, all others 0

    def project(self, x: Tensor) -> Tensor:
        """X [T, H] → x · weightᵀ, this rank's columns of [T, V]: the embedding as an output head."""
        return lookup("dense", "*", x.device.type)(x, self.weight)


class OutputHead(Linear):
    """The projection onto the vocabulary: protected, and tied to the embedding in some models.

    A tied head that is kept unquantized has no parameter: it projects with the embedding's, whichever of the two
    is built first. A tied head that a recipe quantizes is a separate copy, read from the embedding's tensor. In the
    same way the head of a draft layer is the model's, or a separate copy, read from its own tensor where there is one.

    Args:
        name: The module's name (``lm_head``), which an override must spell to reach it.
        rows: V.
        in_features: H.
        tied_to: The embedding whose checkpoint tensor the head shares, if it is tied.
        ranks: The ranks, each of which has some of the rows.
        kind: What kind of protected layer it is; None: its name says it.
        same_as: The head that it is, but for what a recipe says of it.
    """

    def __init__(
        self,
        name: str,
        rows: int,
        in_features: int,
        tied_to: Embedding | None = None,
        ranks: Ranks = ALONE,
        *,
        kind: str | None = None,
        same_as: "OutputHead | None" = None,
    ) -> None:
        own = ranks.split(rows, "vocab_size") if ranks.size > 1 else None
        super().__init__(name, in_features, [Part(name, rows, own=own)], protected=kind or name)
        self._ranks = ranks
        self._shares = [len(share) for share in ranks.shares(rows, "vocab_size")]
        owner = tied_to or same_as
        self.tied = owner is not None
        # The method and not the module, which would appear a second time among the model's modules.
        self._project: Callable[[Tensor], Tensor] | None = owner.project if owner else None
        self._others = owner.placements if owner else ()
        if tied_to is not None:
            self.placements = tied_to.placements

    def match_checkpoint(self, tensors: Container[str]) -> None:
        """Read what it shares where the checkpoint has no tensor of its own."""
        if self._others and self.placements[0].tensor not in tensors:
            self.placements = self._others

    def build(self, format: Format | None, dtype: torch.dtype, device: torch.device) -> None:
        """As :meth:`Linear.build`; nothing is created for a tied head that is kept unquantized."""
        if not (self.tied and format is None):
            super().build(format, dtype, device)
            return
        self._format, self.weight, self.weight_scale = None, None, None

    def finish(self) -> None:
        """As :meth:`Linear.finish`."""
        if self._project is not None and self._format is None:
            self._forward = self._project
        else:
            super().finish()

    def project(self, x: Tensor) -> Tensor:
        """X [T, H] → this rank's columns of [T, V]."""
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        """X [T, H] → [T, V], the same on every rank."""
        logits = self.project(x)
        return self._ranks.group.all_gather(logits, self._shares) if self._ranks.size > 1 else logits
