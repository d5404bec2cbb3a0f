"""Compiling Triton kernels for a GPU on a machine that has none: what the interpreter takes, the compiler may refuse.

Functions of the kernel table run with tensors on the CPU; their launches are recorded, not executed.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "u8", torch.int32: "i32"}
_TYPES |= {torch.int64: "i64", torch.int8: "i8", torch.bool: "i1", torch.float8_e4m3fn: "fp8e4nv", torch.int16: "i16"}


@dataclass
class Launch:
    """A kernel with the arguments of one launch."""

    kernel: JITFunction
    arguments: dict[str, Any]

    def compile(self, target: GPUTarget = HOPPER) -> Any:
        """As the launch would, specialized to its arguments."""
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(self.kernel.params):
            value = self.arguments.get(parameter.name, parameter.default)
            special = not parameter.do_not_specialize
            constant = parameter.is_constexpr or value is None or (type(value) is int and value == 1 and special)
            if constant:
                signature[parameter.name] = "constexpr"
                constants[(i,)] = value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = f"*{_TYPES[value.dtype]}"
                if value.data_ptr() % 16 == 0:
                    attributes[(i,)] = [["tt.divisibility", 16]]
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            else:
                signature[parameter.name] = "i32"
                if value % 16 == 0 and special:
                    attributes[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        options = {name: self.arguments[name] for name in _OPTIONS if name in self.arguments}
        return triton.compile(source, target=target, options=options)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches of a test so far. The device is taken for one that casts to E4M3."""
    found: list[Launch] = []

    def record(kernel: JITFunction, *values: Any, grid: Any, warmup: bool, **named: Any) -> None:
        names = [parameter.name for parameter in kernel.params]
        found.append(Launch(kernel, dict(zip(names, values, strict=False)) | named))

    monkeypatch.setattr(JITFunction, "run", record)
    yes: Callable[..., bool] = lambda device: True  # noqa: E731
    for name, module in list(sys.modules.items()):
        if name.startswith("requant.kernels.triton.") and hasattr(module, "casts_in_hardware"):
            monkeypatch.setattr(module, "casts_in_hardware", yes)
    return found
