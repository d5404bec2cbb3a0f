"""A Linear of transformers with its weight in a format.

Legend: N output features (rows), K input features.
"""

import torch
from torch import Tensor, nn

from requant.formats import Format, QuantizedTensor
from requant.integrations.transformers.module import QuantizedModule
from requant.kernels import lookup


class QuantizedLinear(QuantizedModule):
    """y = x · Wᵀ + b, in the place of an ``nn.Linear``.

    Args:
        linear: The Linear, on no device; its bias is taken over.
        format: How W is stored.

    Attributes:
        in_features: K.
        out_features: N.
        weight: Codes, ``format.data_shape(N, K)``.
        weight_scale: Scales, ``format.scale_shape(N, K)``.
        bias: [N] in the model's dtype, or None.
    """

    weight: nn.Parameter
    weight_scale: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, format: Format) -> None:
        super().__init__(format)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        shape = self.out_features, self.in_features
        self.add_weight("weight", format.data_shape(*shape), format.scale_shape(*shape))
        self.register_parameter("bias", linear.bias)

    @property
    def quantized(self) -> QuantizedTensor:
        """The weight."""
        shape = self.out_features, self.in_features
        return QuantizedTensor(self.weight.data, self.weight_scale.data, self.format, shape)

    def forward(self, x: Tensor) -> Tensor:
        """X [..., K] → [..., N], both in one dtype."""
        with torch.cuda.device_of(x):  # kernels run on the current device, which may be another
            y = self.made(x.dtype, self._make)(x.reshape(-1, self.in_features))
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Sizes and format."""
        return f"{self.in_features}, {self.out_features}, {self.format.name}, bias={self.bias is not None}"

    def _make(self, dtype: torch.dtype) -> object:
        return lookup("linear", self.format.name, self.weight.device.type)(self.quantized, dtype)
