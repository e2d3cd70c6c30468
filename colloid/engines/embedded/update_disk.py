"""Weights from files: a Hugging Face directory, or what changed since the version that the engine holds.

Only files of the engine's own user are read, and only below the directories that it was started with.
"""

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from colloid.engines import delta
from colloid.engines.checksums import CHECKSUMS_FILE, raw_bytes, tensor_checksum
from colloid.engines.contract import ITEM_SIZES
from colloid.engines.contract_fields import BadRequest
from colloid.engines.delta_files import MANIFEST, ChangedTensor, Manifest, read_blocks
from colloid.engines.embedded.shared_memory import DTYPES, open_own
from colloid.engines.embedded.weights import WeightStore, is_unused, read_safetensors
from colloid.errors import ConfigError, WeightSyncError

logger = logging.getLogger(__name__)


class WeightFiles:
    """Opens what lies in one of `places`. Raises BadRequest."""

    def __init__(self, places: tuple[Path, ...]):
        self._places = places

    def directory(self, path: str) -> "FullDirectory":
        """A Hugging Face directory, all of whose weight files may be read."""
        found = self._checked(path)
        checksums = None
        if (found / CHECKSUMS_FILE).exists():
            try:
                checksums = json.loads(_read(found / CHECKSUMS_FILE)).get("tensors")
            except (ValueError, AttributeError) as error:
                raise BadRequest(f"{found / CHECKSUMS_FILE} cannot be read: {error}") from error
        for file in sorted(found.glob("*.safetensors*")):
            os.close(open_own(file))
        return FullDirectory(found, checksums)

    def delta(self, path: str) -> "Delta":
        """A directory with a delta."""
        found = self._checked(path)
        try:
            return Delta(found, Manifest.parse(_read(found / MANIFEST)))
        except WeightSyncError as error:
            raise BadRequest(f"{found}: {error}") from error

    def _checked(self, path: str) -> Path:
        try:
            found = Path(path).resolve(strict=True)
            places = [place.resolve() for place in self._places]
        except (OSError, ValueError, RuntimeError) as error:
            raise BadRequest(f"cannot read weights from {path!r}: {error}") from error
        if not any(found.is_relative_to(place) for place in places):
            allowed = " or ".join(map(str, places)) or "none: start the engine with --weights-dir"
            raise BadRequest(f"weights are read below {allowed}, not from {found}")
        return found


def _read(path: Path) -> bytes:
    with os.fdopen(open_own(path), "rb") as file:
        return file.read()


@dataclass(frozen=True)
class FullDirectory:
    """All weights. `checksums`: of each tensor, where the sender wrote them."""

    path: Path
    checksums: dict[str, str] | None

    def tensors(self, num_layers: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that a model of so many layers has, one by one; raises BadRequest for one that is damaged."""
        try:
            for name, tensor in read_safetensors(self.path):
                if is_unused(name, num_layers):
                    continue
                if self.checksums is not None and self.checksums.get(name) != tensor_checksum(tensor):
                    raise BadRequest(f"{self.path}: {name} is not as it was written: its checksum differs")
                yield name, tensor
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, ConfigError) as error:
            raise BadRequest(f"{self.path} cannot be read: {error}") from error


class Delta:
    """What changed, and how it is applied."""

    def __init__(self, path: Path, manifest: Manifest):
        self._path, self._manifest = path, manifest
        self._tensors = {tensor.name: tensor for tensor in manifest.tensors}
        self.base_version, self.weight_version = manifest.base_version, manifest.weight_version
        self.names = list(self._tensors)

    def check(self, store: WeightStore) -> None:
        """Raises BadRequest unless the model has all of the tensors like this."""
        try:
            for tensor in self._tensors.values():
                store.check_patch(tensor.name, tensor.shape, DTYPES[tensor.dtype])
        except WeightSyncError as error:
            raise BadRequest(f"{self._path}: {error}") from error

    def apply(self, store: WeightStore) -> list[str]:
        """Changes the tensors that arrived; returns those that did not, or did not become what they should."""
        failed: list[str] = []
        with contextlib.ExitStack() as stack:
            files: dict[str, int] = {}
            for name in {tensor.file for tensor in self._tensors.values()}:
                with contextlib.suppress(BadRequest):  # its tensors did not arrive
                    files[name] = open_own(self._path / name)
                    stack.callback(os.close, files[name])

            def patched(name: str, current: torch.Tensor) -> torch.Tensor | None:
                tensor = self._tensors[name]
                try:
                    return self._patched(tensor, current, files.get(tensor.file))
                except WeightSyncError as error:
                    logger.warning("%s is to be sent again: %s", name, error)
                    failed.append(name)
                    return None

            store.patch(self.names, patched)
        return failed

    def _patched(self, tensor: ChangedTensor, current: torch.Tensor, descriptor: int | None) -> torch.Tensor:
        if descriptor is None:
            raise WeightSyncError(f"{tensor.file} did not arrive")
        values = current.to(DTYPES[tensor.dtype], copy=True).contiguous()
        target = delta.elements(raw_bytes(values), ITEM_SIZES[tensor.dtype])
        for block in read_blocks(tensor, descriptor, self._manifest.checksum):
            delta.apply(block, target[block.start : block.start + block.count], self._manifest.encoding)
        if tensor_checksum(values, self._manifest.checksum) != tensor.checksum:
            raise WeightSyncError(f"{tensor.name} did not become what it should: its base differs")
        return values
