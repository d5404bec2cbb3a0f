"""The promise that makes quantizing while loading worth it: the source's weights are never all there at once."""

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

MIB = 1024**2
LAYERS, ROWS, COLUMNS = 8, 2048, 2048

SCRIPT = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import torch
from torch import nn
from pathlib import Path
from conftest import Matrices
from requant.loading import load, make_plan, read_headers
from requant.recipe import Recipe

def run(folder, layers, rows, columns):
    model = nn.Module()
    model.layers = nn.ModuleList(Matrices(f"layers.{i}", {f"layers.{i}": rows}, columns) for i in range(layers))
    plan = make_plan(model, read_headers(folder), Recipe.parse({"global_quant_config": "mxfp4"}), name="m", config={},
                     dtype=torch.bfloat16, device=torch.device("cpu"))
    begin = int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) * 1024
    result = load(plan, model)
    print(plan.weight_bytes, result.peak_device_memory - begin, result.staged_bytes, plan.bytes_to_read)

torch.set_num_threads(1)
run(Path(sys.argv[2]), 1, 64, 64)  # what is set up once
run(Path(sys.argv[3]), *map(int, sys.argv[4:]))
"""


def write(folder: Path, layers: int, rows: int, columns: int) -> str:
    folder.mkdir()
    save_file({f"layers.{i}.weight": torch.ones(rows, columns) for i in range(layers)}, folder / "model.safetensors")
    return str(folder)


def test_peak_is_the_finished_weights_and_little_more(tmp_path):
    small = write(tmp_path / "small", 1, 64, 64)
    large = write(tmp_path / "large", LAYERS, ROWS, COLUMNS)
    shape = [str(LAYERS), str(ROWS), str(COLUMNS)]
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), small, large, *shape]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    finished, peak, staged, source = map(int, output.splitlines()[-1].split())
    assert source == LAYERS * ROWS * COLUMNS * 4
    assert staged <= 16 * MIB
    assert finished <= peak <= finished + 80 * MIB < source
