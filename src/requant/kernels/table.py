"""The kernel table: (op, format, device type) → function, the torch reference as the fallback.

A layer asks once, when it is built, and never looks at a format's name. Ops and their signatures:

``quantize(format: Format, weight: Tensor, data: Tensor, scale: Tensor) -> None``
    Quantize ``weight`` [N, K] (bf16, fp16 or fp32, contiguous, finite values) into the preallocated ``data`` and
    ``scale`` (contiguous views of the final parameter, shapes as the format says). Bit for bit the reference.

``quantize_many(format, weights: list[Tensor], data: list[Tensor], scale: list[Tensor], bad: list[Tensor]) -> None``
    ``quantize`` for several matrices of one shape [N, K] and dtype, K a multiple of 32, all at addresses that are
    multiples of 16 (scales at those of their dtype), which also adds the number of each matrix's values that are not
    finite to its ``bad`` (int64 []); codes and scales are undefined if there are any.

``linear(weight: QuantizedTensor, dtype: torch.dtype, row_max: RowMax | None = None) -> Callable[[Tensor], Tensor]``
    Called once after loading: does the layout that its GEMM needs and returns the forward
    x [M, K] (``dtype``) → y [M, N] (``dtype``), activations quantized as ``format.activation`` says. The
    forward must be safe to capture in a CUDA graph. ``row_max``, where x is one rank's share of a token's features: is
    given the largest magnitudes of the features that share a scale, float32 [M, G], and returns those of all ranks.
    A ``dtype`` of float64 asks the reference for a product in float64.

``requantize(format, codes: list[Tensor], codes_scale: list[Tensor], data, scale, bad: list[Tensor]) -> None``
    Of ``per_block_fp8`` weights of one shape, ``codes`` [N, K] and ``codes_scale`` float32 [⌈N/128⌉, ⌈K/128⌉], both
    contiguous: dequantize to float32, round to bfloat16, add the number of each one's values that are then not finite
    to its ``bad`` (int64, one value), and quantize into ``data`` and ``scale`` as above, whose contents are undefined
    if any was not. In one pass over the device's memory, without a bfloat16 copy, where a kernel does it.

``experts(weights: ExpertWeights, dtype: torch.dtype, row_max: RowMax | None = None) -> Callable[..., Tensor]``
    Called once after loading, as ``linear``; returns the forward of a fused MoE: x [T, H] (``dtype``), chosen experts
    int64 [T, k], their weights float32 [T, k] → [T, H] (``dtype``), the weighted sum of the chosen experts' outputs.
    Inputs of both products are quantized as ``format.activation`` says, a token's independently of all others. Weights
    in the model's dtype are looked up as ``"none"``. Safe to capture in a CUDA graph on a GPU. Of experts that are not
    here (``ExpertWeights.here``) a token gets exactly nothing. ``row_max`` is asked once a forward, for the inputs of
    the second product of all (token, choice) pairs; those of the first are whole.

``dense(x: Tensor, weight: Tensor) -> Tensor``
    x [M, K] · ``weight`` [N, K] transposed → [M, N], floating point, unquantized. Looked up as ``"*"``.

``dense_heads(x: Tensor, weight: Tensor) -> Tensor``
    x [H, M, K] · ``weight`` [H, N, K] transposed, head by head → [H, M, N]. Looked up as ``"*"``.

``attention(q, k_cache, v_cache, batch: AttentionBatch, scale: float, sliding_window: int | None) -> Tensor``
    Causal attention of q [T, Hq, D] over the paged caches [pages, block_size, Hk, D] and [pages, block_size, Hk, Dv],
    which already hold this step's keys and values → [T, Hq, Dv]. ``v_cache`` may be the first Dv features of
    ``k_cache`` (a view of the same memory): multi-head latent attention. No format: looked up as ``"*"``.

``rms_norm(x, weight, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]``
    Root-mean-square norm of x + ``residual``, and the sum itself. Looked up as ``"*"``, as the following three are.

``heads(qkv, num_heads, norms, eps, rope, k_cache, v_cache, slots) -> Tensor``
    Normalize and rotate the heads of a layer's projection, store keys and values, and return the queries; see
    :func:`requant.kernels.rotary_reference.heads`.

``gated(y: Tensor, activation: str) -> Tensor``
    act(gate) · up of y [T, 2I], gate first; see :func:`requant.kernels.gated_reference.gated`.

``route(logits: Tensor, correction_bias: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]``
    Which experts each token goes to, and with which weights; see :func:`requant.kernels.routing_reference.route`.

``kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None``
    Put keys [T, Hk, D] and values [T, Hk, Dv] into the paged caches at ``slots`` (-1: nowhere); both caches may be
    views of the last dimension of one tensor. No format: looked up as ``"*"``.
    One sequence's NaN never reaches another: ``attention`` does not read behind a sequence's end, or ``kv_write``
    leaves nothing there that comes through its mask.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

RowMax = Callable[[Tensor], Tensor]
"""Given the largest magnitudes of a rank's share of activations, float32 [M, G], those that the scales are made of."""

# (op, format, device type): "module:function"; "*" matches every format or device. The most specific row wins.
_ROWS: dict[tuple[str, str, str], str] = {
    ("quantize", "*", "*"): "requant.kernels.reference:quantize",
    ("quantize_many", "*", "*"): "requant.kernels.reference:quantize_many",
    ("quantize_many", "ptpc_fp8", "cuda"): "requant.kernels.triton.quantize_fp8:quantize_ptpc_many",
    ("quantize_many", "per_block_fp8", "cuda"): "requant.kernels.triton.quantize_fp8:quantize_per_block_many",
    ("quantize_many", "mxfp4", "cuda"): "requant.kernels.triton.quantize_mxfp4:quantize_mxfp4_many",
    ("requantize", "*", "*"): "requant.kernels.reference:requantize",
    ("requantize", "ptpc_fp8", "cuda"): "requant.kernels.triton.requantize:requantize_ptpc",
    ("requantize", "mxfp4", "cuda"): "requant.kernels.triton.requantize:requantize_mxfp4",
    ("linear", "*", "*"): "requant.kernels.reference:linear",
    ("experts", "*", "*"): "requant.kernels.experts_reference:experts",
    ("experts", "ptpc_fp8", "cuda"): "requant.kernels.triton.experts:experts_fp8",
    ("experts", "per_block_fp8", "cuda"): "requant.kernels.triton.experts:experts_fp8",
    ("experts", "mxfp4", "cuda"): "requant.kernels.triton.experts:experts_mxfp4",
    ("experts", "none", "cuda"): "requant.kernels.triton.experts:experts_dense",
    ("dense", "*", "*"): "torch.nn.functional:linear",
    ("dense", "*", "cpu"): "requant.kernels.dense:dense",
    ("dense_heads", "*", "*"): "requant.kernels.dense:dense_heads_batched",
    ("dense_heads", "*", "cpu"): "requant.kernels.dense:dense_heads",
    ("rms_norm", "*", "*"): "requant.kernels.norm_reference:rms_norm",
    ("rms_norm", "*", "cuda"): "requant.kernels.triton.norm:rms_norm",
    ("heads", "*", "*"): "requant.kernels.rotary_reference:heads",
    ("heads", "*", "cuda"): "requant.kernels.triton.rotary:heads",
    ("gated", "*", "*"): "requant.kernels.gated_reference:gated",
    ("gated", "*", "cuda"): "requant.kernels.triton.moe_elementwise:gated",
    ("route", "*", "*"): "requant.kernels.routing_reference:route",
    ("route", "*", "cuda"): "requant.kernels.triton.routing:route",
    ("kv_write", "*", "*"): "requant.kernels.attention_reference:kv_write",
    ("kv_write", "*", "cuda"): "requant.kernels.triton.kv_write:kv_write",
    ("attention", "*", "*"): "requant.kernels.attention_reference:attention",
    ("attention", "*", "cuda"): "requant.kernels.triton.attention:attention",
    ("quantize", "ptpc_fp8", "cuda"): "requant.kernels.triton.quantize_fp8:quantize_ptpc",
    ("quantize", "per_block_fp8", "cuda"): "requant.kernels.triton.quantize_fp8:quantize_per_block",
    ("quantize", "mxfp4", "cuda"): "requant.kernels.triton.quantize_mxfp4:quantize_mxfp4",
    ("linear", "ptpc_fp8", "cuda"): "requant.kernels.triton.linear:linear_ptpc",
    ("linear", "per_block_fp8", "cuda"): "requant.kernels.triton.linear:linear_per_block",
    ("linear", "mxfp4", "cuda"): "requant.kernels.triton.linear:linear_mxfp4",
}


@cache
def lookup(op: str, format: str, device_type: str) -> Callable[..., Any]:
    """The function that runs ``op`` for ``format`` on ``device_type`` (``torch.device.type``).

    Raises:
        KeyError: No row, not even a fallback, names ``op``.
    """
    for key in ((op, format, device_type), (op, format, "*"), (op, "*", device_type), (op, "*", "*")):
        if key in _ROWS:
            module, function = _ROWS[key].split(":")
            return getattr(import_module(module), function)
    raise KeyError(f"no kernel for op {op!r}; the table has {sorted({row[0] for row in _ROWS})}")


def layout_bytes(device: torch.device, n: int, k: int) -> int:
    """Bytes that the layout step adds to a quantized [N, K] weight: the CPU's float32 copy, else none."""
    return n * k * 4 if device.type == "cpu" else 0
