"""Prometheus metrics: what the core counts, and how long requests took. Names are vLLM's, after ``requant:``."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from requant.engine.messages import CoreStats
from requant.engine.request_output import FinishedRequest

# (name, what it is, field of CoreStats)
_GAUGES = (
    ("requant:num_requests_running", "Sequences being computed.", "running"),
    ("requant:num_requests_waiting", "Sequences waiting for their turn.", "waiting"),
    ("requant:kv_cache_usage_perc", "Share of the KV cache in use, 1 being all of it.", "kv_usage"),
)
_COUNTERS = (
    ("requant:prompt_tokens", "Prompt tokens processed.", "prompt_tokens"),
    ("requant:generation_tokens", "Tokens generated.", "generation_tokens"),
    ("requant:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries"),
    ("requant:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hits"),
    ("requant:num_preemptions", "Sequences put back to make room for others.", "preemptions"),
)
# (name, what it is, field of SpeculationCounts); only where tokens are drafted
_DRAFTS = (
    ("requant:spec_decode_num_drafts", "Times that a sequence's drafts were checked.", "drafts"),
    ("requant:spec_decode_num_draft_tokens", "Tokens drafted.", "tokens"),
    ("requant:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", "accepted"),
)
_DRAFTS_BY_POSITION = "requant:spec_decode_num_accepted_tokens_per_pos"

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TPOT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_E2E = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class Metrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._stats = CoreStats()
        self._registry.register(self)
        self._reasons = Counter(
            "requant:request_success", "Sequences ended, by reason.", ["finished_reason"], registry=self._registry
        )
        self._ttft = self._histogram("requant:time_to_first_token_seconds", "Time to the first token.", _TTFT)
        self._tpot = self._histogram(
            "requant:time_per_output_token_seconds", "Mean time of a request's later tokens.", _TPOT
        )
        self._e2e = self._histogram("requant:e2e_request_latency_seconds", "Time to the last token.", _E2E)

    def observe(self, request: FinishedRequest) -> None:
        """Count a request that ended; times only of one that was not cut short."""
        for reason in request.reasons:
            self._reasons.labels(finished_reason=reason).inc()
        if request.first_token is None or "abort" in request.reasons:
            return
        self._ttft.observe(request.first_token - request.arrival)
        self._e2e.observe(request.end - request.arrival)
        longest = max(request.output_tokens)
        if longest > 1:
            self._tpot.observe((request.end - request.first_token) / (longest - 1))

    def render(self, stats: CoreStats) -> bytes:
        """Everything in Prometheus' text format, with the core's numbers as ``stats`` has them."""
        self._stats = stats
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The core's numbers, for the registry."""
        for name, help, field in _GAUGES:
            yield GaugeMetricFamily(name, help, value=getattr(self._stats, field))
        for name, help, field in _COUNTERS:
            yield CounterMetricFamily(name, help, value=getattr(self._stats, field))

        speculation = self._stats.speculation
        if speculation.by_position:
            for name, help, field in _DRAFTS:
                yield CounterMetricFamily(name, help, value=getattr(speculation, field))
            places = CounterMetricFamily(
                _DRAFTS_BY_POSITION, "Drafted tokens that were accepted, by their place.", labels=["position"]
            )
            for place, count in enumerate(speculation.by_position):
                places.add_metric([str(place)], count)
            yield places

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help, buckets=buckets, registry=self._registry)
