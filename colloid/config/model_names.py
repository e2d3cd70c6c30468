"""Options that say again what follows from the model: compared with it."""

from __future__ import annotations

import re
from collections.abc import Callable

from colloid.config.args import Args
from colloid.models import families

Rule = Callable[[Args], "str | None"]


def _plain(name: str) -> str:
    """`Qwen3-MoE`, `qwen3_moe` and the config's class `Qwen3MoeConfig` are one name."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removesuffix("config").removesuffix("forcausallm")


def _model_name(args: Args) -> str | None:
    name, family = args.model_name, families.family_name(args.hf_config or {})
    if name is None or family is None:
        return None
    names = {_plain(known): known for known in (*families.FAMILIES, *families.SAME_AS, *families.NOT_BUILT)}
    named = names.get(_plain(name))
    if named is None:
        return f"--model-name {name}: no such family; the model's is {family}, so leave it out (known: {_known()})"
    if families.SAME_AS.get(named, named) != family:
        return f"--model-name {name} is the family {named!r}, and the model {args.hf_checkpoint} is of {family!r}"
    return None


def _padded_vocabulary(args: Args) -> str | None:
    rows, ranks = args.padded_vocab_size, args.tensor_model_parallel_size
    if rows is None:
        return None
    if args.vocab_size and rows < args.vocab_size:
        return f"--padded-vocab-size {rows} is less than the model's vocabulary of {args.vocab_size}"
    if rows % ranks:
        return f"--padded-vocab-size {rows} is no multiple of --tensor-model-parallel-size {ranks}"
    if "make_vocab_size_divisible_by" in args.given:
        return "--padded-vocab-size and --make-vocab-size-divisible-by say the same: leave one out"
    return None


def _known() -> str:
    return ", ".join(sorted({*families.FAMILIES, *families.SAME_AS}))


RULES: tuple[Rule, ...] = (_padded_vocabulary,)
RUN_RULES: tuple[Rule, ...] = (_model_name,)
