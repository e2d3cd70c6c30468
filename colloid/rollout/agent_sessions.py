"""Opens the sessions of agents that bring their own loop: colloid/agents knows the APIs, and this the rollout.

A session samples as the generate function that opened it does: in its rollout's scope (an abort ends it), with the
run's sampling parameters and limits, and seeds that follow from run, sample and context.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import xxhash

from colloid.agents.chat import ChatRequest, ContextFull, RequestError, Sampled
from colloid.agents.endpoint import AgentEndpoint
from colloid.agents.processes import AgentProcesses
from colloid.agents.sessions import Session
from colloid.data.sample import Sample, Status
from colloid.errors import HookError
from colloid.rollout.client import EngineClient, RequestAborted, RequestRefused
from colloid.rollout.conversation import Recordings, active_recordings
from colloid.rollout.generate_sample import record_answer, routing_of
from colloid.rollout.options import SamplingOptions, request_seed

logger = logging.getLogger(__name__)

KEPT = "agents"
"""In `RolloutContext.kept`: the run's `AgentServices`."""


class AgentServices:
    """What the sessions of a run share."""

    def __init__(self, host: str):
        self.endpoint = AgentEndpoint(host)
        self.processes = AgentProcesses()
        self.unused: set[str] = set()
        """Sampling parameters that agents have asked for, and that are not theirs to set."""

    async def close(self) -> None:
        await self.endpoint.close()
        await self.processes.close()


class _Sampler:
    """Samples for one session."""

    def __init__(
        self,
        client: EngineClient,
        sampling: SamplingOptions,
        services: AgentServices,
        sample: Sample,
        recordings: Recordings,
        params: dict[str, Any] | None,
        client_sampling: bool,
    ):
        self._client, self._sampling, self._services = client, sampling, services
        self._index = sample.index or 0
        self._rollout_id = recordings.rollout_id
        self.number = 0
        """Of the session, among those of its sample."""
        given = dict(params or {})
        given.pop("sampling_seed", None)
        self._limit = given.pop("max_new_tokens", 0) or sampling.max_response_len
        self._params = {**sampling.params, **given}
        self._client_sampling = client_sampling

    async def __call__(self, ids: list[int], request: ChatRequest, draw: int) -> Sampled:
        """
        Raises:
            RequestError: the context is full, or the engine refuses the request.
            RequestAborted: the rollout was.
        """
        limit, context = min(self._limit, request.max_tokens or self._limit), self._sampling.max_context_len
        if context is not None:
            limit = min(limit, context - len(ids))
            if limit <= 0:
                raise ContextFull(len(ids), context)
        params = self._requested(request) | {"max_new_tokens": limit, "sampling_seed": self._seed(draw)}
        name = f"a turn of the agent of sample {self._index}"
        payload = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
        routing = self._sampling.routing
        if routing is not None:
            payload["return_routed_experts"] = True
        try:
            answer = await self._client.generate(payload, name=name)
        except RequestRefused as error:
            raise RequestError(str(error)) from error
        sampled = Sample(index=self._index)
        record_answer(sampled, answer)
        if sampled.status is Status.ABORTED:
            raise RequestAborted(f"{name} was aborted")
        stop = answer["meta_info"]["finish_reason"].get("matched")
        whole = len(ids) + len(sampled.tokens)
        return Sampled(
            sampled.tokens,
            sampled.rollout_log_probs,
            sampled.weight_versions,
            truncated=sampled.status is Status.TRUNCATED,
            stop=stop if isinstance(stop, str) else None,
            experts=routing_of(answer, whole, routing, self._index) if routing and sampled.tokens else None,
        )

    def _requested(self, request: ChatRequest) -> dict[str, Any]:
        params = dict(self._params)
        if request.stop:
            params["stop"] = [*(params.get("stop") or []), *request.stop]
        if self._client_sampling:
            return params | request.sampling
        other = {name: value for name, value in request.sampling.items() if params.get(name) != value}
        for name in sorted(set(other) - self._services.unused):
            logger.warning(
                "the agent of sample %s asks for %s %s: it is sampled with the run's, %s, as training takes it to be "
                "(see client_sampling in docs/agents.md)",
                *(self._index, name, other[name], params.get(name)),
            )
        self._services.unused |= set(other)
        return params

    def _seed(self, draw: int) -> int:
        turn = xxhash.xxh3_64_intdigest(f"{self.number}/{draw}".encode())
        return request_seed(self._sampling.seed, self._rollout_id, self._index, turn)


@asynccontextmanager
async def open_session(
    context: Any, args: Any, sample: Sample, sampling_params: dict[str, Any] | None, *, client_sampling: bool
) -> AsyncIterator[Session]:
    """A session for a sample of the running generate function; see `colloid.agents.session`.

    Args:
        context: the manager's `RolloutContext`.

    Raises:
        HookError: no generate function runs, or not in the manager's event loop, or not with this sample.
        EngineError: the engine failed meanwhile, or the rollout was aborted.
    """
    recordings = active_recordings()
    if recordings is None:
        raise HookError("colloid.agents.session works only inside the function of --custom-generate-function-path")
    if context.loop not in (None, asyncio.get_running_loop()):
        raise HookError("colloid.agents.session works only in the event loop that calls the generate function")
    renderer = recordings.renderer_of(sample)
    if KEPT not in context.kept:
        context.kept[KEPT] = AgentServices(args.agent_endpoint_host)
    services = context.kept[KEPT]
    await services.endpoint.start()
    sampler = _Sampler(
        *(context.client, recordings.sampling, services, sample, recordings),
        params=sampling_params,
        client_sampling=client_sampling,
    )
    template = getattr(context.tokenizer, "chat_template", None)
    template = template if isinstance(template, str) else None
    session = Session(sample, renderer, template, sampler, services.processes)
    sampler.number = recordings.add_session(session)
    with services.endpoint.serving(session):
        try:
            yield session
        except Exception as error:  # Whatever an agent raises where its session has failed.
            if session.failure not in (None, error):
                raise session.failure from error
            raise
        finally:
            await session.close()
    if session.failure is not None:
        raise session.failure
