"""The package declares what it imports, ships its data, and its scripts are well-formed."""

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = {"sglang", "transformer_engine", "apex", "smg", "wandb", "memray"}
"""Of machines with CUDA, imported only where they are there; and of extras, imported only where an option asks."""


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def declared():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return {canonical(re.match(r"[\w.-]+", line).group()) for line in lines if line and not line.startswith("#")}


def imported_packages():
    found = {}
    for path in [*ROOT.glob("*.py"), *(ROOT / "colloid").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            for name in names:
                found.setdefault(name.partition(".")[0], path.relative_to(ROOT))
    return found


def test_every_import_of_the_package_is_in_the_requirements():
    owners = packages_distributions()
    known = declared()
    undeclared = {
        name: str(path)
        for name, path in imported_packages().items()
        if name not in sys.stdlib_module_names | OPTIONAL | {"colloid", "tomli"}
        and not (ROOT / path).with_name(f"{name}.py").exists()  # of a script that runs without the package
        and not {canonical(owner) for owner in owners.get(name, [name])} & known
    }
    assert undeclared == {}


def test_data_files_of_the_package_are_shipped():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["colloid"]
    package = ROOT / "colloid"
    shipped = {path for pattern in patterns for path in package.glob(pattern)}
    data = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert data - shipped == set()


def test_torch_may_be_the_release_that_set_up_installs():
    requirement = next(
        line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("torch")
    )
    assert requirement == "torch>=2.6"
    assert 'CPU_TORCH="torch==2.13.0"' in (ROOT / "scripts" / "setup.sh").read_text()


@pytest.mark.parametrize(
    "script",
    ["scripts/setup.sh", "scripts/quickstart.sh", "scripts/test.sh", "scripts/docker_entrypoint.sh", ".ci/run"],
)
def test_scripts_are_well_formed_and_executable(script):
    path = ROOT / script
    assert path.stat().st_mode & 0o100
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, timeout=10).stderr == ""


def quickstart(*options):
    command = ["bash", str(ROOT / "scripts" / "quickstart.sh"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_quick_start_explains_itself_and_refuses_half_an_option():
    assert "--continue" in quickstart("--help").stdout
    done = quickstart("--seed")
    assert done.returncode == 1 and "--seed needs a value" in done.stderr
    assert "use --run-name" in quickstart("--outputs-dir", "elsewhere").stderr
