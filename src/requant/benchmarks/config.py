"""Configuration of one benchmark of a server; the flags are generated from it. Names and defaults are vLLM's."""

import math
from dataclasses import dataclass

from requant.errors import ConfigError
from requant.flags import check, option

BACKENDS = {"vllm": "/v1/completions", "openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
METRICS = ("ttft", "tpot", "itl", "e2el")
GOALS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class BenchConfig:
    """A benchmark: which server, which requests, when they arrive, and what is told of them."""

    model: str = option("", "name of the model in requests, and by default of the tokenizer; always needed")
    served_model_name: str | None = option(None, "name of the model in requests (default: --model)")
    backend: str = option("openai", "which API is spoken", choices=tuple(BACKENDS))
    base_url: str | None = option(None, "address of the server, http://…; instead of --host and --port")
    host: str = option("127.0.0.1", "host of the server")
    port: int = option(8000, "HTTP port of the server")
    endpoint: str | None = option(None, "path of the API (default: the backend's)")
    tokenizer: str | None = option(None, "folder or id of the tokenizer (default: --model)")
    trust_remote_code: bool = option(False, "allow a tokenizer class that a checkpoint brings")
    dataset_name: str = option("random", "where prompts come from", choices=("random",))
    num_prompts: int = option(1000, "how many requests")
    random_input_len: int = option(1024, "tokens of a prompt, beside its prefix")
    random_output_len: int = option(128, "tokens of an answer")
    random_range_ratio: float = option(0.0, "both lengths vary evenly by this share, up and down")
    random_prefix_len: int = option(0, "tokens at the beginning that all prompts share")
    request_rate: float = option(math.inf, "requests a second; inf: all at once")
    burstiness: float = option(1.0, "shape of the gamma distribution of the time between requests; 1: Poisson arrivals")
    max_concurrency: int | None = option(None, "most requests at a time; others wait and are not timed meanwhile")
    num_warmups: int = option(0, "requests before the first that is measured")
    seed: int = option(0, "of prompts, lengths and arrivals")
    ignore_eos: bool = option(False, "answers have their full length, whatever the model says")
    temperature: float = option(0.0, "of sampling")
    percentile_metrics: str = option("ttft,tpot,itl", f"what to tell: some of {','.join(METRICS)}")
    metric_percentiles: str = option("99", "which percentiles: numbers from 0 to 100, with commas between")
    goodput: tuple[str, ...] = option(
        (), f"what makes a request good: each of {', '.join(GOALS)} with its limit in ms", metavar="METRIC:MS"
    )
    save_result: bool = option(False, "write the result as JSON")
    save_detailed: bool = option(False, "with every request's times, text and error")
    result_dir: str | None = option(None, "folder of the result (default: the working directory)")
    result_filename: str | None = option(None, "its name (default: of backend, rate, model and time)")
    disable_tqdm: bool = option(False, "no progress bar")

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
        check(bool(self.model), "model", self.model, "a local folder or a Hugging Face id")
        check(self.backend in BACKENDS, "backend", self.backend, ", ".join(BACKENDS))
        url = self.base_url
        check(url is None or url.startswith(("http://", "https://")), "base_url", url, "http://HOST:PORT")
        check(1 <= self.port <= 65535, "port", self.port, "1 to 65535")
        check(self.endpoint is None or self.endpoint.startswith("/"), "endpoint", self.endpoint, "a path: /…")
        for name, least in (("num_prompts", 1), ("random_output_len", 1), ("num_warmups", 0), ("seed", 0)):
            check(getattr(self, name) >= least, name, getattr(self, name), f"{least} or more")
        for name in ("random_input_len", "random_prefix_len"):
            check(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        tokens = self.random_input_len + self.random_prefix_len
        check(tokens >= 1, "random_input_len", self.random_input_len, "1 or more, without a prefix")
        check(0 <= self.random_range_ratio < 1, "random_range_ratio", self.random_range_ratio, "0 up to below 1")
        check(self.request_rate > 0, "request_rate", self.request_rate, "above 0, or inf")
        check(0 < self.burstiness < math.inf, "burstiness", self.burstiness, "above 0")
        check(self.max_concurrency is None or self.max_concurrency >= 1, "max_concurrency", self.max_concurrency, "1 …")
        check(0 <= self.temperature < math.inf, "temperature", self.temperature, "0 or more")
        _ = self.metrics, self.percentiles, self.goals

    @property
    def url(self) -> str:
        """Where requests go."""
        return self.server + (self.endpoint or BACKENDS[self.backend])

    @property
    def server(self) -> str:
        """The server's address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (self.base_url or f"http://{host}:{self.port}").rstrip("/")

    @property
    def name(self) -> str:
        """The model in requests."""
        return self.served_model_name or self.model

    @property
    def metrics(self) -> tuple[str, ...]:
        """What is told, in the order given.

        Raises:
            ConfigError: Something else is named.
        """
        names = tuple(name.strip() for name in self.percentile_metrics.split(",") if name.strip())
        for name in names:
            check(name in METRICS, "percentile_metrics", self.percentile_metrics, f"some of {','.join(METRICS)}")
        return names

    @property
    def percentiles(self) -> tuple[float, ...]:
        """The percentiles.

        Raises:
            ConfigError: One is no number from 0 to 100.
        """
        given = self.metric_percentiles
        try:
            numbers = tuple(float(number) for number in given.split(","))
        except ValueError:
            numbers = (-1.0,)
        check(all(0 <= p <= 100 for p in numbers), "metric_percentiles", given, "numbers from 0 to 100: 50,90,99")
        return numbers

    @property
    def goals(self) -> dict[str, float]:
        """What makes a request good: seconds, by metric.

        Raises:
            ConfigError: A goal is not METRIC:MS.
        """
        goals = {}
        for goal in self.goodput:
            name, _, limit = goal.partition(":")
            try:
                goals[name] = float(limit) / 1000
            except ValueError:
                goals[name] = -1.0
            if name not in GOALS or not goals[name] >= 0:
                raise ConfigError(f"--goodput is {goal!r}; accepted: METRIC:MS with one of {', '.join(GOALS)}")
        return goals
