"""A reward function of the user's (`--custom-rm-path`), called inside a worker process of the pool.

There it may block, hang or crash without holding up generation; it is loaded once a worker.
"""

from __future__ import annotations

import functools
import inspect
import json
from typing import Any

from colloid.data.sample import Sample, Status
from colloid.rewards.worker import SHARED

RETURNED_FIELDS = ("metadata", "train_metadata", "remove_sample", "status")
"""What a reward function may change on the sample, beside its reward."""


def preload(path: str) -> None:
    """Imports the user's file."""
    _load(path)


async def call_custom_reward(path: str, sample: Sample) -> dict[str, Any]:
    """`reward` (float or dict), `changes` that the function made to the sample, and the options it has read."""
    before = {name: _comparable(getattr(sample, name)) for name in RETURNED_FIELDS}
    result = _load(path)(SHARED["args"], sample)
    if inspect.isawaitable(result):
        result = await result
    reward = {str(key): plain_number(value) for key, value in result.items()} if isinstance(result, dict) else result
    changes = {name: getattr(sample, name) for name in RETURNED_FIELDS}
    changes = {name: value for name, value in changes.items() if _comparable(value) != before[name]}
    read = sorted(SHARED["args"].options_read()) if hasattr(SHARED["args"], "options_read") else []
    return {"reward": plain_number(reward), "changes": changes, "options_read": read}


def apply_changes(sample: Sample, changes: dict[str, Any]) -> None:
    """The inverse, in the manager."""
    for name, value in changes.items():
        setattr(sample, name, Status(value) if name == "status" else value)


def plain_number(value: Any) -> Any:
    """A scalar of numpy or torch as a Python number; anything else as it is."""
    return value.item() if hasattr(value, "item") and not isinstance(value, (str, bytes)) else value


def _comparable(value: Any) -> str:
    return json.dumps(value, default=repr, sort_keys=True)


@functools.lru_cache(maxsize=16)
def _load(path: str):
    from colloid.hooks import load_hook

    return load_hook(path, "custom_rm")
