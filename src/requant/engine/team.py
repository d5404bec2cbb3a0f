"""One rank among its peers: what :mod:`requant.engine.build` makes its share of the engine with."""

import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from requant.engine.config import ParallelConfig
from requant.engine.seat import Seat
from requant.errors import ConfigError
from requant.host import cores
from requant.parallel import ALONE, Ranks
from requant.parallel.distributed import connected


@dataclass
class Team:
    """A rank that has joined the others.

    Attributes:
        ranks: What a model is made with.
        steps: See :class:`~requant.engine.seat.Seat`.
        counts: Whether collectives are counted: until every rank is ready some may be far behind, reading from a slow
            disk.
    """

    ranks: Ranks
    steps: Sequence[Connection] = ()
    counts: bool = False

    def announce(self, step: object) -> None:
        """Tell the other ranks what rank 0 is about to do."""
        message = pickle.dumps(step, protocol=pickle.HIGHEST_PROTOCOL)
        for pipe in self.steps:
            pipe.send_bytes(message)

    def next_step(self) -> Any:
        """What rank 0 is about to do.

        Raises:
            EOFError: It is gone.
        """
        return pickle.loads(self.steps[0].recv_bytes())

    def smallest(self, number: int, device: torch.device) -> int:
        """The smallest of the ranks' numbers."""
        return -int(self.ranks.group.all_reduce_max(torch.tensor([-number], device=device)))


def alone(config: ParallelConfig) -> Team:
    """A rank without others."""
    return Team(Ranks(deterministic=config.deterministic_tp))


@contextmanager
def join(seat: Seat, config: ParallelConfig) -> Iterator[Team]:
    """Take the seat: settle on the rank's device and meet the others.

    Raises:
        ConfigError: There are not as many devices.
    """
    size = config.tensor_parallel_size
    device = rank_device(config, seat.rank)
    team = Team(ALONE, seat.steps)

    def on_call() -> None:
        if team.counts:
            seat.pulse.begin(seat.rank)

    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores() // size))
    with connected(seat.rank, size, seat.port, device, seat.listener, on_call) as group:
        team.ranks = Ranks(group, config.enable_expert_parallel, config.deterministic_tp)
        yield team


def rank_device(config: ParallelConfig, rank: int) -> torch.device:
    """The device of one rank.

    Raises:
        ConfigError: There is none.
    """
    there, size = torch.cuda.device_count(), config.tensor_parallel_size
    if config.device == "cpu" or (config.device == "auto" and not there):
        return torch.device("cpu")
    if there < size:
        accepted = f"at most {there}, or --device cpu" if there else "--device cpu"
        raise ConfigError(f"-tp is {size}, and torch sees {there} GPUs; accepted here: {accepted}")
    return torch.device("cuda", rank)
