import io
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from requant.formats import FORMATS
from requant.formats.storage import Storage
from requant.loading import LayerPlan, Plan
from requant.recipe import Decision
from requant.tools.plan import WIDE, render


def row(name: str, format: str | None, pattern: str, reason: str = "") -> LayerPlan:
    return LayerPlan(
        Decision(name, format, pattern, reason),
        Storage(FORMATS[format] if format else None, bool(format), reason),
        (name,),
        "BF16",
        "bfloat16",
        4_000_000,
        2_000_000,
        8_000_000 if format else 0,
    )


@pytest.fixture
def plan() -> Plan:
    quantized = [row(f"model.layers.{i}.mlp.down_proj", "mxfp4", "*[a-z].down_proj") for i in range(3)]
    kept = [row(f"model.layers.{i}.mlp.gate", None, "", "protected: MoE router") for i in range(400)]
    kept.append(row("lm_head", None, "lm_head", "excluded by 'lm_head'"))
    return Plan(
        model="some/model",
        recipe={},
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        layers=(*quantized, *kept),
        steps=(),
        scales=(),
        conversions=(),
        plain_bytes=5_000_000,
        warnings=("exclude_layer '[x]' matches nothing",),
    )


def printed(plan: Plan, width: int = WIDE, every_layer: bool = False) -> str:
    output = io.StringIO()
    render(plan, Console(file=output, width=width), every_layer)
    return output.getvalue()


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_every_layer_has_its_row_where_that_is_asked_for(plan):
    lines = printed(plan, every_layer=True).splitlines()
    for i in range(3):
        name = f"model.layers.{i}.mlp.down_proj"
        (line,) = [line for line in lines if name in line]
        assert cells(line) == [name, "1", "BF16", "mxfp4", "*[a-z].down_proj", "bfloat16", "4 MB", "2 MB"]
    assert sum("MoE router" in line for line in lines) == 400


def test_layers_that_differ_in_their_indices_share_a_row(plan):
    lines = printed(plan).splitlines()
    (line,) = [line for line in lines if "down_proj" in line]
    name = "model.layers.{0-2}.mlp.down_proj"
    assert cells(line) == [name, "3", "BF16", "mxfp4", "*[a-z].down_proj", "bfloat16", "12 MB", "6 MB"]
    (line,) = [line for line in lines if "MoE router" in line]
    assert cells(line) == ["model.layers.{0-399}.mlp.gate", "400", "BF16", "protected: MoE router", "1.60 GB", "800 MB"]
    assert any("lm_head" in line and "excluded by 'lm_head'" in line for line in lines)


def test_indices_with_gaps_and_of_experts(plan):
    some = [row(f"model.layers.{i}.a", "mxfp4", "x") for i in (0, 1, 5, 7, 8)]
    experts = [row(f"model.layers.{i}.experts.{e}", "mxfp4", "x") for i in range(2) for e in range(2)]
    text = printed(replace(plan, layers=(*some, *experts)))
    assert "model.layers.{0-1,5,7-8}.a" in text
    assert "model.layers.*.experts.*" in text


def test_totals_warnings_and_memory(plan):
    text = printed(plan)
    assert "Warning: exclude_layer '[x]' matches nothing" in text
    assert "3 layers quantized: 12 MB → 6 MB; 401 layers kept: 802 MB; everything else: 5 MB" in text
    assert "Estimated device memory: 813 MB weights + 24 MB layout" in text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_nothing_is_cut_off(plan, width):
    text = printed(plan, width)
    assert "…" not in text
    assert len(re.findall(r" 4 MB +2 MB", text)) == 1
