"""A reward of the user's (`--custom-rm-path`), called inside a worker process of the pool.

There it may block, hang or crash without holding up generation; it is loaded, and a model made, once a worker.
"""

from __future__ import annotations

import functools
import inspect
import json
from typing import Any

from colloid.data.sample import Sample, Status
from colloid.rewards.forms import constructor_takes_path
from colloid.rewards.worker import SHARED

RETURNED_FIELDS = ("metadata", "train_metadata", "remove_sample", "status")
"""What a reward function may change on the sample, beside its reward."""
_PLAIN = (bool, int, float, str, type(None))


def preload(path: str, model_path: str | None = None) -> None:
    """Imports the user's file, and makes the model where it is a class."""
    target = _load(path)
    if inspect.isclass(target):
        _model(path, model_path)


async def call_custom_reward(path: str, sample: Sample) -> dict[str, Any]:
    """`reward` (float or dict), `changes` that the function made to the sample, and the options it has read."""
    before = _fields(sample)
    reward = await _awaited(_load(path)(SHARED["args"], sample))
    return {"reward": plain_reward(reward), "changes": _changes(sample, before), "options_read": _options_read()}


async def call_group_reward(path: str, samples: list[Sample]) -> dict[str, Any]:
    """The same for the function of a whole group: `rewards`, a list as the function returned it, and `changes`."""
    before = [_fields(sample) for sample in samples]
    rewards = _plain_list(await _awaited(_load(path)(SHARED["args"], samples)))
    changes = [_changes(sample, fields) for sample, fields in zip(samples, before, strict=True)]
    return {"rewards": rewards, "changes": changes, "options_read": _options_read()}


async def call_batch_reward(
    path: str, model_path: str | None, prompts: list[Any], responses: list[str], columns: dict[str, list[Any]]
) -> list[Any]:
    """The values of a class's `compute_reward`, or of a function of prompts and responses; not checked yet.

    Args:
        columns: one list a column, one entry a sample. What the function does not declare is not passed.
    """
    target = _load(path)
    if inspect.isclass(target):
        compute = _model(path, model_path).compute_reward
        return _plain_list(await _awaited(compute(prompts, responses, **_declared(compute, columns))))
    completions = [
        [{"role": "assistant", "content": response}] if isinstance(prompt, list) else response
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    named = {"prompts": prompts, "responses": responses, "completions": completions}
    return _plain_list(await _awaited(target(**{**columns, **named})))


def apply_changes(sample: Sample, changes: dict[str, Any]) -> None:
    """In the manager: does to its sample what the function did to the worker's."""
    for name, value in changes.items():
        setattr(sample, name, Status(value) if name == "status" else value)


def plain_reward(value: Any) -> Any:
    """A scalar of numpy or torch as a Python number, in a dict too; anything else as it is."""
    if isinstance(value, dict):
        return {str(key): _plain_number(entry) for key, entry in value.items()}
    return _plain_number(value)


def _plain_number(value: Any) -> Any:
    if not hasattr(value, "item") or isinstance(value, (str, bytes)):
        return value
    return value.item() if tuple(getattr(value, "shape", ())) in ((), (1,)) else value


def _plain_list(values: Any) -> list[Any]:
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"it must return a list of rewards, and returned {values!r:.200}")
    return [_transportable(plain_reward(value)) for value in values]


def _transportable(value: Any) -> Any:
    """What JSON cannot carry is no reward either; its text says what it was."""
    return value if isinstance(value, (*_PLAIN, dict)) else repr(value)[:200]


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _declared(function: Any, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return columns
    return {name: values for name, values in columns.items() if name in list(parameters)[2:]}


def _fields(sample: Sample) -> dict[str, str]:
    return {name: _comparable(getattr(sample, name)) for name in RETURNED_FIELDS}


def _changes(sample: Sample, before: dict[str, str]) -> dict[str, Any]:
    after = {name: getattr(sample, name) for name in RETURNED_FIELDS}
    return {name: value for name, value in after.items() if _comparable(value) != before[name]}


def _options_read() -> list[str]:
    return sorted(SHARED["args"].options_read()) if hasattr(SHARED["args"], "options_read") else []


def _comparable(value: Any) -> str:
    return json.dumps(value, default=repr, sort_keys=True)


@functools.lru_cache(maxsize=16)
def _load(path: str) -> Any:
    """The user's function (a `Hook`) or class."""
    from colloid import slime_imports
    from colloid.hooks import load_hook_or_class

    if getattr(SHARED.get("args"), "slime_imports", False):
        slime_imports.install()
    return load_hook_or_class(path, "custom_rm")


@functools.lru_cache(maxsize=1)
def _model(path: str, model_path: str | None) -> Any:
    model_class = _load(path)
    return model_class(model_path) if constructor_takes_path(model_class) else model_class()
