"""Which parameters are trained.

A parameter has the same names on every layout of the ranks, and a pattern means the same: where a pipeline's last stage
has a copy of the embedding, the copy's name is the embedding's; what a pattern is found in may be on other ranks.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from colloid.errors import ConfigError
from colloid.weights.hf_loader import NamedParameters
from colloid.weights.names import NameMap
from colloid.weights.names.llama import EMBEDDING

MOST_NEAR = 3
"""Names that an error shows."""


def freeze(
    parameters: NamedParameters,
    names: NameMap,
    only: Sequence[str] | None,
    frozen: Sequence[str] | None,
    *,
    over_ranks: Callable[[Any], list[Any]] = lambda mine: [mine],
    checks: bool = True,
) -> None:
    """Takes `requires_grad` from what is not trained.

    Args:
        parameters: of this rank.
        only: regular expressions; what none of them is found in is frozen. A parameter has several names: Megatron's,
            and those of its parts in a Hugging Face checkpoint.
        frozen: what one of them is found in is frozen.
        over_ranks: gathers an object of every rank. Collective.
        checks: whether what is wrong is an error.

    Raises:
        ConfigError: a pattern is found nowhere, or nothing is left to train. The same on all ranks.
    """
    matched: set[str] = set()
    trained = 0
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        hits = [text for text in only or frozen or [] if any(re.search(text, each) for each in _names(name, names))]
        matched.update(hits)
        parameter.requires_grad_(bool(hits) if only else not hits)
        trained += parameter.requires_grad
    if checks:
        _check(parameters, names, only, frozen, matched, trained, over_ranks)


def keep_graph(model: torch.nn.Module) -> None:
    """Lets gradients reach what is recomputed above a frozen embedding.

    A checkpointed block has a gradient only where one of its inputs requires one, whatever its parameters do.
    """
    embedding = getattr(model, "embedding", None)
    if embedding is not None and not embedding.word_embeddings.weight.requires_grad:
        embedding.register_forward_hook(_require_grad)


def _require_grad(_module: torch.nn.Module, _inputs: Any, hidden: torch.Tensor) -> torch.Tensor:
    return hidden.requires_grad_() if torch.is_grad_enabled() else hidden


def _names(name: str, names: NameMap) -> tuple[str, ...]:
    """What a parameter is called. One that is not exported is a copy of the embedding."""
    mapped = names[name]
    return (name if mapped.entry.exported else EMBEDDING.megatron[0], *mapped.hf_names)


def _check(
    parameters: NamedParameters,
    names: NameMap,
    only: Sequence[str] | None,
    frozen: Sequence[str] | None,
    matched: set[str],
    trained: int,
    over_ranks: Callable[[Any], list[Any]],
) -> None:
    said = over_ranks((matched, trained))
    option, patterns = ("--only-train-params-name-list", only) if only else ("--freeze-params-name-list", frozen)
    everywhere = set().union(*(each for each, _ in said))
    missing = [text for text in patterns or [] if text not in everywhere]
    if missing:
        local = {each for name, _ in parameters for each in _names(name, names)}
        known = sorted(set().union(*over_ranks(local)))
        near = ", ".join(_nearest(missing[0], known))
        raise ConfigError(f"{option}: no parameter's name has {', '.join(map(repr, missing))}; near it are {near}")
    if not any(count for _, count in said):
        raise ConfigError(f"{option} {' '.join(patterns or [])} freezes every parameter: nothing would be trained")


def _nearest(pattern: str, known: Sequence[str]) -> list[str]:
    """The names whose best part, of as many words as the pattern has, is most like it; one layer's stand for all."""
    kinds: dict[str, str] = {}
    for name in known:
        kinds.setdefault(re.sub(r"\.\d+\.", ".0.", name), name)
    text = pattern.replace("\\", "").strip("^$")
    width = text.count(".") + 1

    def likeness(name: str) -> float:
        words = name.split(".")
        parts = [".".join(words[row : row + width]) for row in range(max(1, len(words) - width + 1))]
        return max(difflib.SequenceMatcher(None, text, part).ratio() for part in parts)

    return sorted(kinds.values(), key=likeness, reverse=True)[:MOST_NEAR]
