"""Measuring a server over HTTP: what ``python -m requant.benchmarks.benchmark_serving`` and ``requant bench`` run."""
