"""Bandwidth of each transport of weights beside memcpy, and what a delta moves.

    python -m benchmarks.weight_sync [--mib 512] [--engines 1] [--transports tensor gloo disk delta]

Transports are measured between two processes: a sender, and a receiver that does what the embedded engine does until
a tensor is there to be packed: map or receive, check, copy out. (Packing into the engine's own layout is no transport.)
Copies of memcpy and updates alternate, and the least of each counts. Beside the wall time, which a busy machine makes
longer, stands the CPU time of the busier side: with a core for each of them, that bounds the bandwidth.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from colloid.engines.contract import WeightUpdateBucket
from colloid.engines.contract_weights import BroadcastBucket, DiskUpdate, GroupStart
from colloid.engines.control import EngineControl
from colloid.engines.embedded.memory import keep_freed_memory
from colloid.engines.embedded.shared_memory import SharedRings
from colloid.engines.embedded.update_disk import WeightFiles
from colloid.engines.embedded.update_group import UpdateGroups
from colloid.weights.senders import SendOptions
from colloid.weights.transports import make_sender

START_SECONDS = 120


class Receiver:
    """The embedded engine's own parts, and tensors that they are copied into."""

    def __init__(self, place: Path):
        self.tensors: dict[str, torch.Tensor] = {}
        self.version = "0"
        self._groups = UpdateGroups()
        self._rings = SharedRings()
        self._files = WeightFiles((place,))

    def take(self, name: str, tensor: torch.Tensor) -> None:
        if name in self.tensors:
            self.tensors[name].copy_(tensor)
        else:
            self.tensors[name] = tensor.clone()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/update_weights_from_tensor":
            # As in the engine: copied out, to be packed; here the copy is all that is kept.
            for name, tensor in self._rings.tensors(WeightUpdateBucket.from_json(body), lambda _: None):
                self.tensors[name] = tensor
        elif path == "/init_weights_update_group":
            self._groups.join(GroupStart.from_json(body))
        elif path == "/destroy_weights_update_group":
            self._groups.leave(body["group_name"])
        elif path == "/update_weights_from_distributed":
            for name, tensor in self._groups.receive(BroadcastBucket.from_json(body)):
                self.take(name, tensor)
        elif path == "/update_weights_from_disk":
            update = DiskUpdate.from_json(body)
            if update.is_delta:
                delta = self._files.delta(update.path)
                assert delta.apply(self) == []
            else:
                for name, tensor in self._files.directory(update.path).tensors(1 << 20):
                    self.take(name, tensor)
        elif path == "/end_weight_update":
            self._rings.forget()
        self.version = body.get("weight_version", self.version)
        return {}

    def patch(self, names: list[str], patched: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
        for name in names:
            self.tensors[name] = patched(name, self.tensors[name])


def receive(place: str, connection: Any) -> None:
    """Serves a `Receiver` over HTTP; sends its port."""
    torch.set_num_threads(1)
    keep_freed_memory()
    receiver, lock = Receiver(Path(place)), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def answer(self, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self.answer({"engine": "embedded", "tp_size": 1, "weight_version": receiver.version})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                self.answer(receiver.post(self.path, body))

        def log_message(self, *_args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    connection.send(server.server_port)
    server.serve_forever()


@contextmanager
def receivers(count: int, place: Path) -> Iterator[tuple[list[EngineControl], list[int]]]:
    context = multiprocessing.get_context("spawn")
    processes, controls = [], []
    try:
        for _ in range(count):
            own, other = context.Pipe()
            processes.append(context.Process(target=receive, args=(str(place), other), daemon=True))
            processes[-1].start()
            if not own.poll(START_SECONDS):
                raise TimeoutError(f"receiver {len(processes)} does not serve after {START_SECONDS} s")
            controls.append(EngineControl(f"http://127.0.0.1:{own.recv()}", "key", timeout=300))
        yield controls, [os.getpid(), *(process.pid for process in processes)]
    finally:
        for process in processes:
            process.kill()
            process.join(10)


def make_tensors(mib: int) -> dict[str, torch.Tensor]:
    """bfloat16 matrices of 16 MiB."""
    generator = torch.Generator().manual_seed(0)
    shape = (2048, 4096)
    return {
        f"model.layers.{row}.weight": (0.02 * torch.randn(shape, generator=generator)).bfloat16()
        for row in range(max(2, mib // 16))
    }


def change(tensors: dict[str, torch.Tensor], share: float, seed: int) -> None:
    """Moves a share of the elements by one unit of the last place, as a small step does."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        positions = torch.randint(0, tensor.numel(), (int(share * tensor.numel()),), generator=generator)
        flat = tensor.view(-1).view(torch.int16)
        flat[positions] ^= 1


def memcpy(tensors: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Seconds, and CPU seconds, of one copy of all tensors into memory that is there."""
    targets = [torch.empty_like(tensor) for tensor in tensors.values()]

    def copy() -> None:
        for target, tensor in zip(targets, tensors.values(), strict=True):
            target.copy_(tensor)

    copy()
    begin, used = time.perf_counter(), time.thread_time()
    copy()
    return time.perf_counter() - begin, time.thread_time() - used


def cpu_seconds(pids: list[int]) -> list[float]:
    """That each process has used, by its own clock (Linux: clock_getcpuclockid)."""
    return [time.clock_gettime(~pid << 3 | 2) for pid in pids]


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    tensors = make_tensors(args.mib)
    total = sum(tensor.nbytes for tensor in tensors.values())
    rows = []
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        place = Path(name)
        (place / "config.json").write_text("{}")
        with receivers(args.engines, place) as (engines, pids):
            for transport in args.transports:
                mode, carrier = ("delta", "disk") if transport == "delta" else ("full", transport)
                options = SendOptions(carrier, mode, args.buffer_mib << 20, "in_place", place, place / "weights")
                sender = make_sender(options)
                copies, updates, moved = [], [], 0
                for version in range(args.rounds + 1):
                    change(tensors, args.share, version)
                    copied = memcpy(tensors)
                    begin, used = time.perf_counter(), cpu_seconds(pids)
                    moved = sender.send(engines, version + 1, iter(tensors.items())).num_bytes
                    seconds = time.perf_counter() - begin
                    used = [after - before for before, after in zip(used, cpu_seconds(pids), strict=True)]
                    if version:  # the first one makes the group, or the base
                        copies.append(copied)
                        updates.append((seconds, max(used)))
                sender.close()
                least_copy, least = (tuple(map(min, zip(*times, strict=True))) for times in (copies, updates))
                rows.append(
                    {
                        "transport": transport,
                        "GB/s": round(total / least[0] / 1e9, 2),
                        "memcpy GB/s": round(total / least_copy[0] / 1e9, 2),
                        "of memcpy": round(least_copy[0] / least[0], 3),
                        "of memcpy, by CPU time": round(least_copy[1] / least[1], 3),
                        "bytes moved": moved,
                        "share of all bytes": round(moved / total, 5),
                    }
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="of the weights")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--buffer-mib", type=int, default=128, help="--update-weight-buffer-size")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--share", type=float, default=0.01, help="of the elements that change between two updates")
    parser.add_argument("--transports", nargs="+", default=["tensor", "gloo", "disk", "delta"])
    parser.add_argument("--directory", default=None, help="where files are written")
    args = parser.parse_args()
    print(f"{args.mib} MiB in bfloat16, {args.engines} engines, {os.cpu_count()} CPUs, least of {args.rounds} rounds")
    for row in measure(args):
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
