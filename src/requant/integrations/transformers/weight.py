"""One parameter that is loaded by requant: what it is made of, and whether the checkpoint's tensors fit.

Legend: E experts (1 for a Linear), N output features (rows), K input features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from requant.errors import CheckpointError
from requant.formats import Format
from requant.integrations.transformers.routes import Feed, Routes, is_stacking
from requant.integrations.transformers.sources import BLOCK, Source


@dataclass(frozen=True)
class Weight:
    """One parameter of the model that is loaded here, not by transformers.

    Attributes:
        module: The module that has it.
        name: Its name there.
        shape: (E, N, K) of its values.
        parts: Rows of each part of its matrices, which are quantized by themselves (gate and up).
        format: What it is stored as; None: it stays the parameter that it is, and its source is dequantized.
        feeds: What it is made of.
        transposed: Whether model and checkpoint have [K, N] for each matrix.
    """

    module: str
    name: str
    shape: tuple[int, int, int]
    parts: tuple[int, ...]
    format: Format | None
    feeds: tuple[Feed, ...]
    transposed: bool = False

    @property
    def full_name(self) -> str:
        """Its name in the model."""
        return f"{self.module}.{self.name}"

    @property
    def is_reordered(self) -> bool:
        """Whether transformers does more than to stack matrices: cuts tensors, or moves their elements."""
        return self.feeds[0].converter is not None and not is_stacking(self.feeds)

    def stored_shapes(self, format: Format) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of its codes and scales in a format: E of those of one matrix, whose parts begin new scales."""
        experts, n, k = self.shape
        rows = sum(format.scale_shape(part, k)[0] for part in self.parts)
        return (experts, *format.data_shape(n, k)), (experts, rows, format.scale_shape(n, k)[1])

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in its format."""
        experts, _, k = self.shape
        return experts * sum(self.format.nbytes(n, k) for n in self.parts) if self.format else 0


def check_shapes(weight: Weight, shape: tuple[int, ...]) -> None:
    """Refuse tensors that do not make up the parameter."""
    feeds = weight.feeds
    experts, n, k = weight.shape
    if weight.is_reordered:
        quantized = next((feed.source for feed in feeds if feed.source.format), None)
        if quantized is not None:
            raise CheckpointError(
                f"{quantized.weight} is {quantized.weight.dtype}, and transformers cuts or reorders it for "
                f"{weight.full_name}; accepted: BF16, F16, F32"
            )
        return
    if feeds[0].converter is None:
        wanted = [shape if weight.transposed else (experts, n, k)[3 - len(shape) :]]
    else:
        each = (n,) if len({feed.pattern for feed in feeds}) == 1 else weight.parts
        wanted = [(rows, k) for rows in each for _ in range(experts)]
    if len(feeds) != len(wanted):
        raise CheckpointError(
            f"{weight.full_name} is made of {len(feeds)} tensors of the checkpoint ({feeds[0].source.name} first); "
            f"the model's configuration needs {len(wanted)}"
        )
    for feed, values in zip(feeds, wanted, strict=True):
        format = feed.source.format
        # Codes that share a byte fill whole groups, so K may be less than what is stored.
        columns = format.data_shape(1, values[-1])[1] * format.codes_per_byte if format else values[-1]
        expected = (*values[:-1], columns)
        if feed.source.shape != expected:
            raise CheckpointError(
                f"{feed.source.weight} has shape {list(feed.source.shape)}; the model's configuration needs "
                f"{list(expected)}"
            )
        rows, cut = BLOCK.group[0], feed.source.format is BLOCK and expected[-2] != weight.parts[0]
        if cut and weight.parts[0] % rows:
            raise CheckpointError(
                f"{feed.source.weight}: its scale blocks of {rows} rows cross the border between matrices of "
                f"{weight.parts[0]} rows; accepted: matrices in tensors of their own, or of a multiple of {rows} rows"
            )


def check_others(routes: Routes, sources: Sequence[Source]) -> None:
    """Refuse quantized tensors that feed anything but a layer: transformers would take the codes for values."""
    known = {id(source) for source in sources}
    for target, feeds in routes.feeds.items():
        for feed in feeds:
            source = feed.source
            if id(source) not in known and source.format is not None and not source.flaw:
                raise CheckpointError(
                    f"{source.weight} is {source.weight.dtype} and feeds {target}, which is neither a Linear nor "
                    "experts; accepted: BF16, F16, F32"
                )
