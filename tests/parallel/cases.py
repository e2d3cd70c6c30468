"""What the ranks of the tests do. Each function runs in a process of its own, see `ranks.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.parallel.rollouts import TEMPERATURE, make_args, make_rollout, split


class Ranks:
    """Actors one after another in this process: each joins a world of its own."""

    def __init__(self, rank: int, world_size: int, init_method: str):
        self.rank, self.world_size = rank, world_size
        self._init_method, self._count = init_method, 0

    def actor(self, model: Path, kind: Any = None, **options: Any) -> Any:
        """`kind`: the class, if it is not `Actor`."""
        from colloid.training.actor import Actor

        self._count += 1
        resume = options.pop("resume_from", None)
        args = make_args(model, **options)
        args.resume_from = resume
        actor = (kind or Actor)(args, self.rank, self.world_size, f"{self._init_method}_{self._count}")
        actor.state = actor.start()
        return actor


def several(rank: int, world_size: int, init_method: str, calls: dict[str, tuple[str, dict]]) -> dict[str, Any]:
    """Several of the functions below in one spawn: name -> (function, its arguments)."""
    return {
        name: globals()[function](rank, world_size, f"{init_method}_{row}", **arguments)
        for row, (name, (function, arguments)) in enumerate(calls.items())
    }


def weights(actor: Any) -> dict[str, np.ndarray]:
    """By Hugging Face name."""
    return {name: tensor.float().numpy().copy() for name, tensor in actor._export()}


def gradients(actor: Any) -> dict[str, np.ndarray]:
    """The last step's, by Hugging Face name; those of a whole (not distributed) optimizer."""
    found = {}
    for name, parameter in actor._parameters:
        for hf_name, tensor in actor._names[name].to_hf(parameter.main_grad):
            found[hf_name] = tensor.numpy().copy()
    return found


def same_on_all_ranks(actor: Any) -> bool:
    """Whether the weights are, bit by bit; under data parallelism alone."""
    from colloid.engines.checksums import tensor_checksum as checksum

    sums: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(sums, {name: checksum(tensor) for name, tensor in actor._parameters})
    return all(other == sums[0] for other in sums)


def one_step(rank: int, world_size: int, init_method: str, runs: dict[str, dict]) -> dict[str, dict]:
    """Metrics and gradient of one step for each run: {model, options, rollout, micro_batch_size, only_gradient}."""
    ranks = Ranks(rank, world_size, init_method)
    results = {}
    for name, run in runs.items():
        actor = ranks.actor(run["model"], lr=0.0, clip_grad=0.0, **run.get("options", {}))
        batch = make_rollout(**run.get("rollout", {}))
        parts = split(batch, world_size, run["micro_batch_size"], only_gradient=run.get("only_gradient", False))
        metrics = actor.train(0, parts[rank])
        results[name] = {"metrics": metrics, "gradients": gradients(actor)}
        actor.close()
    return results


def training(rank: int, world_size: int, init_method: str, runs: dict[str, dict]) -> dict[str, dict]:
    """Metrics of two rollouts of two steps each, and the weights after them."""
    ranks = Ranks(rank, world_size, init_method)
    results = {}
    for name, run in runs.items():
        actor = ranks.actor(run["model"], num_steps_per_rollout=2, **run.get("options", {}))
        metrics = [
            actor.train(i, split(make_rollout(i, num_steps=2), world_size, run["micro_batch_size"])[rank])
            for i in range(2)
        ]
        same = same_on_all_ranks(actor)
        results[name] = {"metrics": metrics, "weights": weights(actor), "same": same}
        actor.close()
    return results


def empty_step(rank: int, world_size: int, init_method: str, model: Path) -> dict[str, Any]:
    """A rollout whose first step has no sample with a gradient."""
    actor = Ranks(rank, world_size, init_method).actor(
        model, num_steps_per_rollout=2, lr=1e-2, weight_decay=0.5, lr_decay_style="linear"
    )
    before = weights(actor)
    batch = make_rollout(num_steps=2)
    batch.rewards[batch.steps == 0] = 0.0
    metrics = actor.train(0, split(batch, world_size, 2, only_gradient=True)[rank])
    batch.rewards[:] = 0.0
    between = weights(actor)
    idle = actor.train(1, split(batch, world_size, 2, only_gradient=True)[rank])
    result = {"metrics": metrics, "idle": idle, "before": before, "between": between, "after": weights(actor)}
    actor.close()
    return result


def uneven_metrics(rank: int, world_size: int, init_method: str, model: Path) -> dict[str, float]:
    """A step of two samples, of which one has log-probs of the engine."""
    actor = Ranks(rank, world_size, init_method).actor(model, lr=0.0, global_batch_size=2)
    metrics = actor.train(0, split(make_rollout().select([2, 3]), world_size, 1)[rank])
    actor.close()
    return metrics


def resume(rank: int, world_size: int, init_method: str, model: Path, directory: Path, options: dict) -> dict[str, Any]:
    """Three rollouts at a stretch, and two + save + a new actor + one."""
    ranks = Ranks(rank, world_size, init_method)
    options = {"num_steps_per_rollout": 2, "lr_decay_style": "cosine", "lr_warmup_iters": 3} | options

    def train(actor: Any, rollout: int) -> dict[str, float]:
        return actor.train(rollout, split(make_rollout(rollout, num_steps=2), world_size, 2)[rank])

    actor = ranks.actor(model, **options)
    for rollout in range(2):
        train(actor, rollout)
    actor._weight_version = 5
    place = directory / "trainer"
    place.mkdir(parents=True, exist_ok=True)
    actor.save(str(place), 1)
    draws = [float(torch.rand(())), float(np.random.random())]
    straight = train(actor, 2)
    result: dict[str, Any] = {"straight": (straight, actor.weight_checksums(), draws)}
    actor.close()

    actor = ranks.actor(model, resume_from=str(directory), **options)
    draws = [float(torch.rand(())), float(np.random.random())]
    result["state"] = (actor.state.start_rollout_id, actor.state.weight_version)
    result["resumed"] = (train(actor, 2), actor.weight_checksums(), draws)
    actor.close()
    return result


def damaged_checkpoints(rank: int, world_size: int, init_method: str, model: Path, directory: Path) -> dict[str, Any]:
    """A checkpoint that was cut off, altered, stripped of a file or of its optimizer."""
    from colloid.errors import ConfigError

    ranks = Ranks(rank, world_size, init_method)
    saved = ranks.actor(model)
    saved.train(0, split(make_rollout(), 1, 2)[0])
    for name in ("whole", "without_optimizer"):
        (directory / name / "trainer").mkdir(parents=True)
    saved.save(str(directory / "whole" / "trainer"), 0)
    saved._optimizer, optimizer = None, saved._optimizer
    saved.save(str(directory / "without_optimizer" / "trainer"), 0)
    saved._optimizer = optimizer
    result: dict[str, Any] = {"saved": saved.weight_checksums()}
    saved.close()
    whole = directory / "whole" / "trainer"
    data = next(whole.glob("*.distcp"))

    def attempt() -> str:
        try:
            ranks.actor(model, resume_from=str(whole.parent))
        except (RuntimeError, ConfigError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            from colloid.training.megatron import parallel

            parallel.shutdown()
        return "loaded"

    content = data.read_bytes()
    result["file"] = str(data)
    data.write_bytes(content[: len(content) // 2])
    result["cut off"] = attempt()
    data.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    result["altered"] = attempt()
    data.unlink()
    result["missing"] = attempt()
    data.write_bytes(content)
    result["whole"] = attempt()

    blocked = directory / "blocked"
    (blocked / "__0_0.distcp").mkdir(parents=True)
    actor = ranks.actor(model, resume_from=str(directory / "without_optimizer"))
    try:
        actor.save(str(blocked), 0)
    except RuntimeError as error:
        result["blocked"] = f"{type(error).__name__}: {error}"
    result["without optimizer"] = (actor.state.start_rollout_id, actor.weight_checksums())
    actor.train(1, split(make_rollout(1), 1, 2)[0])
    actor.close()
    return result


def non_finite(rank: int, world_size: int, init_method: str, model: Path) -> str:
    """A rollout with an infinite reward in its second step."""
    actor = Ranks(rank, world_size, init_method).actor(model, num_steps_per_rollout=2)
    batch = make_rollout(num_steps=2)
    batch.rewards[np.flatnonzero(batch.steps == 1)[-1]] = np.inf
    try:
        actor.train(7, split(batch, world_size, 2)[rank])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        actor.close()
    return "no error"


def update(rank: int, world_size: int, init_method: str, model: Path, urls: list[str], broken: str) -> dict[str, Any]:
    """Two updates of all engines, then one in which an engine is broken, then another good one."""
    from colloid.engines.control import EngineAddress

    actor = Ranks(rank, world_size, init_method).actor(model, update_weight_buffer_size=100_000)
    engines = [EngineAddress(url) for url in urls]
    result: dict[str, Any] = {"metrics": [actor.update_weights(engines, "key") for _ in range(2)]}
    try:
        actor.update_weights([*engines, EngineAddress(broken)], "key")
    except RuntimeError as error:
        result["error"] = f"{type(error).__name__}: {error}"
    result["metrics"].append(actor.update_weights(engines, "key"))
    result["checksums"] = actor.weight_checksums()
    actor.close()
    return result


def sync_with_engine(
    rank: int, world_size: int, init_method: str, model: Path, url: str, *, rounds: int = 3, vocab: int = 512
) -> dict[str, Any]:
    """Rounds of: send the weights, generate with the engine, judge that as a teacher's engine does, train on it."""
    from colloid.data.columns import to_columns
    from colloid.data.sample import Sample
    from colloid.engines.control import EngineAddress, EngineControl

    actor = Ranks(rank, world_size, init_method).actor(model, lr=1e-2)
    engine = EngineControl(url, "key")
    result: dict[str, list] = {"metrics": [], "engine": [], "trainer": [], "judged": []}
    for rollout in range(rounds):
        actor.update_weights([EngineAddress(url)], "key")
        checked = engine.post("/weights_checker", {"action": "checksum"})
        result["engine"].append((checked["weight_version"], checked["checksums"]))
        result["trainer"].append((str(rollout + 1), actor.weight_checksums()))
        samples = []
        for index in range(8):
            prompt = np.random.default_rng(index // 2).integers(0, vocab, 4 + index // 2).tolist()
            sampling = {"temperature": TEMPERATURE, "max_new_tokens": 5 + index, "ignore_eos": True}
            request = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
            answer = engine.post("/generate", request)
            log_probs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
            sample = Sample(index=index, group_index=index // 2, tokens=prompt, status=Sample.Status.PENDING)
            sample.append_response_tokens(answer["output_ids"], log_probs=log_probs)
            request = {"input_ids": sample.tokens, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
            request |= {"logprob_start_len": len(prompt) - 1, "input_logprob_temperature": TEMPERATURE}
            judged = engine.post("/generate", request)["meta_info"]["input_token_logprobs"][1:]
            result["judged"] += [own - entry[0] for own, entry in zip(log_probs, judged, strict=True)]
            sample.status = Sample.Status.COMPLETED
            samples.append(sample)
        rewards = np.tile([1.0, -1.0], 4)
        batch = to_columns(samples, raw_rewards=rewards, rewards=rewards)
        result["metrics"].append(actor.train(rollout, split(batch, world_size, 3)[rank]))
    actor.close()
    return result


def process_without_cuda(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    """What the trainer's process makes of torch."""
    from colloid.training.megatron.cpu.adam import FusedAdam

    found: dict[str, Any] = {"cuda": torch.cuda.is_available(), "on cuda": str(torch.ones(2, device="cuda").device)}
    with torch.device("meta"):
        found["on meta"] = {str(tensor.device) for tensor in (torch.tensor([1.0]), torch.arange(3), torch.empty(1))}
    for decoupled, original in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
        parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 50)) for _ in range(2)]
        options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
        optimizers = [
            FusedAdam([parameters[0]], adam_w_mode=decoupled, **options),
            original([parameters[1]], foreach=False, **options),
        ]
        for step in range(4):
            for parameter, optimizer in zip(parameters, optimizers, strict=True):
                parameter.grad = torch.sin(torch.arange(50.0) * (step + 1))
                optimizer.step()
        found[original.__name__] = float((parameters[0] - parameters[1]).abs().max())
    return found
