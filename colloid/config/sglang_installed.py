"""Which interpreter has SGLang, and whether what is installed there has the options that were given.

SGLang is never imported here: it may live in an environment of its own, and its import takes seconds.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import subprocess
import sys

from colloid.config.args import Args
from colloid.config.external import is_external
from colloid.config.sglang import SET_BY_COLLOID, sglang_rows
from colloid.config.tables import tables

TABLE_VERSION = "0.5.23"
"""Of the SGLang whose options are in the table."""
ENVIRONMENT = os.path.join(".venv-sglang", "bin", "python")
INSTALL = (
    "install it into this environment, or for a machine without CUDA with scripts/install_sglang_cpu.sh, or name the "
    "Python that has it with --rollout-engine-python"
)
_DEADLINE = 300

_VERSION = "from importlib.metadata import version; print(version('sglang'))"
_OPTIONS = (
    "import argparse, json; from sglang.srt.server_args import ServerArgs; parser = argparse.ArgumentParser();"
    "ServerArgs.add_cli_args(parser);"
    "print(json.dumps([name for action in parser._actions for name in action.option_strings]))"
)


def is_here(args: Args) -> bool:
    """Whether `--rollout-engine auto` can be SGLang: this interpreter has it, or one was named."""
    return bool(args.rollout_engine_python) or importlib.util.find_spec("sglang") is not None


def find_python(args: Args) -> str | None:
    """The interpreter that has SGLang, or None: the one given, this one, or that of scripts/install_sglang_cpu.sh."""
    if args.rollout_engine_python:
        return args.rollout_engine_python
    if is_here(args):
        return sys.executable
    repository = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    places = (os.path.join(place, ENVIRONMENT) for place in (os.getcwd(), repository))
    return next((place for place in places if os.access(place, os.X_OK)), None)


def check(args: Args) -> str | None:
    """A rule: is SGLang there, and does it know the given options?"""
    if args.rollout_engine != "sglang" or is_external(args):
        return None
    python = find_python(args)
    if python is None:
        return f"--rollout-engine sglang: SGLang is not installed here; {INSTALL}"
    try:
        version = _ask(python, _VERSION)
        if version == TABLE_VERSION:
            return None
        known = json.loads(_ask(python, _OPTIONS))
    except (OSError, subprocess.SubprocessError) as error:
        words = (getattr(error, "stderr", None) or str(error)).strip()[-1000:]
        return f"--rollout-engine sglang: {python} has no SGLang that works; {INSTALL}. It says:\n{words}"
    return _unknown(args, version, known)


def _unknown(args: Args, version: str, known: list[str]) -> str | None:
    overridden = {
        f"sglang_{name}": f"{model.name!r}: {name}"
        for model in args.sglang_models
        for group in model.groups
        for name in group.overrides
    }
    for row in sglang_rows():
        if row.dest not in args.given | overridden.keys() or row.dest in SET_BY_COLLOID:
            continue
        names = ["--" + name.removeprefix("--sglang-") for name in row.names]
        if not any(name in known for name in names):
            near = [f"--sglang-{name[2:]}" for name in difflib.get_close_matches(names[0], known, 3)]
            close = f"; near to it are {', '.join(near)}" if near else ""
            flag = tables().by_dest[row.dest][0].flag
            if row.dest not in args.given:
                flag = f"--sglang-config {args.sglang_config}: overrides of model {overridden[row.dest]}"
            return f"{flag}: the installed SGLang {version} has no such option{close}"
    return None


def _ask(python: str, program: str) -> str:
    answer = subprocess.run(
        [python, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=_DEADLINE,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return answer.stdout.strip().splitlines()[-1]
