"""`ifbench`: 1 where the response follows all instructions of its row, else 0 (strict, of IFEval and IFBench).

The row's metadata (or its label) holds `instruction_id_list` and `kwargs`, a list with one object an instruction;
entries that are null are left out, as the published data sets have one for every argument of every instruction.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from colloid.rewards.instructions import ifbench, ifeval, single

INSTRUCTIONS: dict[str, Callable[..., bool]] = {**ifeval.INSTRUCTIONS, **ifbench.INSTRUCTIONS, **single.INSTRUCTIONS}
NOT_CHECKED = {"words:start_verb": "whether a word is a verb takes a part-of-speech tagger, which colloid has not"}


def grade(response: str, label: Any, metadata: dict[str, Any]) -> float:
    """1.0 or 0.0. An empty response follows nothing.

    Raises:
        ValueError: the row names no instructions, or some that are not known.
    """
    problem = row_problem(label, metadata)
    if problem is not None:
        raise ValueError(problem)
    ids, arguments = instructions_of(label, metadata)
    followed = (INSTRUCTIONS[name](response, **given) for name, given in zip(ids, arguments, strict=True))
    return float(bool(response.strip()) and all(followed))


def instructions_of(label: Any, metadata: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """Ids and arguments, in order."""
    source = metadata
    if "instruction_id_list" not in metadata:
        source = _parsed(label)
        source = source if isinstance(source, dict) else {}
    ids = [str(name).strip() for name in _parsed(source.get("instruction_id_list")) or []]
    arguments = _parsed(source.get("kwargs")) or []
    arguments = [arguments] * len(ids) if isinstance(arguments, dict) else list(arguments)
    arguments += [{}] * (len(ids) - len(arguments))
    return ids, [{key: value for key, value in (_parsed(one) or {}).items() if value is not None} for one in arguments]


def row_problem(label: Any, metadata: dict[str, Any]) -> str | None:
    """What keeps a row from being graded."""
    ids, arguments = instructions_of(label, metadata)
    if not ids:
        return "no instructions: give instruction_id_list and kwargs in the metadata (--metadata-key) or the label"
    if len(arguments) != len(ids):
        return f"{len(ids)} instructions in instruction_id_list, and {len(arguments)} entries in kwargs"
    for name, given in zip(ids, arguments, strict=True):
        if name in NOT_CHECKED:
            return f"the instruction {name!r} is not supported: {NOT_CHECKED[name]}"
        if name not in INSTRUCTIONS:
            return f"unknown instruction {name!r}; known: {', '.join(INSTRUCTIONS)}"
        try:
            inspect.signature(INSTRUCTIONS[name]).bind("", **given)
        except TypeError as error:
            return f"the instruction {name!r} cannot be checked with {given}: {error}"
    return None


def _parsed(value: Any) -> Any:
    """A value that may be JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return None
