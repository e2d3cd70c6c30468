"""How SGLang engines divide their GPUs: what does not divide is an error here, with the equation; SGLang would say so
minutes later.

SGLang's `--tp-size` counts all ranks of an engine. Attention data parallelism (`--attn-dp-size N`, or by its older name
`--dp-size N --enable-dp-attention`) and expert parallelism divide these same ranks. The rules hold for the engines of
the policy: for each group of `--sglang-config` with the sizes that it has of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from colloid.config.args import Args
from colloid.config.served_models import ServerGroup, policy_model

Rule = Callable[[Args], "str | None"]


@dataclass(frozen=True)
class EngineSizes:
    """What the engines of one group are divided into."""

    args: Args
    group: ServerGroup
    place: str = ""
    """Where the group stands, to begin an error with."""

    def of(self, name: str) -> Any:
        """SGLang's option of that name: the group's own, else that of the command line."""
        return self.group.overrides.get(name, getattr(self.args, f"sglang_{name}"))

    def flag(self, name: str) -> str:
        """What the user writes for it."""
        return name if name in self.group.overrides else f"--sglang-{name.replace('_', '-')}"

    def said(self, name: str) -> str:
        """The same with its value."""
        return f"{self.flag(name)} {self.of(name)}"

    @property
    def ranks(self) -> int:
        return self.group.num_gpus_per_engine

    @property
    def said_ranks(self) -> str:
        return f"{'num_gpus_per_engine' if self.place else '--rollout-num-gpus-per-engine'} {self.ranks}"

    @property
    def attention(self) -> str:
        """The option that says into how many groups attention is divided."""
        return "attn_dp_size" if self.of("attn_dp_size") > 1 or not self.of("enable_dp_attention") else "dp_size"


SizesRule = Callable[[EngineSizes], "str | None"]


def _replicas(sizes: EngineSizes) -> str | None:
    size = sizes.of("dp_size")
    if size == 1:
        return None
    if sizes.of("attn_dp_size") > 1:
        return f"{sizes.said('dp_size')} and {sizes.said('attn_dp_size')} say the same of attention: leave one out"
    if not sizes.of("enable_dp_attention"):
        return (
            f"{sizes.said('dp_size')} makes {size} copies of the model in one engine, and SGLang then takes no weight "
            f"updates: for copies lower {sizes.said_ranks}, which makes more engines; for attention in data-parallel "
            "groups add --sglang-enable-dp-attention"
        )
    return None


def _pipeline(sizes: EngineSizes) -> str | None:
    if sizes.of("pp_size") > 1:
        return (
            f"{sizes.said('pp_size')} is not supported yet: weight updates reach the ranks of one pipeline stage. "
            "Leave it out; an engine's GPUs are tensor-parallel, over several nodes too"
        )
    return None


def _attention(sizes: EngineSizes) -> str | None:
    groups, said, ranks = sizes.of(sizes.attention), sizes.said(sizes.attention), sizes.ranks
    context = sizes.of("attn_cp_size")
    if ranks % (groups * context):
        product = f"{said} × {sizes.said('attn_cp_size')} = {groups * context}" if context > 1 else said
        return f"{sizes.said_ranks} is no multiple of {product}"
    heads, each = sizes.args.num_attention_heads, ranks // (groups * context)
    if heads and heads % each:
        return (
            f"the model's {heads} attention heads cannot be divided among {ranks} / {groups * context} = {each} ranks "
            f"({sizes.said_ranks}, {said})"
        )
    return None


def _experts(sizes: EngineSizes) -> str | None:
    size, copies, ranks = sizes.of("ep_size"), sizes.of("moe_dp_size"), sizes.ranks
    said, said_copies = sizes.said("ep_size"), sizes.said("moe_dp_size")
    if size == copies == 1:
        return None
    if sizes.args.hf_config and not sizes.args.num_experts:
        return f"{said}, {said_copies}: the model has no experts"
    if ranks % (size * copies):
        product = f"{said} × {said_copies} = {size * copies}" if copies > 1 else said
        return f"{sizes.said_ranks} is no multiple of {product}"
    if size > 1 and copies > 1 and size * copies != ranks:
        return f"{said} × {said_copies} = {size * copies} must be {sizes.said_ranks} where both are above 1"
    experts, more = sizes.args.num_experts, sizes.of("ep_num_redundant_experts")
    if experts and (experts + more) % size:
        sum_of = f"{experts} experts + {more} of {sizes.flag('ep_num_redundant_experts')} = {experts + more}"
        return f"{sum_of} cannot be divided by {said}"
    return None


def _groups(args: Args) -> Iterator[EngineSizes]:
    """Those of the policy that start engines. (Engines of others were divided by who started them.)"""
    model = policy_model(args)
    for number, group in enumerate(model.groups):
        if group.num_engines:
            where = f"--sglang-config {args.sglang_config}: model {model.name!r}: server_groups[{number}]: "
            yield EngineSizes(args, group, where if args.sglang_config else "")


def _of_sglang(rule: SizesRule) -> Rule:
    def check(args: Args) -> str | None:
        if args.rollout_engine != "sglang":
            return None
        return next((f"{sizes.place}{found}" for sizes in _groups(args) if (found := rule(sizes))), None)

    return check


RULES: tuple[Rule, ...] = tuple(map(_of_sglang, (_replicas, _pipeline, _attention, _experts)))
