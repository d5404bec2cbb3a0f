"""How the checkpoint stores each part: read from the part's own tensors, whatever the config says of the whole.

Legend: N output features (rows), K input features of one part.
"""

from dataclasses import dataclass
from math import ceil, prod

import torch

from requant.errors import CheckpointError
from requant.formats import FORMATS, Format
from requant.loading.headers import Checkpoint, TensorInfo
from requant.parallel import Placement
from requant.recipe import SourceQuantization

SOURCE_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""The dtypes of unquantized tensors that can be loaded, as safetensors spells them."""


@dataclass(frozen=True)
class _Kind:
    """How a quantized part lies in a checkpoint.

    Attributes:
        format: The format.
        scale_names: What stands behind the module's name in the name of its scales, by preference.
        scale_dtypes: The dtypes they may have.
        declared: It can be told from other content only by the checkpoint's config.
    """

    format: Format
    scale_names: tuple[str, ...]
    scale_dtypes: tuple[str, ...]
    declared: bool


# dtype of the weight → the one kind of quantized part that has it.
_KINDS = {
    "F8_E4M3": _Kind(
        FORMATS["per_block_fp8"], ("weight_scale_inv", "scale"), ("F32", "BF16", "F8_E8M0"), declared=False
    ),
    "U8": _Kind(FORMATS["mxfp4"], ("weight_scale",), ("U8", "F8_E8M0"), declared=True),
}


_ACCEPTED = (
    f"{', '.join(SOURCE_DTYPES)}; of matrices F8_E4M3 with scales of 128 x 128 blocks, U8 with MXFP4 scales in a "
    "checkpoint that is declared as such"
)


@dataclass(frozen=True)
class ScalePart:
    """The scales of one part.

    Attributes:
        tensor: The tensor that holds them.
        start: Their first row in it, counted over all dimensions but the last.
        shape: Their rows and columns.
    """

    tensor: TensorInfo
    start: int
    shape: tuple[int, int]

    def cut(self, rows: range) -> "ScalePart":
        """Some of their rows."""
        return ScalePart(self.tensor, self.start + rows.start, (len(rows), self.shape[1]))

    @property
    def begin(self) -> int:
        """Offset of their first byte, within the tensor."""
        return self.start * self.shape[1] * self._itemsize

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return prod(self.shape) * self._itemsize

    @property
    def _itemsize(self) -> int:
        return self.tensor.nbytes // max(self.tensor.numel, 1)


@dataclass(frozen=True)
class SourcePart:
    """One part of a layer as the checkpoint has it.

    Attributes:
        tensor: The tensor that holds it (values or codes).
        format: The format it is in; None: unquantized.
        scale: Its scales, if it is quantized.
    """

    tensor: TensorInfo
    format: Format | None = None
    scale: ScalePart | None = None

    @property
    def name(self) -> str:
        """For plan and report: the format's name, or the dtype as safetensors spells it."""
        return self.format.name if self.format else self.tensor.dtype


class Sources:
    """Finds the tensors of a checkpoint, and remembers which ones found a use.

    Attributes:
        used: Their names.
    """

    def __init__(self, checkpoint: Checkpoint, quantization: SourceQuantization | None) -> None:
        self._checkpoint = checkpoint
        self._quantization = quantization
        self.used: set[str] = set()

    def plain(self, placement: Placement) -> TensorInfo:
        """An unquantized tensor.

        Raises:
            CheckpointError: It is missing, or has another shape or dtype than what can be loaded.
        """
        info = self._tensor(placement.tensor)
        # The dtype first: packed codes have another shape, too, which alone would not tell what they are.
        if info.dtype not in SOURCE_DTYPES:
            raise self._refused(info, "")
        _check_shape(info, placement.whole or placement.shape)
        return info

    def part(self, placement: Placement) -> SourcePart:
        """A matrix [N, K], quantized or not.

        Raises:
            CheckpointError: As :meth:`plain`, or its scales are.
        """
        info = self._tensor(placement.tensor)
        kind = _KINDS.get(info.dtype)
        if kind is None or (kind.declared and not self._is_declared(kind.format)):
            return SourcePart(self.plain(placement))
        *leading, k = placement.whole or placement.shape
        _check_shape(info, (*leading, kind.format.data_shape(1, k)[1]))
        return SourcePart(info, kind.format, self._scale(info, placement, kind))

    def _scale(self, info: TensorInfo, placement: Placement, kind: _Kind) -> ScalePart:
        n, k = placement.shape
        shape = kind.format.scale_shape(n, k)
        *experts, rows, _ = placement.whole or placement.shape
        whole = (*experts, *kind.format.scale_shape(rows, k))
        names = [_scale_name(info.name, suffix) for suffix in kind.scale_names]
        name = next((name for name in names if name in self._checkpoint.tensors), None)
        if name is None:
            expected = " or ".join(f"{name} {list(whole)}" for name in names)
            raise self._refused(info, f" without its scales ({expected})")
        scale = self._tensor(name)
        _check_shape(scale, whole)
        if scale.dtype not in kind.scale_dtypes:
            accepted = ", ".join(kind.scale_dtypes)
            raise CheckpointError(f"tensor {name} of {scale.file} is {scale.dtype}; accepted: {accepted}")
        first, group = placement.start % rows, kind.format.group[0]
        if first % group or (n % group and n != rows):
            raise CheckpointError(
                f"tensor {info.name} of {info.file}: its scale blocks of {group} rows cross the border between "
                f"matrices of {n} rows; accepted: matrices in tensors of their own, or of a multiple of {group} rows"
            )
        start = placement.start // rows * ceil(rows / group) + first // group
        return ScalePart(scale, start, shape)

    def _tensor(self, name: str) -> TensorInfo:
        info = self._checkpoint.tensors.get(name)
        if info is None:
            raise CheckpointError(f"tensor {name} is missing from {self._checkpoint.folder}")
        self.used.add(name)
        return info

    def _is_declared(self, format: Format) -> bool:
        return self._quantization is not None and self._quantization.format == format.name

    def _refused(self, info: TensorInfo, detail: str) -> CheckpointError:
        method = f" in a checkpoint with quant_method {self._quantization.method!r}" if self._quantization else ""
        return CheckpointError(
            f"tensor {info.name} of {info.file} is {info.dtype}{detail}{method}; accepted: {_ACCEPTED}"
        )


def _scale_name(weight: str, suffix: str) -> str:
    """``…q_proj.weight_scale_inv`` of ``…q_proj.weight``; ``…gate_up_proj_scale_inv`` of ``…gate_up_proj``."""
    if weight.endswith(".weight"):
        return weight.removesuffix("weight") + suffix
    return f"{weight}_{suffix.removeprefix('weight_')}"


def _check_shape(info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.shape != shape:
        raise CheckpointError(
            f"tensor {info.name} of {info.file} has shape {list(info.shape)}; "
            f"the model's configuration needs {list(shape)}"
        )
