"""A user's functions that hold a run at a chosen moment, until the test has done there what it wants.

A moment is a file `gates/MOMENT` that holds the number of a rollout; who reaches it writes `gates/MOMENT.reached` with
its process id, and goes on when the first file is gone.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import time
from pathlib import Path

from colloid.data.source import RolloutDataSourceWithBuffer
from colloid.rollout import get_model_url, post

GATES = Path("gates")
"""In the working directory of the run."""


async def generate(args, sample, sampling_params):
    """One turn; the last sample of a rollout stops at `rollout` before it is sent."""
    if _is_last(args, sample):
        await _pass("rollout", _rollout(args, sample))
    payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    answer = await post(get_model_url(args), payload)
    meta = answer["meta_info"]
    sample.append_response_tokens(
        [token for _, token, *_ in meta["output_token_logprobs"]],
        log_probs=[log_prob for log_prob, *_ in meta["output_token_logprobs"]],
        weight_version=meta["weight_version"],
    )
    sample.response = answer["text"]
    sample.status = sample.Status.TRUNCATED
    return sample


async def reward_func(args, sample, **kwargs) -> float:
    """A number that follows from the response; the last sample of a rollout stops at `grading`, in a grader."""
    if _is_last(args, sample):
        await _pass("grading", _rollout(args, sample))
    return hashlib.md5(sample.response.encode()).digest()[0] / 255


def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler) -> None:
    """All trainer ranks stop at `training`."""
    asyncio.run(_pass("training", rollout_id))


def post_write(args, version_dir, rollout_engines) -> None:
    """The first trainer rank stops at `sync`: the weights are written, and the engines do not know. Version n comes
    after rollout n - 2."""
    asyncio.run(_pass("sync", int(re.findall(r"\d+", Path(version_dir).name)[-1]) - 2))


class DataSource(RolloutDataSourceWithBuffer):
    """The rollout actor stops at `save`: the trainer ranks write, or have written, their part."""

    def save(self, rollout_id: int) -> None:
        gate = _gate("save", rollout_id)
        while gate is not None and gate.exists():
            time.sleep(0.005)
        super().save(rollout_id)


async def _pass(moment: str, rollout_id: int) -> None:
    gate = _gate(moment, rollout_id)
    while gate is not None and gate.exists():
        await asyncio.sleep(0.005)


def _gate(moment: str, rollout_id: int) -> Path | None:
    """The gate, where the run is to stop here; says that it is reached."""
    gate = GATES / moment
    try:
        wanted = int(gate.read_text())
    except (FileNotFoundError, ValueError):
        return None
    if wanted != rollout_id:
        return None
    reached = GATES / f"{moment}.reached"
    temporary = reached.with_suffix(f".{os.getpid()}")
    temporary.write_text(str(os.getpid()))
    os.replace(temporary, reached)
    return gate


def _rollout(args, sample) -> int:
    return sample.index // (args.rollout_batch_size * args.n_samples_per_prompt)


def _is_last(args, sample) -> bool:
    return (sample.index + 1) % (args.rollout_batch_size * args.n_samples_per_prompt) == 0
