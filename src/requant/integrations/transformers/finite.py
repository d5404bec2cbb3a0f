"""The check of what transformers loads itself: a NaN is as bad in a layer that is kept."""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from requant.errors import CheckpointError
from requant.formats import count_nonfinite
from requant.integrations.transformers.routes import Feed


def check_kept(model: PreTrainedModel, kept: Mapping[str, Sequence[Feed]]) -> None:
    """Refuse values that are NaN or infinite.

    Args:
        model: The model, loaded.
        kept: Its parameters and buffers that transformers loaded, and what they are made of.

    Raises:
        CheckpointError: Names the tensor of the checkpoint (of a stack: the parameter), and the count.
    """
    counts = {}
    for name in kept:
        values = model.get_parameter_or_buffer(name)
        if values.is_floating_point() and values.numel() and not values.is_meta:
            counts[name] = values, count_nonfinite(values.detach().reshape(-1, values.shape[-1] if values.ndim else 1))
    for name, (values, count) in counts.items():
        bad, (feed, *others) = int(count), kept[name]
        if bad:
            more = f" (of {len(others) + 1} tensors, {feed.source.name} first)" if others else ""
            who = f"parameter {name}{more}" if others else str(feed.source.weight)
            dtype = str(values.dtype).removeprefix("torch.")
            raise CheckpointError(f"{who}: {bad} of {values.numel()} values are NaN or Inf (as {dtype})")
