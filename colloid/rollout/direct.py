"""Which engine a request goes to that the router cannot pass on.

The routers write requests anew from the fields that they know, and drop the others without a word: sglang-router
`return_routed_experts` (https://github.com/sgl-project/sglang/issues/20696), both `logit_bias`; lists for the prompts
of a batch they refuse. Such requests go to an engine directly: to the one that has the same prompt already, so that its
cache is shared, unless that one is too busy; else to the one with the fewest requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from colloid.rollout.http import RequestRefused

PASSED_ON = frozenset(
    ("audio_data", "background", "bootstrap_host", "bootstrap_pair_key", "bootstrap_port", "bootstrap_room")
    + ("conversation_id", "custom_logit_processor", "data_parallel_rank", "extra_key", "image_data", "input_embeds")
    + ("input_ids", "log_metrics", "logprob_start_len", "lora_id", "lora_path", "modalities", "model", "no_logs")
    + ("priority", "return_bytes", "return_entropy", "return_hidden_states", "return_logprob")
    + ("return_text_in_logprobs", "rid", "sampling_params", "session_params", "stream", "text", "token_ids_logprob")
    + ("top_logprobs_num", "video_data")
)
"""Fields of a request that sglang-router 0.3.2 and smg 1.13 both pass on (tests/engine/test_router.py)."""
PARAMETERS_PASSED_ON = frozenset(
    ("ebnf", "frequency_penalty", "ignore_eos", "json_schema", "max_new_tokens", "min_new_tokens", "min_p", "n")
    + ("no_stop_trim", "presence_penalty", "regex", "repetition_penalty", "sampling_seed", "skip_special_tokens")
    + ("stop", "stop_token_ids", "temperature", "top_k", "top_p")
)
"""Those of its `sampling_params`."""
ONE_VALUE = ("logprob_start_len", "return_logprob", "rid", "sampling_params", "text", "top_logprobs_num")
"""Fields that the routers take no list of, for the prompts of a batch."""
ASKS_FOR_NOTHING = (None, False)
SLACK = 16
"""Requests that an engine may have beyond twice those of the idlest one before a prompt that it has goes elsewhere."""


class DirectRequests:
    """Those in flight at each engine.

    Args:
        router_url: where all other requests go.
        engine_urls: none: all requests go to `router_url`, whatever it is.
        through_router: whether the router alone may send to engines, as it pairs them.
    """

    def __init__(self, router_url: str, engine_urls: Sequence[str], *, through_router: bool = False):
        self._router_url = router_url
        self._through_router = through_router
        self._load = dict.fromkeys(engine_urls, 0)
        self._prompts: dict[Any, Counter[str]] = {}

    def set_engines(self, router_url: str, engine_urls: Sequence[str]) -> None:
        """The engines are others from now on."""
        self._router_url = router_url
        self._load = {url: self._load.get(url, 0) for url in engine_urls}

    @contextmanager
    def target(self, payload: dict[str, Any]) -> Iterator[str]:
        """The server that is sent this request, which is in flight while it is open.

        Raises:
            RequestRefused: it would lose a part on its way through the router, and there is no other.
        """
        lost = not_passed_on(payload) if self._load else []
        if not lost:
            yield self._router_url
            return
        if self._through_router:
            raise RequestRefused(
                f"the router {self._router_url} does not pass on {', '.join(lost)}, and prefill and decode engines "
                "cannot be asked directly"
            )
        prompt = _prompt(payload)
        places = self._prompts.setdefault(prompt, Counter())
        url = self._choose(places)
        self._load[url] += 1
        places[url] += 1
        try:
            yield url
        finally:
            if self._load.get(url):  # it may have left, or have come back since
                self._load[url] -= 1
            places[url] -= 1
            if not places.total():
                self._prompts.pop(prompt, None)

    def _choose(self, places: Counter[str]) -> str:
        idlest = min(self._load, key=self._load.__getitem__)
        limit = 2 * self._load[idlest] + SLACK
        have = [url for url, count in places.items() if count and self._load.get(url, limit) < limit]
        return min(have, key=self._load.__getitem__) if have else idlest


def not_passed_on(payload: dict[str, Any]) -> list[str]:
    """What of a request for /generate the routers would drop or refuse; empty for all that is usual."""
    parameters = payload.get("sampling_params")
    lost = [name for name in payload.keys() - PASSED_ON if payload[name] not in ASKS_FOR_NOTHING]
    lost += [f"a list of {name}" for name in ONE_VALUE if isinstance(payload.get(name), list)]
    if isinstance(parameters, dict):
        unknown = parameters.keys() - PARAMETERS_PASSED_ON
        lost += [f"sampling_params.{name}" for name in unknown if parameters[name] not in ASKS_FOR_NOTHING]
    return sorted(lost)


def _prompt(payload: dict[str, Any]) -> Any:
    """Something equal for equal prompts; None for a batch."""
    ids, text = payload.get("input_ids"), payload.get("text")
    if ids is None:
        return text if isinstance(text, str) else None
    return None if list in set(map(type, ids)) else tuple(ids)
