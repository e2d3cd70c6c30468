"""What user code inside a rollout can reach without being handed it: the client, the tokenizer, the options.

The manager sets the context for the tasks of its rollouts; outside of a rollout there is none.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from colloid.agents import use_sessions
from colloid.config.eval_config import EvalDatasetConfig
from colloid.config.served_models import DEFAULT_NAME
from colloid.data.prompts import PromptDataset
from colloid.errors import HookError
from colloid.rewards.worker import SHARED
from colloid.rollout.agent_sessions import open_session
from colloid.rollout.client import EngineClient
from colloid.rollout.conversation import generate_single, next_turn_seed
from colloid.rollout.custom_generate import GenerateFunction
from colloid.rollout.grading import Grader
from colloid.rollout.group_hooks import load_sample_hooks
from colloid.rollout.model_urls import model_url, router_urls
from colloid.rollout.options import PartialOptions, SamplingOptions, partial_options
from colloid.rollout.runner import GroupRunner
from colloid.rollout.scopes import RequestScope, outside_scopes
from colloid.rollout.staleness import Versions


@dataclass(frozen=True)
class EvalSet:
    """One evaluation set."""

    dataset: PromptDataset
    config: EvalDatasetConfig

    @property
    def name(self) -> str:
        """Of its curve."""
        return self.config.name

    @property
    def metadata(self) -> dict[str, Any]:
        """What goes before the metadata of its rows: a reward of its own, and the overrides."""
        rm_type = self.config.rm_type
        return {**({} if rm_type is None else {"rm_type": rm_type}), **self.config.metadata_overrides}


@dataclass(frozen=True)
class RolloutContext:
    """One manager's shared parts."""

    args: Any
    client: EngineClient
    tokenizer: Any
    grader: Grader
    eval_sets: list[EvalSet] = field(default_factory=list)
    eval_graders: dict[str, Grader] = field(default_factory=dict)
    """Of evaluation sets that have a reward of their own, by their names."""
    end_ids: list[int] = field(default_factory=list)
    """Tokens that end generation, as the model's directory says."""
    loop: asyncio.AbstractEventLoop | None = None
    """In which the client works."""
    versions: Versions = field(default_factory=Versions)
    policy: str = DEFAULT_NAME
    """The name of the model that is trained."""
    frozen_clients: Mapping[str, EngineClient] = field(default_factory=dict)
    """One a frozen model, by its name."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What a rollout function keeps between rollouts; each has an `async close()`, called when the run ends, and may
    have a `weights_updated()`, called when the engines hold a newer version."""

    def runner(
        self,
        scope: RequestScope,
        sampling: SamplingOptions,
        rollout_id: int,
        *,
        evaluation: bool = False,
        reward_key: str | None = None,
        grader: Grader | None = None,
        custom_generate: str | None = None,
    ) -> GroupRunner:
        """A runner of this manager's, for one rollout or one evaluation set.

        Args:
            grader, custom_generate: None: the run's.
        """
        return GroupRunner(
            self.client,
            self.tokenizer,
            grader or self.grader,
            sampling,
            scope,
            rollout_id=rollout_id,
            custom_generate=custom_generate or self.args.custom_generate_function_path,
            load_generate=self._load_generate,
            evaluation=evaluation,
            reward_key=reward_key,
            end_ids=self.end_ids,
            partial=PartialOptions() if evaluation else partial_options(self.args),
            sample_hooks=load_sample_hooks(self.args),
        )

    def _load_generate(self, path: str) -> GenerateFunction:
        from colloid.hooks import bind, load_hook

        hook = load_hook(path, "custom_generate")
        # A file that calls it without an import means this one.
        getattr(inspect.unwrap(hook.target), "__globals__", {}).setdefault("generate_single", generate_single)
        return bind(hook, self.args)


WORKER_ATTEMPTS = 8
"""Of a request from a reward's worker, a minute in all: an engine that was lost may be replaced meanwhile."""

_CONTEXT: contextvars.ContextVar[RolloutContext | None] = contextvars.ContextVar("colloid_rollout", default=None)


@contextmanager
def use_context(context: RolloutContext) -> Iterator[None]:
    """Tasks started inside see `context`, and open sessions of agents in it."""
    token = _CONTEXT.set(context)
    try:
        with use_sessions(partial(open_session, context)):
            yield
    finally:
        _CONTEXT.reset(token)


def current_context() -> RolloutContext:
    """The context of the running rollout.

    Raises:
        HookError: there is none.
    """
    context = _CONTEXT.get()
    if context is None:
        raise HookError(
            "colloid.rollout.post and its like work only inside a rollout, and in the worker processes of rewards"
        )
    return context


async def post(url: str, payload: dict[str, Any]) -> dict[str, Any]:
    """POSTs JSON to a server of this run (a model's router, an engine) with its key, and returns the JSON answer.

    Works in a rollout, and in a reward's worker process. A generation request inside a generate function gets the
    sampling seed of its sample and turn.
    """
    seed = next_turn_seed() if url.rstrip("/").endswith("/generate") else None
    if seed is not None:
        payload = {**payload, "sampling_params": {**(payload.get("sampling_params") or {}), "sampling_seed": seed}}
    context = _CONTEXT.get()
    client = _of_url(url, _worker_clients() if context is None else [*context.frozen_clients.values(), context.client])
    if context is not None and client is context.client:
        return await client.post(url, payload)
    with outside_scopes():  # a rollout that is aborted ends its requests at the policy's engines alone
        return await client.post(url, payload)


def get_model_url(args: Any = None, model_name: str = "default", endpoint: str = "/generate") -> str:
    """The address of `endpoint` at the router that serves a model.

    Works in a rollout, and in a reward's worker process.

    Args:
        args: those that the hook was given. None: the run's.
        model_name: as in `--sglang-config`; `default`, `actor` and `policy` are the policy, by whatever name.

    Raises:
        HookError: there is no such model; names those that there are.
    """
    context = _CONTEXT.get()
    if context is not None:  # of now: a router that was lost may be elsewhere
        clients = {context.policy: context.client, **context.frozen_clients}
        return model_url({name: client.router_url for name, client in clients.items()}, model_name, endpoint)
    if args is None:
        args = SHARED["args"] if "args" in SHARED else current_context().args
    return model_url(router_urls(args), model_name, endpoint)


def _worker_clients() -> list[EngineClient]:
    """In a reward's worker process: a client for each model, the policy's last."""
    if "clients" not in SHARED:
        args = SHARED.get("args")
        urls = router_urls(args)
        if not urls:
            current_context()  # raises
        options = {"api_key": args.rollout_api_key, "max_attempts": WORKER_ATTEMPTS}
        SHARED["clients"] = [EngineClient(url, [], **options) for url in reversed(urls.values())]
    return SHARED["clients"]


def _of_url(url: str, clients: Sequence[EngineClient]) -> EngineClient:
    """The one whose router the URL is of, else the last."""
    return next((client for client in clients if url.startswith(f"{client.router_url}/")), clients[-1])
