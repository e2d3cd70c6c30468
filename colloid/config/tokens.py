"""From a command line or a config file to option values: names, duplicates, types. No defaults and no rules.

A name must be written in full. A value is what follows, up to the next `--`; `--name=value` is the same.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from colloid.config.option import Option
from colloid.config.tables import tables
from colloid.errors import ConfigError

HELP = {"-h": "", "--help": "", "--help-megatron": "megatron", "--help-sglang": "sglang", "--help-router": "router"}
"""Names that ask for help, and the category that they ask for."""


def parse_tokens(argv: Sequence[str]) -> dict[str, Any]:
    """Attribute -> value of all options on a command line.

    Raises:
        ConfigError: a name is unknown, a value missing or wrong, or an option given twice with different values.
    """
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    position = 0
    previous = ""
    while position < len(argv):
        token = argv[position]
        position += 1
        name, equals, attached = token.partition("=")
        option = tables().by_name.get(name)
        if option is None:
            raise _unknown(token, previous)
        if not option.takes_value:
            if equals:
                raise ConfigError(f"{name} takes no value, but {attached!r} was given")
            value: Any = option.names[name]
            spelling = name
        else:
            texts = [attached] if equals else []
            if not equals:
                most = len(argv) if option.is_list else 1
                while position < len(argv) and len(texts) < most and not _is_name(argv[position]):
                    texts.append(argv[position])
                    position += 1
            value = option.convert(_shape(option, name, texts), name)
            spelling = " ".join([name, *texts])
        _add(values, spelled, option, value, spelling)
        previous = name
    return values


def _is_name(token: str) -> bool:
    return token.startswith("--") and len(token) > 2


def _shape(option: Option, name: str, texts: list[str]) -> Any:
    if option.is_list:
        return texts
    if not texts and option.nargs != "?":
        raise ConfigError(f"{name} needs a value")
    return texts[0] if texts else ""


def _add(values: dict[str, Any], spelled: dict[str, str], option: Option, value: Any, spelling: str) -> None:
    dest = option.dest
    if option.repeat:
        values.setdefault(dest, [])
        values[dest] += value if option.is_list else [value]
    elif dest in values and values[dest] != value:
        raise ConfigError(f"{option.flag} is given twice, as `{spelled[dest]}` and as `{spelling}`: leave one out")
    else:
        values[dest] = value
    spelled[dest] = spelling


def parse_mapping(
    content: dict[str, Any], source: str, allow_unknown: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(options, other keys) of a config file. Keys may be written with dashes or underscores.

    Args:
        source: names the file in errors.
        allow_unknown: keys that name no option are returned apart, rather than refused.
    """
    values: dict[str, Any] = {}
    others: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, value in content.items():
        name = "--" + key.lstrip("-").replace("_", "-")
        dest = name[2:].replace("-", "_")
        option = _option_of(name, dest)
        if option is None:
            if not allow_unknown:
                raise ConfigError(f"{source}: unknown option {key!r}{_suggestion(name)}")
            others[key] = value
            continue
        if option.dest in keys:
            raise ConfigError(f"{source}: {keys[option.dest]!r} and {key!r} are the same option: leave one out")
        keys[option.dest] = key
        result = _from_file(option, value, f"{source}: {key}")
        if not option.takes_value and isinstance(result, bool) and name in option.names and dest != option.dest:
            result = option.names[name] if result else not option.names[name]
        values[option.dest] = result
    return values, others


def _from_file(option: Option, value: Any, source: str) -> Any:
    """A repeatable option is a list in a file; pairs may also be lists of two, or a mapping."""
    if not option.repeat or value is None:
        return option.convert(value, source)
    items = list(value.items()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
    if not option.is_list:
        return [option.convert(item, source) for item in items]
    return option.convert(
        [word for item in items for word in (item if isinstance(item, (list, tuple)) else [item])], source
    )


def _option_of(name: str, dest: str) -> Option | None:
    by_dest = tables().by_dest.get(dest)
    return tables().by_name.get(name) or (by_dest[0] if by_dest else None)


def _unknown(token: str, previous: str) -> ConfigError:
    if not token.startswith("-") or token == "--":
        after = f" after {previous}" if previous else ""
        return ConfigError(f"unexpected value {token!r}{after}: options start with --")
    return ConfigError(f"unknown option {token.partition('=')[0]}{_suggestion(token.partition('=')[0])}")


def _suggestion(name: str) -> str:
    names = list(tables().by_name)
    for prefix in ("--sglang-", "--router-"):
        if prefix + name[2:] in tables().by_name:
            return f"; did you mean {prefix}{name[2:]}?"
    starts = [known for known in names if len(name) > 4 and known.startswith(name)]
    if len(starts) == 1:
        return f"; names cannot be abbreviated: did you mean {starts[0]}?"
    if 1 < len(starts) <= 5:
        return f"; names cannot be abbreviated: did you mean one of {', '.join(sorted(starts))}?"
    close = difflib.get_close_matches(name, names, 1, cutoff=0.7) or difflib.get_close_matches(
        name, names, 1, cutoff=0.5
    )
    return f"; did you mean {close[0]}?" if close else "; --help lists the options"
