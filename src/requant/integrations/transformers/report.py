"""What a load did to each layer: the same rows as the report of requant's own engine."""

from math import prod
from typing import Any

from transformers import PreTrainedModel

from requant.integrations.transformers.config import OnlineQuantConfig
from requant.integrations.transformers.plan import LoadPlan, PlannedLayer
from requant.kernels import layout_bytes


def make_report(model: PreTrainedModel, config: OnlineQuantConfig, plan: LoadPlan, seconds: float) -> dict[str, Any]:
    """The report as a JSON object.

    Args:
        model: The model, loaded.
        config: The recipe.
        plan: What was loaded.
        seconds: Time that reading and quantizing the layers took.
    """
    quantized = [layer for layer in plan.layers if layer.storage.quantized]
    return {
        "model": str(model.config.name_or_path),
        "online_quant_config": config.recipe.to_dict(),
        "elapsed_seconds": seconds,
        "num_layers": len(quantized),
        "layers": [_row(model, layer) for layer in quantized],
        "kept": [
            {"layer": layer.layer.names.module, "reason": layer.storage.reason}
            for layer in plan.layers
            if not layer.storage.quantized
        ],
        "unmatched_patterns": list(plan.unmatched_patterns),
    }


def _row(model: PreTrainedModel, layer: PlannedLayer) -> dict[str, Any]:
    format = layer.storage.format
    assert format is not None
    kinds = dict.fromkeys(source.format.name if source.format else source.weight.dtype for source in layer.sources)
    return {
        "layer": layer.layer.names.module,
        "quant_type": format.quant_type,
        "quant_dtype": format.quant_dtype,
        "source": ", ".join(kinds),
        "pattern": layer.decision.pattern,
        "activation": format.activation or str(model.dtype).removeprefix("torch."),
        "bytes_before": sum(source.nbytes for source in layer.sources),
        "bytes_after": sum(weight.nbytes for weight in layer.weights),
        "layout_bytes": sum(
            layout_bytes(model.get_parameter(weight.full_name).device, prod(weight.shape[:2]), weight.shape[2])
            for weight in layer.weights
        ),
    }
