"""What hooks import: there, and cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest

import colloid
import colloid.rollout
from colloid.errors import HookError


def test_importing_colloid_imports_neither_torch_nor_ray_nor_transformers():
    code = (
        "import sys, colloid, colloid.rollout; colloid.Sample, colloid.DynamicFilterOutput;"
        "print(sorted({'torch', 'ray', 'transformers', 'aiohttp', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_public_names_are_there():
    for name in colloid.__all__:
        assert getattr(colloid, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Sampel'"):
        colloid.Sampel  # noqa: B018


def test_outside_of_a_rollout_the_functions_for_hooks_say_so():
    with pytest.raises(HookError, match="only inside a rollout"):
        colloid.rollout.get_model_url()
