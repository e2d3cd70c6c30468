"""Writes a Hugging Face directory: safetensors shards with their index, and config and tokenizer of the model.

Tensors are written shard by shard as they come, so that one shard is all that is ever held. The directory appears whole
under its name or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from colloid.errors import CheckpointError
from colloid.weights.buckets import make_buckets

INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 2 * 1024**3
"""Of a file, and of what is held; a larger tensor has a file of its own."""

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")
"""What is not copied from the model's directory: its weights, in any format."""


def write_hf_directory(
    directory: Path,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    source: Path,
    *,
    sends: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes the model; replaces what is there under that name.

    Args:
        named_tensors: by Hugging Face name; exhausted on every rank, also after an error.
        source: the model's own directory: its config, tokenizer and other small files are copied.
        sends: whether this rank has the tensors (the others take part in gathering them and write nothing).
        shard_bytes: of a file.

    Raises:
        CheckpointError: it could not be written. Names the directory.
    """
    named_tensors = iter(named_tensors)
    try:
        if sends:
            _write(directory, named_tensors, source, shard_bytes)
    except (OSError, SafetensorError) as error:  # the library's own, where a file could not be written
        raise CheckpointError(f"the Hugging Face model could not be written to {directory}: {error}") from error
    finally:
        for _ in named_tensors:
            pass


def _write(directory: Path, named_tensors: Iterable[tuple[str, torch.Tensor]], source: Path, shard_bytes: int) -> None:
    writing = directory.with_name(f".writing_{directory.name}")
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    files: list[list[str]] = []
    total, dtype = 0, None
    for bucket in make_buckets(named_tensors, shard_bytes):
        tensors = {
            name: tensor.detach().to("cpu").contiguous()
            for name, tensor in zip(bucket.names, bucket.tensors, strict=True)
        }
        _save_shard(tensors, writing / f"shard_{len(files)}")
        files.append(bucket.names)
        total += sum(tensor.nbytes for tensor in tensors.values())
        dtype = dtype or bucket.tensors[0].dtype
    weight_map = {}
    for row, names in enumerate(files):
        file = f"model-{row + 1:05d}-of-{len(files):05d}.safetensors"
        (writing / f"shard_{row}").rename(writing / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (writing / INDEX_FILE).write_text(json.dumps(index, indent=1))
    _copy_small_files(source, writing, str(dtype).removeprefix("torch."))
    if directory.exists():
        shutil.rmtree(directory)
    writing.rename(directory)


def _save_shard(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Views of one storage become tensors of their own, as the format wants it."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes:
            tensors[name] = tensor.clone()
        seen.add(storage.data_ptr())
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library makes it readable for its owner alone


def _copy_small_files(source: Path, target: Path, dtype: str) -> None:
    """All but the weights; `config.json` names the dtype that was written."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not any(file.match(pattern) for pattern in WEIGHT_FILES):
            shutil.copyfile(file, target / file.name)
    config = json.loads((source / "config.json").read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2))
