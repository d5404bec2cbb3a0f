"""What lies where in a cache entry: safetensors files, known before a byte is written.

A file has the scales of its matrices first, then their codes, both in the order in which parameters hold them: a rank
that has all of a parameter reads it at once, and so does one that has some of its experts.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from requant.formats.base import Format
from requant.loading.plan import Conversion
from requant.parallel import Placement

FILE_BYTES = 4 * 1000**3
"""Where a file ends, give or take a matrix: several can be written at a time, which one cannot."""

_ALIGNMENT = 16
_NAMES = {torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32", torch.uint8: "U8"}


@dataclass(frozen=True)
class Stored:
    """One tensor of a file.

    Attributes:
        name: Its name.
        dtype: As safetensors spells it.
        shape: [rows, columns].
        start: Offset of its first byte in the file.
        row_bytes: Bytes of a row.
    """

    name: str
    dtype: str
    shape: tuple[int, int]
    start: int
    row_bytes: int


@dataclass(frozen=True)
class EntryFile:
    """One file.

    Attributes:
        name: Its name.
        header: What it begins with.
        size: Its size in bytes.
        matrices: What is in it, and where its codes and its scales lie.
    """

    name: str
    header: bytes
    size: int
    matrices: tuple[tuple[Conversion, Stored, Stored], ...]


def matrix_name(placement: Placement) -> str:
    """Name of a matrix's codes: the checkpoint tensor's, with the matrix's first row if that holds several.

    The name of its scales is this with ``_scale`` behind.
    """
    return f"{placement.tensor}[{placement.start}]" if placement.whole else placement.tensor


def shapes(conversion: Conversion) -> tuple[tuple[tuple[int, int], str], tuple[tuple[int, int], str]]:
    """Shape and dtype (as safetensors spells it) of a whole matrix's codes, and of its scales."""
    format, (n, k) = conversion.format, conversion.placement.shape
    return described(format, n, k)


def described(format: Format, n: int, k: int) -> tuple[tuple[tuple[int, int], str], tuple[tuple[int, int], str]]:
    """Of an [N, K] matrix in a format: see :func:`shapes`."""
    return (format.data_shape(n, k), _NAMES[format.data_dtype]), (format.scale_shape(n, k), _NAMES[format.scale_dtype])


def arrange(conversions: Iterable[Conversion]) -> list[EntryFile]:
    """The files of an entry. The same on every rank: nothing of it depends on what a rank has."""
    groups = list(_grouped(conversions))
    return [_file(f"weights-{i:05}-of-{len(groups):05}.safetensors", group) for i, group in enumerate(groups, 1)]


def _grouped(conversions: Iterable[Conversion]) -> Iterator[list[Conversion]]:
    modules: dict[str, list[Conversion]] = {}
    for conversion in conversions:
        modules.setdefault(conversion.module, []).append(conversion)
    group: list[Conversion] = []
    nbytes = 0
    for of_module in modules.values():
        for conversion in sorted(of_module, key=lambda c: c.placement.parameter):  # stable: parts stay as they stack
            group.append(conversion)
            nbytes += conversion.format.nbytes(*conversion.placement.shape)
            if nbytes >= FILE_BYTES:
                yield group
                group, nbytes = [], 0
    if group:
        yield group


def _file(name: str, conversions: list[Conversion]) -> EntryFile:
    tensors: list[tuple[str, str, tuple[int, int], int]] = []
    for which in (1, 0):
        for conversion in conversions:
            shape, dtype = shapes(conversion)[which]
            item = (conversion.format.scale_dtype if which else conversion.format.data_dtype).itemsize
            tensors.append((matrix_name(conversion.placement) + "_scale" * which, dtype, shape, shape[1] * item))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends = [0]
    for tensor, dtype, shape, row_bytes in tensors:
        ends.append(ends[-1] + shape[0] * row_bytes)
        header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": ends[-2:]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    data = 8 + len(text)
    stored = [
        Stored(tensor, dtype, shape, data + begin, row_bytes)
        for (tensor, dtype, shape, row_bytes), begin in zip(tensors, ends, strict=False)
    ]
    scales, codes = stored[: len(conversions)], stored[len(conversions) :]
    return EntryFile(
        name,
        len(text).to_bytes(8, "little") + text,
        data + ends[-1],
        tuple(zip(conversions, codes, scales, strict=True)),
    )


def total_bytes(files: Iterable[EntryFile]) -> int:
    """Bytes of all files."""
    return sum(file.size for file in files)
