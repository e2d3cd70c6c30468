"""Single values of a request, parsed and checked: what the records of the contract are made of."""

from __future__ import annotations

import reprlib
from typing import Any


class BadRequest(ValueError):
    """The request is malformed or asks for what cannot be given; the message says what and what is allowed."""


def as_object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{what} must be a JSON object, not {type(value).__name__}")
    return value


def as_integer(value: Any, name: str, low: int, high: int | None = None) -> int:
    if type(value) is not int or value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"from {low} to {high}"
        raise BadRequest(f"{name} must be an integer {allowed}, got {shown(value)}")
    return value


def as_number(value: Any, name: str, low: float, high: float, *, low_open: bool = False) -> float:
    if type(value) not in (int, float) or not low <= value <= high or (low_open and value == low):
        raise BadRequest(f"{name} must be a number in {'(' if low_open else '['}{low}, {high}], got {shown(value)}")
    return float(value)


def as_boolean(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false, got {shown(value)}")
    return value


def as_string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be a string, got {shown(value)}")
    return value


def as_token_ids(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not all(type(token) is int for token in value):
        raise BadRequest(f"{name} must be a list of integers, got {shown(value)}")
    return tuple(value)


def shown(value: Any) -> str:
    """A value for a message: short, however large or deep it is."""
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 4, 76, 76, 76


def refuse(body: dict[str, Any], unsupported: dict[str, tuple]) -> None:
    """Raises for a field that asks for something: for each name the values that ask for nothing are given."""
    for name, neutral in unsupported.items():
        if name in body and body[name] not in neutral:
            raise BadRequest(f"{name} = {shown(body[name])} is not supported by the embedded engine; leave it out")


def only_known(body: dict[str, Any], known: frozenset[str], what: str) -> None:
    """Raises for a field that nobody knows, so that a misspelt one is not ignored."""
    for name in body:
        if name not in known:
            raise BadRequest(f"{what} has no {shown(name)}; known are {', '.join(sorted(known))}")
