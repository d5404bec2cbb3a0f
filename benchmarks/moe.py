"""The fused MoE of one layer on a GPU: time of the forward for each format and number of tokens, beside its floor.

    python benchmarks/moe.py
    python benchmarks/moe.py --experts 256 --choices 8 --hidden 7168 --inner 2048 --tokens 1 64 --format mxfp4

Weights are random codes, routing is uniform. Each figure is the median over replays of a CUDA graph; the graph holds
several calls on weights of their own, so that the cache does not hold what it would not. The floor is the larger of
two times: the bytes of every expert that is touched (its scales included) over the bandwidth of a device copy, and the
multiplications over the rate of a large library product, FP8 for FP8 activations and BF16 otherwise, both measured in
the same run. Prints one table and writes the same as JSON.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table

import requant
from gpu import BF16, CACHE_BYTES, ceilings, graph_seconds
from perplexity import device_name
from requant.formats import FORMATS, QuantizedStack
from requant.kernels import lookup
from requant.kernels.experts import UNQUANTIZED, ExpertWeights


def stack(experts: int, parts: tuple[int, ...], k: int, name: str) -> torch.Tensor | QuantizedStack:
    """Random weights of a stack of matrices on the GPU."""
    n = sum(parts)
    if name == UNQUANTIZED:
        return torch.randn(experts, n, k, dtype=BF16, device="cuda") * k**-0.5
    format = FORMATS[name]
    shapes = [format.scale_shape(rows, k) for rows in parts]
    data = torch.empty(experts, *format.data_shape(n, k), dtype=format.data_dtype, device="cuda")
    scale = torch.empty(experts, sum(rows for rows, _ in shapes), shapes[0][1], dtype=format.scale_dtype, device="cuda")
    for expert in range(experts):
        row, scale_row = 0, 0
        for rows, (scales, _) in zip(parts, shapes, strict=True):
            weight = torch.randn(rows, k, dtype=BF16, device="cuda") * k**-0.5
            targets = data[expert, row : row + rows], scale[expert, scale_row : scale_row + scales]
            lookup("quantize", name, "cuda")(format, weight, *targets)
            row, scale_row = row + rows, scale_row + scales
    return QuantizedStack(data, scale, format, (n, k), parts)


def nbytes(weights: ExpertWeights) -> int:
    """Bytes of all experts of a layer."""
    both = weights.w13, weights.w2
    return sum(w.nbytes if isinstance(w, torch.Tensor) else w.data.nbytes + w.scale.nbytes for w in both)


def make_layers(arguments: argparse.Namespace, name: str) -> list[ExpertWeights]:
    """Layers in one format, as many as it takes that a token's experts of all of them exceed the cache; at most 8."""

    def layer() -> ExpertWeights:
        w13 = stack(arguments.experts, (arguments.inner, arguments.inner), arguments.hidden, name)
        w2 = stack(arguments.experts, (arguments.hidden,), arguments.inner, name)
        return ExpertWeights(w13, w2, None, None, "silu", True)

    first = layer()
    touched = nbytes(first) * min(arguments.choices, arguments.experts) // arguments.experts
    return [first, *(layer() for _ in range(min(CACHE_BYTES // touched + 1, 7)))]


def measure(
    arguments: argparse.Namespace, name: str, layers: list[ExpertWeights], tokens: int, ceiling: dict[str, float]
) -> dict[str, Any]:
    """One format and number of tokens."""
    e, k, hidden, inner = arguments.experts, arguments.choices, arguments.hidden, arguments.inner
    x = torch.randn(tokens, hidden, dtype=BF16, device="cuda")
    ids = torch.rand(tokens, e, device="cuda").topk(k).indices
    scores = torch.rand(tokens, k, device="cuda")
    forwards = [lookup("experts", name, "cuda")(weights, BF16) for weights in layers]
    time = graph_seconds([partial(forward, x, ids, scores) for forward in forwards])
    touched = ids.unique().numel()
    moved = nbytes(layers[0]) * touched / e / ceiling["bytes"]
    fp8 = name != UNQUANTIZED and FORMATS[name].activation is not None
    computed = 2 * tokens * k * 3 * hidden * inner / ceiling["fp8" if fp8 else "bf16"]
    return {
        "format": name,
        "tokens": tokens,
        "microseconds": time * 1e6,
        "floor_microseconds": max(moved, computed) * 1e6,
        "bound": "bytes" if moved > computed else "products",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", action="append", choices=[UNQUANTIZED, *FORMATS], help="default: each")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128, 2048, 8192])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--choices", type=int, default=8, help="experts a token")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768, help="inner size of an expert")
    parser.add_argument("--output-file", type=Path, default=Path("out/moe.json"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: this benchmark needs a GPU, and torch sees none", file=sys.stderr)
        return 2
    ceiling = ceilings()
    rows = []
    for name in arguments.format or (UNQUANTIZED, *FORMATS):
        layers = make_layers(arguments, name)
        rows += [measure(arguments, name, layers, tokens, ceiling) for tokens in arguments.tokens]
        del layers  # before the next format's are made
    shape = f"{arguments.experts} experts, {arguments.choices} a token, {arguments.hidden} x {arguments.inner}"
    table = Table(title=f"Fused MoE, {shape}, {device_name()}, torch {torch.__version__}")
    for heading in ("format", "tokens", "µs", "floor µs", "times floor", "bound by"):
        table.add_column(heading, justify="left" if heading in ("format", "bound by") else "right")
    for row in rows:
        time, floor = row["microseconds"], row["floor_microseconds"]
        cells = f"{time:.1f}", f"{floor:.1f}", f"{time / floor:.2f}", row["bound"]
        table.add_row(row["format"], f"{row['tokens']:,}", *cells)
    Console(width=120).print(table)
    print(", ".join(f"{name} {value:.3g}/s" for name, value in ceiling.items()))
    facts = {"device": device_name(), "shape": shape, "ceilings": ceiling}
    versions = {"requant": requant.__version__, "torch": torch.__version__, "triton": triton.__version__}
    arguments.output_file.parent.mkdir(parents=True, exist_ok=True)
    document = {**facts, "versions": versions, "rows": rows}
    arguments.output_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
