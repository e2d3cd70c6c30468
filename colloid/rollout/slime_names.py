"""What hook files written for slime use inside a rollout, by the names that they know. See `colloid.slime_imports`."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable
from typing import Any

from colloid.data.prompts import load_tokenizer
from colloid.data.sample import Sample
from colloid.rollout import context
from colloid.rollout.generate_sample import generate_sample
from colloid.rollout.options import training_sampling


class GenerateState:
    """Tokenizer, sampling parameters and a semaphore for requests, made anew at each call."""

    def __init__(self, args: Any):
        sampling = training_sampling(args)
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint)
        self.processor = None
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency)
        self.sampling_params = {**sampling.params, "max_new_tokens": sampling.max_response_len}
        self.aborted = False


async def post(url: str, payload: dict[str, Any], max_retries: int = 60, headers: dict | None = None) -> Any:
    """`colloid.rollout.post`: retries are the client's affair, and headers hold its key."""
    return await context.post(url, payload)


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The built-in generation of one response."""
    here = context.current_context()
    return await generate_sample(sample, here.client, here.tokenizer, training_sampling(args), sampling_params)


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """The reward of a sample, by the run's reward; None where it FAILED."""
    await context.current_context().grader.grade(sample)
    return sample.reward


async def batched_async_rm(args: Any, samples: list[Sample], **kwargs: Any) -> list[Any]:
    """The rewards of samples."""
    return list(await asyncio.gather(*(async_rm(args, sample) for sample in samples)))


def run(coroutine: Awaitable[Any]) -> Any:
    """The result of a coroutine that runs in the rollout's event loop; for plain functions, which run in a thread."""
    return asyncio.run_coroutine_threadsafe(_awaited(coroutine), context.current_context().loop).result()


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def load_function(path: str) -> Any:
    """What `module.attribute` names."""
    module, _, attribute = path.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
