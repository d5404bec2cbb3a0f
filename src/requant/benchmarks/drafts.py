"""How well a server's speculative decoding did during a benchmark, from the counters at its ``/metrics``."""

import asyncio
from dataclasses import dataclass
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

# Behind any prefix, vLLM's own ("vllm:") among them.
_DRAFTS = "spec_decode_num_drafts_total"
_TOKENS = "spec_decode_num_draft_tokens_total"
_ACCEPTED = "spec_decode_num_accepted_tokens_total"
_BY_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"
_PATIENCE = 10.0


@dataclass(frozen=True)
class DraftCounts:
    """Totals.

    Attributes:
        drafts: Times that a sequence's drafts were checked.
        tokens: Tokens drafted.
        accepted: Those that were accepted.
        by_position: Those at each place of a draft.
    """

    drafts: int
    tokens: int
    accepted: int
    by_position: tuple[int, ...]


def parse(text: str) -> DraftCounts | None:
    """The totals in Prometheus' text format, over all engines of a server; None: nothing is drafted there.

    Raises:
        ValueError: It is something else.
    """
    totals: dict[str, int] = {}
    places: dict[int, int] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.rpartition(":")[2]
            if name == _BY_POSITION:
                place = int(sample.labels["position"])
                places[place] = places.get(place, 0) + int(sample.value)
            elif name in (_DRAFTS, _TOKENS, _ACCEPTED):
                totals[name] = totals.get(name, 0) + int(sample.value)
    if _DRAFTS not in totals:
        return None
    by_position = tuple(places.get(place, 0) for place in range(max(places, default=-1) + 1))
    return DraftCounts(totals[_DRAFTS], totals.get(_TOKENS, 0), totals.get(_ACCEPTED, 0), by_position)


async def fetch(session: aiohttp.ClientSession, server: str) -> DraftCounts | None:
    """The totals of a server by now; None if it does not draft, or tells nothing of it."""
    try:
        async with asyncio.timeout(_PATIENCE), session.get(f"{server}/metrics") as response:
            return parse(await response.text()) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError):
        return None  # a server need not have such a page


def draft_figures(before: DraftCounts | None, after: DraftCounts | None) -> dict[str, Any]:
    """What came between two moments, under vLLM's names; empty if nothing was drafted."""
    if before is None or after is None or after.drafts <= before.drafts:
        return {}
    drafts, tokens = after.drafts - before.drafts, after.tokens - before.tokens
    accepted = after.accepted - before.accepted
    earlier = (*before.by_position, *[0] * len(after.by_position))
    return {
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": tokens,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_acceptance_rate": 100 * accepted / max(tokens, 1),
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_per_position_acceptance_rates": [
            (now - then) / drafts for now, then in zip(after.by_position, earlier, strict=False)
        ],
    }
