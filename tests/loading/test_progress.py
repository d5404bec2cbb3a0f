import io
import logging

from rich.console import Console

from requant.loading.progress import LogProgress, show_progress


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_line_every_interval(caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    lines = LogProgress(100_000_000, interval=5.0, clock=clock)
    for now in (1.0, 4.9, 5.0, 6.0, 9.9, 10.0):
        clock.now = now
        lines.advance(10_000_000, f"tensor{now}")
    lines.done()
    assert [record.message for record in caplog.records] == [
        "Loading weights: 30% of 100 MB, 6 MB/s, tensor5.0",
        "Loading weights: 60% of 100 MB, 6 MB/s, tensor10.0",
        "Loaded 60 MB of weights in 10.0 seconds, 6 MB/s",
    ]


def test_no_terminal_means_log_lines_and_no_bar(caplog):
    caplog.set_level(logging.INFO)
    output = io.StringIO()
    with show_progress(10, Console(file=output)) as progress:
        progress.advance(10, "a")
    assert output.getvalue() == ""
    assert "Loaded 10 bytes" in caplog.text


def test_a_terminal_gets_a_bar_with_bytes_per_second(caplog):
    caplog.set_level(logging.INFO)
    output = io.StringIO()
    with show_progress(4_000_000, Console(file=output, force_terminal=True, width=160)) as progress:
        progress.advance(1_000_000, "a")
        progress.advance(1_000_000, "model.layers.0.mlp.down_proj.weight")
    assert "model.layers.0.mlp.down_proj.weight" in output.getvalue()
    assert "MiB" in output.getvalue()
    assert not caplog.records
