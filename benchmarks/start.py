"""From the start of a process to an engine that takes requests, under several recipes, and what it is spent on.

    python benchmarks/start.py --model models/SmolLM2-135M-Instruct-q4_1
    python benchmarks/start.py --model /dev/shm/q30 --recipe ptpc_fp8 --recipe mxfp4 --max-model-len 4096

Every recipe has two processes: the first finds an empty cache of compiled kernels, the second what the first left
there. Time runs from before the interpreter starts; "process" is what passes until the engine is being built: the
interpreter and the libraries. Prints one table and writes the same as JSON.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import requant
from perplexity import device_name, parse_recipe
from requant.recipe import FORMATS

Row = dict[str, Any]
_BUILT = re.compile(r"engine built in (?P<seconds>[\d.]+) seconds: (?P<stages>.*)")
# What the engine's process does, and no more: it imports nothing that an engine does not need.
_CHILD = """
import json, sys
from requant.engine.logs import configure_logging
configure_logging()
from requant.engine.build import build_core
from requant.engine.config import EngineConfig
from requant.errors import RequantError
try:
    build_core(EngineConfig.create(**json.loads(sys.argv[1])))
except RequantError as error:
    sys.exit(f"error: {error}")
print("ready", flush=True)
"""


def measure(options: dict[str, Any], recipe: str, kernels: Path, state: str) -> Row:
    """Start a process and wait until its engine is ready; ``kernels``: where compiled ones are kept."""
    options = {**options, "online_quant_config": parse_recipe(recipe)[1]}
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-c", _CHILD, json.dumps(options)]
        environment = {**os.environ, "TRITON_CACHE_DIR": str(kernels)}
        begin = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process:
            assert process.stdout is not None
            ready = process.stdout.readline()
            seconds = time.perf_counter() - begin
        log.seek(0)
        said = log.read()
    built = _BUILT.search(said)
    if ready != "ready\n" or built is None:
        sys.exit(said.strip())
    stages = dict(_stage(stage) for stage in built["stages"].split(", "))
    stages = {"process": seconds - float(built["seconds"]), **stages}
    return {"recipe": recipe, "kernels": state, "ready_seconds": seconds, "stages": stages}


def _stage(text: str) -> tuple[str, float]:
    name, seconds = text.rsplit(" ", 1)
    return name, float(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a local folder or a Hugging Face id")
    parser.add_argument("--recipe", action="append", help="none, a format, JSON or a file (default: none and each)")
    parser.add_argument("--max-model-len", type=int, help="as the server's")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="as the server's")
    parser.add_argument("--enforce-eager", action="store_true", help="as the server's")
    parser.add_argument("--online-quant-cache", help="as the server's: the second process then reads from it")
    parser.add_argument("--output-file", type=Path, default=Path("out/start.json"))
    arguments = parser.parse_args()
    arguments.output_file.parent.mkdir(parents=True, exist_ok=True)
    names = ("model", "max_model_len", "max_num_seqs", "enforce_eager", "online_quant_cache")
    options = {name: getattr(arguments, name) for name in names}
    options["online_quant_info_dir"] = str(arguments.output_file.parent)
    rows = []
    for recipe in arguments.recipe or ("none", *FORMATS):
        with tempfile.TemporaryDirectory() as kernels:
            rows += [measure(options, recipe, Path(kernels), state) for state in ("to compile", "compiled")]
    table = Table(title=f"{arguments.model}, {device_name()}, torch {torch.__version__}")
    table.add_column("recipe")
    table.add_column("kernels")
    stages = list(rows[0]["stages"])
    for title in ("ready s", *stages):
        table.add_column(title, justify="right")
    for row in rows:
        seconds = [f"{row['stages'].get(stage, 0.0):.2f}" for stage in stages]
        table.add_row(row["recipe"], row["kernels"], f"{row['ready_seconds']:.2f}", *seconds)
    Console(width=150).print(table)
    versions = {"requant": requant.__version__, "torch": torch.__version__}
    facts = {"device": device_name(), "versions": versions, **options}
    arguments.output_file.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
