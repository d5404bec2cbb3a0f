"""The recipes that come with the project, on the real dimensions of the models they are for: exact layer lists."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import requant_headers

from requant.entrypoints.cli import main
from requant.recipe import FORMATS, Recipe

RECIPES = Path(__file__).parents[2] / "recipes"
FILES = sorted(path.relative_to(RECIPES).as_posix() for path in RECIPES.rglob("*.json"))
MODELS = {
    "qwen3-30b-a3b": requant_headers.QWEN3_30B_A3B,
    "qwen3-235b-a22b": requant_headers.QWEN3_235B_A22B,
    "deepseek-r1": requant_headers.DEEPSEEK_R1,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: requant_headers.write_headers(root / name, config) for name, config in MODELS.items()}


def plan(folder: Path, recipe: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What ``requant plan --json`` prints."""
    capsys.readouterr()
    arguments = ["plan", "--model", str(folder), "--online_quant_config", str(RECIPES / recipe), "--json"]
    assert main(arguments) == 0
    return json.loads(capsys.readouterr().out)


def by_format(report: dict[str, Any]) -> dict[str, list[str]]:
    """The quantized layers of each format, by its ``quant_type``."""
    names = {"per_Token": "ptpc_fp8", "per_1x128": "per_block_fp8", "per_1x32": "mxfp4"}
    out: dict[str, list[str]] = {}
    for row in report["layers"]:
        out.setdefault(names[row["quant_type"]], []).append(row["layer"])
    return out


def layers(count: int, *names: str, first: int = 0) -> list[str]:
    return [f"model.layers.{i}.{name}" for i in range(first, count) for name in names]


QWEN = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.experts")
MLA = tuple(f"self_attn.{part}" for part in ("fused_qkv_a_proj", "q_b_proj", "kv_b_proj", "o_proj"))
SHARED = ("mlp.shared_experts.gate_up_proj", "mlp.shared_experts.down_proj")
DENSE = ("mlp.gate_up_proj", "mlp.down_proj")


def deepseek(*, attention: bool = False, dense: bool = False, shared: bool = False, routed: bool = False) -> set[str]:
    """Layers of DeepSeek-R1: 61, the first 3 dense."""
    names = set(layers(61, *MLA)) if attention else set()
    names |= set(layers(3, *DENSE)) if dense else set()
    names |= set(layers(61, *SHARED, first=3)) if shared else set()
    return names | (set(layers(61, "mlp.experts", first=3)) if routed else set())


@pytest.mark.parametrize("target", ["ptpc_fp8", "per_block_fp8"])
def test_qwen3_30b_a3b_has_144_quantized_layers(folders, target, capsys):
    report = plan(folders["qwen3-30b-a3b"], f"qwen3-moe/{target}.json", capsys)
    assert by_format(report) == {target: layers(48, *QWEN)}
    assert report["num_layers"] == 144
    assert [row["layer"] for row in report["kept"]] == [*layers(48, "mlp.gate"), "lm_head"]
    assert {row["reason"] for row in report["kept"]} == {"excluded by '*.gate.*'", "excluded by 'lm_head'"}
    assert report["unmatched_patterns"] == []
    experts = report["layers"][2]
    assert experts["bytes_before"] == 128 * 3 * 768 * 2048 * 2
    scales = 128 * (2 * 768 + 2048) if target == "ptpc_fp8" else 128 * (2 * 6 * 16 + 16 * 6)
    assert experts["bytes_after"] == 128 * 3 * 768 * 2048 + 4 * scales
    assert experts["pattern"] == ("*expert*" if target == "ptpc_fp8" else "global_quant_config")


def test_qwen3_235b_a22b_has_94_times_3_quantized_layers(folders, capsys):
    report = plan(folders["qwen3-235b-a22b"], "qwen3-moe/mxfp4.json", capsys)
    assert by_format(report) == {"mxfp4": layers(94, *QWEN)}
    assert report["num_layers"] == 94 * 3
    experts = report["layers"][2]
    assert experts["bytes_after"] == 128 * 3 * 1536 * 4096 * 17 // 32


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("step-1-attention", {"ptpc_fp8": layers(48, *QWEN[:2])}),
        ("step-2-routed-experts", {"ptpc_fp8": layers(48, QWEN[2])}),
        ("step-3-mxfp4-experts", {"ptpc_fp8": layers(48, *QWEN[:2]), "mxfp4": layers(48, QWEN[2])}),
        ("step-4-everything", {"mxfp4": layers(48, *QWEN), "ptpc_fp8": ["lm_head"]}),
    ],
)
def test_steps_for_qwen3_moe(folders, step, expected, capsys):
    assert by_format(plan(folders["qwen3-30b-a3b"], f"qwen3-moe/{step}.json", capsys)) == expected


@pytest.mark.parametrize(
    ("recipe", "ptpc", "mxfp4"),
    [
        (
            "ptpc_fp8_mxfp4_experts",
            deepseek(attention=True, dense=True),
            deepseek(shared=True, routed=True),
        ),
        ("step-1-attention", deepseek(attention=True), set()),
        ("step-2-shared-experts", deepseek(attention=True, shared=True), set()),
        ("step-3-routed-experts", deepseek(attention=True, dense=True, shared=True), deepseek(routed=True)),
        ("step-4-everything", set(), deepseek(attention=True, dense=True, shared=True, routed=True)),
    ],
)
def test_deepseek_r1(folders, recipe, ptpc, mxfp4, capsys):
    report = plan(folders["deepseek-r1"], f"deepseek-v3/{recipe}.json", capsys)
    found = by_format(report)
    assert set(found.get("ptpc_fp8", ())) == ptpc
    assert set(found.get("mxfp4", ())) == mxfp4
    assert report["num_layers"] == len(ptpc) + len(mxfp4)
    assert {row["source"] for row in report["layers"]} == {"per_block_fp8"}
    kept = {row["layer"]: row["reason"] for row in report["kept"]}
    mtp = {f"model.layers.61.{n}" for n in ("eh_proj", *MLA, "mlp.gate", "mlp.experts", *SHARED, "shared_head.head")}
    everything = deepseek(attention=True, dense=True, shared=True, routed=True)
    assert set(kept) == (everything - ptpc - mxfp4) | mtp | set(layers(61, "mlp.gate", first=3)) | {"lm_head"}
    assert {kept[name].partition(":")[0] for name in mtp} == {"not loaded"}
    assert {kept[name] for name in everything - ptpc - mxfp4} <= {"no rule matches"}
    assert report["unmatched_patterns"] == []


def test_deepseek_r1_in_its_own_format_is_not_touched(folders, tmp_path, capsys):
    recipe = tmp_path / "recipe.json"
    recipe.write_text('{"global_quant_config": "per_block_fp8"}')
    report = plan(folders["deepseek-r1"], str(recipe), capsys)
    assert report["num_layers"] == 0
    kept = {row["layer"]: row["reason"] for row in report["kept"]}
    names = deepseek(attention=True, dense=True, shared=True, routed=True)
    assert {kept[name] for name in names} == {"per_block_fp8 in the checkpoint already, which is its target"}


@pytest.mark.parametrize("file", FILES)
def test_every_recipe_parses_and_is_described(file):
    recipe = Recipe.parse(str(RECIPES / file))
    assert recipe.to_dict()
    assert {recipe.global_format, *(target for _, target in recipe.overrides)} & set(FORMATS)
    folder, name = file.split("/")
    section = re.split(r"^## ", (RECIPES / "README.md").read_text(), flags=re.M)
    text = next(part for part in section if f"`{folder}/`" in part.splitlines()[0])
    (line,) = (line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
    assert line.rstrip(" |").endswith(".")


def test_every_described_recipe_exists():
    text = (RECIPES / "README.md").read_text()
    assert len(re.findall(r"^\| `[\w-]+\.json` \|", text, flags=re.M)) == len(FILES)
