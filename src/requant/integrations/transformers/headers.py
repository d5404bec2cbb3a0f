"""What the files of a checkpoint hold: names, dtypes and shapes, without a weight being read."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from safetensors import SafetensorError, safe_open

from requant.errors import CheckpointError, ConfigError, one_line

DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
}
"""The dtypes of tensors that can feed a layer, by their names in safetensors."""


@dataclass(frozen=True)
class Header:
    """One tensor of a checkpoint.

    Attributes:
        name: Its name.
        dtype: As safetensors spells it (``"BF16"``).
        shape: Its shape.
        file: The file that it is in.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def nbytes(self) -> int:
        """Its bytes; of a dtype that no layer takes, as if an element had one."""
        return prod(self.shape) * (DTYPES[self.dtype].itemsize if self.dtype in DTYPES else 1)

    def __str__(self) -> str:
        return f"tensor {self.name} of {self.file}"


def read_headers(files: Sequence[str | os.PathLike[str]] | None) -> dict[str, Header]:
    """The tensors of a checkpoint's files.

    Raises:
        ConfigError: There are no files, or they are not safetensors.
        CheckpointError: A file cannot be read.
    """
    if not files:
        raise ConfigError("OnlineQuantConfig needs a checkpoint in files; a state_dict alone is not accepted")
    headers: dict[str, Header] = {}
    for file in [os.fspath(file) for file in files]:
        if not file.endswith(".safetensors"):
            raise ConfigError(f"OnlineQuantConfig reads safetensors files only; {file} is none")
        try:
            with safe_open(file, framework="pt") as opened:
                names = opened.keys()
                for name in names:
                    part = opened.get_slice(name)
                    headers[name] = Header(name, part.get_dtype(), tuple(part.get_shape()), file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {file}: {one_line(error)}") from error
    return headers
