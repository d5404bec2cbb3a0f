"""How much memory there is, and how much of it becomes KV cache."""

import os
from pathlib import Path

import torch

from requant.engine.config import CacheConfig
from requant.errors import ConfigError
from requant.loading.units import show_bytes

# A CPU shares its memory with everything else on the machine: a default that is generous for trying recipes.
CPU_KV_CACHE_BYTES = 4 << 30


def available_bytes(device: torch.device, utilization: float) -> int:
    """Bytes that weights and KV cache may take together, before anything is loaded.

    A GPU: ``utilization`` of its memory, less what others hold. A CPU: the memory that the system (and the
    control group, where one sets a limit) would give without swapping.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return min(free, int(total * utilization))
    return min(_system_available(), _cgroup_available())


def _system_available() -> int:
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    # Not Linux: all of the memory, since what is free of it is not told.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_available() -> int:
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return 1 << 62
    return 1 << 62 if limit == "max" else max(int(limit) - used, 0)


def kv_blocks(
    config: CacheConfig, device: torch.device, left: int, block_bytes: int, max_model_len: int, max_seqs: int
) -> int:
    """Number of KV cache pages: what was asked for, else what is ``left`` after weights and activations.

    Never more than ``max_seqs`` sequences of full length could use.

    Raises:
        ConfigError: Not even one sequence of ``max_model_len`` tokens fits.
    """
    one = -(-max_model_len // config.block_size)
    default = left if device.type == "cuda" else min(left, CPU_KV_CACHE_BYTES)
    nbytes = config.kv_cache_memory_bytes or max(default, 0)
    if config.kv_cache_memory_bytes and nbytes > left:
        raise ConfigError(
            f"not enough memory: the KV cache of {show_bytes(nbytes)} that was asked for does not fit in the "
            f"{show_bytes(max(left, 0))} left beside the weights"
        )
    blocks = min(nbytes // block_bytes, one * max_seqs)
    if blocks < one:
        fits = blocks * config.block_size
        raise ConfigError(
            f"not enough memory: the KV cache of one sequence of {max_model_len} tokens takes "
            f"{show_bytes(one * block_bytes)} and {show_bytes(nbytes)} are there; lower --max-model-len"
            + (f" to {fits} or less" if fits >= 2 else " or the model's size")
        )
    return blocks
