"""`Option`: one row of an option table, and how a text or a YAML value becomes its value.

A row says all there is to know of an option: parsing, checks, `--help` and the documentation are made from it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

from colloid.errors import ConfigError

FLAG, OFF, SWITCH = "flag", "off", "switch"
"""Kinds without a value: sets True; sets False; `--x` sets True and `--no-x` sets False."""
BOOLEANS = (FLAG, OFF, SWITCH)

_TRUE = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_NOUNS = {"int": "a whole number", "float": "a number", "size": "a number like 4096, 8k or 8K", "json": "JSON"}


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        flag: the name that users type.
        kind: `int`, `float`, `str`, `json`, `size` (an int that may end in k, K, m, M, g, G), `pattern` (an int, or a
            list expression like `[0]*3+[1]*58`), `bool` (a value that is true or false), or one of `BOOLEANS`.
        default: the value where the user gives none. None: derived, or off.
        nargs: "" one value; "+", "*", "?" as in argparse.
        repeat: given several times, the values add up.
        low, high: bounds, inclusive.
        built: the values that work. None: all that are allowed. Others are refused. The default always works, and so
            does False where it says that something is off.
        refused: why they are, and what to take instead; ends a sentence that begins with the option.
        at_run: refused when a run starts, not when the options are parsed (model arguments: so that they can be
            planned with `--dry-run`).
        field: Megatron-Core's `Class.field` that the option sets.
        lower: the value is lower-cased first.
        shown: how the default reads in the help where it is derived.
    """

    flag: str
    kind: str
    default: Any
    help: str = ""
    group: str = ""
    category: str = "colloid"
    choices: tuple = ()
    nargs: str = ""
    repeat: bool = False
    dest: str = ""
    aliases: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    built: tuple | None = None
    refused: str = ""
    at_run: bool = False
    field: str = ""
    lower: bool = False
    shown: str = ""
    names: dict[str, bool] = dataclasses.field(init=False, compare=False, repr=False)
    """Every spelling, and the value that a spelling without a value sets."""

    def __post_init__(self) -> None:
        works = self.built is None or (self.built and set(self.choices) == set(self.built))
        assert works or self.refused, f"{self.flag} is refused, and says no reason"
        object.__setattr__(self, "dest", self.dest or self.flag.lstrip("-").replace("-", "_"))
        names = {name: self.kind != OFF for name in (self.flag, *self.aliases)}
        if self.kind == SWITCH:
            names["--no-" + self.flag[2:]] = False
        object.__setattr__(self, "names", names)

    @property
    def takes_value(self) -> bool:
        return self.kind not in BOOLEANS

    @property
    def is_list(self) -> bool:
        return self.nargs in ("+", "*")

    def supports(self, value: Any) -> bool:
        """Whether the value works in this version."""
        if self.built is None or value == self.default or value in self.built:
            return True
        return value is False and not self.default

    def convert(self, value: Any, source: str) -> Any:
        """The value of the option, from a text (or, for lists, texts) or from a typed value of a config file.

        Raises:
            ConfigError: it is not one, is not among the choices, or out of bounds. `source` names where it stands.
        """
        if value is None:
            return None
        if self.is_list:
            items = value if isinstance(value, (list, tuple)) else [value]
            if self.nargs == "+" and not items:
                raise ConfigError(f"{source}: at least one value is needed")
            return [self._one(item, source) for item in items]
        if isinstance(value, (list, tuple)) and self.kind not in ("json", "pattern"):
            raise ConfigError(f"{source} takes one value, not {list(value)}")
        return self._one(value, source)

    def _one(self, value: Any, source: str) -> Any:
        result = self._typed(value, source)
        if self.choices and result not in self.choices:
            allowed = ", ".join(str(choice) for choice in self.choices)
            raise ConfigError(
                f"{source}: {value!r} is not allowed; choose one of: {allowed}{_nearest(result, self.choices)}"
            )
        low, high = self.low, self.high
        if isinstance(result, (int, float)) and not isinstance(result, bool):
            if low is not None and result < low:
                raise ConfigError(f"{source}: {value} is too small; it must be at least {low:g}")
            if high is not None and result > high:
                raise ConfigError(f"{source}: {value} is too large; it must be at most {high:g}")
        return result

    def _typed(self, value: Any, source: str) -> Any:
        kind = self.kind
        try:
            if kind in BOOLEANS or kind == "bool":
                return value if isinstance(value, bool) else _TRUE[str(value).lower()]
            if kind == "str":
                if isinstance(value, (bool, dict, list)):
                    raise ValueError
                return str(value).lower() if self.lower else str(value)
            if isinstance(value, bool):
                raise ValueError
            if kind == "json":
                return json.loads(value) if isinstance(value, str) else value
            if kind == "float":
                number = float(value)
                if not math.isfinite(number):
                    raise ValueError
                return number
            if kind == "size":
                return _size(value)
            if kind == "pattern":
                return value if isinstance(value, (int, list)) else _pattern(value)
            if isinstance(value, float):
                if not value.is_integer():
                    raise ValueError
                return int(value)
            return int(value)
        except (ValueError, KeyError, TypeError, OverflowError):
            noun = _NOUNS.get(kind, "true or false" if kind in (*BOOLEANS, "bool") else f"a {kind}")
            raise ConfigError(f"{source}: {value!r} is not {noun}") from None


def _nearest(value: Any, choices: tuple) -> str:
    import difflib

    close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], 1)
    return f" (did you mean {close[0]}?)" if close else ""


def _size(value: Any) -> int:
    """`8k` is 8,000 and `8K` is 8,192, as SGLang reads them."""
    text = str(value)
    scale = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2, "g": 1000**3, "G": 1024**3}.get(text[-1:])
    return int(float(text[:-1]) * scale) if scale else int(text)


def _pattern(text: str) -> int | list[int]:
    """An int, or a list expression of ints with `+` and `*`; evaluated without `eval`."""
    import ast

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [value(item) for item in items]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                one, other = value(left), value(right)
                if (one if isinstance(one, int) else other) > 10_000:
                    raise ValueError
                return one * other
        raise ValueError

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError from None


def opt(flag: str, kind: str, default: Any = None, help: str = "", **more: Any) -> Option:
    """A row of colloid's own tables. A default of None for a kind without a value stands for False."""
    if kind == FLAG and default is None:
        default = False
    if kind == OFF and default is None:
        default = True
    return Option(flag, kind, default, help, **more)
