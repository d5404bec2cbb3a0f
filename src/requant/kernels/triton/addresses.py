"""One launch for many matrices: a table of where each lies, and where what becomes of it goes.

What lies at multiples of 16 bytes is read and written in wide accesses.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

ALIGNMENT = 16
TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def address_table(*columns: Sequence[Tensor]) -> Tensor:
    """Addresses, int64 [columns, matrices], on the device of the tensors; the copy does not wait for it."""
    table = torch.tensor([[tensor.data_ptr() for tensor in column] for column in columns], dtype=torch.int64)
    device = columns[0][0].device
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def aligned(*columns: Sequence[Tensor]) -> bool:
    """Whether everything lies at multiples of 16 bytes."""
    return all(tensor.data_ptr() % ALIGNMENT == 0 for column in columns for tensor in column)


@triton.jit
def matrix_of(table, many, matrix, TYPE: tl.constexpr, SCALE_TYPE: tl.constexpr):
    """A matrix's weight and codes (bytes), both at multiples of 16 bytes, its scales, and its count of values that are
    not finite (int64).
    """
    weight = tl.load(table + matrix).to(tl.pointer_type(TYPE))
    data = tl.load(table + many + matrix).to(tl.pointer_type(tl.uint8))
    scale = tl.load(table + 2 * many + matrix).to(tl.pointer_type(SCALE_TYPE))
    bad = tl.load(table + 3 * many + matrix).to(tl.pointer_type(tl.int64))
    return tl.multiple_of(weight, 16), tl.multiple_of(data, 16), scale, bad


@triton.jit
def count_bad(bad, count):
    """Add a program's count; of finite weights there is none to add."""
    if count > 0:
        tl.atomic_add(bad, count.to(tl.int64))
