"""A complete entry: whole matrices, as quantized once, in the place of those of the checkpoint."""

import fcntl
import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from requant.errors import CheckpointError
from requant.formats.base import Format
from requant.loading.cache.layout import described, matrix_name
from requant.loading.headers import TensorInfo, read_header
from requant.loading.sources import ScalePart, SourcePart
from requant.parallel import Placement

DESCRIPTION = "entry.json"
"""What an entry is for. It is written last, and locked (shared) by whoever reads the entry."""


class Entry:
    """An entry that is being used: it is not removed before :meth:`close`, or before its context is left.

    Args:
        folder: Where it lies.

    Attributes:
        folder: Where it lies.
        description: What it is for.

    Raises:
        CheckpointError: It is not there, or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: int | None = None
        try:
            self._lock = os.open(folder / DESCRIPTION, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            self.description = read_description(folder)
            self._tensors = self._read_tensors()
        except OSError as error:
            self.close()
            raise CheckpointError(f"cannot read {folder / DESCRIPTION}: {error.strerror or error}") from error
        except CheckpointError:
            self.close()
            raise

    def part(self, placement: Placement, format: Format) -> tuple[SourcePart, Placement] | None:
        """A matrix of the checkpoint in ``format``, and where it lies here; None: it is not here."""
        name, (n, k) = matrix_name(placement), placement.shape
        codes, scale = self._tensors.get(name), self._tensors.get(f"{name}_scale")
        if codes is None or scale is None:
            return None
        wanted = described(format, n, k)
        if ((codes.shape, codes.dtype), (scale.shape, scale.dtype)) != wanted:
            return None
        here = replace(placement, tensor=name, whole=(), start=0)
        return SourcePart(codes, format, ScalePart(scale, 0, format.scale_shape(n, k))), here

    def touch(self) -> None:
        """Note that it is used."""
        with suppress(OSError):  # somebody else's folder can be read, too
            os.utime(self.folder / DESCRIPTION)

    def close(self) -> None:
        """Let go of it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read_tensors(self) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for name, size in self.description["files"].items():
            found = os.stat(self.folder / name).st_size
            if found != size:
                raise CheckpointError(f"{self.folder / name} has {found} bytes; it was written with {size}")
            tensors |= {info.name: info for info in read_header(self.folder / name)}
        return tensors


def read_description(folder: Path) -> dict[str, Any]:
    """What an entry is for, as :class:`~requant.loading.cache.writer.Writer` wrote it.

    Raises:
        CheckpointError: It is not there, or damaged.
    """
    file = folder / DESCRIPTION
    try:
        description = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(description, dict) or not isinstance(description.get("files"), dict):
        raise CheckpointError(f"{file} does not describe a cache entry")
    return description
