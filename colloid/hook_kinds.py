"""The kinds of functions that users may bring: their options, canonical names and signatures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HookKind:
    """One row.

    Attributes:
        option: the option that names the hook.
        names: what the object is called in a file of its own, best first.
        forms: positional parameters of each form, best first.
        is_class: a class is expected; its forms are those of its constructor.
        runs: "async": a coroutine function (or, in a thread, a plain one); "sync": a plain function; "both".
        methods: what a class must have.
        class_methods: what makes a class one of the forms, beside functions.
        keywords: a function with a parameter of one of these names is called by keywords alone.
    """

    option: str
    names: tuple[str, ...]
    forms: tuple[tuple[str, ...], ...]
    is_class: bool = False
    runs: str = "sync"
    methods: tuple[str, ...] = ()
    class_methods: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _forms(*forms: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(form.split()) for form in forms)


KINDS: dict[str, HookKind] = {
    "rollout_function": HookKind(
        "--rollout-function-path",
        _names("generate_rollout rollout_function"),
        _forms("args rollout_id data_source"),
        runs="both",
    ),
    "eval_function": HookKind(
        "--eval-function-path",
        _names("eval_rollout eval_function generate_rollout"),
        _forms("args rollout_id data_source"),
        runs="both",
    ),
    "custom_generate": HookKind(
        "--custom-generate-function-path",
        _names("custom_generate generate"),
        _forms("args sample sampling_params", "args samples"),
        runs="async",
    ),
    "custom_rm": HookKind(
        "--custom-rm-path",
        _names("CustomRewardModel reward_func custom_rm"),
        _forms("args sample", "args samples", "prompts responses"),
        runs="both",
        class_methods=("compute_reward",),
        keywords=("responses", "completions"),
    ),
    "custom_reward_post_process": HookKind(
        "--custom-reward-post-process-path", _names("custom_reward_post_process post_process"), _forms("args samples")
    ),
    "custom_convert_samples": HookKind(
        "--custom-convert-samples-to-train-data-path",
        _names("custom_convert_samples_to_train_data convert_samples_to_train_data"),
        _forms("args samples"),
    ),
    "data_source": HookKind(
        "--data-source-path",
        _names("CustomDataSource DataSource"),
        _forms("args", ""),
        is_class=True,
        methods=("get_samples",),
    ),
    "buffer_filter": HookKind(
        "--buffer-filter-path", _names("buffer_filter"), _forms("args rollout_id buffer num_samples")
    ),
    "dynamic_filter": HookKind(
        "--dynamic-sampling-filter-path", _names("dynamic_sampling_filter dynamic_filter"), _forms("args samples")
    ),
    "rollout_sample_filter": HookKind(
        "--rollout-sample-filter-path", _names("rollout_sample_filter sample_filter"), _forms("args data")
    ),
    "rollout_all_samples": HookKind(
        "--rollout-all-samples-process-path",
        _names("rollout_all_samples_process process_all_samples"),
        _forms("args all_samples data_source"),
    ),
    "rollout_sample_hook": HookKind(
        "--rollout-sample-hook-path", _names("rollout_sample_hook sample_hook"), _forms("args sample"), runs="both"
    ),
    "rollout_data_postprocess": HookKind(
        "--rollout-data-postprocess-path",
        _names("rollout_data_postprocess postprocess"),
        _forms("args rollout_id rollout_data"),
    ),
    "rollout_log": HookKind(
        "--custom-rollout-log-function-path",
        _names("custom_rollout_log log_rollout_data"),
        _forms("rollout_id args samples extra_metrics rollout_time"),
    ),
    "eval_rollout_log": HookKind(
        "--custom-eval-rollout-log-function-path",
        _names("custom_eval_rollout_log log_eval_rollout_data"),
        _forms("rollout_id args data extra_metrics"),
    ),
    "custom_loss": HookKind(
        "--custom-loss-function-path",
        _names("custom_loss loss_function"),
        _forms("args batch logits sum_of_sample_mean"),
    ),
    "custom_advantage": HookKind(
        "--custom-advantage-function-path", _names("custom_advantage advantage_function"), _forms("args rollout_data")
    ),
    "custom_tis": HookKind("--custom-tis-function-path", _names("custom_tis tis_function"), _forms("args")),
    "pg_loss_reducer": HookKind(
        "--custom-pg-loss-reducer-function-path",
        _names("custom_pg_loss_reducer pg_loss_reducer"),
        _forms("total_lengths response_lengths loss_masks calculate_per_token_loss"),
    ),
    "model_provider": HookKind(
        "--custom-model-provider-path",
        _names("custom_model_provider model_provider"),
        _forms("pre_process post_process"),
    ),
    "megatron_init": HookKind("--custom-megatron-init-path", _names("custom_megatron_init"), _forms("args")),
    "before_log_prob": HookKind(
        "--custom-megatron-before-log-prob-hook-path", _names("before_log_prob"), _forms("args model store_prefix")
    ),
    "before_train_step": HookKind(
        "--custom-megatron-before-train-step-hook-path",
        _names("before_train_step"),
        _forms("args rollout_id step_id model optimizer opt_param_scheduler"),
    ),
    "update_weight_post_write": HookKind(
        "--custom-update-weight-post-write-path",
        _names("post_write"),
        _forms("args version_dir rollout_engines"),
    ),
}
"""Kind -> row. The option of each is in `--help` under "hooks"."""
