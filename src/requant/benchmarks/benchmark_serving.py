"""``python -m requant.benchmarks.benchmark_serving``: how fast a server answers, whichever OpenAI-compatible one."""

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime

from requant.benchmarks.config import BenchConfig
from requant.console import EngineFailed, Parser, run
from requant.flags import add_flags as add_config_flags
from requant.flags import values

DESCRIPTION = "Measure an OpenAI-compatible server: time to first token, time per output token, throughput."


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Every option of :class:`BenchConfig`."""
    add_config_flags(parser, BenchConfig)


def bench(parsed: argparse.Namespace) -> None:
    """Run the benchmark and print its figures.

    Raises:
        RequantError: An option is not accepted, there is no tokenizer, or the server does not answer.
        EngineFailed: Not one request succeeded; the figures were printed all the same.
    """
    config = BenchConfig(**values(parsed, BenchConfig))
    # Imported now, so that help and a wrong flag are answered at once.
    import numpy as np

    from requant.benchmarks import report
    from requant.benchmarks.metrics import figures
    from requant.benchmarks.progress import progress
    from requant.benchmarks.run import run as run_requests
    from requant.benchmarks.workload import Lengths, arrivals, random_samples
    from requant.engine.config import ModelConfig
    from requant.engine.tokenizer import load_tokenizer

    now = datetime.now()
    file = report.result_file(config, now) if config.save_result else None
    source = config.tokenizer or config.model
    tokenizer = load_tokenizer(ModelConfig(model=source, trust_remote_code=config.trust_remote_code))
    rng = np.random.default_rng(config.seed)
    lengths = Lengths(
        config.random_prefix_len, config.random_input_len, config.random_output_len, config.random_range_ratio
    )
    samples = random_samples(tokenizer, tokenizer.plain_token_ids(), lengths, config.num_prompts, rng)
    times = arrivals(len(samples), config.request_rate, config.burstiness, rng)
    with progress(len(samples), config.disable_tqdm) as on_done:
        outcome = run_requests(config, samples, times, on_done)
    told = figures(outcome.records, outcome.duration, config.metrics, config.percentiles, config.goals) | outcome.drafts
    for line in report.lines(config, told, outcome.records):
        print(line)
    if file:
        report.write(file, report.result(config, source, told, outcome.records, now))
        print(f"Result saved to {file}")
    if not told["completed"]:
        raise EngineFailed(f"all {told['failed']} requests failed")


def main(argv: Sequence[str] | None = None) -> int:
    """Run as the arguments say; returns the exit code."""

    def command(argv: Sequence[str] | None) -> None:
        parser = Parser(prog="requant.benchmarks.benchmark_serving", description=DESCRIPTION, allow_abbrev=False)
        add_flags(parser)
        bench(parser.parse_args(argv))

    return run(command, argv)


if __name__ == "__main__":
    sys.exit(main())
