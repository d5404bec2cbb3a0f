"""The plan: what loading will do, decided before a weight is read. Made by :func:`requant.loading.make_plan`."""

from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from typing import Any

import torch

from requant.errors import ConfigError
from requant.formats.base import Format
from requant.formats.shard import Shard
from requant.formats.storage import Storage
from requant.loading.headers import TensorInfo
from requant.loading.sources import ScalePart
from requant.loading.units import show_bytes
from requant.parallel import ALONE, Placement, Ranks
from requant.recipe.layer import Decision

BUDGET = 1024**3
"""Most bytes that loading takes on the device beside the finished weights."""

# A chunk that is quantized and the temporaries of the reference, which holds each value a few times in float32: no
# checkpoint takes more than this for each of its bytes, so small ones need less than BUDGET.
_TEMPORARIES = 8
_TEMPORARIES_REQUANTIZING = 32


@dataclass(frozen=True)
class Step:
    """A rectangle of one tensor of the checkpoint on its way into one parameter.

    Rows and columns are those of ``placement.shape``; a vector is a column.

    Attributes:
        tensor: What is read.
        module: Name of the module that owns the parameter.
        placement: Which of its rows are filled, and by which rectangle of the tensor.
        rows: Rows that are read: this rank's, and the others of the blocks that they are in.
        columns: Columns that are read, likewise; all of them where a row is short.
        source: The format that the tensor is in; None: unquantized.
        format: What the parameter is stored as; None: unquantized.
        scale_offset: Row of the parameter's scales where those of this tensor begin.
        scale: Index in :attr:`Plan.scales` of the tensor's scales, where it is dequantized; else None.
        together: Whether rows have scales of their own, and parts of them on every rank: their largest magnitudes are
            compared. The same on every rank.
    """

    tensor: TensorInfo
    module: str
    placement: Placement
    rows: range
    columns: range
    source: Format | None = None
    format: Format | None = None
    scale_offset: int = 0
    scale: int | None = None
    together: bool = False

    @property
    def converts(self) -> bool:
        """Whether values are computed: quantized or dequantized, not only copied or cast."""
        return self.source != self.format

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row of the tensor; rows are counted as :class:`~requant.parallel.Placement` says."""
        leading = self.tensor.shape[: len(self.tensor.shape) - len(self.placement.shape) + 1]
        return self.tensor.nbytes // max(prod(leading), 1)

    @cached_property
    def run_bytes(self) -> int:
        """Bytes that are read of each row."""
        return self._column_bytes(len(self.columns))

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return len(self.rows) * self.run_bytes

    @property
    def wanted_bytes(self) -> int:
        """Bytes of what this rank has: those that are read, without what is read for its neighbours' sake."""
        columns = len(self.placement.own_columns if len(self.placement.shape) == 2 else self.columns)
        row = self._column_bytes(columns)
        if self.source is not None and self.placement.columns is not None:
            row = ceil(columns / self.source.codes_per_byte) * self.source.data_dtype.itemsize
        return len(self.placement.own_rows) * row

    @property
    def begin(self) -> int:
        """Offset of the first byte that is read, within the tensor."""
        return self.offset(self.rows.start)

    @property
    def cut(self) -> bool:
        """Whether some columns are not read, so that each row is a run of its own in the file."""
        return self.run_bytes < self.row_bytes

    @cached_property
    def shard(self) -> Shard | None:
        """How the parameter stores what this rank has; None: unquantized."""
        if self.format is None:
            return None
        n, k = self.placement.shape
        return Shard(self.format, (n, k), self.placement.own_rows, self.placement.own_columns)

    def offset(self, row: int) -> int:
        """Offset of the first byte that is read of a row, within the tensor."""
        return (self.placement.start + row) * self.row_bytes + self._column_bytes(self.columns.start)

    def _column_bytes(self, columns: int) -> int:
        """Bytes of a row's first columns: a number that ends with a group, or all of them."""
        if self.source is not None:
            return self.source.data_shape(1, columns)[1] * self.source.data_dtype.itemsize
        return self.row_bytes * columns // max(prod(self.placement.shape[1:]), 1)


@dataclass(frozen=True)
class ScaleStep:
    """Scales of the checkpoint, read before any weight.

    Attributes:
        part: What is read: whole rows.
        columns: Those of its columns that are kept.
        module: Name of the module that owns the weight.
        parameter: Name of the parameter that holds the scales from now on; "": they are needed only until the weight
            has been dequantized.
        offset: The parameter's row where they begin.
    """

    part: ScalePart
    columns: range
    module: str
    parameter: str = ""
    offset: int = 0

    @property
    def wanted_bytes(self) -> int:
        """Bytes of what is kept."""
        return self.part.nbytes // max(self.part.shape[1], 1) * len(self.columns)


@dataclass(frozen=True)
class Conversion:
    """A matrix of the checkpoint that is quantized: all of it, of which this rank has a part, or nothing.

    Attributes:
        module: Name of the module that owns the parameter.
        placement: Where the matrix lies in the checkpoint, and where what this rank has of it goes.
        format: What it is quantized to.
        scale_offset: Row of the parameter's scales where this rank's of the matrix begin.
    """

    module: str
    placement: Placement
    format: Format
    scale_offset: int

    @property
    def shard(self) -> Shard:
        """How the parameter stores what this rank has."""
        n, k = self.placement.shape
        return Shard(self.format, (n, k), self.placement.own_rows, self.placement.own_columns)


@dataclass(frozen=True)
class LayerPlan:
    """One layer that the recipe could reach.

    Attributes:
        decision: What the recipe says, and which pattern said it.
        storage: What it is stored as.
        parts: Checkpoint names of the matrices it is made of.
        source: What they are in the checkpoint: a format's name, or a dtype as safetensors spells it (several joined
            by ``+``).
        activation: How its input is quantized (``"fp8_per_token"``), or the model's dtype (``"bfloat16"``).
        bytes_before: Bytes of its matrices in the checkpoint, scales included.
        bytes_after: Bytes of its matrices on the device, scales included; 0 for a tied head without a copy.
        layout_bytes: Bytes that the layout step adds to them.
    """

    decision: Decision
    storage: Storage
    parts: tuple[str, ...]
    source: str
    activation: str
    bytes_before: int
    bytes_after: int
    layout_bytes: int

    @property
    def name(self) -> str:
        """The module's name."""
        return self.decision.layer

    @property
    def format(self) -> Format | None:
        """What it is stored as; None: unquantized, or not loaded."""
        return self.storage.format


@dataclass(frozen=True)
class Plan:
    """Every tensor of a checkpoint accounted for, and what the model will take.

    Attributes:
        model: The model as the user named it.
        recipe: The recipe as a JSON object, formats by their canonical names.
        dtype: The model's dtype.
        device: Where it will run.
        layers: Every layer that a recipe could reach, in the model's order.
        steps: What is read into parameters, in the order of files and offsets.
        scales: Scales of the checkpoint, which are read first.
        conversions: What is quantized, or has been before and is read as it was then: the same on every rank, but for
            what each has of it.
        plain_bytes: Bytes on the device of all parameters that no recipe reaches (norms, embeddings, biases).
        ranks: The rank whose share this is, and its way to the others while loading.
        unmatched_patterns: Excludes that match nothing.
        warnings: One line each, for the log.
    """

    model: str
    recipe: dict[str, Any]
    dtype: torch.dtype
    device: torch.device
    layers: tuple[LayerPlan, ...]
    steps: tuple[Step, ...]
    scales: tuple[ScaleStep, ...]
    conversions: tuple[Conversion, ...]
    plain_bytes: int
    ranks: Ranks = ALONE
    unmatched_patterns: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def quantized(self) -> tuple[LayerPlan, ...]:
        """The layers that are quantized while they are loaded."""
        return tuple(layer for layer in self.layers if layer.storage.quantized)

    @property
    def kept(self) -> tuple[LayerPlan, ...]:
        """The layers that keep the source's precision."""
        return tuple(layer for layer in self.layers if not layer.storage.quantized)

    @property
    def bytes_to_read(self) -> int:
        """Bytes that are read from the checkpoint."""
        return sum(step.part.nbytes for step in self.scales) + sum(step.nbytes for step in self.steps)

    @property
    def bytes_wanted(self) -> int:
        """Bytes of what this rank has of the checkpoint: less than is read where blocks or short rows are shared."""
        return sum(step.wanted_bytes for step in self.scales) + sum(step.wanted_bytes for step in self.steps)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all finished parameters on the device, without what the layout step adds."""
        return self.plain_bytes + sum(layer.bytes_after for layer in self.layers)

    @property
    def layout_bytes(self) -> int:
        """Bytes that the layout step adds: on the CPU, a float copy of the quantized layers."""
        return sum(layer.layout_bytes for layer in self.layers)

    @property
    def loading_bytes(self) -> int:
        """Bound of what loading takes beside the finished weights, until it is done."""
        requantizes = any(step.source and step.converts for step in self.steps)
        return min(BUDGET, (_TEMPORARIES_REQUANTIZING if requantizes else _TEMPORARIES) * self.bytes_to_read)

    def device_bytes(self, cache_bytes: int = 0) -> int:
        """Bytes needed on the device: finished weights, and loading's share or, after it, the KV cache's."""
        return self.weight_bytes + self.layout_bytes + max(self.loading_bytes, cache_bytes)

    def to_report(self) -> dict[str, Any]:
        """The report as a JSON object, without the times and the peak, which only a load can tell."""
        return {
            "model": self.model,
            "online_quant_config": self.recipe,
            "tensor_parallel_size": self.ranks.size,
            "expert_parallel": self.ranks.expert_parallel and self.ranks.size > 1,
            "bytes_wanted": self.bytes_wanted,
            "bytes_read": self.bytes_to_read,
            "num_layers": len(self.quantized),
            "layers": [_row(layer, layer.format) for layer in self.quantized if layer.format],
            "kept": [{"layer": layer.name, "reason": layer.storage.reason} for layer in self.kept],
            "unmatched_patterns": list(self.unmatched_patterns),
        }


def check_memory(plan: Plan, available_bytes: int, cache_bytes: int = 0) -> None:
    """Refuse a model that does not fit, before anything is read.

    Args:
        plan: The plan.
        available_bytes: What the device can give.
        cache_bytes: What the KV cache will take at the least, once loading is done.

    Raises:
        ConfigError: It does not fit; the message has the needed and the available bytes.
    """
    needed = plan.device_bytes(cache_bytes)
    if needed <= available_bytes:
        return
    held = f"{show_bytes(plan.weight_bytes + plan.layout_bytes)} of weights"
    while_loading = plan.loading_bytes >= cache_bytes
    more = (
        f"{show_bytes(plan.loading_bytes)} to load them" if while_loading else f"{show_bytes(cache_bytes)} of KV cache"
    )
    raise ConfigError(
        f"not enough memory on {plan.device} for {plan.model}: {show_bytes(needed)} needed ({held}, {more}), "
        f"{show_bytes(available_bytes)} available"
    )


def _row(layer: LayerPlan, format: Format) -> dict[str, Any]:
    return {
        "layer": layer.name,
        "quant_type": format.quant_type,
        "quant_dtype": format.quant_dtype,
        "source": layer.source,
        "pattern": layer.decision.pattern,
        "activation": layer.activation,
        "bytes_before": layer.bytes_before,
        "bytes_after": layer.bytes_after,
        "layout_bytes": layer.layout_bytes,
    }
