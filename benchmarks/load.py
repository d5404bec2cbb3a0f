"""Loading under several recipes: from the checkpoint, in a fresh process and again, and from the cache.

    python benchmarks/load.py --model models/SmolLM2-135M-Instruct-q4_1
    python benchmarks/load.py --model /dev/shm/q30 --cache-dir /dev/shm/cache --recipe ptpc_fp8
    python benchmarks/load.py --model /data/q8layers --cold

Every recipe has two processes of its own: the first loads twice from the checkpoint (the first time is that of a fresh
process) and writes the cache entry, the second loads twice from the entry. Beside each load stands what its bytes take
at the speed at which pinned memory reaches the device, measured in the same process (on a CPU: at that of a copy), and
what reading them takes with the same threads and nothing else. With --cold every recipe has one process, which loads
once from the checkpoint; before that, and before the reading, the files are taken out of the page cache. Prints one
table and writes the same as JSON.
"""

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import requant
from page_cache import disk_of, evict
from perplexity import device_name, parse_recipe
from requant.engine.build import Planned, plan_rank, read_files
from requant.engine.config import EngineConfig
from requant.errors import RequantError
from requant.host import without_collections
from requant.loading import Plan, SlabPool, Staging, load
from requant.loading.cache import Entry, Store, identify, make_writer, new_nonce
from requant.loading.chunks import weight_chunks
from requant.loading.reader import Reader
from requant.recipe import FORMATS

Row = dict[str, Any]
_COPIES, _COPY_BYTES = 16, 256 * 1024**2


def bus_bytes_per_second(device: torch.device) -> float:
    """Pinned host memory to the device; on a CPU, from one piece of memory to another."""
    cuda = device.type == "cuda"
    host = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=cuda)
    there = torch.empty_like(host, device=device)
    best = 0.0
    for _ in range(_COPIES):
        begin = time.perf_counter()
        there.copy_(host, non_blocking=True)
        if cuda:
            torch.cuda.synchronize()
        best = max(best, _COPY_BYTES / (time.perf_counter() - begin))
    return best


def read_seconds(plan: Plan) -> float:
    """Read what a load reads, into the same slabs with the same threads, and drop it."""
    staging = Staging.of(plan.device)
    chunks = weight_chunks(plan, staging.slab_bytes)
    largest = max(chunk.extent.nbytes for chunk in chunks)
    pool = SlabPool(staging, plan.device, largest)
    begin = time.perf_counter()
    with Reader([chunk.extent for chunk in chunks], pool, staging.threads) as reader:
        for _ in chunks:
            pool.release(reader.wait()[1])
    return time.perf_counter() - begin


def timed_load(make: Any, device: torch.device, files: Sequence[Path] = ()) -> tuple[Planned, Row]:
    """Plan, as an engine does while its slabs are being made, and load once, with ``files`` out of the page cache."""
    with SlabPool(Staging.of(device), device) as pool, without_collections():
        begin = time.perf_counter()
        planned: Planned = make()
        plan_seconds = time.perf_counter() - begin
        evict(files)
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        result = load(planned.plan, planned.model, pool=pool)
    over = result.peak_device_memory - before - planned.plan.weight_bytes
    row = {**asdict(result), "plan_seconds": plan_seconds, "weight_bytes": planned.plan.weight_bytes}
    return planned, row | {"peak_over_weights": over if device.type == "cuda" else None}


def child(arguments: argparse.Namespace, recipe: str, cached: bool) -> list[Row]:
    """What one process measures."""
    config = EngineConfig.create(model=arguments.model, online_quant_config=parse_recipe(recipe)[1])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    files = read_files(config)
    store, identity = Store(arguments.cache_dir), identify(files.checkpoint, files.recipe, arguments.model)
    entry: Entry | None = store.find(identity) if cached else None
    rows = []
    on_disk = sorted({tensor.file for tensor in files.checkpoint.tensors.values()}) if arguments.cold else []
    for state in ("cold",) if arguments.cold else ("fresh", "warm"):
        planned, row = timed_load(lambda: plan_rank(files, config, cached=entry), device, on_disk)
        rows.append({"recipe": recipe, "source": "cache" if cached else "checkpoint", "process": state, **row})
        if state == "warm" and not cached and files.recipe:
            store.check_writable()
            writer = make_writer(store, identity, planned.plan, planned.model, new_nonce())
            begin = time.perf_counter()
            if writer:
                writer.start()
                writer.wait()
            rows[-1]["write_seconds"] = time.perf_counter() - begin
        plan = planned.plan
        del planned
        gc.collect()
        if plan.device.type == "cuda":
            torch.cuda.empty_cache()
    evict(on_disk)
    reading = read_seconds(plan)
    if entry:
        entry.close()
        store.remove(entry.folder)  # room for the next one
    bus = bus_bytes_per_second(plan.device)
    for row in rows:
        row |= {"read_seconds": reading, "bus_bytes_per_second": bus, "floor_seconds": row["bytes_read"] / bus}
    return rows


def measure(arguments: argparse.Namespace, recipe: str, cached: bool) -> list[Row]:
    """Run a process of its own."""
    command = [sys.executable, __file__, "--model", arguments.model, "--cache-dir", str(arguments.cache_dir)]
    command += ["--child", recipe, *(["--cached"] if cached else []), *(["--cold"] if arguments.cold else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(done.returncode)  # it has said why
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a local folder or a Hugging Face id")
    parser.add_argument("--recipe", action="append", help="none, a format, JSON or a file (default: none and each)")
    parser.add_argument("--cache-dir", type=Path, default=Path("out/quantized-weights"))
    parser.add_argument("--cold", action="store_true", help="the files out of the page cache, and no cache entry")
    parser.add_argument("--output-file", type=Path, default=Path("out/load.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--cached", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        try:
            print(json.dumps(child(arguments, arguments.child, arguments.cached)))
        except (OSError, RequantError) as error:
            sys.exit(f"error: {error.strerror if isinstance(error, OSError) else error}")
        return
    arguments.output_file.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for recipe in arguments.recipe or ("none", *FORMATS):
        rows += measure(arguments, recipe, cached=False)
        if parse_recipe(recipe)[1] and not arguments.cold:
            rows += measure(arguments, recipe, cached=True)
    table = Table(title=f"{arguments.model}, {device_name()}, torch {torch.__version__}")
    titles = (
        "plan s",
        "load s",
        "floor s",
        "load / floor",
        "reading s",
        "read GB",
        "GB/s",
        "over weights GB",
        "write s",
    )
    for name in ("recipe", "from", "process", *titles):
        table.add_column(name, justify="right" if name in titles else "left")
    for row in rows:
        seconds, over, write = row["load_seconds"], row["peak_over_weights"], row.get("write_seconds")
        table.add_row(
            row["recipe"],
            row["source"],
            row["process"],
            f"{row['plan_seconds']:.2f}",
            f"{seconds:.2f}",
            f"{row['floor_seconds']:.2f}",
            f"{seconds / row['floor_seconds']:.2f}",
            f"{row['read_seconds']:.2f}",
            f"{row['bytes_read'] / 1e9:.2f}",
            f"{row['bytes_read'] / seconds / 1e9:.1f}",
            "-" if over is None else f"{over / 1e9:.2f}",
            "-" if write is None else f"{write:.1f}",
        )
    Console(width=150).print(table)
    versions = {"requant": requant.__version__, "torch": torch.__version__}
    facts = {"device": device_name(), "versions": versions, "model": arguments.model}
    if Path(arguments.model).is_dir():
        facts["disk"] = disk_of(Path(arguments.model))
    arguments.output_file.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
