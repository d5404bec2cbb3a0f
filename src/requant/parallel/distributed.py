"""Ranks that are processes of one host: the collectives of :class:`~requant.parallel.Group` by torch.distributed."""

import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

# A rank may wait as long for its peers as they need; whoever watches the processes decides when that is too long.
_PATIENCE = timedelta(days=30)
_HOST = "127.0.0.1"
# Its name from torch 2.13 on; the old one then warns.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class DistributedGroup:
    """The processes of torch's default group, which :func:`connected` makes.

    Args:
        on_call: Called with every collective, before it: a rank that hangs has made fewer than the others.
    """

    def __init__(self, on_call: Callable[[], None] = lambda: None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._on_call = on_call

    def all_reduce_sum(self, x: Tensor, /) -> Tensor:
        """See :class:`~requant.parallel.Group`."""
        self._on_call()
        dist.all_reduce(x, dist.ReduceOp.SUM)
        return x

    def all_reduce_max(self, x: Tensor, /) -> Tensor:
        """See :class:`~requant.parallel.Group`."""
        self._on_call()
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    def all_gather(self, x: Tensor, sizes: Sequence[int], /) -> Tensor:
        """See :class:`~requant.parallel.Group`."""
        self._on_call()
        widest = max(sizes)
        x = F.pad(x, (0, widest - x.shape[1])).contiguous()
        parts = x.new_empty(self.size * x.shape[0], widest)
        _gather(parts, x)
        return torch.cat([part[:, :n] for part, n in zip(parts.view(self.size, *x.shape), sizes, strict=True)], dim=1)


@contextmanager
def connected(
    rank: int,
    size: int,
    port: int,
    device: torch.device,
    listener: socket.socket | None = None,
    on_call: Callable[[], None] = lambda: None,
) -> Iterator[DistributedGroup]:
    """Meet the other processes of this host; NCCL between GPUs, gloo on a CPU.

    Args:
        rank: Which one this is.
        size: How many there are.
        port: Where rank 0 listens, on the loopback interface.
        device: This rank's own.
        listener: Of rank 0: the socket, which is bound to the port and listens already.
        on_call: See :class:`DistributedGroup`.
    """
    # All ranks are on this host, whose own name gloo would otherwise look up to find an interface.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    store = dist.TCPStore(
        _HOST,
        port,
        size,
        is_master=rank == 0,
        timeout=_PATIENCE,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener is not None else None,
    )
    cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=_PATIENCE,
        device_id=device if cuda else None,
    )
    try:
        yield DistributedGroup(on_call)
    finally:
        dist.destroy_process_group()
