"""What the tests of Triton kernels share.

Without a GPU their small cases run under Triton's interpreter, which must be chosen before Triton is imported: a test
file runs itself as a program, which checks its cases and prints ``all passed`` last.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor


def check_small_cases(program: str) -> None:
    """Run a test file under the interpreter, on the CPU whatever the machine has."""
    pytest.importorskip("triton")
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    run = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1] == "all passed"


def nan_empty(*shape: int, **options: object) -> Tensor:
    """``torch.empty`` whose memory is poisoned, so that what a kernel fails to write is seen."""
    empty = torch.zeros(*shape, **options)  # type: ignore[call-overload]
    return empty.fill_(float("nan")) if empty.dtype.is_floating_point else empty.fill_(0x7F)
