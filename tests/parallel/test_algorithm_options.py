"""Every option of estimator, loss and correction changes what is trained, from the samples to the weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from colloid.config.schema import loss
from tests.parallel.options_cases import train_with
from tests.parallel.ranks import run_ranks

pytestmark = pytest.mark.timeout(240)

HOOKS = """
def custom_tis(args, *, pg_loss, train_log_probs, rollout_log_probs, **kw):
    return pg_loss * 0.5, None, {"halved": 0.5}

def custom_advantage(args, rollout_data):
    rollout_data["advantages"] = [mask * 0.1 for mask in rollout_data["loss_masks"]]

def custom_loss(args, batch, logits, sum_of_sample_mean):
    return sum_of_sample_mean(logits.square().mean(1)), {}

def pg_loss_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda x: sum((part * mask).sum() * row for row, (part, mask) in
        enumerate(zip(x.split(response_lengths), loss_masks), 1))

def rollout_data_postprocess(args, rollout_id, rollout_data):
    rollout_data["loss_masks"] = [mask * (row % 2) for row, mask in enumerate(rollout_data["loss_masks"])]
"""
CUSTOM = {"loss_type": "custom_loss", "custom_loss_function_path": "HOOKS"}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.5, "ref_load": "OTHER"}
RPP = {"advantage_estimator": "reinforce_plus_plus", "ref_load": "OTHER"}
SAPO = {"policy_loss": "sapo"}
TIS = {"use_tis": True}
REJECTS = {"rs_lower_bound": 0.5}
OPSM = {"use_opsm": True, "use_rollout_logprobs": True}
OPD = {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": "OTHER"}
OWN_TEACHER = OPD | {"opd_teacher_load": "SAME", "disable_rewards_normalization": True, "lr": 0.0}

CLIPPED = {"eps_clip": 1e-4}
"""Without clipping, cispo's gradient is that of ppo."""
WHOLE = {"num_steps_per_rollout": 1}
"""Both groups in a step: Adam does not see how long a gradient is."""

CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"advantage_estimator": "gspo"}),
    (CLIPPED, {"advantage_estimator": "cispo"}),
    (WHOLE, {"advantage_estimator": "rloo"}),
    *[({}, {"advantage_estimator": f"reinforce_plus_plus{form}"}) for form in ("", "_baseline")],
    *[({}, {"policy_loss": name}) for name in ("gspo", "gmpo", "sapo")],
    (CLIPPED, {"policy_loss": "cispo"}),
    ({"advantage_estimator": "gspo"}, {"policy_loss": "ppo"}),
    ({}, {"eps_clip": 1e-4}),
    ({}, {"eps_clip": 1e-4, "eps_clip_high": 0.5}),
    ({"use_rollout_logprobs": True}, {"eps_clip_c": 1.1}),
    (KL, {"use_kl_loss": False}),
    (KL, {"kl_loss_coef": 0.1}),
    *[(KL, {"kl_loss_type": kind}) for kind in ("k1", "k2")],
    (KL, {"use_unbiased_kl": True}),
    (RPP, {"kl_coef": 0.5}),
    ({"advantage_estimator": "reinforce_plus_plus_baseline", "ref_load": "OTHER"}, {"kl_coef": 0.5}),
    ({}, {"entropy_coef": 0.1}),
    ({}, {"calculate_per_token_loss": True}),
    (WHOLE, {"disable_grpo_std_normalization": True}),
    ({}, {"disable_rewards_normalization": True}),
    ({}, {"normalize_advantages": True}),
    (RPP, {"gamma": 0.5}),
    (SAPO, {"sapo_tau_pos": 3.0}),
    (SAPO, {"sapo_tau_neg": 3.0}),
    ({}, {"custom_advantage_function_path": "HOOKS"}),
    ({}, CUSTOM),
    ({}, {"custom_pg_loss_reducer_function_path": "HOOKS"}),
    ({}, {"rollout_data_postprocess_path": "HOOKS"}),
    ({}, {"keep_old_actor": True}),
    ({}, {"use_stateless_adam": True}),
    ({}, {"use_rollout_logprobs": True}),
    ({}, TIS),
    (TIS, {"tis_clip": 1.1}),
    (TIS, {"tis_clip_low": 0.9}),
    *[(TIS, {"tis_level": level}) for level in ("sequence", "geometric")],
    (TIS | {"tis_clip_low": 0.9}, {"tis_mode": "truncate"}),
    (TIS | {"tis_clip_low": 0.9}, {"tis_mode": "mask"}),
    (TIS, {"custom_tis_function_path": "HOOKS"}),
    ({}, REJECTS),
    ({}, {"rs_upper_bound": 1.5}),
    ({}, {"rs_veto_threshold": 0.3}),
    *[(REJECTS, {"rs_level": level}) for level in ("sequence", "geometric")],
    (KL, {"ref_update_interval": 1}),
    ({}, {"reset_optimizer_states": True}),
    ({}, {"bf16": True}),
    ({"bf16": True}, {"bf16": True, "reset_optimizer_states": True}),
    ({}, {"freeze_params_name_list": "embed"}),
    ({}, {"only_train_params_name_list": "linear_qkv"}),
    ({}, {"use_distributed_optimizer": True, "freeze_params_name_list": r"mlp\."}),
    ({"use_rollout_logprobs": True}, OPSM),
    (OPSM, {"opsm_delta": 1.0}),
    ({}, OPD),
    (OPD, {"opd_kl_coef": 0.1}),
    (OPD, {"use_rollout_logprobs": True}),
]
METRICS_ONLY = {"get_mismatch_metrics", "use_rollout_entropy"}
"""They change no weight; the latter also what hooks see, see `test_trainer_options.py`."""
LOSS_DECIDES = {"compute_advantages_and_returns", "disable_compute_advantages_and_returns"}
"""What is not computed only a custom loss can tell, see `test_trainer_options.py`."""


OF_EXPERTS = {"use_routing_replay", "use_rollout_routing_replay"}
"""They need a mixture of experts, see `test_routing_replay.py`."""

OF_THE_CRITIC = {"lambd", "value_clip", "num_critic_only_steps"}
"""They need ranks of a critic; `tests/unit/test_algorithm_invariances.py` changes the first two."""


def key(options: dict[str, Any]) -> str:
    return " ".join(f"--{name}={value}" for name, value in sorted(options.items()) if value is not False) or "nothing"


def changed(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in (base | change).items() if value is not False}


@pytest.fixture(scope="module")
def trained(tiny_model_dir, tmp_path_factory) -> dict[str, dict[str, Any]]:
    model, other = (tiny_model_dir("qwen3", hidden=32, layers=1, seed=seed) for seed in (0, 1))
    hooks = tmp_path_factory.mktemp("hooks") / "hooks.py"
    hooks.write_text(HOOKS)
    runs = {}
    for options in [
        *[base for base, _ in CHANGES],
        *[changed(base, change) for base, change in CHANGES],
        {"get_mismatch_metrics": True},
        OWN_TEACHER,
    ]:
        places = {"OTHER": other, "SAME": model, "HOOKS": hooks}
        runs[key(options)] = {name: places.get(value, value) for name, value in options.items()}
    return run_ranks(train_with, 1, tmp_path_factory.mktemp("rank"), timeout=200.0, model=model, runs=runs)[0]


@pytest.mark.parametrize(("base", "change"), CHANGES, ids=lambda options: key(options))
def test_the_option_changes_what_is_trained(trained, base, change):
    before, after = (trained[key(options)]["weights"] for options in (base, changed(base, change)))
    assert np.isfinite(after).all()
    assert np.abs(before - after).max() > 1e-5


def test_the_kl_to_oneself_as_the_teacher_is_0_at_any_temperature(trained):
    assert trained[key(OWN_TEACHER)]["metrics"]["train/opd_kl"] == 0.0
    assert trained[key(OPD)]["metrics"]["train/opd_kl"] != 0.0


def test_mismatch_metrics_change_metrics_alone(trained):
    plain, measured = trained["nothing"], trained[key({"get_mismatch_metrics": True})]
    assert np.array_equal(plain["weights"], measured["weights"])
    assert {name for name in measured["metrics"] if name not in plain["metrics"]} == {
        f"train/{step}mismatch_{name}"
        for step in ("", "step_0/", "step_1/")
        for name in (
            "kl",
            "k3_kl",
            "ratio",
            "chi2_token",
            "chi2_sequence",
            "trainer_ppl",
            "rollout_ppl",
            "log_ppl_diff",
        )
    }


def test_metrics_of_corrections_are_logged(trained):
    assert trained[key(TIS)]["metrics"]["train/tis"] > 0
    assert 0 < trained[key(REJECTS)]["metrics"]["train/rs_rejected"] < 1
    assert 0 < trained[key(OPSM)]["metrics"]["train/opsm_clipfrac"] < 1
    assert trained[key(TIS | {"custom_tis_function_path": "HOOKS"})]["metrics"]["train/halved"] == pytest.approx(0.5)


def test_a_reference_that_was_updated_is_the_policy_of_then(trained):
    metrics = trained[key(KL | {"ref_update_interval": 1})]["metrics"]
    assert metrics["train/step_0/kl_loss"] == 0.0 and metrics["train/step_1/kl_loss"] > 0
    assert trained[key(KL)]["metrics"]["train/step_0/kl_loss"] > 0


def test_parameters_that_are_frozen_stay_bit_by_bit(trained):
    everything = trained["nothing"]["trained"]
    assert trained[key({"freeze_params_name_list": "embed"})]["trained"] == everything - {"model.embed_tokens.weight"}
    attention = {f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"}
    attention_norm = "model.layers.0.input_layernorm.weight"
    only = trained[key({"only_train_params_name_list": "linear_qkv"})]["trained"]
    assert attention <= only <= attention | {attention_norm}
    mlp = trained[key({"use_distributed_optimizer": True, "freeze_params_name_list": r"mlp\."})]["trained"]
    assert mlp == {name for name in everything if ".mlp." not in name}


OF_THE_TEACHER = {"opd_teacher_ckpt_step"}
"""Which checkpoint it is, see `tests/unit/test_config_checkpoints.py`."""

ELSEWHERE = {
    ("advantage_estimator", "ppo"): "test_critic_layouts.py",
    ("loss_type", "sft_loss"): "test_teacher_and_sft_layouts.py",
    ("opd_type", "sglang"): "test_teacher_and_sft_layouts.py",
    ("kl_loss_type", "k3"): "tests/unit/test_algorithms_objective.py: low_var_kl but for its clamp",
}
"""Choices that this file does not try."""


def test_no_option_is_left_out():
    options = [option for option in loss.ALGORITHM + loss.CORRECTION + loss.DISTILLATION if option.built != ()]
    built = {option.flag[2:].replace("-", "_") for option in options}
    tried = {name for base, change in CHANGES for name in base | change}
    built |= {"only_train_params_name_list", "freeze_params_name_list", "reset_optimizer_states"}
    assert built - OF_THE_CRITIC - OF_EXPERTS - OF_THE_TEACHER <= tried | METRICS_ONLY | LOSS_DECIDES
    values = {pair for base, change in CHANGES for pair in (base | change).items()} | ELSEWHERE.keys()
    choices = {(option.flag[2:].replace("-", "_"), one) for option in options for one in option.choices or ()}
    defaults = {(option.flag[2:].replace("-", "_"), option.default) for option in options}
    assert choices - defaults <= values
