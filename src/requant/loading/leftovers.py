"""Tensors of a checkpoint that the model has no use for: known ones are passed over, any other is an error."""

import re
from collections.abc import Container, Iterable

from requant.errors import CheckpointError
from requant.loading.headers import Checkpoint

# Buffers that old versions of transformers saved, and that every model computes by itself.
_BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|masked_bias)$")
_LAYER = re.compile(r"^(.*?\blayers)\.(\d+)\.")
_SHOWN = 3


def check_leftovers(
    checkpoint: Checkpoint, used: set[str], tied: bool, not_loaded: Iterable[str] = (), copies: Container[str] = ()
) -> list[str]:
    """Account for the tensors that fill no parameter.

    Args:
        checkpoint: The headers.
        used: Names of the tensors that do.
        tied: The output head shares the embedding, so that an ``lm_head.weight`` is a copy of it.
        not_loaded: Layers that the model does not run, whose loss is reported elsewhere.
        copies: Tensors that are copies of others.

    Returns:
        Warnings: tensors of layers behind the model's last one.

    Raises:
        CheckpointError: A tensor belongs nowhere.
    """
    depth = _depth(used)
    known = {block_of(name) for name in not_loaded}
    unknown: list[str] = []
    beyond: list[str] = []
    for name in checkpoint.tensors:
        if name in used or name in copies or _BUFFERS.search(name) or (tied and name == "lm_head.weight"):
            continue
        layer = _LAYER.match(name)
        if layer and layer[0] in known:
            continue
        if layer and int(layer[2]) >= depth.get(layer[1], int(layer[2]) + 1):
            beyond.append(name)
        else:
            unknown.append(name)
    if unknown:
        raise CheckpointError(f"the model takes no such tensor as {_first(unknown)} of {checkpoint.folder}")
    if beyond:
        return [f"passed over, being of layers behind the model's last one: {_first(beyond)}"]
    return []


def block_of(name: str) -> str | None:
    """``model.layers.3.`` of any name below it; None for what is in no numbered block."""
    layer = _LAYER.match(name)
    return layer[0] if layer else None


def _depth(used: Iterable[str]) -> dict[str, int]:
    """How many layers the model has, for each prefix (``model.layers``)."""
    depth: dict[str, int] = {}
    for name in used:
        if layer := _LAYER.match(name):
            depth[layer[1]] = max(depth.get(layer[1], 0), int(layer[2]) + 1)
    return depth


def _first(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
