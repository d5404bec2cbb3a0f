"""Loading and decoding over several GPUs of one host: what each number of ranks costs and gains.

    python benchmarks/multi_gpu.py --model M --recipe ptpc_fp8
    python benchmarks/multi_gpu.py --model M --recipe ptpc_fp8 --tp 1 2 --expert-parallel --requests 1 16 128 --check 40

For each number of ranks, and with ``--expert-parallel`` once more with whole experts on each: seconds to load (of the
slowest rank), bytes that a rank wants and reads (the most of any), bytes that it gives to the others while loading,
and time per output token (TPOT, as ``benchmarks/decode.py`` defines it). One process a rank, NCCL between GPUs and
gloo on a CPU; numbers of ranks for which there are not enough GPUs are left out, and said so. ``--check n`` quantizes
every n-th matrix of the checkpoint anew on each rank, whole, and compares what the rank has with its slices.
Prints one table and writes the same as JSON.
"""

import argparse
import json
import multiprocessing
import time
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import requant
from decode import run
from perplexity import device_name, parse_recipe
from requant.engine.build import LoadedRank, load_rank, make_core
from requant.engine.config import EngineConfig
from requant.engine.seat import Pulse, Seat, listen
from requant.engine.team import Team, alone, join
from requant.formats import count_nonfinite
from requant.loading.plan import Step
from requant.loading.sources import SOURCE_DTYPES

Row = dict[str, Any]


def whole_matrix(step: Step, device: torch.device) -> torch.Tensor:
    """The unquantized matrix [N, K] of the checkpoint that a step takes a part of."""
    n, k = step.placement.shape
    with step.tensor.file.open("rb") as file:
        file.seek(step.tensor.start + step.placement.start * step.row_bytes)
        data = bytearray(file.read(n * step.row_bytes))
    return torch.frombuffer(data, dtype=SOURCE_DTYPES[step.tensor.dtype]).view(n, k).to(device)


def check(loaded: LoadedRank, every: int) -> tuple[int, int]:
    """Compare some of a rank's matrices with the slices of the whole ones: how many, and how many of them differ."""
    plan, model = loaded.planned.plan, loaded.planned.model
    steps = [step for step in plan.steps if step.shard is not None and step.source is None][::every]
    differ = 0
    for step in steps:
        shard = step.shard
        assert shard is not None
        weight = whole_matrix(step, plan.device)
        assert not count_nonfinite(weight)
        whole = requant.quantize(weight, shard.format.name)
        columns = range(step.placement.shape[1])
        module = model.get_submodule(step.module)
        data = module.get_parameter(step.placement.parameter).data
        scale = module.get_parameter(f"{step.placement.parameter}_scale").data
        data = data.view(-1, data.shape[-1])[step.placement.offset :][: len(shard.rows)]
        scale = scale.view(-1, scale.shape[-1])[step.scale_offset :][: len(shard.scale_rows)]
        wanted = shard.cut_data(whole.data[shard.rows.start : shard.rows.stop].clone(), columns)
        scales = shard.cut_scale(whole.scale[shard.scale_rows.start : shard.scale_rows.stop], columns)
        same = torch.equal(data.view(torch.uint8), wanted.contiguous().view(torch.uint8))
        differ += not (same and torch.equal(scale, scales))
    return len(steps), differ


def rank_main(seat: Seat | None, config: EngineConfig, arguments: argparse.Namespace, result: Connection) -> None:
    """One rank: load, tell what it cost, then lead the runs or follow them."""
    if seat is not None:
        seat.pulse.live(seat.rank)
    begin = time.perf_counter()
    with join(seat, config.parallel) if seat is not None else nullcontext(alone(config.parallel)) as team:
        loaded = load_rank(config, team)
        plan, cost = loaded.planned.plan, loaded.result
        checked, differ = check(loaded, arguments.check) if arguments.check else (0, 0)
        facts = {
            "load_seconds": cost.load_seconds,
            "bytes_read": cost.bytes_read,
            "bytes_wanted": plan.bytes_wanted,
            "bytes_sent": cost.bytes_sent,
            "weight_bytes": plan.weight_bytes,
            "peak_device_memory": cost.peak_device_memory,
            "ready_seconds": time.perf_counter() - begin,
            "checked": checked,
            "differ": differ,
        }
        result.send(facts)
        if team.ranks.rank == 0:
            result.send(lead(loaded, config, arguments))
        else:
            follow(loaded, team)


def lead(loaded: LoadedRank, config: EngineConfig, arguments: argparse.Namespace) -> list[Row]:
    built = make_core(loaded, config)
    run(built.core, built.vocab_size, 1, 8, 4, seed=-1)  # what is compiled or allocated at first use
    rows = []
    for requests in arguments.requests:
        prefill, decode = run(built.core, built.vocab_size, requests, arguments.input, arguments.output, seed=requests)
        rows.append(
            {
                "requests": requests,
                "prefill_tokens_per_second": requests * arguments.input / prefill,
                "tpot_ms": decode / (arguments.output - 1) * 1e3,
            }
        )
    return rows


def follow(loaded: LoadedRank, team: Team) -> None:
    try:
        while True:
            loaded.runner.follow(team.next_step())
    except EOFError:
        return  # rank 0 is done


def measure(arguments: argparse.Namespace, size: int, expert_parallel: bool) -> Row:
    """All ranks of one size."""
    config = EngineConfig.create(
        model=arguments.model,
        online_quant_config=parse_recipe(arguments.recipe)[1],
        online_quant_info_dir=str(arguments.output_file.parent),
        dtype=arguments.dtype,
        device=arguments.device,
        enforce_eager=arguments.enforce_eager,
        tensor_parallel_size=size,
        enable_expert_parallel=expert_parallel,
        max_model_len=arguments.input + arguments.output,
        max_num_seqs=max(arguments.requests),
        no_enable_prefix_caching=True,
    )
    context = multiprocessing.get_context("spawn")
    seats: list[Seat | None] = [None]
    if size > 1:
        listener, pulse = listen(None), Pulse(context, size)
        port = listener.getsockname()[1]
        pipes = [context.Pipe(duplex=False) for _ in range(1, size)]
        seats = [Seat(0, port, pulse, listener, [sender for _, sender in pipes])]
        seats += [Seat(rank, port, pulse, None, [receiver]) for rank, (receiver, _) in enumerate(pipes, start=1)]
    results = [context.Pipe(duplex=False) for _ in seats]
    processes = [
        context.Process(target=rank_main, args=(seat, config, arguments, theirs), daemon=True)
        for seat, (_, theirs) in zip(seats, results, strict=True)
    ]
    for process in processes:
        process.start()
    for _, theirs in results:
        theirs.close()
    if size > 1:
        for end in (listener, *(end for pipe in pipes for end in pipe)):
            end.close()
    try:
        facts = [ours.recv() for ours, _ in results]
        runs = results[0][0].recv()
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.kill()
    return {"tp": size, "expert_parallel": expert_parallel, "ranks": facts, "runs": runs}


def show(rows: list[Row], arguments: argparse.Namespace) -> None:
    title = f"{arguments.recipe}, {arguments.input} in, {arguments.output} out, {device_name()}"
    table = Table(title=f"{title}, torch {torch.__version__}")
    names = [
        "load s",
        "ready s",
        "wanted GB",
        "read GB",
        "sent MB",
        "checked",
        *(f"TPOT {n}" for n in arguments.requests),
    ]
    for name in ("ranks", *names):
        table.add_column(name, justify="left" if name == "ranks" else "right")
    for row in rows:
        ranks = row["ranks"]

        def most(key: str, ranks: list[Row] = ranks) -> float:
            return max(rank[key] for rank in ranks)

        checked, differ = (sum(rank[key] for rank in ranks) for key in ("checked", "differ"))
        table.add_row(
            f"tp {row['tp']}{' + ep' if row['expert_parallel'] else ''}",
            f"{most('load_seconds'):.2f}",
            f"{most('ready_seconds'):.1f}",
            f"{most('bytes_wanted') / 1e9:.2f}",
            f"{most('bytes_read') / 1e9:.2f}",
            f"{most('bytes_sent') / 1e6:.2f}",
            f"{checked - differ} of {checked} equal" if checked else "-",
            *(f"{run['tpot_ms']:.2f} ms" for run in row["runs"]),
        )
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a local folder or a Hugging Face id")
    parser.add_argument("--recipe", default="ptpc_fp8", help="none, a format, JSON or a file")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of ranks")
    parser.add_argument("--expert-parallel", action="store_true", help="several ranks once more, with whole experts")
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[1, 16, 128], help="numbers of simultaneous requests"
    )
    parser.add_argument("--input", type=int, default=1024, help="prompt tokens a request")
    parser.add_argument("--output", type=int, default=256, help="new tokens a request, at least 2")
    parser.add_argument("--check", type=int, default=0, metavar="N", help="compare every N-th matrix of each rank")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--output-file", type=Path, default=Path("out/multi_gpu.json"))
    arguments = parser.parse_args()
    arguments.output_file.parent.mkdir(parents=True, exist_ok=True)
    there = torch.cuda.device_count() if arguments.device != "cpu" else 0
    rows = []
    for size in arguments.tp:
        if there and size > there:
            print(f"tp {size} is left out: there are {there} GPUs")
            continue
        for expert_parallel in (False, True) if arguments.expert_parallel and size > 1 else (False,):
            rows.append(measure(arguments, size, expert_parallel))
    show(rows, arguments)
    versions = {"requant": requant.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    facts = {"device": device_name(), "versions": versions, "model": arguments.model, "recipe": arguments.recipe}
    arguments.output_file.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
