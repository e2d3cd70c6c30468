"""Options of services outside the run: the server that makes rollouts (`--rollout-buffer-url`), and a proxy."""

from __future__ import annotations

from collections.abc import Callable

from colloid.config.args import Args
from colloid.config.tables import tables

Rule = Callable[[Args], "str | None"]

ROLLOUT_FUNCTION = "colloid.rollout.trajectories.generate_rollout"
"""Fetches what such a server has made."""
ALSO = "slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout"
"""What commands of this field call it."""

_OF_BUFFER = ("fetch_trajectory_retry_times", "min_batch_collection_ratio", "rollout_task_type")
_OF_GENERATION = (
    "data_source_path",
    "custom_generate_function_path",
    "dynamic_sampling_filter_path",
    "buffer_filter_path",
    "partial_rollout",
    "custom_rm_path",
    "group_rm",
    "rollout_sample_hook_path",
)
_OF_ENGINE_LOG_PROBS = (
    "use_rollout_logprobs",
    "use_tis",
    "rs_lower_bound",
    "rs_upper_bound",
    "rs_veto_threshold",
    "use_rollout_routing_replay",
)


def resolve_services(args: Args) -> None:
    """Chooses the rollout function."""
    if args.rollout_function_path in (ALSO, ROLLOUT_FUNCTION.rpartition(".")[0]):
        args.rollout_function_path = ROLLOUT_FUNCTION
    if args.rollout_buffer_url is not None and "rollout_function_path" not in args.given:
        args.rollout_function_path = ROLLOUT_FUNCTION


def takes_trajectories(args: Args) -> bool:
    """Whether a server outside makes the rollouts, and rewards them."""
    return args.rollout_function_path == ROLLOUT_FUNCTION


def _buffer(args: Args) -> str | None:
    url = args.rollout_buffer_url
    if url is None:
        if takes_trajectories(args):
            return f"--rollout-function-path {args.rollout_function_path} needs --rollout-buffer-url: whose rollouts"
        found = _given(args, _OF_BUFFER)
        return f"{found}: no server is asked for rollouts without --rollout-buffer-url" if found else None
    if not url.startswith(("http://", "https://")):
        return f"--rollout-buffer-url {url}: it must begin with http:// or https://"
    return None


def _together(args: Args) -> str | None:
    if not takes_trajectories(args):
        return None
    if found := _given(args, _OF_GENERATION):
        return f"{found}: with --rollout-buffer-url the server there generates, rewards and filters; leave it out"
    if found := _given(args, _OF_ENGINE_LOG_PROBS):
        return f"{found}: trajectories of --rollout-buffer-url are messages, without the engines' log-probs or experts"
    if args.deterministic:
        return "--deterministic: which trajectories --rollout-buffer-url has ready depends on what finishes first"
    if args.loss_type == "sft_loss":
        return "--rollout-buffer-url makes rollouts to learn from by their rewards, and --loss-type sft_loss has none"
    if args.prompt_data is not None and len(args.prompt_data) != 1:
        return f"--prompt-data {' '.join(args.prompt_data)}: the server at --rollout-buffer-url reads one file"
    if args.prompt_data is not None and "@[" in args.prompt_data[0]:
        return f"--prompt-data {args.prompt_data[0]}: the server at --rollout-buffer-url reads a file as a whole"
    return None


def _proxy(args: Args) -> str | None:
    proxy = args.http_proxy
    if proxy is None:
        return None
    if not proxy.startswith("http://"):
        return f"--http-proxy {proxy}: it must begin with http://"
    if args.rm_url is None and args.rollout_buffer_url is None:
        return (
            f"--http-proxy {proxy}: no request leaves the run without --rm-url or --rollout-buffer-url; its own "
            "engines are asked directly"
        )
    return None


def _given(args: Args, dests: tuple[str, ...]) -> str:
    return ", ".join(tables().by_dest[dest][0].flag for dest in dests if dest in args.given and getattr(args, dest))


RULES: tuple[Rule, ...] = (_buffer, _together, _proxy)
