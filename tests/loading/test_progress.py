import io
import logging

import pytest
from rich.console import Console

from requant.errors import CheckpointError
from requant.loading import load, make_progress
from requant.loading.progress import LogProgress


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_line_every_interval(caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    with LogProgress(100_000_000, interval=5.0, clock=clock) as lines:
        for now in (1.0, 4.9, 5.0, 6.0, 9.9, 10.0):
            clock.now = now
            lines.advance(10_000_000, f"tensor{now}")
    assert [record.message for record in caplog.records] == [
        "Loading weights: 30% of 100 MB, 6 MB/s, tensor5.0",
        "Loading weights: 60% of 100 MB, 6 MB/s, tensor10.0",
        "Loaded 60 MB of weights in 10.0 seconds, 6 MB/s",
    ]


def test_a_load_that_failed_is_not_said_to_be_done(caplog, tiny):
    caplog.set_level(logging.INFO)
    plan = tiny.plan()
    plan.steps[0].tensor.file.unlink()
    with pytest.raises(CheckpointError):
        load(plan, tiny.model, progress=LogProgress(10))
    assert not caplog.records


def test_no_terminal_means_log_lines_and_no_bar(caplog, tiny):
    caplog.set_level(logging.INFO)
    output = io.StringIO()
    plan = tiny.plan()
    load(plan, tiny.model, progress=make_progress(plan, Console(file=output)))
    assert output.getvalue() == ""
    assert "Loaded " in caplog.text


def test_a_terminal_gets_a_bar_with_bytes_per_second(caplog, tiny):
    caplog.set_level(logging.INFO)
    output = io.StringIO()
    plan = tiny.plan()
    with make_progress(plan, Console(file=output, force_terminal=True, width=160)) as progress:
        progress.advance(plan.bytes_to_read // 2, "a")
        progress.advance(plan.bytes_to_read // 2, "model.layers.0.mlp.down_proj.weight")
    assert "model.layers.0.mlp.down_proj.weight" in output.getvalue()
    assert "kB/s" in output.getvalue() or "MB/s" in output.getvalue() or "GB/s" in output.getvalue()
    assert not caplog.records
