"""The conversation: what the model searches for is looked up, and it goes on with what was found.

Used as `--custom-generate-function-path examples/search_r1/generate.py`; `--max-turns` is how often it may speak.
`--custom-config-path` names a YAML file with `search_url`, the address of a retrieval server
(`python -m colloid.agents.search`, or Search-R1's own), and `search_topk`, documents a search.
"""

from __future__ import annotations

import re

from colloid.agents.search import retrieve
from colloid.rollout import generate_single
from examples.search_r1.make_task import information

QUERY = re.compile(r"<search>(.*?)</search>", re.DOTALL)


async def generate(args, sample, sampling_params):
    """`sample.metadata["searches"]` counts them."""
    conversation = sample.prompt
    sample.metadata["searches"] = 0
    for _ in range(args.max_turns):
        reply = await generate_single(conversation)
        conversation.append({"role": "assistant", "content": reply})
        queries = QUERY.findall(reply)
        if not queries:
            break
        sample.metadata["searches"] += 1
        conversation.append({"role": "tool", "content": await search(args, queries[-1].strip())})
    return sample


async def search(args, query: str) -> str:
    """What the server finds, as the model is shown it."""
    (found,) = await retrieve(args.search_url, [query], args.search_topk)
    return information([document["contents"] for document in found])
