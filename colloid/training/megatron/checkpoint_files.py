"""The files of a checkpoint's directory: written whole, or found out.

`checksums.json` is written last, so that where it exists the directory is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash

from colloid.checkpoints import CHECKSUMS_FILE
from colloid.errors import CheckpointError


def write_checksums(directory: Path, group: dist.ProcessGroup | None = None) -> None:
    """Size and xxh3_128 of each file. Collective over `group` (None: all ranks)."""
    files = sorted(path for path in directory.iterdir() if path.is_file())
    checksums = over_ranks(files, _file_checksum, group)
    if dist.get_rank() == 0:
        unfinished = directory / f".{CHECKSUMS_FILE}"
        unfinished.write_text(json.dumps(checksums, indent=1))
        unfinished.rename(directory / CHECKSUMS_FILE)


def check_files(directory: Path) -> None:
    """Compares every file with its checksum. Collective over all ranks.

    Raises:
        CheckpointError: names the first file that is missing or is not as it was written. The same on all ranks.
    """
    path = directory / CHECKSUMS_FILE
    try:
        expected = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read, so this is not a whole checkpoint: {error}") from error

    def problem(file: Path) -> str | None:
        if not file.exists():
            return "is missing"
        wanted = expected[file.name]
        if file.stat().st_size != wanted["size"]:
            return f"has {file.stat().st_size} bytes where {wanted['size']} were written: it is cut off"
        return None if _file_checksum(file) == wanted else "is not what was written: its checksum differs"

    for name, text in sorted(over_ranks([directory / name for name in sorted(expected)], problem).items()):
        if text is not None:
            raise CheckpointError(f"checkpoint file {directory / name} {text}. Load an earlier checkpoint")


def over_ranks(
    files: list[Path], function: Callable[[Path], Any], group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """`function` of each file, by name; the files are dealt out to the ranks. Collective."""
    mine = {path.name: function(path) for path in files[dist.get_rank() :: dist.get_world_size()]}
    everyones: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, mine, group=group)
    return {name: value for part in everyones for name, value in part.items()}


def _file_checksum(path: Path) -> dict[str, Any]:
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
            size += len(block)
    return {"size": size, "xxh3_128": digest.hexdigest()}
