"""`Args`: the options of a run, as one object with flat attributes.

It remembers which attributes were read, so that an option that was set and never read can be reported.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from typing import Any

_STATE = ("_values", "_given", "_derived", "_read")
_SECRET = re.compile(
    r"(^|_)(wandb_key|api_keys?|keyfile_password|password|passwd|secret|credentials?|(auth|access)_token)$"
)
_USERINFO = re.compile(r"(\w+://)[^/@\s]+@")
REDACTED = "***"


class Args:
    """All options, and what follows from them.

    Args:
        values: attribute -> value.
        given: attributes that the user set.
        derived: attributes that follow from the model's `config.json`.

    Raises (on reading):
        AttributeError: there is no such attribute; names the nearest.
    """

    def __init__(self, values: dict[str, Any], given: Iterable[str] = (), derived: Iterable[str] = ()):
        self.__dict__.update(_values=dict(values), _given=frozenset(given), _derived=frozenset(derived), _read=set())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _STATE:
            raise AttributeError(name)
        try:
            value = self._values[name]
        except KeyError:
            import difflib

            close = difflib.get_close_matches(name, self._values, 1)
            hint = f"; the nearest is args.{close[0]}" if close else ""
            raise AttributeError(f"there is no option args.{name}{hint}") from None
        self._read.add(name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self._values[name] = value

    def __delattr__(self, name: str) -> None:
        del self._values[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Args) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Args({', '.join(f'{key}={value!r}' for key, value in sorted(self.as_dict(only=self._given).items()))})"

    def __getstate__(self) -> dict[str, Any]:
        return {key: self.__dict__[key] for key in _STATE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def given(self) -> frozenset[str]:
        """Attributes that the user set."""
        return self._given

    @property
    def derived(self) -> frozenset[str]:
        """Attributes that follow from the model's `config.json`."""
        return self._derived

    def derive(self, values: dict[str, Any]) -> None:
        """Sets attributes that follow from the model, but for those that the user gave."""
        self._values.update({name: value for name, value in values.items() if name not in self._given})
        self.__dict__["_derived"] = self._derived | values.keys()

    def options_read(self) -> set[str]:
        """Attributes that were read in this process since parsing."""
        return set(self._read)

    def mark_read(self, *names: str) -> None:
        """Counts attributes as read."""
        self._read.update(names)

    def forget_reads(self) -> None:
        """Counts no attribute as read: what parsing itself looked at is no use of an option."""
        self._read.clear()

    def unread(self, extra_read: Iterable[str] = ()) -> list[str]:
        """Attributes that the user set and nothing read, here or (`extra_read`) in other processes."""
        return sorted(self._given - self._read - set(extra_read))

    def as_dict(self, redact: bool = True, only: Iterable[str] | None = None) -> dict[str, Any]:
        """Attributes and values; `redact`: without keys, passwords and the like."""
        chosen = self._values if only is None else {key: self._values[key] for key in only if key in self._values}
        return {key: redacted(key, value) if redact else value for key, value in chosen.items()}

    def plain(self) -> dict[str, Any]:
        """All attributes as YAML and JSON have them, without secrets and the model's `config.json`."""
        return {key: _plain(value) for key, value in self.as_dict().items() if key != "hf_config"}

    def write_yaml(self, path: str | os.PathLike[str]) -> None:
        """Writes all attributes as YAML, without secrets; those that the user set come first.

        (Not `save`: `args.save` is the option.)
        """
        import yaml

        values = self.plain()
        given = {key: values[key] for key in sorted(self._given & values.keys())}
        rest = {key: value for key, value in values.items() if key not in given}
        text = "# given by the user\n" + yaml.safe_dump(given, sort_keys=False) if given else ""
        text += "# defaults, and what follows from the above\n" + yaml.safe_dump(rest, sort_keys=False)
        temporary = f"{os.fspath(path)}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)


def redacted(key: str, value: Any) -> Any:
    """The value, unless its name says that it is a secret; names and passwords in URLs are left out."""
    if value is None or value == [] or isinstance(value, bool):
        return value
    if _SECRET.search(key.lower().replace("-", "_")):
        return REDACTED
    if isinstance(value, dict):
        return {name: redacted(str(name), item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(key, item) for item in value]
    return _USERINFO.sub(rf"\1{REDACTED}@", value) if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
