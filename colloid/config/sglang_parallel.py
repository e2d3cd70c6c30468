"""How an SGLang engine divides its `--rollout-num-gpus-per-engine` GPUs: what does not divide is an error here, with
the equation; SGLang would say so minutes later.

SGLang's `--tp-size` counts all ranks of an engine. Attention data parallelism (`--attn-dp-size N`, or by its older name
`--dp-size N --enable-dp-attention`) and expert parallelism divide these same ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from colloid.config.args import Args

Rule = Callable[[Args], "str | None"]


def attention_groups(args: Args) -> tuple[int, str]:
    """Into how many groups attention is divided, and the option that says so."""
    if args.sglang_attn_dp_size > 1 or not args.sglang_enable_dp_attention:
        return args.sglang_attn_dp_size, "--sglang-attn-dp-size"
    return args.sglang_dp_size, "--sglang-dp-size"


def _replicas(args: Args) -> str | None:
    size, groups = args.sglang_dp_size, args.sglang_attn_dp_size
    if size == 1:
        return None
    if groups > 1:
        return f"--sglang-dp-size {size} and --sglang-attn-dp-size {groups} say the same of attention: leave one out"
    if not args.sglang_enable_dp_attention:
        return (
            f"--sglang-dp-size {size} makes {size} copies of the model in one engine, and SGLang then takes no weight "
            f"updates: for copies lower --rollout-num-gpus-per-engine {args.rollout_num_gpus_per_engine}, which makes "
            "more engines; for attention in data-parallel groups add --sglang-enable-dp-attention"
        )
    return None


def _pipeline(args: Args) -> str | None:
    if args.sglang_pp_size > 1:
        return (
            f"--sglang-pp-size {args.sglang_pp_size} is not supported yet: weight updates reach the ranks of one "
            "pipeline stage. Leave it out; an engine's GPUs are tensor-parallel, over several nodes too"
        )
    return None


def _attention(args: Args) -> str | None:
    (groups, option), ranks = attention_groups(args), args.rollout_num_gpus_per_engine
    context = args.sglang_attn_cp_size
    if ranks % (groups * context):
        product = f"{groups} × --sglang-attn-cp-size {context} = {groups * context}" if context > 1 else str(groups)
        return f"--rollout-num-gpus-per-engine {ranks} is no multiple of {option} {product}"
    heads, each = args.num_attention_heads, ranks // (groups * context)
    if heads and heads % each:
        return (
            f"the model's {heads} attention heads cannot be divided among {ranks} / {groups * context} = {each} ranks "
            f"(--rollout-num-gpus-per-engine {ranks}, {option} {groups})"
        )
    return None


def _experts(args: Args) -> str | None:
    size, copies, ranks = args.sglang_ep_size, args.sglang_moe_dp_size, args.rollout_num_gpus_per_engine
    if size == copies == 1:
        return None
    if args.hf_config and not args.num_experts:
        return f"--sglang-ep-size {size}, --sglang-moe-dp-size {copies}: the model has no experts"
    if ranks % (size * copies):
        product = f"{size} × --sglang-moe-dp-size {copies} = {size * copies}" if copies > 1 else str(size)
        return f"--rollout-num-gpus-per-engine {ranks} is no multiple of --sglang-ep-size {product}"
    if size > 1 and copies > 1 and size * copies != ranks:
        return (
            f"--sglang-ep-size {size} × --sglang-moe-dp-size {copies} = {size * copies} must be "
            f"--rollout-num-gpus-per-engine {ranks} where both are above 1"
        )
    experts, more = args.num_experts, args.sglang_ep_num_redundant_experts
    if experts and (experts + more) % size:
        return (
            f"{experts} experts + {more} of --sglang-ep-num-redundant-experts = {experts + more} cannot be divided by "
            f"--sglang-ep-size {size}"
        )
    return None


def _of_sglang(rule: Rule) -> Rule:
    return lambda args: rule(args) if args.rollout_engine == "sglang" else None


RULES: tuple[Rule, ...] = tuple(map(_of_sglang, (_replicas, _pipeline, _attention, _experts)))
