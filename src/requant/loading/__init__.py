"""From a checkpoint to a model that is ready to run.

:func:`inspect` (or :func:`locate` and :func:`read_headers`) finds the tensors, :func:`make_plan` decides what becomes
of each, :func:`check_memory` tells whether it fits, :func:`load` does it, and what :func:`prepare_report` returns
writes it down. :mod:`requant.loading.cache` keeps what has been quantized for the next time.
"""

from requant.loading.checkpoint import inspect, locate, locate_metadata, read_config
from requant.loading.headers import Checkpoint, TensorInfo, read_headers
from requant.loading.plan import LayerPlan, Plan, Step, check_memory
from requant.loading.planner import CachedParts, make_plan
from requant.loading.progress import Progress, make_progress
from requant.loading.report import prepare_report
from requant.loading.slabs import SlabPool, Staging
from requant.loading.stream import LoadResult, load

__all__ = [
    "CachedParts",
    "Checkpoint",
    "LayerPlan",
    "LoadResult",
    "Plan",
    "Progress",
    "SlabPool",
    "Staging",
    "Step",
    "TensorInfo",
    "check_memory",
    "inspect",
    "load",
    "locate",
    "locate_metadata",
    "make_plan",
    "make_progress",
    "prepare_report",
    "read_config",
    "read_headers",
]
