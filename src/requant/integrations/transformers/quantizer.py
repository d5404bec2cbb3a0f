"""The quantizer: where transformers asks for the model to be changed, and for its weights to be loaded."""

import logging
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from requant.errors import ConfigError
from requant.integrations.transformers.config import METHOD, OnlineQuantConfig
from requant.integrations.transformers.convert import LayerConverter
from requant.integrations.transformers.experts import QuantizedExperts
from requant.integrations.transformers.finite import check_kept
from requant.integrations.transformers.headers import read_headers
from requant.integrations.transformers.linear import QuantizedLinear
from requant.integrations.transformers.load import make_loaders
from requant.integrations.transformers.plan import LoadPlan, make_plan
from requant.integrations.transformers.report import make_report
from requant.integrations.transformers.routes import Renamer
from requant.integrations.transformers.weight import Weight

logger = logging.getLogger(__name__)


@register_quantizer(METHOD)
class OnlineQuantizer(HfQuantizer):
    """Replaces the layers that a recipe names, and quantizes their weights while transformers reads them.

    Attributes:
        report: Once the model is loaded, what became of each layer; see :func:`make_report`.
    """

    requires_calibration = False
    quantization_config: OnlineQuantConfig

    def __init__(self, quantization_config: OnlineQuantConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # How a tensor is stored is read from itself. To transformers the checkpoint is one that is quantized on the
        # way: that alone makes it read tensors when they are asked for, where it would read ahead of their use.
        self.pre_quantized = False
        self.report: dict[str, Any] = {}
        self._conversions: list[str] = []
        self._converter: LayerConverter | None = None

    def validate_environment(self, *args: object, device_map: object = None, **kwargs: object) -> None:
        """Refuse devices that weights would have to be fetched from for every step."""
        _check_devices(device_map)

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **kwargs: object
    ) -> PreTrainedModel:
        conversions = get_model_conversion_mapping(model)
        self._conversions = [repr(conversion) for conversion in conversions]
        renamer = Renamer(model, conversions)
        self._plan = make_plan(model, self.quantization_config, read_headers(checkpoint_files), renamer)
        for line in self._plan.warnings:
            logger.warning("%s", line)
        if self._plan.untied:
            model.all_tied_weights_keys.pop(self._plan.untied[0])
            model.config.tie_word_embeddings = False
        _replace(model, self._plan)
        shared = dict([self._plan.untied]) if self._plan.untied and self._plan.shared else {}
        self._loaders = make_loaders(self._plan.weights, shared)
        self._converter = LayerConverter(self._loaders, model, renamer)
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], *unused: object) -> list[Any]:
        """The model's conversions, behind the one that takes the tensors of quantized layers."""
        if self._converter is None:  # after loading: for an adapter, say
            return weight_conversions
        if [repr(conversion) for conversion in weight_conversions] != self._conversions:
            raise ConfigError(
                "OnlineQuantConfig follows transformers' own names; accepted: no key_mapping, no fusion_config"
            )
        return [self._converter, *weight_conversions]

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: object) -> PreTrainedModel:
        _check_devices(getattr(model, "hf_device_map", None))
        check_kept(model, self._plan.kept)
        seconds = sum(loader.seconds for loader in self._loaders)
        self.report = make_report(model, self.quantization_config, self._plan, seconds)
        logger.info(
            "Weight post-processing done: %.2f seconds, %d layers online-quantized", seconds, self.report["num_layers"]
        )
        del self._plan, self._loaders  # of a large checkpoint as many objects as it has tensors
        self._converter = None
        return model

    def is_serializable(self) -> bool:
        """False: the checkpoint stays as it is, and a recipe is cheap to apply again."""
        return False

    @property
    def is_trainable(self) -> bool:
        """False: codes have no gradient."""
        return False


def _check_devices(device_map: object) -> None:
    devices = {str(device) for device in device_map.values()} if isinstance(device_map, dict) else set()
    if "disk" in devices or ("cpu" in devices and len(devices) > 1):
        raise ConfigError(
            f"device_map puts layers on {', '.join(sorted(devices))}; accepted: GPUs only, or the CPU only"
        )


def _replace(model: PreTrainedModel, plan: LoadPlan) -> None:
    by_module: dict[str, list[Weight]] = {}
    for weight in plan.weights:
        if weight.format is not None:
            by_module.setdefault(weight.module, []).append(weight)
    for name, weights in by_module.items():
        module, format = model.get_submodule(name), weights[0].format
        assert format is not None
        if isinstance(module, nn.Linear):
            model.set_submodule(name, QuantizedLinear(module, format))
        else:
            model.set_submodule(name, QuantizedExperts(module, format, (weights[0], weights[1])))
