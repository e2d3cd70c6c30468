"""Messages of /release_memory_occupation and /resume_memory_occupation."""

from dataclasses import dataclass
from typing import Any

from colloid.engines.contract_fields import BadRequest, as_object, only_known, shown

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)
"""What memory an engine can give back, in the order in which it is wanted again."""
OF_OTHERS = ("cuda_graph",)
"""Tags of SGLang for what the embedded engine never has."""


@dataclass(frozen=True)
class MemoryTags:
    """Body of both requests. Without tags all are meant."""

    tags: tuple[str, ...]

    @classmethod
    def from_json(cls, body: Any) -> "MemoryTags":
        body = as_object({} if body is None else body, "the request")
        only_known(body, frozenset({"tags"}), "the request")
        tags = body.get("tags")
        if tags is None or tags == []:
            return cls(TAGS)
        if not isinstance(tags, list) or not all(tag in (*TAGS, *OF_OTHERS) for tag in tags):
            raise BadRequest(f"tags must be a list of {', '.join(TAGS)}, got {shown(tags)}")
        return cls(tuple(tag for tag in TAGS if tag in tags))
