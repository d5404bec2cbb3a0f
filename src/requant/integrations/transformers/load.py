"""The tensors of a parameter, from transformers' hands into codes and scales: one tensor at a time."""

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from requant.errors import CheckpointError
from requant.integrations.transformers.headers import DTYPES, Header
from requant.integrations.transformers.routes import Feed
from requant.integrations.transformers.target import Target
from requant.integrations.transformers.weight import Weight

Read = Callable[[], Tensor]


class Loader:
    """Loads one parameter, whose tensors are matrices of it, or all of it.

    Args:
        weight: The parameter.
        shared: A parameter of transformers that is the same tensor of the checkpoint (the embedding that a head is
            tied to), or "".

    Attributes:
        weights: The parameters that this loads.
        feeds: What they are made of.
        seconds: What loading took.
    """

    def __init__(self, weight: Weight, shared: str = "") -> None:
        self.weights: Sequence[Weight] = (weight,)
        self.feeds = weight.feeds
        self.seconds = 0.0
        self._shared = shared
        self._reads: dict[str, Read] = {}

    def collect(self, name: str, read: Read) -> None:
        """Take what reads one tensor of the checkpoint, by its name there."""
        self._reads[name] = read

    def load(self, model: PreTrainedModel, loading_info: Any) -> dict[str, Tensor]:
        """Read, quantize and place everything, once.

        Args:
            model: The model.
            loading_info: transformers' account of what is missing.

        Returns:
            What transformers is to place: parameters by name.

        Raises:
            CheckpointError: A tensor has values that are NaN or infinite.
        """
        if not self._reads:
            return {}
        started = time.perf_counter()
        given = self._load(model, loading_info)
        self._reads.clear()
        for weight in self.weights:
            if weight.format is not None:
                loading_info.missing_keys -= {weight.full_name, f"{weight.full_name}_scale"}
        self.seconds = time.perf_counter() - started
        return given

    def _load(self, model: PreTrainedModel, loading_info: Any) -> dict[str, Tensor]:
        (weight,) = self.weights
        module = model.get_submodule(weight.module)
        given: dict[str, Tensor] = {}
        target: Target | None = None
        bad: list[tuple[Header, Tensor]] = []
        for feed, experts, part in _pieces(weight):
            values, scale = self._read(feed)
            target = target or Target.make(weight, module, values.device)
            counts = target.fill(feed.source.format, values, scale, experts, part)
            bad += [(feed.source.weight, count) for count in counts]
            if self._shared:
                given[self._shared] = values.to(model.get_parameter(self._shared).dtype)
            del values, scale  # before the next one is read
        assert target is not None
        _check_finite(bad)
        return {**given, **target.give(module)}

    def _read(self, feed: Feed) -> tuple[Tensor, Tensor | None]:
        source = feed.source
        # transformers may have cast it up to float32 on the way, which loses nothing.
        weight = self._reads[source.weight.name]().to(DTYPES[source.weight.dtype])
        if source.scale is None or source.format is None:
            return weight, None
        if source.format.codes_per_byte > 1:
            weight = weight.reshape(*source.shape[:-1], source.shape[-1] // source.format.codes_per_byte)
        return weight, self._reads[source.scale.name]().to(DTYPES[source.scale.dtype])


class ReorderingLoader(Loader):
    """Loads parameters that transformers cuts out of a tensor, or reorders: whole ones, by its own operations.

    Args:
        weights: The parameters that are quantized, of those that the conversion makes.
    """

    def __init__(self, weights: Sequence[Weight]) -> None:
        super().__init__(weights[0])
        self.weights = weights

    def _load(self, model: PreTrainedModel, loading_info: Any) -> dict[str, Tensor]:
        assert self.feeds[0].converter is not None
        converter = copy.deepcopy(self.feeds[0].converter)
        for feed in self.feeds:
            converter.add_tensor(feed.target, feed.source.name, feed.pattern, self._reads[feed.source.weight.name])
        made = converter.convert(self.feeds[0].target, model=model, config=model.config, loading_info=loading_info)
        weights = {weight.full_name: weight for weight in self.weights}
        given: dict[str, Tensor] = {}
        for name, value in made.items():
            values = value[0] if isinstance(value, list) else value
            if name not in weights:
                given[name] = values.to(model.get_parameter_or_buffer(name).dtype)
                continue
            weight = weights[name]
            module = model.get_submodule(weight.module)
            if (values.shape[:-2].numel(), *values.shape[-2:]) != weight.shape:
                raise CheckpointError(
                    f"{self.feeds[0].source.weight} gives {name} the shape {list(values.shape)}; the model's "
                    f"configuration needs {list(weight.shape[-values.ndim :])}"
                )
            target = Target.make(weight, module, values.device)
            counts = target.fill(None, values, None, range(weight.shape[0]), None)
            _check_finite((self.feeds[0].source.weight, count) for count in counts)
            given.update(target.give(module))
        return given


def make_loaders(weights: Iterable[Weight], shared: dict[str, str]) -> list[Loader]:
    """What loads some parameters.

    Args:
        weights: The parameters.
        shared: Those whose tensor is another parameter's as well, and that one; see :class:`Loader`.
    """
    loaders: list[Loader] = []
    together: dict[str, list[Weight]] = defaultdict(list)
    for weight in weights:
        if weight.is_reordered:
            together[weight.feeds[0].target].append(weight)
        else:
            loaders.append(Loader(weight, shared.get(weight.full_name, "")))
    return loaders + [ReorderingLoader(group) for group in together.values()]


def _pieces(weight: Weight) -> Iterator[tuple[Feed, range, int | None]]:
    """Each tensor, the experts that it holds and the part that it is; None: all parts."""
    converter = weight.feeds[0].converter
    if converter is None:
        yield weight.feeds[0], range(weight.shape[0]), None
        return
    patterns = converter.source_patterns
    seen: dict[str, int] = defaultdict(int)
    for feed in weight.feeds:
        pattern = feed.pattern or ""
        expert, seen[pattern] = seen[pattern], seen[pattern] + 1
        yield feed, range(expert, expert + 1), patterns.index(pattern) if len(patterns) > 1 else None


def _check_finite(bad: Iterable[tuple[Header, Tensor]]) -> None:
    counted = list(bad)
    counts: dict[Header, int] = defaultdict(int)
    # One copy from the device for all of them, where one for each would wait as often.
    for (header, _), count in zip(counted, torch.stack([count for _, count in counted]).tolist(), strict=True):
        counts[header] += count
    for header, count in counts.items():
        if count:
            raise CheckpointError(f"{header}: {count} of {prod(header.shape)} values are NaN or Inf")
