"""The kernels that quantize while loading: bytes a second, beside those of a device copy in the same run.

    python benchmarks/quantize_kernels.py
    python benchmarks/quantize_kernels.py --gigabytes 0.01 --format mxfp4 --shape 768x2048

For every format and shape there are two rows: from bfloat16 values, and from block FP8 (dequantized, rounded to
bfloat16, quantized: one pass). Each is one launch for as many matrices of a shape as fill --gigabytes, as loading does
it; bytes are those of codes and scales before and after. Beside it stands the same by the reference in plain torch, on
a few of the matrices. The first and the last matrix are compared with the reference: a kernel whose bits are wrong ends
the run. Prints one table and writes the same as JSON.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import requant
from perplexity import device_name
from requant.formats import FORMATS, Format
from requant.kernels import lookup, reference

# Rows × columns of one tensor of a checkpoint: Qwen3-30B-A3B's experts (down, then gate and up) and o_proj, and the
# experts of DeepSeek-V3.
SHAPES = ("2048x768", "768x2048", "2048x4096", "2048x7168")
SOURCE = FORMATS["per_block_fp8"]
_REPEATS, _EAGER = 20, 4


@dataclass
class Case:
    """Matrices of one shape, what becomes of them, and the call that does it."""

    format: Format
    converts: bool
    sources: tuple[list[Tensor], ...]
    data: list[Tensor]
    scale: list[Tensor]
    bad: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes read and written, each once."""
        return sum(tensor.nbytes for column in (*self.sources, self.data, self.scale) for tensor in column)

    def call(self, function: Callable[..., None], first: int | None = None) -> Callable[[], None]:
        """``function`` on the matrices, or on the first few."""
        columns = [column[:first] for column in (*self.sources, self.data, self.scale, self.bad.unbind())]
        return lambda: function(self.format, *columns)

    def check(self) -> None:
        """Raise RuntimeError unless the first and the last matrix are the reference's, bit for bit."""
        for i in (0, -1):
            if self.converts:
                codes, scales = (column[i] for column in self.sources)
                weight = SOURCE.dequantize(codes, scales, tuple(codes.shape)).to(torch.bfloat16)
            else:
                weight = self.sources[0][i]
            for got, wanted in zip((self.data[i], self.scale[i]), self.format.quantize(weight), strict=True):
                if not torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)):
                    raise RuntimeError(f"{self.format.name} of {list(weight.shape)}: not the bits of the reference")
        if self.bad.any():
            raise RuntimeError(f"{self.format.name}: finite values were counted as NaN or Inf")


def make_case(format: Format, converts: bool, n: int, k: int, nbytes: int, device: torch.device) -> Case:
    """Random weights of about ``nbytes`` in all, before."""
    many = max(nbytes // (n * k * (1 if converts else 2)), 1)
    weights = torch.empty(many, n, k, dtype=torch.bfloat16, device=device).normal_(std=0.02)
    sources: tuple[list[Tensor], ...] = (list(weights),)
    if converts:
        codes = torch.empty(many, n, k, dtype=SOURCE.data_dtype, device=device)
        scales = torch.empty(many, *SOURCE.scale_shape(n, k), device=device)
        for weight, data, scale in zip(weights, codes, scales, strict=True):
            lookup("quantize", SOURCE.name, device.type)(SOURCE, weight, data, scale)
        sources = list(codes), list(scales)
    data = torch.empty(many, *format.data_shape(n, k), dtype=format.data_dtype, device=device)
    scale = torch.empty(many, *format.scale_shape(n, k), dtype=format.scale_dtype, device=device)
    data.view(torch.uint8).fill_(0xFF)
    bad = torch.zeros(many, dtype=torch.int64, device=device)
    return Case(format, converts, sources, list(data), list(scale), bad)


def seconds(run: Callable[[], object], device: torch.device, repeats: int = _REPEATS) -> float:
    """Median time of a call, on the device's own clock; on a CPU the least of a few."""
    if device.type != "cuda":
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return min(times)
    run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)  # the calls are queued meanwhile
    for begin, end in zip(events[::2], events[1::2], strict=True):
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in zip(events[::2], events[1::2], strict=True)) / 1e3


def copy_bytes_per_second(nbytes: int, device: torch.device) -> float:
    """Bytes read and written by a copy on the device."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / seconds(lambda: target.copy_(source), device)


def measure(case: Case, device: torch.device, copy: float) -> dict[str, Any]:
    """One row."""
    op = "requantize" if case.converts else "quantize_many"
    n, k = case.sources[0][0].shape
    time_ours = seconds(case.call(lookup(op, case.format.name, device.type)), device)
    case.check()
    few = min(_EAGER, len(case.data))
    eager = seconds(case.call(getattr(reference, op), few), device, 5) / few
    rate = case.nbytes / time_ours
    return {
        "format": case.format.name,
        "source": SOURCE.name if case.converts else "bfloat16",
        "shape": [n, k],
        "matrices": len(case.data),
        "seconds": time_ours,
        "bytes": case.nbytes,
        "bytes_per_second": rate,
        "ceiling_bytes_per_second": copy,
        "ratio": rate / copy,
        "torch_ratio": case.nbytes / len(case.data) / eager / copy,
    }


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title=f"Quantize kernels, {device_name()}, torch {torch.__version__}")
    titles = ("rows x columns", "matrices", "ms", "GB/s", "copy GB/s", "of copy", "plain torch")
    for title in ("format", "from", *titles):
        table.add_column(title, justify="right" if title in titles else "left", no_wrap=True)
    for row in rows:
        table.add_row(
            row["format"],
            row["source"],
            "{} x {}".format(*row["shape"]),
            str(row["matrices"]),
            f"{row['seconds'] * 1e3:.3f}",
            f"{row['bytes_per_second'] / 1e9:,.0f}",
            f"{row['ceiling_bytes_per_second'] / 1e9:,.0f}",
            f"{row['ratio']:.2f}",
            f"{row['torch_ratio']:.2f}",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", action="append", choices=list(FORMATS), help="default: each")
    parser.add_argument("--shape", action="append", help=f"rows x columns (default: {', '.join(SHAPES)})")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of the sources of one launch (default: 4)")
    parser.add_argument("--output-file", type=Path, default=Path("out/quantize_kernels.json"))
    arguments = parser.parse_args()
    shapes = []
    for shape in arguments.shape or SHAPES:
        sizes = shape.split("x")
        if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
            parser.error(f"--shape is {shape!r}; accepted: ROWSxCOLUMNS, such as {SHAPES[0]}")
        shapes.append((int(sizes[0]), int(sizes[1])))
    if arguments.gigabytes <= 0:
        parser.error(f"--gigabytes is {arguments.gigabytes}; accepted: more than 0")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    nbytes = int(arguments.gigabytes * 1e9)
    copy = copy_bytes_per_second(nbytes, device)
    rows = []
    for name in arguments.format or FORMATS:
        for converts in (False, True):
            if converts and FORMATS[name] == SOURCE:
                continue  # there is nothing to do
            for n, k in shapes:
                rows.append(measure(make_case(FORMATS[name], converts, n, k, nbytes, device), device, copy))
    print_table(rows)
    arguments.output_file.parent.mkdir(parents=True, exist_ok=True)
    versions = {"requant": requant.__version__, "torch": torch.__version__}
    document = {"device": device_name(), "versions": versions, "rows": rows}
    arguments.output_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
