"""What all tests share: one thread a process, no model hub, and tiny models made on the spot."""

# ruff: noqa: E402 (the environment must be set before torch is imported)

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# Inherited by every process that a test starts.
ROOT = Path(__file__).resolve().parent.parent
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

import pytest
import torch

from tests.tiny import make_tiny_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model_dir(family="qwen3", **options)` -> directory of a tiny model; the same options, the same directory.

    The directory is shared by the session: read it, and copy it to change it.
    """
    made: dict[tuple, Path] = {}

    def get(family: str = "qwen3", **options) -> Path:
        key = (family, *sorted(options.items()))
        if key not in made:
            made[key] = make_tiny_model(tmp_path_factory.mktemp(f"tiny-{family}"), family, **options)
        return made[key]

    return get
