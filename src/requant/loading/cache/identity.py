"""What a cache entry is for: this very checkpoint, this recipe, these numbers."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from requant.errors import CheckpointError
from requant.formats import CONTRACT_VERSION
from requant.loading.headers import Checkpoint
from requant.recipe import Recipe

# Of every file this many places are read, spread evenly: together less than one tensor of a large model.
_SAMPLES = 64
_SAMPLE_BYTES = 1024


@dataclass(frozen=True)
class Identity:
    """What quantized weights depend on, and nothing that they do not depend on: not the number of ranks, for one.

    Attributes:
        fingerprint: Of the checkpoint, see :func:`fingerprint`.
        recipe: Canonical JSON object of the recipe.
        contract: :data:`requant.formats.CONTRACT_VERSION` that made them.
        model: The model as the user named it; for people, not a part of the key.
        folder: Where its files lie; likewise.
    """

    fingerprint: str
    recipe: dict[str, Any]
    contract: int = CONTRACT_VERSION
    model: str = field(default="", compare=False)
    folder: str = field(default="", compare=False)

    @property
    def key(self) -> str:
        """Name of the entry."""
        # The order of a recipe's overrides counts.
        parts = [self.fingerprint, self.recipe, self.contract]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def to_dict(self) -> dict[str, Any]:
        """As JSON, for the entry's description."""
        return asdict(self)


def identify(checkpoint: Checkpoint, recipe: Recipe, model: str) -> Identity:
    """What an entry for this load must be for.

    Raises:
        CheckpointError: A file cannot be read.
    """
    return Identity(
        fingerprint(checkpoint), recipe.to_dict(), model=model, folder=str(checkpoint.folder.expanduser().absolute())
    )


def fingerprint(checkpoint: Checkpoint) -> str:
    """Changes with every change of a checkpoint: SHA-256, hex.

    Of the names, shapes, dtypes and places of all tensors; the files' names, sizes and times of the last change (of
    content, which tools may set back, and of the file's record, which they cannot: so a copy has another fingerprint,
    too); and a sample of every file's content.

    Raises:
        CheckpointError: A file cannot be read.
    """
    digest = hashlib.sha256()
    by_file: dict[Path, list[tuple[Any, ...]]] = {}
    for info in checkpoint.tensors.values():
        by_file.setdefault(info.file, []).append((info.start, info.name, info.dtype, info.shape))
    for file in sorted(by_file):
        try:
            with file.open("rb") as stream:
                state = os.fstat(stream.fileno())
                known = [file.name, state.st_size, state.st_mtime_ns, state.st_ctime_ns, sorted(by_file[file])]
                digest.update(json.dumps(known).encode())
                for i in range(_SAMPLES):
                    position = max(state.st_size - _SAMPLE_BYTES, 0) * i // (_SAMPLES - 1)
                    digest.update(os.pread(stream.fileno(), _SAMPLE_BYTES, position))
        except OSError as error:
            raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    return digest.hexdigest()
