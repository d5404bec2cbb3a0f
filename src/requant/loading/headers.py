"""What lies where in a checkpoint: safetensors headers, read and checked without touching a weight.

File layout: 8 bytes little-endian length, a JSON header of that length, then the tensors' bytes without holes
(https://huggingface.co/docs/safetensors/index#format).
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from requant.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# The safetensors library refuses longer headers too.
_LONGEST_HEADER = 100_000_000

_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint.

    Attributes:
        name: Its name.
        dtype: Its dtype, as safetensors spells it (``"BF16"``, ``"F8_E4M3"``).
        shape: Its shape.
        file: The file that holds it.
        start: Offset of its first byte from the beginning of the file.
        nbytes: Its size in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int

    @property
    def numel(self) -> int:
        """How many values it has."""
        return prod(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """Every tensor of a checkpoint.

    Attributes:
        folder: Where the files lie (for headers read over the network: where only the configuration lies).
        tensors: By name.
    """

    folder: Path
    tensors: dict[str, TensorInfo]


def read_headers(folder: Path) -> Checkpoint:
    """Read the headers of ``model.safetensors``, of the shards its index names, or of every ``*.safetensors``.

    Raises:
        CheckpointError: No such files, a shard or a tensor that the index promises is missing, a tensor is there
            twice, or a file is truncated or corrupt; the message names file and tensor.
    """
    # os.path.isfile, unlike Path.is_file, has no errors: what it cannot see is not there.
    if os.path.isfile(folder / SINGLE):
        return collect(folder, [read_header(folder / SINGLE)])
    if os.path.isfile(folder / INDEX):
        return _read_indexed(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"no weights in {folder}: neither {SINGLE} nor {INDEX} nor any other *.safetensors")
    return collect(folder, [read_header(file) for file in files])


def collect(folder: Path, files: Iterable[list[TensorInfo]]) -> Checkpoint:
    """Join the tensors of several files.

    Raises:
        CheckpointError: Two files hold a tensor of the same name.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for info in file:
            if info.name in tensors:
                raise CheckpointError(f"tensor {info.name} is in two files: {tensors[info.name].file} and {info.file}")
            tensors[info.name] = info
    return Checkpoint(folder, tensors)


def read_header(file: Path) -> list[TensorInfo]:
    """The tensors of one safetensors file, in the order of their bytes.

    Raises:
        CheckpointError: The file cannot be read, is truncated or is corrupt.
    """
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8:
                raise CheckpointError(f"{file} is truncated: {size} bytes are too few for a safetensors header")
            if length > _LONGEST_HEADER:
                raise CheckpointError(f"{file} is corrupt: a safetensors header is not {length} bytes long")
            if 8 + length > size:
                raise CheckpointError(f"{file} is truncated: it has {size} bytes, its header alone takes {8 + length}")
            header = _parse_json(stream.read(length), file)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    tensors = [_tensor(file, 8 + length, name, entry) for name, entry in header.items() if name != "__metadata__"]
    tensors.sort(key=lambda info: (info.start, info.nbytes))
    _check_layout(file, size, 8 + length, tensors)
    return tensors


def _read_indexed(folder: Path) -> Checkpoint:
    index = folder / INDEX
    try:
        content = index.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {index}: {error.strerror or error}") from error
    weight_map = _parse_json(content, index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} is corrupt: it has no 'weight_map' of tensor names to files")
    shards: dict[str, list[TensorInfo]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index} is corrupt: tensor {name} is in {shard!r}, not in a file of that folder")
        if shard not in shards:
            if not os.path.isfile(folder / shard):
                raise CheckpointError(f"shard {shard}, which {index} names for tensor {name}, is missing")
            shards[shard] = read_header(folder / shard)
    checkpoint = collect(folder, shards.values())
    for name, shard in weight_map.items():
        info = checkpoint.tensors.get(name)
        if info is None or info.file.name != shard:
            raise CheckpointError(f"tensor {name} is missing from {folder / shard}, where {index} says it is")
    return checkpoint


def _parse_json(content: bytes, file: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = dict(pairs)
        if len(keys) < len(pairs):
            twice = next(key for i, (key, _) in enumerate(pairs) if any(key == k for k, _ in pairs[:i]))
            raise CheckpointError(f"{file} is corrupt: {twice} is in its header twice")
        return keys

    try:
        parsed = json.loads(content, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is corrupt: its header is not JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{file} is corrupt: its header is not a JSON object")
    return parsed


def _tensor(file: Path, data: int, name: str, entry: Any) -> TensorInfo:
    """One entry of a header whose tensors' bytes begin at ``data``."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{file} is corrupt: tensor {name} lacks a valid dtype, shape or data_offsets")
    if dtype not in _BITS:
        raise CheckpointError(f"{file}: tensor {name} has the unknown dtype {dtype!r}; known: {', '.join(_BITS)}")
    begin, end = offsets
    expected = (prod(shape) * _BITS[dtype] + 7) // 8
    if end - begin != expected:
        raise CheckpointError(
            f"{file} is corrupt: tensor {name} takes {end - begin} bytes, but {dtype} {shape} needs {expected}"
        )
    return TensorInfo(name, dtype, tuple(shape), file, data + begin, end - begin)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _check_layout(file: Path, size: int, data: int, tensors: list[TensorInfo]) -> None:
    """The tensors lie one behind the other, from ``data`` to the end of the file."""
    end = data
    for info in tensors:
        if info.start != end:
            what = "overlaps another" if info.start < end else "has a hole before it"
            raise CheckpointError(f"{file} is corrupt: tensor {info.name} {what}")
        end += info.nbytes
    if size < end:
        cut = next(info.name for info in tensors if info.start + info.nbytes > size)
        raise CheckpointError(f"{file} is truncated: it has {size} bytes of {end}; tensor {cut} is cut off")
    if size > end:
        raise CheckpointError(f"{file} is corrupt: {size - end} bytes follow its last tensor")
