"""Reads the option tables of other projects that come with the package, as rows of columns."""

from __future__ import annotations

import os

_FOLDER = os.path.join(os.path.dirname(__file__), "data")


def read(name: str) -> list[dict[str, str]]:
    """The rows of `data/<name>.tsv`, by column name; missing columns at the end of a row are empty."""
    with open(os.path.join(_FOLDER, f"{name}.tsv"), encoding="utf-8") as file:
        header, *lines = [line.rstrip("\n").split("\t") for line in file]
    return [dict(zip(header, line + [""] * (len(header) - len(line)), strict=True)) for line in lines]
