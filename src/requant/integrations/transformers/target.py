"""Where the matrices of one parameter go: each expert's, and of those each part's, by themselves.

Legend: E experts (1 for a Linear), N output features (rows), K input features.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from requant.formats import Format
from requant.integrations.transformers.fill import fill
from requant.integrations.transformers.module import QuantizedModule
from requant.integrations.transformers.weight import Weight


@dataclass(frozen=True)
class Target:
    """A parameter that is being loaded.

    Attributes:
        weight: The parameter.
        data: Its codes, or values in the model's dtype: E of those of one matrix.
        scale: Its scales, likewise; None without a format.
    """

    weight: Weight
    data: Tensor
    scale: Tensor | None

    @classmethod
    def make(cls, weight: Weight, module: nn.Module, device: torch.device) -> "Target":
        """Memory for a parameter of ``module``."""
        if weight.format is None:
            dtype = getattr(module, weight.name).dtype
            return cls(weight, torch.empty(weight.shape, dtype=dtype, device=device), None)
        data, scale = weight.stored_shapes(weight.format)
        return cls(
            weight,
            torch.empty(data, dtype=weight.format.data_dtype, device=device),
            torch.empty(scale, dtype=weight.format.scale_dtype, device=device),
        )

    def fill(
        self, source: Format | None, weight: Tensor, scale: Tensor | None, experts: range, part: int | None
    ) -> Iterator[Tensor]:
        """Fill what one tensor of the checkpoint has, matrix by matrix.

        Args:
            source: The format that it is in.
            weight: [N, K] or [experts, N, K], values or codes.
            scale: Its scales, likewise; None without a format.
            experts: Which experts it holds.
            part: Which part of them; None: all, one after the other.

        Yields:
            Counts of values that are NaN or infinite, int64 [].
        """
        numbers = range(len(self.weight.parts)) if part is None else range(part, part + 1)
        for index, expert in enumerate(experts):
            matrix = _at(weight, index)
            matrix = matrix.T if self.weight.transposed else matrix
            scales = None if scale is None else _at(scale, index)
            row = scale_row = 0
            for number in numbers:
                n = self.weight.parts[number]
                blocks = source.scale_shape(n, 1)[0] if source else 0
                own = None if scales is None else scales[scale_row : scale_row + blocks]
                data, out = self._place(expert, number)
                yield fill(source, matrix[row : row + n], own, self.weight.format, data, out)
                row, scale_row = row + n, scale_row + blocks

    def give(self, module: nn.Module) -> dict[str, Tensor]:
        """Hand codes and scales to the module.

        Returns:
            What transformers is to place instead: the values of a parameter without a format, by name.
        """
        stacked = getattr(module, self.weight.name).ndim == 3
        data = self.data if stacked else self.data[0]
        if self.scale is None:
            return {self.weight.full_name: data}
        assert isinstance(module, QuantizedModule)
        module.set_weight(self.weight.name, data, self.scale if stacked else self.scale[0])
        return {}

    def _place(self, expert: int, part: int) -> tuple[Tensor, Tensor | None]:
        parts, format = self.weight.parts, self.weight.format
        row = sum(parts[:part])
        data = self.data[expert, row : row + parts[part]]
        if format is None or self.scale is None:
            return data, None
        blocks = [format.scale_shape(n, 1)[0] for n in parts]
        start = sum(blocks[:part])
        return data, self.scale[expert, start : start + blocks[part]]


def _at(tensor: Tensor, index: int) -> Tensor:
    return tensor[index] if tensor.ndim == 3 else tensor
