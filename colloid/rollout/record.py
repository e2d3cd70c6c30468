"""Samples on disk: one Parquet file a rollout or evaluation, for pandas, duckdb, datasets."""

from __future__ import annotations

import json
import os
from pathlib import Path

from colloid.data.sample import Sample


def write_samples(path: str | Path, samples: list[Sample], shaped_rewards: list[float] | None = None) -> None:
    """Writes one row a sample, whole or not at all."""
    import pyarrow
    import pyarrow.parquet

    columns = {
        "index": [sample.index for sample in samples],
        "group_index": [sample.group_index for sample in samples],
        "prompt": [_text(sample.prompt) for sample in samples],
        "response": [sample.response for sample in samples],
        "label": [_text(sample.label) for sample in samples],
        "reward": [_text(sample.reward) for sample in samples],
        "status": [sample.status.value for sample in samples],
        "prompt_length": [len(sample.tokens) - sample.response_length for sample in samples],
        "response_length": [sample.response_length for sample in samples],
        "oldest_weight_version": [min(sample.weight_versions, default=-1) for sample in samples],
        "newest_weight_version": [max(sample.weight_versions, default=-1) for sample in samples],
        "metadata": [_text(sample.metadata) for sample in samples],
    }
    if all(sample.reward is None or isinstance(sample.reward, (bool, int, float)) for sample in samples):
        columns["reward"] = [None if sample.reward is None else float(sample.reward) for sample in samples]
    if shaped_rewards is not None:
        columns["shaped_reward"] = shaped_rewards
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    pyarrow.parquet.write_table(pyarrow.table(columns), temporary, compression="zstd")
    os.replace(temporary, path)


def _text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
