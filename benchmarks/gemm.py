"""Linear layers on a GPU: time of the forward for each format, shape and number of tokens, beside floor and library.

    python benchmarks/gemm.py
    python benchmarks/gemm.py --format mxfp4 --shape 5120x2048 --tokens 1 16

"ours" is the whole forward of a layer, its input's quantization included. "library" is torch's product alone, on inputs
that are quantized already: row-wise scaled for ptpc_fp8, block-scaled for per_block_fp8 where it runs, BF16 otherwise.
Each figure is the median over replays of a CUDA graph; the graph holds several calls on weights of their own, so that
the cache does not hold what it would not. The floor is the larger of two times: the weight's bytes over the rate of a
device copy, and the multiplications over the rate of a large product, both measured in the same run. Prints one table
and writes the same as JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from rich.console import Console
from rich.table import Table
from torch import Tensor

import requant
from gpu import BF16, CACHE_BYTES, ceilings, graph_seconds
from perplexity import device_name
from requant.formats import FORMATS, QuantizedTensor
from requant.kernels import lookup
from requant.kernels.experts import UNQUANTIZED

# N × K: qkv_proj and o_proj of Qwen3-30B-A3B, qkv_proj, gate_up_proj and down_proj of Qwen3-8B.
SHAPES = ("5120x2048", "2048x4096", "6144x4096", "24576x4096", "4096x12288")
TOKENS = (1, 16, 64, 128, 2048, 8192)
_MOST_WEIGHTS = 64
Run = Callable[[Tensor], object]


def weight(name: str, n: int, k: int) -> Tensor | QuantizedTensor:
    """A random weight."""
    values = torch.randn(n, k, dtype=BF16, device="cuda") * k**-0.5
    if name == UNQUANTIZED:
        return values
    format = FORMATS[name]
    data = torch.empty(format.data_shape(n, k), dtype=format.data_dtype, device="cuda")
    scale = torch.empty(format.scale_shape(n, k), dtype=format.scale_dtype, device="cuda")
    lookup("quantize", name, "cuda")(format, values, data, scale)
    return QuantizedTensor(data, scale, format, (n, k))


def nbytes(w: Tensor | QuantizedTensor) -> int:
    """Bytes that a product reads of it."""
    return w.nbytes if isinstance(w, Tensor) else w.data.nbytes + w.scale.nbytes


def ours(w: Tensor | QuantizedTensor) -> Run:
    """The forward that a layer has."""
    if isinstance(w, Tensor):
        return partial(lookup("dense", "*", "cuda"), weight=w)
    return lookup("linear", w.format.name, "cuda")(w, BF16)


def library(w: Tensor | QuantizedTensor, tokens: int) -> Run | None:
    """torch's own product; None: it has none for this format and shape."""
    if isinstance(w, Tensor):
        return lambda x: F.linear(x, w)
    if w.format.name == "mxfp4":
        values = w.dequantize(BF16)
        return lambda x: F.linear(x, values)
    n, k = w.shape
    codes = torch.randn(tokens, k, device="cuda").to(torch.float8_e4m3fn)
    if w.format.name == "ptpc_fp8":
        scale = torch.ones(tokens, 1, device="cuda")
        return lambda x: torch._scaled_mm(codes, w.data.t(), scale_a=scale, scale_b=w.scale.t(), out_dtype=BF16)
    if tokens % 4 or n % 128 or k % 512:  # the layout of its scales
        return None
    kinds = torch.nn.functional.ScalingType
    scale = torch.ones(k // 128, tokens, device="cuda").t()
    recipes = kinds.BlockWise1x128, w.scale.t(), kinds.BlockWise128x128
    return lambda x: F.scaled_mm(codes, w.data.t(), scale, *recipes, output_dtype=BF16)


def measure(weights: list[Tensor | QuantizedTensor], tokens: int, ceiling: dict[str, float]) -> dict[str, Any]:
    """One format, shape and number of tokens."""
    first = weights[0]
    n, k = first.shape
    x = torch.randn(tokens, k, dtype=BF16, device="cuda")
    own = graph_seconds([partial(ours(w), x) for w in weights])
    theirs = [run for w in weights if (run := library(w, tokens)) is not None]
    try:
        other = graph_seconds([partial(run, x) for run in theirs]) if theirs else None
    except RuntimeError:  # the library has no kernel for it
        other = None
    moved = nbytes(first) / ceiling["bytes"]
    fp8 = isinstance(first, QuantizedTensor) and first.format.activation is not None
    computed = 2 * tokens * n * k / ceiling["fp8" if fp8 else "bf16"]
    return {
        "format": UNQUANTIZED if isinstance(first, Tensor) else first.format.name,
        "shape": f"{n}x{k}",
        "tokens": tokens,
        "microseconds": own * 1e6,
        "library_microseconds": None if other is None else other * 1e6,
        "floor_microseconds": max(moved, computed) * 1e6,
        "bound": "bytes" if moved > computed else "products",
    }


def shape_of(text: str) -> tuple[int, int]:
    """``"5120x2048"`` → (5120, 2048)."""
    n, _, k = text.partition("x")
    if not (n.isdigit() and k.isdigit() and int(n) and int(k)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; accepted: ROWSxCOLUMNS")
    return int(n), int(k)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", action="append", choices=[UNQUANTIZED, *FORMATS], help="default: each")
    parser.add_argument("--shape", action="append", type=shape_of, metavar="NxK", help=f"default: {', '.join(SHAPES)}")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--output-file", type=Path, default=Path("out/gemm.json"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: this benchmark needs a GPU, and torch sees none", file=sys.stderr)
        return 2
    ceiling = ceilings()
    rows = []
    for n, k in arguments.shape or map(shape_of, SHAPES):
        for name in arguments.format or (UNQUANTIZED, *FORMATS):
            first = weight(name, n, k)
            more = min(CACHE_BYTES // nbytes(first) + 1, _MOST_WEIGHTS - 1)
            weights = [first, *(weight(name, n, k) for _ in range(more))]
            rows += [measure(weights, tokens, ceiling) for tokens in arguments.tokens]
            del first, weights  # before the next ones are made
    table = Table(title=f"Linear layers, {device_name()}, torch {torch.__version__}")
    for heading in ("shape", "format", "tokens", "µs", "floor µs", "times floor", "library µs", "bound by"):
        table.add_column(heading, justify="left" if heading in ("shape", "format", "bound by") else "right")
    for row in rows:
        time, floor, other = row["microseconds"], row["floor_microseconds"], row["library_microseconds"]
        cells = f"{time:.1f}", f"{floor:.1f}", f"{time / floor:.2f}", "-" if other is None else f"{other:.1f}"
        table.add_row(row["shape"], row["format"], f"{row['tokens']:,}", *cells, row["bound"])
    Console(width=120).print(table)
    print(", ".join(f"{name} {value:.3g}/s" for name, value in ceiling.items()))
    versions = {"requant": requant.__version__, "torch": torch.__version__, "triton": triton.__version__}
    document = {"device": device_name(), "ceilings": ceiling, "versions": versions, "rows": rows}
    arguments.output_file.parent.mkdir(parents=True, exist_ok=True)
    arguments.output_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
