"""Imports run in one direction: loop -> rollout, training, cluster -> … -> algorithms, models, config, observe."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "colloid"
LAYERS = [
    ("errors",),
    ("algorithms", "models", "config", "observe", "hook_kinds"),
    ("hooks", "checkpoints", "restarts", "slime_imports"),
    ("data", "engines"),
    ("rewards", "weights", "agents"),
    ("rollout", "training"),
    ("cluster",),
    ("loop",),
    ("entry",),
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def _imports(path: Path) -> set[str]:
    """Dotted modules of colloid that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name.startswith("colloid.")}


def test_every_part_has_a_layer():
    parts = {path.stem for path in ROOT.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert parts - {"__init__", "__pycache__"} <= set(LEVEL)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_import_runs_up(path):
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if own == "__init__":
        return  # colloid/__init__.py offers names of all layers, lazily
    for name in _imports(path):
        part = name.split(".")[1]
        assert LEVEL[part] <= LEVEL[own], f"{own} imports {name}"


@pytest.mark.parametrize("part", ["config", "models"])
def test_options_need_neither_torch_nor_ray(part):
    import subprocess
    import sys

    code = f"import colloid.{part}, sys; print(*sorted(m for m in ('torch', 'ray', 'numpy') if m in sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == ""
