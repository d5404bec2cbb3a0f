"""The device of each of several ranks."""

import pytest
import torch

from requant.engine.config import ParallelConfig
from requant.engine.team import rank_device
from requant.errors import ConfigError


@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [("auto", 0, "cpu"), ("cpu", 4, "cpu"), ("auto", 2, "cuda:1"), ("cuda", 8, "cuda:1")],
)
def test_where_a_rank_runs(monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert rank_device(ParallelConfig(device=device, tensor_parallel_size=2), 1) == torch.device(expected)


@pytest.mark.parametrize(
    ("device", "gpus", "says"),
    [
        ("auto", 1, "-tp is 2, and torch sees 1 GPUs; accepted here: at most 1, or --device cpu"),
        ("cuda", 0, "-tp is 2, and torch sees 0 GPUs; accepted here: --device cpu"),
    ],
)
def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, says: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ConfigError) as error:
        rank_device(ParallelConfig(device=device, tensor_parallel_size=2), 1)
    assert str(error.value) == says
