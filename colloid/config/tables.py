"""All option tables of the three categories, joined: who owns a name, and what every name is.

colloid's own rows come first: a name that Megatron or SGLang has too is then colloid's, with colloid's default.
"""

from __future__ import annotations

from functools import lru_cache

from colloid.config import megatron, schema, sglang
from colloid.config.option import Option


class Tables:
    """`by_name`: spelling -> option. `by_dest`: attribute -> its options (two where a pair sets and unsets it)."""

    def __init__(self, options: list[Option]):
        self.options: list[Option] = []
        self.by_name: dict[str, Option] = {}
        self.by_dest: dict[str, list[Option]] = {}
        for option in options:
            if option.flag in self.by_name:
                continue
            self.options.append(option)
            self.by_dest.setdefault(option.dest, []).append(option)
            for name in option.names:
                self.by_name.setdefault(name, option)

    def defaults(self) -> dict[str, object]:
        """The value of each attribute where nothing is given."""
        return {dest: rows[0].default for dest, rows in self.by_dest.items()}


@lru_cache(maxsize=1)
def tables() -> Tables:
    """The tables; read once."""
    return Tables([*schema.options(), *megatron.options(), *sglang.sglang_rows(), *sglang.router_rows()])
