"""What the ranks of `test_export.py` and `test_reshard.py` do: four that hold a model in parts, and then fewer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.parallel.cases import Ranks
from tests.parallel.rollouts import make_rollout, split

BUFFER = 66_000
"""Bytes: of a bucket, so small that a model has many; the padded embedding just fits."""


def four_ranks(
    rank: int, world_size: int, init_method: str, exports: dict[str, dict], saves: dict[str, dict], place: Path
) -> dict[str, Any]:
    """Exports under each of `exports` ({model, options, url}), then trains and saves under each of `saves`."""
    ranks = Ranks(rank, world_size, init_method)
    result: dict[str, Any] = {}
    for name, run in exports.items():
        result[name] = export(ranks, place / name, **run)
    for name, run in saves.items():
        result[name] = save(ranks, place / name, **run)
    return result


def export(ranks: Ranks, directory: Path, model: Path, options: dict[str, Any], url: str | None = None) -> dict:
    """Checksums of the tensors that come together on rank 0, how much came at a time, an update, and a directory."""
    from colloid.engines.control import EngineAddress

    actor = ranks.actor(model, update_weight_buffer_size=BUFFER, **options)
    received: list[int] = []
    receive = actor._export._receive

    def counted(items: Any) -> Any:
        found = receive(items)
        received.append(sum(tensor.nbytes for tensor in found.values()))
        return found

    actor._export._receive = counted
    held = sum(parameter.nbytes for _, parameter in actor._parameters)
    whole = sum(item.nbytes for items in actor._export.rounds for item in items)
    result = {"checksums": actor.weight_checksums(), "received": received[:], "held": held, "whole": whole}
    if url is not None:
        result["update"] = actor.update_weights([EngineAddress(url)], "key")
    actor.export_hf(str(directory))
    actor.close()
    return result


def save(ranks: Ranks, directory: Path, model: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Two steps, a checkpoint, and a third step (during which it is written, with `async_save`)."""
    actor = ranks.actor(model, **options)
    for rollout in range(2):
        train(actor, rollout)
    saved = actor.weight_checksums()
    trainer = directory / "trainer"
    trainer.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    actor.save(str(trainer), 1)
    result = {"saved": saved, "returned before it was written": actor._writer._thread is not None}
    result |= {"next": train(actor, 2), "after": actor.weight_checksums()}
    result["weights"] = {name: tensor.numpy().copy() for name, tensor in actor._export()}
    actor.close()
    return result


def resume(rank: int, world_size: int, init_method: str, runs: dict[str, dict]) -> dict[str, Any]:
    """Of each run (of `start`) what its start says, its weights, and its next step."""
    ranks = Ranks(rank, world_size, init_method)
    result: dict[str, Any] = {}
    for name, run in runs.items():
        try:
            actor = start(ranks, **run)
        except Exception as error:
            from colloid.training.megatron import parallel

            parallel.shutdown()
            result[name] = f"{type(error).__name__}: {error}"
            continue
        found = {"state": actor.state, "loaded": actor.weight_checksums()}
        found["next"] = train(actor, actor.state.start_rollout_id)
        result[name] = found | {"weights": {n: t.numpy().copy() for n, t in actor._export()}}
        actor.close()
    return result


def start(
    ranks: Ranks, model: Path, options: dict[str, Any], weights: Path | None = None, reference: Path | None = None
) -> Any:
    """An actor; `weights` are its start weights, and `reference` those of its reference."""
    from colloid.training.actor import Actor

    if weights is None:
        return ranks.actor(model, **options)

    class Started(Actor):
        def start(self) -> Any:
            self.args.init_checkpoint = str(weights)
            self.args.ref_load = str(reference or model)
            return super().start()

    return ranks.actor(model, kind=Started, **options)


def train(actor: Any, rollout: int) -> dict[str, float]:
    """A step on this rank's part of a rollout."""
    from megatron.core import parallel_state

    parts = split(make_rollout(rollout, vocab=96), parallel_state.get_data_parallel_world_size(), 2)
    metrics = actor.train(rollout, parts[parallel_state.get_data_parallel_rank()])
    return {name: value for name, value in metrics.items() if "perf/" not in name}
