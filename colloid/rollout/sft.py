"""The rollout function of supervised fine-tuning: conversations of the data source, tokenised, with their masks.

Nothing is generated and nothing is rewarded. Evaluation is that of the default rollout function.
"""

from __future__ import annotations

import asyncio
from typing import Any

from colloid.data.groups import Group
from colloid.data.opening import conversation_format
from colloid.data.prompts import load_tokenizer
from colloid.data.sample import Sample, Status
from colloid.data.sft import end_token_ids, tokenised
from colloid.rollout.generate import generate_rollout as generate
from colloid.rollout.types import RolloutFnEvalOutput, RolloutFnTrainOutput


async def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """`--rollout-batch-size` conversations, in the order of the data source.

    Raises:
        DataError: a sample's `prompt` is no conversation that can be trained.
    """
    if evaluation:
        return await generate(args, rollout_id, data_source, evaluation=True)
    groups = data_source.get_samples(args.rollout_batch_size)
    await asyncio.to_thread(_fill, args, groups)
    return RolloutFnTrainOutput(groups)


def _fill(args: Any, groups: list[Group]) -> None:
    tokenizer, row_format = load_tokenizer(args.hf_checkpoint), conversation_format(args)
    end_ids = end_token_ids(args.hf_checkpoint, args.hf_config)
    for group in groups:
        for sample in group:
            fill(sample, tokenizer, row_format, end_ids)


def fill(sample: Sample, tokenizer: Any, row_format: Any, end_ids: list[int]) -> None:
    """Makes the conversation in `prompt` the sample's tokens; the response begins with the first trained one."""
    found = tokenised(sample.prompt, tokenizer, row_format, sample.metadata.get("tools"), end_ids)
    start = found.prompt_length
    sample.tokens = found.token_ids
    sample.response_length = len(found.token_ids) - start
    sample.loss_mask = found.loss_mask[start:]
    sample.response = tokenizer.decode(found.token_ids[start:], skip_special_tokens=False)
    sample.status = Status.COMPLETED
