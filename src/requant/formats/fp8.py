"""FP8 E4M3 (finite, no infinities) with one float32 scale per tile: what the FP8 formats and activations share.

The element format is E4M3 of "FP8 Formats for Deep Learning" (Micikevicius et al., 2022): largest value 448.

Shape legend: M, N rows; K columns; a tile is ``rows`` × ``cols`` elements, and ragged edge tiles use the
elements they have.
"""

from collections.abc import Callable
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from requant.formats.rows import row_runs

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# The smallest normal float32. A smaller scale would be subnormal, and hardware is free to flush those.
SCALE_MIN = 2.0**-126


def scale_shape(m: int, k: int, rows: int, cols: int) -> tuple[int, int]:
    """Shape of the scales of an [M, K] matrix in tiles of ``rows`` × ``cols``; 0 columns: the whole of K."""
    return ceil(m / rows), (ceil(k / cols) if cols else 1)


def quantize_tiles(
    x: Tensor, rows: int, cols: int, reduce: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize [M, K] (floating point, finite values) with one scale per tile.

    s = max(amax / 448, 2^-126), or 1 for a tile of zeros; q = e4m3(clamp(x / s, -448, 448)). Both divisions are
    IEEE float32, and the cast rounds to nearest even.

    Args:
        x: The matrix.
        rows: Rows of a tile.
        cols: Columns of a tile; 0 for the whole of K.
        reduce: Given the tiles' largest magnitudes, returns those to use: where a tile is more than what is here.

    Returns:
        Codes, float8_e4m3fn [M, K], and scales, float32 ``scale_shape(M, K, rows, cols)``.
    """
    m, k = x.shape
    tile_rows, tile_cols = scale_shape(m, k, rows, cols)
    cols = cols or max(k, 1)
    x = x.float()
    padding = (0, tile_cols * cols - k, 0, tile_rows * rows - m)
    if any(padding):
        x = F.pad(x, padding)
    tiles = x.view(tile_rows, rows, tile_cols, cols)
    amax = tiles.abs().amax(3)
    amax = amax.amax(1) if rows > 1 else amax.squeeze(1)
    if reduce is not None:
        amax = reduce(amax)
    scale = _scales(amax)
    codes = _codes(tiles, scale[:, None, :, None]).view(x.shape)
    return (codes[:m, :k].contiguous() if any(padding) else codes), scale


def row_maxima(weight: Tensor) -> Tensor:
    """The largest magnitude of each row of [N, K], float32 [N, 1]; temporaries are of bounded size."""
    n, k = weight.shape
    out = torch.zeros((n, 1), dtype=torch.float32, device=weight.device)
    for start, stop in row_runs(n, k) if k else ():
        out[start:stop] = weight[start:stop].float().abs().amax(1, keepdim=True)
    return out


def quantize_rows(weight: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize some columns of rows whose largest magnitudes are known, as :func:`quantize_tiles` does whole rows.

    Args:
        weight: [N, K], floating point.
        amax: float32 [N, 1], not less than the magnitudes in ``weight``.

    Returns:
        Codes, float8_e4m3fn [N, K], and scales, float32 [N, 1].
    """
    n, k = weight.shape
    data = torch.empty((n, k), dtype=E4M3, device=weight.device)
    scale = _scales(amax)
    for start, stop in row_runs(n, k):
        data[start:stop] = _codes(weight[start:stop].float(), scale[start:stop])
    return data, scale


def _scales(amax: Tensor) -> Tensor:
    # Divided by a tensor: on a CUDA device torch multiplies by the reciprocal of a Python scalar instead.
    scale = (amax / torch.full_like(amax, E4M3_MAX)).clamp_min_(SCALE_MIN)
    return torch.where(amax == 0, 1.0, scale)


def _codes(values: Tensor, scale: Tensor) -> Tensor:
    # Clamped first: the cast turns whatever rounds above 448 into NaN.
    return (values / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)


def dequantize_tiles(data: Tensor, scale: Tensor, rows: int, cols: int) -> Tensor:
    """float(code) · scale of the tile, float32 [M, K]; the inverse of :func:`quantize_tiles`."""
    m, k = data.shape
    if rows > 1:
        scale = scale.repeat_interleave(rows, 0)[:m]
    if cols and scale.shape[1] > 1:
        scale = scale.repeat_interleave(cols, 1)[:, :k]
    return data.float().mul_(scale)


def quantize_weight(weight: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """:func:`quantize_tiles` of a large matrix, with temporaries of bounded size."""
    n, k = weight.shape
    data = torch.empty((n, k), dtype=E4M3, device=weight.device)
    scale = torch.empty(scale_shape(n, k, rows, cols), dtype=torch.float32, device=weight.device)
    for start, stop in row_runs(n, k, rows):
        codes, scales = quantize_tiles(weight[start:stop], rows, cols)
        data[start:stop] = codes
        scale[start // rows : ceil(stop / rows)] = scales
    return data, scale


def dequantize_weight(data: Tensor, scale: Tensor, rows: int, cols: int) -> Tensor:
    """:func:`dequantize_tiles` of a large matrix, with temporaries of bounded size."""
    n, k = data.shape
    out = torch.empty((n, k), dtype=torch.float32, device=data.device)
    for start, stop in row_runs(n, k, rows):
        scales = scale[start // rows : ceil(stop / rows)]
        out[start:stop] = dequantize_tiles(data[start:stop], scales, rows, cols)
    return out
