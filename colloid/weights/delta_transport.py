"""What changed since the last update, through files: the engines apply it to what they hold.

The sender keeps the version before on disk, compares block by block, writes the changes, and changes its copy as it
goes. The first version, one after a failure, and one for engines that hold another version, are sent whole. Engines
that hold nothing (their memory was released) read the copy.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from colloid.engines import delta
from colloid.engines.checksums import raw_bytes
from colloid.engines.contract import ITEM_SIZES
from colloid.engines.control import EngineControl
from colloid.engines.delta_files import DeltaWriter
from colloid.errors import WeightSyncError
from colloid.weights.disk_transport import DiskSender, after_write, version_directory
from colloid.weights.engine_update import EngineUpdate, server_facts
from colloid.weights.local_checkpoint import LocalCheckpoint, Place
from colloid.weights.senders import NamedTensors, SendOptions, Sent

logger = logging.getLogger(__name__)


class DeltaSender:
    """A `WeightSender` of changes."""

    def __init__(self, options: SendOptions):
        self._options = options
        self._whole = DiskSender(options)
        self._base = LocalCheckpoint(options.local_dir or options.disk_dir / "base")
        self._keeps_base = False

    def send(self, engines: Sequence[EngineControl], version: int, tensors: NamedTensors) -> Sent:
        base = self._base.version
        infos = [server_facts(engine, "/model_info") for engine in engines]
        others = [
            f"{engine.url} has {info.get('weight_version')!r}"
            for engine, info in zip(engines, infos, strict=True)
            if str(info.get("weight_version")) != str(base)
        ]
        if base is not None and others:
            logger.warning("version %d is sent whole, as engines are not at version %d: %s", version, base, others)
        with version_directory(self._options, version) as directory:
            if base is None or others:
                self._base.close()
                sent = self._whole.send_directory(engines, version, tensors, directory)
                self._base.adopt(directory, version, self._options.keep_files)
                self._keeps_base = True
                return sent
            self._base.version = None  # until all of it is done
            sent = self._send_delta(engines, base, version, tensors, directory)
            self._base.version = version
            return sent

    def close(self) -> None:
        """Closes the copy of the version before; it stays on disk where the user named its place."""
        self._base.close()
        if self._keeps_base and self._options.local_dir is None:
            shutil.rmtree(self._base.directory, ignore_errors=True)

    def _send_delta(
        self, engines: Sequence[EngineControl], base: int, version: int, tensors: NamedTensors, directory: Path
    ) -> Sent:
        shapes, num_bytes = self._write(directory, base, version, tensors)
        after_write(self._options, directory, engines)
        applies = [_applies_deltas(server_facts(engine)) for engine in engines]
        delta_body = self._body(directory, version) | {"load_format": "delta"}
        whole_body = self._body(self._base.directory, version)
        with EngineUpdate(engines, version, self._options.pause_mode, begins=False) as update:
            answers = update.post(
                "delta", "/update_weights_from_disk", lambda row: delta_body if applies[row] else whole_body
            )
            lacking = {row: answer["failed_tensors"] for row, answer in enumerate(answers) if _lacks(answer)}
            if lacking:
                names = sorted({name for each in lacking.values() for name in each})
                logger.warning("%d tensors did not arrive at %d engines: sent again", len(names), len(lacking))
                num_bytes += self._send_again(update, base, version, {name: shapes[name] for name in names}, lacking)
        total = sum(math.prod(shape) * ITEM_SIZES[dtype] for dtype, shape in shapes.values())
        return Sent(len(shapes), num_bytes, update.seconds_paused, total)

    def _send_again(
        self,
        update: EngineUpdate,
        base: int,
        version: int,
        shapes: dict[str, tuple[str, tuple[int, ...]]],
        lacking: dict[int, list[str]],
    ) -> int:
        """Whole tensors from the copy, to the engines that lack some; returns the bytes."""
        directory = self._options.disk_dir / f"weight_v{version:06d}_again"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        try:
            writer = DeltaWriter(directory, self._options.delta_encoding, self._options.delta_checksum)
            for name, (dtype, shape) in shapes.items():
                place = self._base.place(name, dtype, shape)
                raw = self._base.read(place, 0, place.size)
                values = delta.elements(raw, ITEM_SIZES[dtype])
                blocks = (delta.encode_whole(values[at : at + n], at) for at, n in delta.ranges(len(values)))
                writer.add(name, dtype, shape, raw, blocks)
            writer.finish(str(version), str(base))
            after_write(self._options, directory, [update.engines[row] for row in lacking])
            body = self._body(directory, version) | {"load_format": "delta"}
            answers = update.post("delta again", "/update_weights_from_disk", body, among=list(lacking))
            left = sorted({name for answer in answers if _lacks(answer) for name in answer["failed_tensors"]})
            if left:
                raise WeightSyncError(
                    f"{len(left)} tensors of version {version} did not arrive, sent twice: {', '.join(left[:4])}"
                )
            return writer.num_bytes
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _write(
        self, directory: Path, base: int, version: int, tensors: NamedTensors
    ) -> tuple[dict[str, tuple[str, tuple[int, ...]]], int]:
        """Writes the delta and brings the copy to the new version; (dtype and shape of all tensors, bytes written)."""
        writing = directory.with_name(f".writing_{directory.name}")
        for old in (writing, directory):
            shutil.rmtree(old, ignore_errors=True)
        writing.mkdir()
        writer = DeltaWriter(writing, self._options.delta_encoding, self._options.delta_checksum)
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        try:
            for name, tensor in tensors:
                dtype = str(tensor.dtype).removeprefix("torch.")
                shape = tuple(tensor.shape)
                place = self._base.place(name, dtype, shape)
                raw = raw_bytes(tensor)
                shapes[name] = dtype, shape
                writer.add(name, dtype, shape, raw, self._changes(place, raw, ITEM_SIZES[dtype]))
        finally:
            writer.close()
        if self._base.names != set(shapes):
            missing = sorted(self._base.names - set(shapes))
            raise WeightSyncError(f"the version before had {len(missing)} tensors more: {', '.join(missing[:4])}")
        writer.finish(str(version), str(base))
        writing.rename(directory)
        return shapes, writer.num_bytes

    def _changes(self, place: Place, raw: np.ndarray, width: int) -> Iterator[delta.Block]:
        new = delta.elements(raw, width)
        for at, count in delta.ranges(len(new)):
            old = delta.elements(self._base.read(place, at * width, count * width), width)
            block = delta.encode(old, new[at : at + count], at, self._options.delta_encoding)
            if block is not None:
                yield block
                self._base.write(place, at * width, raw[at * width : (at + count) * width])

    def _body(self, directory: Path, version: int) -> dict[str, Any]:
        return {"model_path": str(directory), "weight_version": str(version)}


def _applies_deltas(engine: dict[str, Any]) -> bool:
    """Whether an engine changes what it holds; others, and one that gave its weights back, read all of them."""
    return engine.get("engine") == "embedded" and engine.get("weights_complete", True)


def _lacks(answer: dict[str, Any]) -> bool:
    return bool(answer.get("failed_tensors"))
