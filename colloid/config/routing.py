"""Rules on the replay of the experts that were chosen. Like those of `checks.py`, they change nothing."""

from __future__ import annotations

from collections.abc import Callable

from colloid.config.args import Args

Rule = Callable[[Args], "str | None"]

FLAGS = ("--use-routing-replay", "--use-rollout-routing-replay")


def _given(args: Args) -> str | None:
    """The option that asks for replay, if any."""
    return next((flag for flag in reversed(FLAGS) if getattr(args, flag[2:].replace("-", "_"))), None)


def _model(args: Args) -> str | None:
    flag = _given(args)
    if flag and not args.num_experts:
        return f"{flag} replays which experts the routers chose, and the model is dense: it has none. Leave it out"
    return None


def _loss(args: Args) -> str | None:
    flag = _given(args)
    if flag and args.loss_type == "sft_loss":
        return f"{flag} replays what was chosen for a sample, and --loss-type sft_loss samples nothing: leave it out"
    return None


def _nothing_noted(args: Args) -> str | None:
    if args.use_routing_replay and not args.use_rollout_routing_replay and not args.compute_advantages_and_returns:
        return (
            "--use-routing-replay replays the experts of the log-probs before the first step, and with "
            "--disable-compute-advantages-and-returns there are none. Take --use-rollout-routing-replay"
        )
    return None


def _fused(args: Args) -> str | None:
    flag = _given(args)
    if flag and args.moe_router_fusion and args.device != "cpu":
        return f"{flag} does not work with --moe-router-fusion, whose kernel chooses by itself: leave one out"
    return None


RULES: tuple[Rule, ...] = (_model, _loss, _nothing_noted, _fused)


def warnings(args: Args) -> list[str]:
    """What is allowed, but probably not meant."""
    if args.use_routing_replay and args.use_rollout_routing_replay:
        return [
            "--use-routing-replay has no effect with --use-rollout-routing-replay: the engine's experts are replayed"
        ]
    return []
