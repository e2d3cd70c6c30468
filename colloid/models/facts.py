"""Facts of the supported models: the Megatron arguments of each, by name.

`facts.json` holds them; `scripts/models/*.sh` are made from it by `scripts/make_model_scripts.py`.
"""

from __future__ import annotations

import json
import os
from typing import Any


def model_facts() -> dict[str, dict[str, Any]]:
    """Model name -> flag -> value (True: a flag without a value; a list: several values)."""
    with open(os.path.join(os.path.dirname(__file__), "facts.json"), encoding="utf-8") as file:
        return json.load(file)


def command_line(name: str) -> list[str]:
    """The model's flags as they stand on a command line."""
    words: list[str] = []
    for flag, value in model_facts()[name].items():
        words.append(flag)
        if value is not True:
            words += value if isinstance(value, list) else [value]
    return words
