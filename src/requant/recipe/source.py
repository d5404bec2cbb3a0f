"""What a checkpoint's config says about how its weights are quantized already."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from requant.errors import CheckpointError

_SECTIONS = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class SourceQuantization:
    """How a checkpoint's weights are quantized, as its config declares it.

    Attributes:
        method: The config's ``quant_method``, in lower case.
    """

    method: str


READERS: dict[str, Callable[[Mapping[str, Any]], SourceQuantization]] = {}
"""``quant_method`` → what reads the rest of the section: one row per kind of quantized checkpoint that loads."""


def source_quantization(config: Mapping[str, Any]) -> SourceQuantization | None:
    """Read how a checkpoint is quantized from its ``config.json``.

    Args:
        config: The config, as JSON gives it.

    Returns:
        None for a checkpoint that is not quantized.

    Raises:
        CheckpointError: The checkpoint is quantized in a way that does not load, with or without a recipe.
    """
    for where, section in _sections(config):
        if not isinstance(section, Mapping):
            raise CheckpointError(f"{where} of the checkpoint is a {type(section).__name__}; accepted: an object")
        method = section.get("quant_method")
        reader = READERS.get(method.strip().lower()) if isinstance(method, str) else None
        if reader is None:
            given = f"quant_method {method!r}" if "quant_method" in section else "no quant_method"
            accepted = ", ".join(("no quantization (BF16, FP16 or FP32 weights)", *map(repr, READERS)))
            raise CheckpointError(f"the checkpoint is quantized already: {where} has {given}; accepted: {accepted}")
        return reader(section)
    return None


def _sections(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The sections with content: at the top, or in the text model's own config of a multimodal model."""
    text = config.get("text_config")
    for prefix, holder in (("", config), ("text_config.", text)):
        if isinstance(holder, Mapping):
            yield from ((prefix + key, holder[key]) for key in _SECTIONS if holder.get(key))
