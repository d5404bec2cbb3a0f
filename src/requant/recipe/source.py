"""What a checkpoint's config says about how its weights are quantized already."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from requant.errors import CheckpointError

_SECTIONS = ("quantization_config", "compression_config")
_BLOCK = [128, 128]
_ACCEPTED = (
    "no quantization (BF16, FP16 or FP32 weights), 'fp8' in blocks of 128 x 128 with dynamic activations, 'mxfp4', "
    "'quark' with MXFP4 weights only"
)
# Quark's description of MXFP4 (its ``FP4PerGroupSpec``, OCP MX): what the weights' section must say.
_QUARK_MXFP4 = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "group_size": 32,
    "scale_format": "e8m0",
    "is_dynamic": False,
}


@dataclass(frozen=True)
class SourceQuantization:
    """How a checkpoint's weights are quantized, as its config declares it.

    A layer's own tensors have the last word: real checkpoints leave some of their layers unquantized.

    Attributes:
        method: The config's ``quant_method``, in lower case.
        format: Name of the format that its quantized layers are in.
    """

    method: str
    format: str


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
        known = method.strip().lower() if isinstance(method, str) else ""
        if known not in READERS:
            given = f"quant_method {method!r}" if "quant_method" in section else "no quant_method"
            raise _refused(where, given)
        format, flaw = READERS[known](section)
        if flaw:
            raise _refused(where, f"quant_method {method!r} {flaw}")
        return SourceQuantization(known, format)
    return None


def _refused(where: str, given: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint is quantized already: {where} has {given}; accepted: {_ACCEPTED}")


def _sections(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The sections with content: at the top, or in the text model's own config of a multimodal model."""
    text = config.get("text_config")
    for prefix, holder in (("", config), ("text_config.", text)):
        if isinstance(holder, Mapping):
            yield from ((prefix + key, holder[key]) for key in _SECTIONS if holder.get(key))


def _fp8(section: Mapping[str, Any]) -> tuple[str, str]:
    """Block FP8 as DeepSeek-V3 published it: e4m3 codes, one scale a block, activations quantized as they come."""
    flaw = ""
    if section.get("weight_block_size") != _BLOCK:
        given = section.get("weight_block_size")
        flaw = f"with weight_block_size {given}" if given is not None else "without weight_block_size"
    elif section.get("activation_scheme", "dynamic") != "dynamic":
        flaw = f"with activation_scheme {section['activation_scheme']!r}"
    elif section.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        flaw = f"with fmt {section['fmt']!r}"
    return "per_block_fp8", flaw


def _mxfp4(section: Mapping[str, Any]) -> tuple[str, str]:
    return "mxfp4", ""


def _quark(section: Mapping[str, Any]) -> tuple[str, str]:
    """AMD Quark: MXFP4 for every layer that it quantizes, none of them with a transformation at run time."""
    flaw = _quark_weight_flaw("global_quant_config", section.get("global_quant_config"))
    for field in ("layer_quant_config", "layer_type_quant_config"):
        for pattern, entry in _items(section.get(field)):
            flaw = flaw or _quark_weight_flaw(f"{field} {pattern!r}", entry)
    for algorithm in section.get("algo_config") or ():
        name = str(algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm)
        if "rot" in name.lower():
            flaw = flaw or f"with algo_config {name!r}"
    return "mxfp4", flaw


def _quark_weight_flaw(where: str, entry: object) -> str:
    """What about one of Quark's layer descriptions is not MXFP4; "" if all is."""
    weight = entry.get("weight") if isinstance(entry, Mapping) else None
    if isinstance(weight, list) and len(weight) == 1:
        weight = weight[0]
    if not isinstance(weight, Mapping):
        given = "missing" if weight is None else repr(weight)
        return f"with {where} whose weight is {given}"
    for key, wanted in _QUARK_MXFP4.items():
        if weight.get(key) != wanted:
            return f"with {where} whose weight has {key} {weight.get(key)!r} (MXFP4: {wanted!r})"
    return ""


def _items(value: object) -> Iterator[tuple[object, object]]:
    """Entries of an object; of anything else with content, itself as the one entry."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif value:
        yield value, value


READERS: dict[str, Callable[[Mapping[str, Any]], tuple[str, str]]] = {"fp8": _fp8, "mxfp4": _mxfp4, "quark": _quark}
"""``quant_method`` → what reads its section: the format's name, and what is wrong with it ("" if nothing).

One row a kind of quantized checkpoint that loads.
"""
