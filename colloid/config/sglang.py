"""Options that pass through to the engines (`--sglang-*`) and to the router (`--router-*`).

The tables are SGLang's and sglang-router's own. Values are checked here, so that a mistake is an error before anything
starts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from colloid.config import tsv
from colloid.config.option import FLAG, SWITCH, Option
from colloid.config.rundir import weights_places

if TYPE_CHECKING:
    from colloid.config.args import Args

EMBEDDED_USES = (
    "context_length",
    "dtype",
    "enable_deterministic_inference",
    "enable_fp32_lm_head",
    "enable_return_routed_experts",
    "log_level",
    "max_running_requests",
    "max_total_tokens",
    "mem_fraction_static",
    "random_seed",
    "served_model_name",
    "skip_tokenizer_init",
)
"""Options of SGLang that the embedded engine has too."""

SET_BY_COLLOID = {
    "sglang_model_path": "the model is --hf-checkpoint",
    "sglang_tokenizer_path": "the tokenizer is that of --hf-checkpoint",
    "sglang_host": "engines listen on 127.0.0.1",
    "sglang_port": "each engine's port is chosen by the system; the router's is --sglang-router-port",
    "sglang_api_key": "each run makes a key of its own",
    "sglang_admin_api_key": "each run makes a key of its own",
    "sglang_tp_size": "an engine has --rollout-num-gpus-per-engine devices",
    "sglang_nnodes": "an engine has --rollout-num-gpus-per-engine devices",
    "sglang_node_rank": "an engine has --rollout-num-gpus-per-engine devices",
    "sglang_dist_init_addr": "engines find each other by themselves",
    "sglang_nccl_port": "ports are chosen by the system",
    "sglang_base_gpu_id": "devices are placed by --rollout-num-gpus and --colocate",
    "sglang_gpu_id_step": "devices are placed by --rollout-num-gpus and --colocate",
    "sglang_device": "devices are chosen by --device",
    "sglang_weight_version": "the weight version is the number of weight updates",
    "sglang_disaggregation_mode": "it follows from the worker_type of the groups in --sglang-config",
    "sglang_disaggregation_bootstrap_port": "ports are chosen by the run",
    "router_host": "the router listens on 127.0.0.1",
    "router_port": "the router's port is --sglang-router-port",
    "router_worker_urls": "the run's own engines register themselves",
    "router_api_key": "each run makes a key of its own",
    "router_model_path": "the model is --hf-checkpoint",
    "router_tokenizer_path": "the tokenizer is that of --hf-checkpoint",
    "router_disable_circuit_breaker": "the router's circuit breaker is always off: the client alone repeats requests",
    **{
        f"router_cb_{name}": "the router's circuit breaker is always off: the client alone repeats requests"
        for name in ("failure_threshold", "success_threshold", "timeout_duration_secs", "window_duration_secs")
    },
    **{
        f"router_retry_{name}": "the router's own retries are always off: the client alone repeats requests, after an "
        "abort, so that none is generated twice"
        for name in ("max_retries", "initial_backoff_ms", "max_backoff_ms", "backoff_multiplier", "jitter_factor")
    },
}
"""Options that cannot be given, with the reason."""

_OTHER_ENGINES = "the run's own engines register themselves; --rollout-external-engine-addrs names others"
_GROUPS = "which engines prefill and which decode follows from --sglang-config"
_ACCESS = "the router serves this run alone, and asks for the run's key"

ROUTER_REFUSED = {
    **dict.fromkeys(
        (
            "router_prefill",
            "router_decode",
            "router_pd_disaggregation",
        ),
        _GROUPS,
    ),
    **dict.fromkeys(
        (
            "router_service_discovery",
            "router_selector",
            "router_service_discovery_port",
            "router_service_discovery_namespace",
            "router_prefill_selector",
            "router_decode_selector",
        ),
        _OTHER_ENGINES,
    ),
    **dict.fromkeys(
        (
            "router_control_plane_api_keys",
            "router_tls_cert_path",
            "router_tls_key_path",
            "router_jwt_role_mapping",
        ),
        _ACCESS,
    ),
    "router_dp_aware": "an engine with data-parallel attention spreads its requests over its ranks itself",
    "router_enable_igw": "a router serves the engines of one model",
    "router_mini_lb": "it is a small router in Python for trying things out, which balances at random",
    "router_backend": "all engines speak SGLang's API",
}
"""Options that change which engines there are, or how they are reached, with the reason why they are refused."""

OF_POLICY = ("context_length", "served_model_name", "skip_tokenizer_init")
"""Options of SGLang that say something of the policy's model: given on the command line they are not for others."""

EMBEDDED_DTYPES = {"auto": None, "float": "float32", "float32": "float32", "bfloat16": "bfloat16"}
"""SGLang's name of a precision -> the embedded engine's; None: the trainer's."""

_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
_LOWER = {"sglang_log_level": _LOG_LEVELS, "sglang_log_level_http": _LOG_LEVELS, "router_log_level": ()}
_BOUNDS: dict[str, dict[str, float]] = {
    "sglang_mem_fraction_static": {"low": 0.001, "high": 1},
    "sglang_context_length": {"low": 1},
    "sglang_max_running_requests": {"low": 1},
    "sglang_max_total_tokens": {"low": 1},
}


def sglang_rows() -> list[Option]:
    """SGLang's options as rows, with the prefix `--sglang-`. (`--sglang-config` is not its `--config`.)"""
    return [_option(row, "sglang") for row in tsv.read("sglang") if row["flag"] != "--config"]


def rows_by_name() -> dict[str, Option]:
    """SGLang's options by every name that they have there (`tp_size`, `tensor_parallel_size`)."""
    prefix = "--sglang-"
    return {
        name.removeprefix(prefix).replace("-", "_"): row
        for row in sglang_rows()
        for name in row.names
        if name.startswith(prefix)
    }


def router_rows() -> list[Option]:
    """sglang-router's options as rows, with the prefix `--router-`."""
    return [_option(row, "router") for row in tsv.read("router")]


def _option(row: dict[str, str], category: str) -> Option:
    text = row["type_or_action"]
    negative = text == "BooleanOptional"
    names = [name for name in row["flag"].split("|") if not (negative and name.startswith("--no-"))]
    flag, *aliases = [name if name.startswith(f"--{category}-") else f"--{category}-{name[2:]}" for name in names]
    dest = flag[2:].replace("-", "_")
    kind = SWITCH if negative else FLAG if text.endswith(("StoreTrue", "StoreConst")) else _KINDS.get(text, "str")
    default = json.loads(row["default"]) if row["default"] else None
    choices: tuple = tuple(row["choices"].split(",")) if row["choices"] and kind != FLAG else ()
    if kind in ("int", "float"):
        choices = tuple(int(choice) for choice in choices)
    return Option(
        flag,
        kind,
        default,
        group=category,
        category=category,
        choices=_LOWER.get(dest) or choices,
        nargs=row["nargs"] if row["nargs"] != "1" else "",
        repeat=text == "Append",
        dest=dest,
        aliases=tuple(aliases),
        built=() if dest in ROUTER_REFUSED else None,
        refused=ROUTER_REFUSED.get(dest, ""),
        lower=dest in _LOWER,
        **_BOUNDS.get(dest, {}),
    )


_KINDS = {
    "int": "int",
    "float": "float",
    "human_readable_int": "size",
    "loads": "json",
    "json_list_type": "json",
}


def given(args: Args, category: str) -> dict[str, Any]:
    """The given options of `sglang` or `router`, by their name there (`mem_fraction_static`)."""
    prefix = f"{category}_"
    table = {option.dest for option in (sglang_rows() if category == "sglang" else router_rows())}
    return {dest.removeprefix(prefix): getattr(args, dest) for dest in sorted(args.given & table)}


@dataclass(frozen=True)
class EngineKind:
    """What the engines of one group have of their own.

    Attributes:
        num_gpus: device slots of one engine.
        overrides: SGLang's options by name; they go before those of the command line.
        of_policy: whether it serves the policy; others have none of its `OF_POLICY`.
    """

    num_gpus: int
    overrides: Mapping[str, Any] = field(default_factory=dict)
    of_policy: bool = True


def _chosen(args: Args, kind: EngineKind) -> dict[str, Any]:
    """SGLang's options for an engine, by name."""
    chosen = {name: value for name, value in given(args, "sglang").items() if kind.of_policy or name not in OF_POLICY}
    if args.deterministic:
        chosen["enable_deterministic_inference"] = True
    if args.use_rollout_routing_replay and kind.of_policy:
        chosen["enable_return_routed_experts"] = True
    if args.offload_rollout and kind.of_policy:
        chosen["enable_memory_saver"] = True
    return {**chosen, **kind.overrides}


def embedded_options(args: Args, kind: EngineKind | None = None) -> dict[str, Any]:
    """Command-line options of the embedded engine, without the dashes (`{"dtype": "float32"}`); True: no value.

    Args:
        kind: None: of the policy, without a file of `--sglang-config`.
    """
    chosen = {name: value for name, value in _chosen(args, kind or EngineKind(1)).items() if name in EMBEDDED_USES}
    chosen["dtype"] = EMBEDDED_DTYPES[chosen.get("dtype", "auto")] or args.params_dtype
    if chosen.get("log_level") == "critical":
        chosen["log_level"] = "error"
    chosen["weights_dir"] = os.pathsep.join(weights_places(args)) or None
    return {name.replace("_", "-"): value for name, value in chosen.items() if value not in (None, False)}


def sglang_options(args: Args, kind: EngineKind | None = None) -> dict[str, Any]:
    """The same of SGLang's server."""
    kind = kind or EngineKind(args.rollout_num_gpus_per_engine)
    chosen: dict[str, Any] = {"dtype": args.params_dtype, "tp-size": kind.num_gpus}
    values = _chosen(args, kind)
    for row in sglang_rows():
        value = values.get(row.dest.removeprefix("sglang_"))
        if value is None or row.dest in SET_BY_COLLOID:
            continue
        name = row.flag.removeprefix("--sglang-")
        if row.kind == SWITCH and not value:
            chosen[f"no-{name}"] = True
        elif row.kind == "json":
            chosen[name] = json.dumps(value)
        elif value is not False:
            chosen[name] = value
    return chosen


def engine_options(args: Args, kind: EngineKind) -> dict[str, Any]:
    """Command-line options of an engine."""
    return sglang_options(args, kind) if args.rollout_engine == "sglang" else embedded_options(args, kind)


def router_options(args: Args) -> dict[str, Any]:
    """Fields of `sglang_router.RouterArgs` that the user gave."""
    renamed = {"tls_cert_path": "server_cert_path", "tls_key_path": "server_key_path"}
    return {
        renamed.get(name, name): value for name, value in given(args, "router").items() if name != "disable_retries"
    }


def unused_by_embedded(given_dests: frozenset[str]) -> list[str]:
    """Attributes of given `--sglang-*` options that the embedded engine has no use for."""
    used = {f"sglang_{name}" for name in EMBEDDED_USES} | SET_BY_COLLOID.keys()
    return sorted({option.dest for option in sglang_rows()} & given_dests - used)
