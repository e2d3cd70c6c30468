"""`--help` and `docs/options.md`, made from the option tables."""

from __future__ import annotations

import textwrap

from colloid.config.option import BOOLEANS, SWITCH, Option
from colloid.config.tables import tables

_INTRO = {
    "": "Options of colloid. Those of Megatron, SGLang and the router: --help-megatron, --help-sglang, --help-router.",
    "megatron": "Options of Megatron, by Megatron-LM's names. Model arguments left out follow from --hf-checkpoint.",
    "sglang": "Options of the engines: SGLang's, with the prefix --sglang-.",
    "router": "Options of the router: sglang-router's, with the prefix --router-.",
}


def help_text(category: str, entry: str = "train") -> str:
    """The help of a category ("" is colloid's own)."""
    lines = [f"usage: python {entry}.py --prompt-data FILE --hf-checkpoint DIR [options]", "", _INTRO[category]]
    for group, rows in grouped(category or "colloid").items():
        lines += ["", f"{group.replace('_', ' ')}:"]
        lines += [line for row in rows if works(row) for line in _entry(row)]
        for reason, refused in refused_options(rows).items():
            text = f"not supported: {', '.join(row.flag for row in refused)} ({reason})"
            lines += textwrap.wrap(text, 110, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(lines)


def grouped(category: str) -> dict[str, list[Option]]:
    """Group -> rows of a category, in the order of the table."""
    groups: dict[str, list[Option]] = {}
    for option in tables().options:
        if option.category == category:
            groups.setdefault(option.group, []).append(option)
    return groups


def works(option: Option) -> bool:
    """Whether any value but the default works."""
    return option.built != ()


def refused_options(rows: list[Option]) -> dict[str, list[Option]]:
    """Reason -> the options that are refused for it, whatever their value."""
    reasons: dict[str, list[Option]] = {}
    for row in rows:
        if not works(row):
            reasons.setdefault(row.refused, []).append(row)
    return reasons


def refused_values(option: Option) -> str:
    """Which of the values that an option knows are refused, and why; "": none."""
    names = [str(choice) for choice in option.choices if option.built and choice not in option.built]
    return f"Not supported: {', '.join(names)}: {option.refused}." if names else ""


def signature(option: Option) -> str:
    """The option with its value, as in `--rollout-stop STR ...`."""
    names = [option.flag, *option.aliases]
    if option.kind == SWITCH:
        names.append("--no-" + option.flag[2:])
    text = ", ".join(names)
    if option.kind in BOOLEANS:
        return text
    value = "{" + ",".join(map(str, option.choices)) + "}" if 0 < len(option.choices) <= 8 else option.kind.upper()
    return f"{text} {value}{' ...' if option.is_list else ''}"


def default_text(option: Option) -> str:
    """The default as the help shows it; "" for off."""
    if option.shown:
        return option.shown
    if option.kind in BOOLEANS or option.default in (None, [], (), {}):
        return ""
    if option.kind == "size" and option.default and option.default % 1024**2 == 0:
        return f"{option.default // 1024**2} MiB"
    return " ".join(map(str, option.default)) if isinstance(option.default, list) else str(option.default)


def _entry(option: Option) -> list[str]:
    parts = [option.help] if option.help else []
    if default_text(option):
        parts.append(f"(default: {default_text(option)})")
    if refused_values(option):
        parts.append(refused_values(option))
    left, right = f"  {signature(option)}", " ".join(parts)
    wrapped = textwrap.wrap(right, 80, break_on_hyphens=False) or [""]
    if len(left) <= 36:
        return [f"{left:<38}{wrapped[0]}".rstrip(), *(" " * 38 + line for line in wrapped[1:])]
    return [left, *(" " * 38 + line for line in wrapped if line)]


def markdown() -> str:
    """`docs/options.md`."""
    lines = [
        "# Options",
        "",
        "Made from the option tables by `python scripts/make_options_doc.py`. An option that is not supported is",
        "refused with its reason. `--config FILE` takes the same names as keys of a YAML or TOML file; the command",
        "line wins.",
    ]
    for group, rows in grouped("colloid").items():
        lines += ["", f"## {group.capitalize()}", "", "| option | default | what it does |", "|---|---|---|"]
        lines += [_row(row) for row in rows if works(row)]
        if refused_options(rows):
            lines += ["", *_refused_table(rows)]
    lines += ["", "## Megatron", "", _INTRO["megatron"], "", "| options | |", "|---|---|"]
    for group, rows in grouped("megatron").items():
        built = [f"`{row.flag}`" for row in rows if works(row)]
        if built:
            lines.append(f"| {', '.join(built)} | {group.replace('_', ' ')} |")
    lines += ["", "These are known, can be planned with `--dry-run`, and are refused by a run:", ""]
    lines += _refused_table([row for rows in grouped("megatron").values() for row in rows])
    lines += ["", "## Engines and router", "", *_pass_through()]
    return "\n".join(lines) + "\n"


def _row(option: Option) -> str:
    text = _cell(option.help)
    if refused_values(option):
        text = f"{text} {_cell(refused_values(option))}".strip()
    return f"| `{_cell(signature(option))}` | {default_text(option)} | {text} |"


def _refused_table(rows: list[Option]) -> list[str]:
    lines = ["| not supported | why |", "|---|---|"]
    for reason, refused in refused_options(rows).items():
        lines.append(f"| {', '.join(f'`{row.flag}`' for row in refused)} | {_cell(reason)} |")
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _pass_through() -> list[str]:
    from colloid.config.sglang import EMBEDDED_USES, SET_BY_COLLOID

    used = ", ".join(f"`--sglang-{name.replace('_', '-')}`" for name in EMBEDDED_USES)
    lines = [
        "`--sglang-*` takes every option of SGLang's server, `--router-*` every option of `sglang-router`; names and",
        f"values are checked. The embedded engine uses {used}; it says which others it has no use for.",
        "",
        "These cannot be given:",
        "",
        "| option | why |",
        "|---|---|",
    ]
    lines += [f"| `{tables().by_dest[dest][0].flag}` | {why} |" for dest, why in SET_BY_COLLOID.items()]
    return lines + ["", *_refused_table(grouped("router")["router"])]
