"""What a rollout needs to know of the options, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import xxhash

from colloid.config.eval_config import EvalDatasetConfig
from colloid.data.opening import context_length
from colloid.data.routing import RoutingShape

MAX_DRAWS = 10
"""A rollout draws at most this many times its batch size before it gives up on its dynamic filter."""


@dataclass(frozen=True)
class SamplingOptions:
    """How responses are sampled."""

    params: dict[str, Any]
    """SGLang's sampling parameters, without `max_new_tokens` and `sampling_seed`, which differ between requests."""
    max_response_len: int
    max_context_len: int | None
    skip_special_tokens: bool
    seed: int
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    routing: RoutingShape | None = None
    """Where the engine is to say which experts it chose."""

    def request_params(
        self, length: int, rollout_id: int, sample_index: int, turn: int = 0, *, response_length: int = 0
    ) -> dict[str, Any]:
        """The sampling parameters of one request.

        Args:
            length: tokens that the sample has, prompt and response.
            response_length: those of them that were generated before; they count towards `max_response_len`.
        """
        limit = self.max_response_len - response_length
        if self.max_context_len is not None:
            limit = min(limit, self.max_context_len - length)
        limit = max(limit, 0)
        seed = request_seed(self.seed, rollout_id, sample_index, turn)
        return {**self.params, "max_new_tokens": limit, "sampling_seed": seed}


@dataclass(frozen=True)
class RolloutOptions:
    """How many groups, and in which order."""

    batch_size: int
    over_sampling_batch_size: int | None
    """Groups that are drawn at a time; None: as many as are missing."""
    deterministic: bool
    max_draws: int


@dataclass(frozen=True)
class PartialOptions:
    """Whether samples that were stopped half way go on in a later rollout."""

    enabled: bool = False
    mask_earlier: bool = False
    """Tokens that an unfinished group got in earlier rollouts have mask 0."""


def request_seed(seed: int, rollout_id: int, sample_index: int, turn: int = 0) -> int:
    """The sampling seed of one request, 0 <= seed < 2^31: a hash of what identifies it."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{rollout_id}/{sample_index}/{turn}".encode()) % 2**31


def training_sampling(args) -> SamplingOptions:
    """The sampling options of training rollouts."""
    return SamplingOptions(
        params=_params(args, args.rollout_temperature, args.rollout_top_p, args.rollout_top_k),
        max_response_len=args.rollout_max_response_len,
        max_context_len=context_length(args),
        skip_special_tokens=bool(args.rollout_skip_special_tokens),
        seed=args.rollout_seed,
        apply_chat_template_kwargs=args.apply_chat_template_kwargs or {},
        routing=routing_shape(args) if args.use_rollout_routing_replay else None,
    )


def routing_shape(args) -> RoutingShape:
    """Of the model's routers."""
    return RoutingShape(args.num_layers, args.moe_router_topk, args.num_experts)


def evaluation_sampling(args, config: EvalDatasetConfig) -> SamplingOptions:
    """The sampling options of an evaluation set."""
    params = _params(args, config.temperature, config.top_p, config.top_k)
    for name in ("stop", "stop_token_ids"):
        params.pop(name, None)
        if getattr(config, name):
            params[name] = list(getattr(config, name))
    if config.min_new_tokens:
        params["min_new_tokens"] = config.min_new_tokens
    limits = [limit for limit in (context_length(args), config.max_context_len) if limit]
    return SamplingOptions(
        params=params,
        max_response_len=config.max_response_len,
        max_context_len=min(limits, default=None),
        skip_special_tokens=bool(args.rollout_skip_special_tokens),
        seed=args.rollout_seed,
        apply_chat_template_kwargs=config.apply_chat_template_kwargs or {},
    )


def rollout_options(args) -> RolloutOptions:
    """The order and size of training rollouts."""
    over_sampling = args.over_sampling_batch_size if "over_sampling_batch_size" in args.given else None
    return RolloutOptions(
        batch_size=args.rollout_batch_size,
        over_sampling_batch_size=over_sampling,
        deterministic=bool(args.deterministic),
        max_draws=MAX_DRAWS * max(args.rollout_batch_size, over_sampling or 0),
    )


def partial_options(args) -> PartialOptions:
    """As `--partial-rollout` and `--mask-offpolicy-in-partial-rollout` say."""
    return PartialOptions(bool(args.partial_rollout), bool(args.mask_offpolicy_in_partial_rollout))


def _params(args, temperature: float, top_p: float, top_k: int) -> dict[str, Any]:
    params: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "skip_special_tokens": bool(args.rollout_skip_special_tokens),
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    if args.rollout_stop:
        params["stop"] = list(args.rollout_stop)
    if args.rollout_stop_token_ids:
        params["stop_token_ids"] = list(args.rollout_stop_token_ids)
    return params
