"""Where the models of a run are served, as hooks ask for it: in the rollout and in the worker processes of rewards.

The manager writes it into `args` once all models serve; `args` goes to wherever hooks run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from colloid.config.served_models import ALIASES, DEFAULT_NAME
from colloid.errors import HookError


def set_model_urls(args: Any, policy: str, routers: Mapping[str, str], api_key: str | None) -> None:
    """Sets `sglang_router_ip` and `_port` (of the policy), `sglang_model_routers` and `rollout_api_key`.

    Args:
        policy: the name of the policy.
        routers: model -> address of its router.
    """
    args.sglang_model_routers = {
        name: (urlsplit(url).hostname, urlsplit(url).port)
        for name, url in sorted(routers.items(), key=lambda item: item[0] != policy)
    }
    args.sglang_router_ip, args.sglang_router_port = args.sglang_model_routers[policy]
    args.rollout_api_key = api_key


def router_urls(args: Any) -> dict[str, str]:
    """Model -> address of its router, the policy's first; empty before `set_model_urls`."""
    routers: dict[str, tuple[str, int]] = getattr(args, "sglang_model_routers", None) or {}
    return {name: f"http://{f'[{host}]' if ':' in host else host}:{port}" for name, (host, port) in routers.items()}


def model_url(routers: Mapping[str, str], model_name: str, endpoint: str) -> str:
    """See `colloid.rollout.get_model_url`.

    Args:
        routers: see `router_urls`.
    """
    if not routers:
        raise HookError(f"get_model_url: no model is served yet, {model_name!r} neither: engines start after the data")
    policy = next(iter(routers))
    name = policy if model_name in ALIASES and model_name not in routers else model_name
    if name not in routers:
        others = [other for other in routers if other != policy]
        known = f"{policy!r} (the policy)" + "".join(f", {other!r}" for other in others)
        hint = "" if policy != DEFAULT_NAME or others else "; --sglang-config serves others beside it"
        raise HookError(f"get_model_url: there is no model {model_name!r}; there is {known}{hint}")
    return f"{routers[name]}/{endpoint.lstrip('/')}"
