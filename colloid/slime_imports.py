"""`--slime-imports`: hook files written for slime find the names that they import, and get colloid's.

`from slime.utils.types import Sample` gives `colloid.Sample`. Only the names of `MODULES` exist, each loaded when it is
first used. Nothing of this is there without the option.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

_TYPES = "colloid.rollout.types"
_SOURCE = "colloid.data.source"
_NAMES = "colloid.rollout.slime_names"

MODULES: dict[str, dict[str, str]] = {
    "slime.utils.types": {"Sample": "colloid.data.sample:Sample", "SampleStatus": "colloid.data.sample:Status"},
    "slime.utils.http_utils": {"post": f"{_NAMES}:post"},
    "slime.utils.async_utils": {"run": f"{_NAMES}:run"},
    "slime.utils.misc": {"load_function": f"{_NAMES}:load_function"},
    "slime.rollout.base_types": {
        "RolloutFnTrainOutput": f"{_TYPES}:RolloutFnTrainOutput",
        "RolloutFnEvalOutput": f"{_TYPES}:RolloutFnEvalOutput",
    },
    "slime.rollout.filter_hub.base_types": {"DynamicFilterOutput": f"{_TYPES}:DynamicFilterOutput"},
    "slime.rollout.filter_hub.dynamic_sampling_filters": {
        "check_reward_nonzero_std": "colloid.rollout.filters:check_reward_nonzero_std"
    },
    "slime.rollout.data_source": {
        "RolloutDataSource": f"{_SOURCE}:RolloutDataSource",
        "RolloutDataSourceWithBuffer": f"{_SOURCE}:RolloutDataSourceWithBuffer",
    },
    "slime.rollout.sglang_rollout": {
        "GenerateState": f"{_NAMES}:GenerateState",
        "generate": f"{_NAMES}:generate",
        "generate_rollout": "colloid.rollout.generate:generate_rollout",
        "get_model_url": "colloid.rollout.context:get_model_url",
    },
    "slime.rollout.rm_hub": {"async_rm": f"{_NAMES}:async_rm", "batched_async_rm": f"{_NAMES}:batched_async_rm"},
}
"""Module of slime -> name in it -> where it is here."""

_PACKAGES = {".".join(name.split(".")[:count]) for name in MODULES for count in range(1, name.count(".") + 1)}


def install() -> None:
    """From now on the names can be imported in this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name in MODULES or name in _PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"The names of {module.__name__} that colloid has."
        vars(module)["__getattr__"] = _getter(module.__name__)


def _getter(module: str) -> Any:
    names = MODULES.get(module, {})

    def get(name: str) -> Any:
        if name in names:
            target, _, attribute = names[name].partition(":")
            return getattr(importlib.import_module(target), attribute)
        inner = f"{module}.{name}"
        if inner in MODULES or inner in _PACKAGES:
            return importlib.import_module(inner)
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        known = ", ".join(sorted(names)) or "no names"
        raise ImportError(f"--slime-imports has no {inner}; of {module} it has {known}")

    return get
