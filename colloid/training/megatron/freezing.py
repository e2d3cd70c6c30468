"""Which parameters are trained."""

from __future__ import annotations

import re
from collections.abc import Sequence

from colloid.errors import ConfigError
from colloid.weights.hf_loader import NamedParameters
from colloid.weights.names import NameMap


def freeze(
    parameters: NamedParameters, names: NameMap, only: Sequence[str] | None, frozen: Sequence[str] | None
) -> None:
    """Takes `requires_grad` from what is not trained.

    Args:
        only: regular expressions; what none of them is found in is frozen. A parameter has several names: Megatron's,
            and those of its parts in a Hugging Face checkpoint.
        frozen: what one of them is found in is frozen.

    Raises:
        ConfigError: a pattern is found nowhere, or nothing is left to train.
    """
    matched: set[str] = set()

    def found(name: str, patterns: Sequence[str]) -> bool:
        hits = [text for text in patterns if any(re.search(text, each) for each in (name, *names[name].hf_names))]
        matched.update(hits)
        return bool(hits)

    trained = 0
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        trains = found(name, only) if only else not found(name, frozen or [])
        parameter.requires_grad_(trains)
        trained += trains
    option = "--only-train-params-name-list" if only else "--freeze-params-name-list"
    missing = [text for text in [*(only or []), *(frozen or [])] if text not in matched]
    if missing:
        example = ", ".join(name for name, _ in list(parameters)[:3])
        raise ConfigError(f"{option}: no parameter's name has {', '.join(map(repr, missing))}; there are {example}, …")
    if not trained:
        raise ConfigError(
            f"{option} {' '.join(frozen or only or [])} freezes every parameter: nothing would be trained"
        )
