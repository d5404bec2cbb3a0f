"""Running a benchmark: requests are sent as they arrive, at most so many at a time, and every one leaves a record."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from requant.benchmarks.config import BenchConfig
from requant.benchmarks.drafts import draft_figures, fetch
from requant.benchmarks.http_client import Client, open_session
from requant.benchmarks.metrics import Record
from requant.benchmarks.workload import Sample
from requant.errors import ConfigError


@dataclass(frozen=True)
class Outcome:
    """What a run has left.

    Attributes:
        records: One a request, in their order.
        duration: Seconds from the first request to the last answer.
        drafts: Figures of the server's speculative decoding meanwhile, if it has any.
    """

    records: list[Record]
    duration: float
    drafts: dict[str, Any] = field(default_factory=dict)


def run(
    config: BenchConfig,
    samples: Sequence[Sample],
    times: Sequence[float],
    on_done: Callable[[Record], None] = lambda record: None,
) -> Outcome:
    """Send every request at its time and wait for all.

    Before, the first one is sent alone, to see that the server answers, and then the warm-up requests.

    Args:
        config: Which server, and how.
        samples: The requests.
        times: When each arrives, in seconds from the beginning.
        on_done: Told of each record.

    Raises:
        ConfigError: The first request fails.
    """
    return asyncio.run(_run(config, samples, times, on_done))


async def _run(
    config: BenchConfig, samples: Sequence[Sample], times: Sequence[float], on_done: Callable[[Record], None]
) -> Outcome:
    limit = config.max_concurrency
    options = {"temperature": config.temperature, **({"ignore_eos": True} if config.ignore_eos else {})}
    async with open_session(limit or 0) as session:
        client = Client(session, config.url, config.name, config.backend == "openai-chat", options)
        first = await client.send(samples[0])
        if first.error:
            raise ConfigError(f"{config.url} does not answer a first request: {first.error}")
        gate = asyncio.Semaphore(limit) if limit else nullcontext()

        async def send(sample: Sample) -> Record:
            async with gate:
                return await client.send(sample)

        warmups = (samples[i % len(samples)] for i in range(config.num_warmups))
        await asyncio.gather(*(send(sample) for sample in warmups))
        before = await fetch(session, config.server)
        begin = time.perf_counter()

        async def arrive(sample: Sample, moment: float) -> Record:
            await asyncio.sleep(max(begin + moment - time.perf_counter(), 0))
            record = await send(sample)
            on_done(record)
            return record

        records = await asyncio.gather(*map(arrive, samples, times))
        duration = time.perf_counter() - begin
        return Outcome(list(records), duration, draft_figures(before, await fetch(session, config.server)))
