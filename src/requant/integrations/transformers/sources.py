"""How the checkpoint stores each matrix: read from its own tensors, whatever the config says of the whole.

Legend: N output features (rows), K input features of one matrix, E experts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from requant.errors import CheckpointError
from requant.formats import FORMATS, Format
from requant.integrations.transformers.headers import Header

BLOCK, MXFP4 = FORMATS["per_block_fp8"], FORMATS["mxfp4"]
_FLOATS = ("BF16", "F16", "F32")
_SCALES = {BLOCK.name: ("F32", "BF16", "F8_E8M0"), MXFP4.name: ("U8", "F8_E8M0")}
_PACKED = ("U8", "I8")
_ACCEPTED = (
    "BF16, F16, F32; F8_E4M3 with scales of 128 x 128 blocks; packed MXFP4 (U8 or I8) with a scale for each 32 values"
)


@dataclass(frozen=True)
class Source:
    """One weight of the checkpoint: a matrix, or a stack of them.

    Attributes:
        name: Its name, as transformers would look for an unquantized one (``….q_proj.weight``).
        weight: The tensor with its values or codes.
        format: The format that it is in; None: unquantized.
        scale: The tensor with its scales; None if unquantized.
        shape: [N, K] or [E, N, K] of the values.
        flaw: Why no layer can be loaded from it; "" if one can.
    """

    name: str
    weight: Header
    format: Format | None
    scale: Header | None
    shape: tuple[int, ...]
    flaw: str = ""

    @property
    def owner(self) -> str:
        """Its name in a recipe: that of the part that it is."""
        return self.name.removesuffix(".weight")

    @property
    def headers(self) -> Iterator[Header]:
        """Its tensors."""
        yield self.weight
        if self.scale is not None:
            yield self.scale

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the checkpoint."""
        return sum(header.nbytes for header in self.headers)

    def check(self) -> None:
        """Refuse a source that no layer can be loaded from.

        Raises:
            CheckpointError: Names the tensor, and what is accepted.
        """
        if self.flaw:
            raise CheckpointError(f"{self.weight} is {self.weight.dtype}{self.flaw}; accepted: {_ACCEPTED}")


def find_sources(headers: Mapping[str, Header]) -> list[Source]:
    """Pair the weights of a checkpoint with their scales; every other tensor is a source of its own."""
    sources = [_source(header, headers) for header in headers.values()]
    scales = {source.scale.name for source in sources if source.scale is not None}
    return [source for source in sources if source.weight.name not in scales]


def _source(header: Header, headers: Mapping[str, Header]) -> Source:
    name, shape = header.name, header.shape
    if name.endswith("_blocks") and header.dtype in _PACKED and len(shape) == 4:
        name = name.removesuffix("_blocks")
        return _quantized(name, header, MXFP4, headers.get(f"{name}_scales"), (*shape[:2], shape[2] * shape[3] * 2))
    if header.dtype == "F8_E4M3" and len(shape) in (2, 3):
        return _quantized(name, header, BLOCK, _beside(name, headers, "scale_inv", "scale"), shape)
    if header.dtype in _PACKED and len(shape) == 2:
        scale = _beside(name, headers, "scale")
        return _quantized(name, header, MXFP4, scale, (shape[0], shape[1] * 2))
    flaw = "" if header.dtype in _FLOATS else ", which is neither a float nor one of the formats"
    return Source(name, header, None, None, shape, flaw)


def _beside(name: str, headers: Mapping[str, Header], *suffixes: str) -> Header | None:
    """The scales of a weight: ``q_proj.weight_scale_inv`` or ``q_proj.scale`` of ``q_proj.weight``."""
    for suffix in suffixes:
        for scale in (f"{name}_{suffix}", f"{name.removesuffix('.weight')}.{suffix}"):
            if scale in headers and scale != name:
                return headers[scale]
    return None


def _quantized(name: str, weight: Header, format: Format, scale: Header | None, shape: tuple[int, ...]) -> Source:
    if scale is None:
        return Source(name, weight, format, None, shape, " without scales beside it")
    *stacked, n, k = shape
    rows, columns = format.group
    expected = (*stacked, ceil(n / rows), ceil(k / columns))
    flaw = ""
    if scale.shape != expected:
        flaw = f" with scales {scale.name} of shape {list(scale.shape)} instead of {list(expected)}"
    elif scale.dtype not in _SCALES[format.name]:
        flaw = f" with scales {scale.name} in {scale.dtype}"
    return Source(name, weight, format, scale, shape, flaw)
