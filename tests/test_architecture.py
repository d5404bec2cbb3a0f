"""The direction of imports is a contract: a package imports only what stands above it."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "requant"

# What each package may import directly; what those may import is allowed too.
MAY_IMPORT: dict[str, set[str]] = {
    "recipe": set(),
    "formats": {"recipe"},
    "kernels": {"formats"},
    "parallel": set(),
    "loading": {"recipe", "formats", "kernels", "parallel"},
    "layers": {"formats", "kernels", "parallel"},
    "models": {"layers"},
    "engine": {"models", "loading"},
    "server": {"engine"},
    "benchmarks": {"engine"},
    "tools": {"engine", "loading"},
    "entrypoints": {"engine", "server", "benchmarks", "tools"},
    "integrations": {"recipe", "formats", "kernels"},
}


@cache
def reachable(package: str) -> frozenset[str]:
    """Everything that ``package`` may import: its own row of the table, and the rows of what stands there."""
    allowed = MAY_IMPORT[package]
    return frozenset(allowed.union(*(reachable(p) for p in allowed)) | {package})


def imports(path: Path) -> set[str]:
    """Full names of the requant modules that a file imports, also inside functions and type-checking blocks."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "requant"}


FILES = sorted(p for p in ROOT.rglob("*.py") if p.parent != ROOT)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_up_only(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        target = name.split(".")[1]
        if (ROOT / f"{target}.py").exists() or not (ROOT / target).is_dir():
            continue  # requant.errors and the package's own public names stand above everything
        assert target in reachable(package), f"requant.{package} must not import requant.{target}"


def test_every_package_is_in_the_table() -> None:
    packages = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith("__")}
    assert packages <= set(MAY_IMPORT)


def test_the_table_has_no_cycle() -> None:
    for package, allowed in MAY_IMPORT.items():
        assert all(package not in reachable(p) for p in allowed)
