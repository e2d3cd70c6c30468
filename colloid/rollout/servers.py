"""The models behind engines: the policy, and frozen ones, each a fleet with a router of its own.

    trainer ──weights──► engines of the policy ◄── router ◄── rollout
                         engines of a frozen model ◄── its router ◄── hooks that ask for it (`get_model_url`)

The trainer knows the policy's engines alone, so nothing else ever changes its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from colloid.config.eval_config import has_trainer
from colloid.config.external import is_external
from colloid.config.placement import Place, Placement, places_of_model
from colloid.config.served_models import (
    DECODE,
    PREFILL,
    ServedModel,
    ServerGroup,
    added_teacher,
    policy_model,
    served_models,
)
from colloid.config.sglang import EngineKind, engine_options, router_options
from colloid.config.sglang_installed import find_python
from colloid.engines.addresses import LOOPBACK, address_towards, lasting_port
from colloid.engines.fleet import Fleet, FleetConfig
from colloid.engines.launch import EngineConfig, WorkerRole
from colloid.engines.router import RouterConfig
from colloid.models.hf import find_model
from colloid.rollout.client import EngineClient
from colloid.rollout.engine_pool import NO_ENGINE_DEADLINE, EnginePool, external_of, tolerance_of

MakeFleet = Callable[[FleetConfig], Fleet]


class Servers:
    """The fleets of a run, each as a pool, by the names of their models. Used from one event loop.

    Args:
        placement: where the engines are to be; without it all are here, on the CPU.
    """

    def __init__(self, args: Any, api_key: str, make_fleet: MakeFleet = Fleet, placement: Placement | None = None):
        self._api_key, self._per_engine = api_key, args.sglang_server_concurrency
        self.policy_name = policy_model(args).name
        self.pools = {
            model.name: EnginePool(make_fleet(fleet_config(args, api_key, model, placement)), self._per_engine)
            for model in served_models(args)
            if model.num_engines or _is_external(args, model)
        }
        self._paired = {model.name for model in served_models(args) if model.disaggregated}

    @property
    def policy(self) -> EnginePool:
        """That of the model which is trained."""
        return self.pools[self.policy_name]

    @property
    def frozen(self) -> dict[str, EnginePool]:
        """All others."""
        return {name: pool for name, pool in self.pools.items() if name != self.policy_name}

    @property
    def pids(self) -> list[int]:
        """The processes of all fleets, the policy's first."""
        return [pid for pool in (self.policy, *self.frozen.values()) for pid in pool.fleet.pids]

    def start(self) -> None:
        """Returns when all models are served; they load side by side. May be called in any thread.

        Raises:
            EngineError: see `Fleet.start`. The others are stopped.
        """
        with ThreadPoolExecutor(len(self.pools), thread_name_prefix="fleet") as threads:
            starting = [threads.submit(pool.fleet.start) for pool in self.pools.values()]
            try:
                for started in as_completed(starting):
                    started.result()
            except BaseException:
                self.stop()  # what still loads ends with it, and nothing has to wait for it
                raise

    def frozen_clients(self) -> dict[str, EngineClient]:
        """A client for each frozen model, which follows its fleet."""
        clients = {}
        for name, pool in self.frozen.items():
            urls = [engine.url for engine in pool.fleet.addresses]
            client = EngineClient(
                *(pool.fleet.router_url, urls),
                api_key=self._api_key,
                max_connections=self._per_engine * len(urls),
                no_engine_deadline=NO_ENGINE_DEADLINE,
                through_router=name in self._paired,
                examine=pool.examine,
            )
            pool.attach(client)
            clients[name] = client
        return clients

    async def or_failure(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What `work` returns.

        Raises:
            EngineError: a fleet cannot go on, before it did; it is cancelled.
        """
        for pool in self.pools.values():
            work = pool.or_failure(work)
        return await work

    async def metrics(self) -> dict[str, float]:
        """The policy's, see `EnginePool.metrics`, and those of a frozen model as `engine/<its name>/…`."""
        found = await self.policy.metrics()
        for name, pool in self.frozen.items():
            of_model = await pool.metrics()
            found |= {f"engine/{name}/{key.removeprefix('engine/')}": value for key, value in of_model.items()}
        return found

    def check(self) -> None:
        """Raises `EngineError` where an engine or a router has ended."""
        for pool in self.pools.values():
            pool.fleet.check()

    def stop(self) -> None:
        """Ends all routers and engines; no client follows them any more."""
        for pool in self.pools.values():
            pool.detach()
            pool.fleet.stop()


def fleet_config(
    args: Any, api_key: str, model: ServedModel | None = None, placement: Placement | None = None
) -> FleetConfig:
    """The engines and the router of a model; None: of the policy."""
    model = model or policy_model(args)
    groups = [group for group in model.groups for _ in range(group.num_engines)]
    places = _places(args, placement, model) if placement else ((),) * len(groups)
    engines = [_engine_config(args, api_key, model, group, place) for group, place in zip(groups, places, strict=True)]
    of_policy = bool(model.update_weights)
    return FleetConfig(
        tuple(engines),
        _router_config(args, model),
        api_key=api_key,
        log_dir=_log_dir(args, model),
        external=external_of(args) if of_policy else None,
        tolerance=tolerance_of(args),
        gets_weights=of_policy and has_trainer(args),
    )


def _places(args: Any, placement: Placement, model: ServedModel) -> tuple[Place, ...]:
    return placement.frozen if model == added_teacher(args) else places_of_model(args, placement, model.name)


def _is_external(args: Any, model: ServedModel) -> bool:
    return bool(model.update_weights) and is_external(args)


def _log_dir(args: Any, model: ServedModel) -> Path:
    directory = Path(args.run_dir) / "engines"
    return directory if model.update_weights else directory / model.name


def _engine_config(args: Any, api_key: str, model: ServedModel, group: ServerGroup, place: Place) -> EngineConfig:
    sglang = args.rollout_engine == "sglang"
    of_policy = bool(model.update_weights)
    options = engine_options(args, EngineKind(group.num_gpus_per_engine, group.overrides, of_policy))
    # A router that runs already may be on another machine, and has to reach the engines.
    host = address_towards(args.sglang_router_ip or LOOPBACK) if of_policy else LOOPBACK
    bootstrap_port = None
    if group.worker_type in (PREFILL, DECODE):
        options["disaggregation-mode"] = group.worker_type
    if group.worker_type == PREFILL:
        options["disaggregation-bootstrap-port"] = bootstrap_port = lasting_port(host)
    return EngineConfig(
        model_path=_model_path(args, model),
        log_dir=_log_dir(args, model),
        api_key=api_key,
        host=host,
        kind=args.rollout_engine,
        options=options,
        python=find_python(args) if sglang else None,
        gpus=place[0].slots if sglang and args.device == "cuda" and place else None,
        place=place,
        role=WorkerRole(group.worker_type, bootstrap_port),
    )


def _model_path(args: Any, model: ServedModel) -> str:
    if model.model_path is not None:
        return find_model(model.model_path) or model.model_path
    # Where no trainer sends its weights, the engines load those that it would start with.
    return args.hf_checkpoint if has_trainer(args) else args.init_checkpoint


def _router_config(args: Any, model: ServedModel) -> RouterConfig:
    options = router_options(args)
    if model.disaggregated:
        options["pd_disaggregation"] = True
    if not model.update_weights:  # a port that was asked for is the policy's router's
        options.pop("prometheus_port", None)
        return RouterConfig(kind=args.rollout_router, options=options)
    return RouterConfig(
        kind=args.rollout_router,
        port=args.sglang_router_port or 0,
        options=options,
        url=f"http://{args.sglang_router_ip}:{args.sglang_router_port}" if args.sglang_router_ip else None,
    )
