"""The place in transformers' loading where the tensors of quantized layers are taken.

transformers gives each tensor of a checkpoint to the first converter that takes its name, cast to the dtype of the
parameter that the converter names. Here that is an empty buffer, one for each dtype that a layer's tensors have, so
that they come as the checkpoint has them; and they are read when they are asked for, one after the other.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter

from requant.errors import ConfigError
from requant.integrations.transformers.headers import DTYPES
from requant.integrations.transformers.load import Loader, Read
from requant.integrations.transformers.routes import Renamer

_PATTERN = "requant_layers"


class LayerConverter(WeightConverter):
    """Takes the tensors of the layers that requant loads; one for the whole model.

    Args:
        loaders: What loads the layers.
        model: The model, on no device; its modules get the buffers.
        renamer: transformers' names of the checkpoint's tensors.
    """

    def __init__(self, loaders: Sequence[Loader], model: PreTrainedModel, renamer: Renamer) -> None:
        super().__init__([_PATTERN], [_PATTERN], [_Nothing()])
        self._buffers: dict[str, Loader] = {}
        self._routes: dict[str, str] = {}
        for loader in loaders:
            for feed in loader.feeds:
                for header in feed.source.headers:
                    buffer = self._buffer(model, loader, DTYPES[header.dtype])
                    self._routes[renamer.route(header.name)] = buffer

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """The buffer that stands for a tensor, if it is one of a quantized layer."""
        buffer = self._routes.get(source_key)
        return (source_key, None) if buffer is None else (buffer, _PATTERN)

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Read) -> None:
        """Take a tensor, unread: nothing but this model's loader decides when it comes into memory."""
        self._buffers[target_key].collect(source_key, future)

    def convert(
        self, layer_name: str, model: PreTrainedModel, loading_info: Any = None, **unused: object
    ) -> Mapping[str, Tensor]:
        """Load what stands behind a buffer; all of its tensors have been taken by now."""
        if getattr(model, "_tp_size", None) not in (None, 1) or getattr(model, "_device_mesh", None) is not None:
            raise ConfigError("OnlineQuantConfig does not load over several ranks; accepted: no tp_plan")
        loading_info.missing_keys.discard(layer_name)
        module, _, buffer = layer_name.rpartition(".")
        del model.get_submodule(module)._buffers[buffer]
        return self._buffers[layer_name].load(model, loading_info)

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerConverter":
        """Itself: transformers copies a converter for every tensor, and this one keeps its tensors apart by name."""
        return self

    def _buffer(self, model: PreTrainedModel, loader: Loader, dtype: torch.dtype) -> str:
        weight = loader.weights[0]
        name = f"requant_{weight.name}_{str(dtype).removeprefix('torch.')}"
        full_name = f"{weight.module}.{name}"
        if full_name not in self._buffers:
            model.get_submodule(weight.module).register_buffer(name, torch.empty(0, dtype=dtype, device="meta"))
            self._buffers[full_name] = loader
        return full_name


class _Nothing(ConversionOps):
    """A converter must have an operation; :class:`LayerConverter` does everything itself."""

    def convert(self, input_dict: dict[str, Any], *unused: object, **more: object) -> dict[str, Any]:
        return input_dict
