"""Samples on disk: one Parquet file a rollout or evaluation, for pandas, duckdb, datasets; and whole, to train on.

Whole (`save_rollout`): JSON lines, one `Sample.to_dict` a line, in the order in which the trainer gets them. Floats are
read back bit by bit; so a run on the files computes what the run that wrote them computed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import orjson

from colloid.data.sample import Sample
from colloid.errors import DataError

_NUMBERS = (
    *("index", "group_index", "prompt_length", "response_length"),
    *("oldest_weight_version", "newest_weight_version"),
)
_REWARDS = ("reward", "shaped_reward")


def write_samples(path: str | Path, samples: list[Sample], shaped_rewards: list[float] | None = None) -> None:
    """Writes one row a sample, whole or not at all. All files of a run have the same columns and types.

    Where a reward is neither a number nor None, the column holds all of them as JSON texts.
    """
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
    types = {name: pyarrow.int64() for name in _NUMBERS} | {name: pyarrow.float64() for name in _REWARDS}
    if any(isinstance(reward, str) for reward in columns["reward"]):
        types["reward"] = pyarrow.string()
    schema = pyarrow.schema([(name, types.get(name, pyarrow.string())) for name in columns])
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    pyarrow.parquet.write_table(pyarrow.table(columns, schema=schema), temporary, compression="zstd")
    os.replace(temporary, path)


def save_rollout(path: str | Path, samples: Sequence[Sample]) -> None:
    """Writes the samples, whole or not at all.

    Raises:
        DataError: a sample holds what JSON cannot.
    """
    lines = []
    for sample in samples:
        try:
            lines.append(orjson.dumps(sample.to_dict(), option=orjson.OPT_SERIALIZE_NUMPY))
        except TypeError as error:
            raise DataError(
                f"--save-debug-rollout-data {path}: sample {sample.index} (its metadata, label or reward) holds what "
                f"JSON cannot: {error}"
            ) from error
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(b"".join(line + b"\n" for line in lines))
    os.replace(temporary, path)


def load_rollout(path: str | Path) -> list[Sample]:
    """The samples of a file, in its order.

    Raises:
        DataError: there is none, or a line is no sample; names the line.
    """
    samples = []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    samples.append(Sample.from_dict(orjson.loads(line)))
                except (ValueError, TypeError) as error:
                    raise DataError(
                        f"{path}:{number} is no sample as --save-debug-rollout-data writes it: {error}"
                    ) from error
    except OSError as error:
        raise DataError(f"--load-debug-rollout-data: {path} cannot be read: {error}") from error
    if not samples:
        raise DataError(f"--load-debug-rollout-data: {path} holds no samples")
    return samples


def _text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
