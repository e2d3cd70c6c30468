"""A rollout whose samples are conversations, held by a generate function, against a fake engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from colloid.config import parse
from colloid.rollout.manager import RolloutManager


def run_conversations(model: Path, directory: Path, function: str, engine, *flags: str, prompt=None, body=None):
    """One rollout of 2 prompts with 2 samples, of the 4 prompts `What is i + 1?`.

    Args:
        model: a Hugging Face directory.
        directory: where files are written.
        function: the text of the file with the generate function.
        engine: a `FakeEngine`.
        prompt: in the place of all prompts.
        body: `async (manager)`, called in the place of the rollout.

    Returns:
        The columns of the rollout and its metrics; or what `body` returned.
    """
    path = directory / f"generate_{len(list(directory.glob('*.py')))}.py"  # a file is imported once
    path.write_text(function)
    prompts = [prompt or [{"role": "user", "content": f"What is {i} + 1?"}] for i in range(4)]
    rows = [{"prompt": asked, "label": str(i + 1)} for i, asked in enumerate(prompts)]
    (directory / "conversations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = parse(
        [
            *("--hf-checkpoint", str(model), "--prompt-data", str(directory / "conversations.jsonl")),
            *("--custom-generate-function-path", str(path), "--rollout-max-response-len", "60"),
            *("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--num-rollout", "2"),
            *("--outputs-dir", str(directory / "outputs"), *flags),
        ],
        "train",
    )

    async def rollout():
        async with engine.serve():
            manager = RolloutManager(args)
            await manager.start(engine.url, [engine.url], "key")
            try:
                return await (body(manager) if body else manager.generate(0, 3))
            finally:
                await manager.close()

    result = asyncio.run(rollout())
    if body is not None:
        return result
    (batch,) = result.batches
    return batch.samples, result.metrics
