"""The rollout function of `--rollout-buffer-url`: a server outside generates with the run's engines, rewards, and hands
out finished trajectories; here they become samples.

A trajectory is messages: they are rendered by the chat template, tokenised, and masked to what the assistant says, as
in SFT. So samples have neither the engines' log-probs nor weight versions, and old log-probs are the trainer's own.

The server reads `--prompt-data` itself. The data source only counts: the samples of its groups are filled. Evaluation
is that of the default rollout function.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

from colloid.data.groups import Group
from colloid.data.opening import conversation_format
from colloid.data.sample import Sample, Status
from colloid.errors import DataError
from colloid.rollout.context import RolloutContext, current_context
from colloid.rollout.generate import generate_rollout as generate
from colloid.rollout.group_hooks import call_group_hooks
from colloid.rollout.sft import fill
from colloid.rollout.source_calls import mark_consumed, take_groups
from colloid.rollout.trajectory_client import Trajectory, TrajectoryServer, instance_ids
from colloid.rollout.types import RolloutFnEvalOutput, RolloutFnTrainOutput

logger = logging.getLogger(__name__)

KEPT = "trajectory server"
TRAINED = "trained_instance_ids"
"""In the data source's metadata, which is saved with every checkpoint."""


async def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """`--rollout-batch-size` groups of the server's; fewer where it is given up, see `--min-batch-collection-ratio`.

    Raises:
        DeadlineExceeded: it was given up, with too few.
        HookError: it answers with something else than trajectories.
    """
    if evaluation:
        return await generate(args, rollout_id, data_source, evaluation=True)
    context = current_context()
    server = context.kept.get(KEPT) or context.kept.setdefault(KEPT, _make_server(args))
    trained: list[Any] = data_source.metadata.setdefault(TRAINED, [])
    await server.start(start_payload(args, trained))
    at_least = max(1, math.ceil(args.min_batch_collection_ratio * args.rollout_batch_size))
    found, metrics = await server.take(args.rollout_batch_size, at_least)
    groups = take_groups(data_source, len(found))
    filled = await asyncio.to_thread(_fill, context, groups, found)
    trained += instance_ids(found)
    mark_consumed(data_source, [group for group, count in zip(groups, filled, strict=True) if not count])
    kept = [group[:count] for group, count in zip(groups, filled, strict=True) if count]
    if not kept:
        raise DataError(f"of {len(found)} groups of {server.url} none has a trajectory that can be trained")
    await asyncio.to_thread(call_group_hooks, args, kept, kept, data_source)
    metrics["rollout/num_dropped_trajectories"] = float(sum(map(len, found)) - sum(filled))
    return RolloutFnTrainOutput(kept, metrics)


def start_payload(args: Any, trained: list[Any]) -> dict[str, Any]:
    """What `/start_rollout` is told. Numbers are texts where that protocol has them so.

    Args:
        trained: prompts whose groups were trained before the checkpoint that the run goes on from.
    """
    sampling = {
        "max_tokens": args.rollout_max_response_len,
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
    }
    return {
        "num_process": str(min(100, args.sglang_server_concurrency)),
        "num_epoch": str(args.num_epoch or 1),
        "remote_engine_url": f"http://{args.sglang_router_ip}:{args.sglang_router_port}",
        "remote_engine_api_key": args.rollout_api_key,
        "remote_buffer_url": args.rollout_buffer_url,
        "task_type": args.rollout_task_type,
        "input_file": args.prompt_data[0] if args.prompt_data else None,
        "num_repeat_per_sample": str(args.n_samples_per_prompt),
        "max_tokens": str(args.rollout_max_response_len),
        "sampling_params": sampling,
        "tokenizer_path": args.hf_checkpoint,
        "skip_instance_ids": list(trained),
    }


def _make_server(args: Any) -> TrajectoryServer:
    return TrajectoryServer(args.rollout_buffer_url, retries=args.fetch_trajectory_retry_times, proxy=args.http_proxy)


def _fill(context: RolloutContext, groups: list[Group], found: list[list[Trajectory]]) -> list[int]:
    """Fills the samples of each group with its trajectories, in place. Returns how many of each: not those beyond the
    group's size, and not those that cannot be trained.
    """
    row_format, counts = conversation_format(context.args), []
    for group, trajectories in zip(groups, found, strict=True):
        filled = 0
        for trajectory in trajectories:
            if filled == len(group):
                break
            try:
                fill_sample(group[filled], trajectory, context.tokenizer, row_format, context.end_ids)
            except DataError as error:
                logger.warning("a trajectory of instance %s is left out: %s", trajectory.instance_id, error)
                continue
            filled += 1
        counts.append(filled)
    return counts


def fill_sample(sample: Sample, trajectory: Trajectory, tokenizer: Any, row_format: Any, end_ids: list[int]) -> None:
    """Makes a trajectory the sample's.

    Raises:
        DataError: its messages cannot be trained; or they are longer than the context.
    """
    sample.prompt, sample.label, sample.reward = trajectory.messages, None, trajectory.reward
    sample.metadata = dict(trajectory.extra) | {"instance_id": trajectory.instance_id}
    fill(sample, tokenizer, row_format, end_ids)
    first = next(i for i, message in enumerate(trajectory.messages) if message["role"] == "assistant")
    sample.prompt = trajectory.messages[:first]
    if row_format.max_tokens is not None and len(sample.tokens) > row_format.max_tokens:
        raise DataError(f"it has {len(sample.tokens)} tokens, and the context {row_format.max_tokens}")
    if trajectory.truncated:
        # The template closes the last message; the model did not.
        _drop_end(sample, {tokenizer.eos_token_id, *end_ids})
        sample.status = Status.TRUNCATED


def _drop_end(sample: Sample, end_ids: set[int]) -> None:
    if sample.response_length > 1 and sample.tokens[-1] in end_ids:
        del sample.tokens[-1], sample.loss_mask[-1]
        sample.response_length -= 1
