"""The fused MoE of a GPU: what the kernel table names for each format.

Sort the (token, choice) pairs by expert, multiply each block of pairs with its expert's w13, gate, quantize for the
formats that want it, multiply with w2, and sum each token's choices. Ten launches or less, none of which waits.

Legend: T tokens, k choices a token, S = T · k pairs, E experts, H hidden size, I inner size.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from requant.formats.base import QuantizedStack
from requant.kernels.experts import ExpertWeights
from requant.kernels.table import RowMax
from requant.kernels.triton.activation import quantizer
from requant.kernels.triton.linear import capability_of, scale_rows
from requant.kernels.triton.linear_tile import Tile, columns_for
from requant.kernels.triton.moe_elementwise import combine, silu_mul, silu_mul_quantize
from requant.kernels.triton.moe_gemm import grouped_dense, grouped_fp8, grouped_mxfp4
from requant.kernels.triton.moe_sort import Blocks, sort_pairs

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
Product = Callable[..., Tensor]


def experts_fp8(weights: ExpertWeights, dtype: torch.dtype, row_max: RowMax | None = None) -> Forward:
    """The forward for ``ptpc_fp8`` and ``per_block_fp8``; see the table's ``experts``."""
    assert isinstance(weights.w13, QuantizedStack)
    kind = weights.w13.format.activation
    assert kind is not None
    # Scales a block are multiplied in after every step, which leaves registers for 64 rows only.
    rows = 64 if kind == "fp8_1x128" else 128
    products = _fp8_product(weights.w13, dtype), _fp8_product(weights.w2, dtype)
    return _forward(weights, dtype, kind, *products, rows, row_max)


def experts_mxfp4(weights: ExpertWeights, dtype: torch.dtype, row_max: RowMax | None = None) -> Forward:
    """The forward for ``mxfp4``: activations in the model's dtype, weights dequantized on the way."""
    return _forward(weights, dtype, None, _mxfp4_product(weights.w13), _mxfp4_product(weights.w2))


def experts_dense(weights: ExpertWeights, dtype: torch.dtype, row_max: RowMax | None = None) -> Forward:
    """The forward for weights in the model's dtype."""
    return _forward(weights, dtype, None, _dense_product(weights.w13), _dense_product(weights.w2))


def rows_of_blocks(pairs: int, experts: int, most: int = 128) -> int:
    """Rows of a block for S pairs over E experts: about the pairs that an expert gets, so that few rows are idle.

    Args:
        pairs: S.
        experts: E.
        most: Not more than this.
    """
    each = pairs / min(experts, pairs)
    return min(16 if each <= 16 else 32 if each <= 32 else 64 if each < 128 else 128, most)


def _forward(
    weights: ExpertWeights,
    dtype: torch.dtype,
    kind: str | None,
    first: Product,
    second: Product,
    rows: int = 128,
    row_max: RowMax | None = None,
) -> Forward:
    num_experts = len(weights.w2)
    here = weights.here or range(num_experts)
    lead, width = weights.lead, weights.w2.shape[-1]
    act = ACT2FN[weights.activation]
    fused = weights.gated and weights.activation in ("silu", "swish")
    inputs = quantizer(kind) if kind is not None else _as_it_is
    inner_inputs = quantizer(kind, row_max) if kind is not None else _as_it_is

    def activate(y: Tensor) -> Tensor:
        if fused:
            return silu_mul(y, lead, width)
        if weights.gated:
            gate, up = y.float().chunk(2, dim=-1)
            inner = act(gate) * up
        else:
            inner = act(y.float())
        return F.pad(inner.to(dtype), (lead, width - lead - inner.shape[1]))

    def between(y: Tensor) -> tuple[Tensor, ...]:
        if fused and kind is not None and row_max is None:
            return silu_mul_quantize(y, kind, lead, width)
        return inner_inputs(activate(y))

    def forward(x: Tensor, experts: Tensor, scores: Tensor) -> Tensor:
        pairs = experts.numel()
        if not pairs:
            return torch.zeros_like(x)
        blocks = sort_pairs(experts, num_experts, rows_of_blocks(pairs, num_experts, rows), here.start)
        y = first(*inputs(x.contiguous()), bias=weights.w13_bias, blocks=blocks, pairs=pairs)
        y = second(*between(y), bias=weights.w2_bias, blocks=blocks, pairs=pairs)
        return combine(y, scores, experts if weights.here else None, here)

    return forward


def _as_it_is(x: Tensor) -> tuple[Tensor]:
    return (x,)


def _fp8_product(weight: Tensor | QuantizedStack, dtype: torch.dtype) -> Product:
    assert isinstance(weight, QuantizedStack)
    n, _ = weight.shape
    per_block = weight.format.activation == "fp8_1x128"
    rows = scale_rows(weight.parts or (n,), weight.skipped).to(weight.data.device) if per_block else None
    fp8_dot = capability_of(weight.data.device) >= (8, 9) and dtype != torch.float32

    def product(x: Tensor, x_scale: Tensor, bias: Tensor | None, blocks: Blocks, pairs: int) -> Tensor:
        return grouped_fp8(
            x,
            x_scale,
            weight.data,
            weight.scale,
            bias,
            blocks,
            pairs,
            dtype,
            _fp8_tile(blocks, n, per_block),
            fp8_dot=fp8_dot,
            scale_rows=rows,
        )

    return product


def _mxfp4_product(weight: Tensor | QuantizedStack) -> Product:
    assert isinstance(weight, QuantizedStack)
    n, _ = weight.shape

    def product(x: Tensor, bias: Tensor | None, blocks: Blocks, pairs: int) -> Tensor:
        tile = _float_tile(blocks, n, x.dtype, dequantizes=True)
        return grouped_mxfp4(x, weight.data, weight.scale, bias, blocks, pairs, tile)

    return product


def _dense_product(weight: Tensor | QuantizedStack) -> Product:
    assert isinstance(weight, Tensor)
    n = weight.shape[1]

    def product(x: Tensor, bias: Tensor | None, blocks: Blocks, pairs: int) -> Tensor:
        return grouped_dense(x, weight, bias, blocks, pairs, _float_tile(blocks, n, x.dtype, dequantizes=False))

    return product


# Fastest of some 50 tiles for each format on an H200, at 2048 × 1536 and 768 × 2048 (Qwen3-30B-A3B), torch 2.11 and
# Triton 3.6: 16 and 128 tokens for blocks of 16 rows, 2,048 and 8,192 for those of 64 and 128.
def _fp8_tile(blocks: Blocks, n: int, per_block: bool) -> Tile:
    if blocks.rows >= 64:
        return Tile(blocks.rows, 128, 128, stages=3 if per_block or blocks.rows == 128 else 4)
    columns = _columns(blocks, n)
    return Tile(blocks.rows, columns, 128 if per_block or columns < 64 else 256, stages=3)


def _float_tile(blocks: Blocks, n: int, dtype: torch.dtype, dequantizes: bool) -> Tile:
    if dtype == torch.float32 or (dequantizes and dtype == torch.float16):
        return Tile(blocks.rows, 32, 32, stages=2)  # products on the vector units
    if blocks.rows >= 64:
        return Tile(blocks.rows, 128, 64, stages=3) if dequantizes else Tile(blocks.rows, 256, 64, warps=8)
    return Tile(blocks.rows, _columns(blocks, n), 128, stages=3 if dequantizes else 4)


def _columns(blocks: Blocks, n: int) -> int:
    """As wide as leaves every multiprocessor some of the N · B to read, at least 32."""
    return max(columns_for(n * blocks.counts.numel()), 32)
