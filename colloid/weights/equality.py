"""Does an engine hold the trainer's weights? Decided by the checksums of all tensors, by Hugging Face name."""

from __future__ import annotations

from colloid.errors import WeightSyncError

NAMES_SHOWN = 5


def check_equal(trainer: dict[str, str], engine: dict[str, str], engine_name: str) -> None:
    """Compares `name -> checksum` of both sides.

    Raises:
        WeightSyncError: lists tensors that the engine lacks, that it has besides, and that differ.
    """
    missing = sorted(set(trainer) - set(engine))
    extra = sorted(set(engine) - set(trainer))
    different = sorted(name for name in set(trainer) & set(engine) if trainer[name] != engine[name])
    problems = [
        f"{len(names)} {kind} ({', '.join(names[:NAMES_SHOWN])}{', …' if len(names) > NAMES_SHOWN else ''})"
        for kind, names in (("missing", missing), ("extra", extra), ("different", different))
        if names
    ]
    if problems:
        raise WeightSyncError(
            f"{engine_name} does not hold the trainer's weights: of {len(trainer)} tensors {'; '.join(problems)}"
        )
