"""A decode step kernel by kernel: time, and for kinds of work that read much, bytes and the time they take at least.

Used by ``benchmarks/decode.py --profile``. On a CPU the same table has torch's operations instead of kernels.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from requant.engine.runner import ModelRunner
from requant.layers.embedding import Embedding
from requant.layers.experts import Experts
from requant.layers.routing import Routing

Row = dict[str, Any]
PROFILED_STEPS = 8
"""Steps that a profile is the mean of; as many run before, without a profiler."""

_SHOWN = 40
# Kinds of work, by the names of their kernels; what is none of these reads little.
_KINDS = (
    ("experts", re.compile(r"^_grouped_")),
    ("attention", re.compile(r"^_(decode|merge)_kernel")),
    ("products", re.compile(r"^_(w8a8|mxfp4)_kernel|scaled_mm|gemm|gemv|nvjet|cutlass|aten::(linear|addmm|mm|bmm)")),
)


@dataclass(frozen=True)
class Work:
    """Bytes that a decode step reads at least, by kind of work.

    Attributes:
        experts: Weights of the experts that are touched, on average of even routing.
        products: All other weights but the embedding's.
        attention: Keys and values.
    """

    experts: float
    products: float
    attention: float

    @classmethod
    def of(cls, runner: ModelRunner, requests: int, context: int) -> "Work":
        """The work of a step of ``requests`` sequences of ``context`` tokens."""
        experts = products = 0.0
        tied = any(getattr(layer, "tied", False) for layer in runner.model.quantizable())
        rules = [module for module in runner.model.modules() if isinstance(getattr(module, "routing", None), Routing)]
        for module in runner.model.modules():
            own = sum(parameter.nbytes for parameter in module.parameters(recurse=False))
            if isinstance(module, Experts):
                rule = rules[0].routing
                experts += own * (1 - (1 - rule.top_k / rule.num_experts) ** requests)
            elif not isinstance(module, Embedding) or tied:
                products += own
        per_token = runner.block_bytes / runner.block_size
        return cls(experts, products, per_token * context * requests)


def profile_step(step: Callable[[], object]) -> tuple[list[Row], float]:
    """Kernels of one step, the slowest first, and the seconds of one step without a profiler."""
    cuda = torch.cuda.is_available()
    begin = time.perf_counter()
    for _ in range(PROFILED_STEPS):
        step()
    seconds = (time.perf_counter() - begin) / PROFILED_STEPS
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        for _ in range(PROFILED_STEPS):
            step()
        if cuda:
            torch.cuda.synchronize()
    rows = []
    for event in profiler.key_averages():
        total = event.self_device_time_total if cuda else event.self_cpu_time_total
        if total > 0:
            rows.append(
                {"kernel": event.key, "calls": event.count / PROFILED_STEPS, "microseconds": total / PROFILED_STEPS}
            )
    return sorted(rows, key=lambda row: -row["microseconds"]), seconds


def kind_of(kernel: str) -> str:
    """What a kernel does: experts, attention, products, or other."""
    return next((kind for kind, pattern in _KINDS if pattern.search(kernel)), "other")


def by_kind(rows: Sequence[Row], work: Work, bytes_per_second: float) -> list[Row]:
    """Time of every kind of work, beside the time that its bytes take."""
    kinds = []
    for kind in ("products", "experts", "attention", "other"):
        mine = [row for row in rows if kind_of(row["kernel"]) == kind]
        nbytes = getattr(work, kind, 0.0)
        kinds.append(
            {
                "kind": kind,
                "calls": sum(row["calls"] for row in mine),
                "microseconds": sum(row["microseconds"] for row in mine),
                "bytes": nbytes,
                "floor_microseconds": nbytes / bytes_per_second * 1e6,
            }
        )
    return kinds


def show(title: str, rows: Sequence[Row], kinds: Sequence[Row], seconds: float, console: Console) -> None:
    """Both tables, and what a step takes that no kernel accounts for."""
    total = sum(row["microseconds"] for row in rows)
    table = Table(title=title)
    for name in ("kernel", "kind", "a step", "µs a step", "share"):
        side = "left" if name in ("kernel", "kind") else "right"
        table.add_column(name, justify=side, overflow="ellipsis", no_wrap=True)
    for row in rows[:_SHOWN]:
        share = f"{100 * row['microseconds'] / total:.1f} %"
        table.add_row(row["kernel"], kind_of(row["kernel"]), f"{row['calls']:.0f}", f"{row['microseconds']:.1f}", share)
    console.print(table)
    summary = Table()
    for name in ("kind", "launches", "µs a step", "MB", "floor µs"):
        summary.add_column(name, justify="left" if name == "kind" else "right")
    for kind in kinds:
        cells = f"{kind['calls']:.0f}", f"{kind['microseconds']:.0f}", f"{kind['bytes'] / 1e6:.0f}"
        summary.add_row(kind["kind"], *cells, f"{kind['floor_microseconds']:.0f}")
    summary.add_row("step", "", f"{seconds * 1e6:.0f}", "", "")
    console.print(summary)
    if torch.cuda.is_available():
        console.print(f"{seconds * 1e6 - total:.0f} µs of a step pass without a kernel")
