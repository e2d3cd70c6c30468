"""`--sglang-config`: what is read, which model is the policy, and how mistakes are named."""

from __future__ import annotations

import json

import pytest

from colloid.config import parse, sglang_installed
from colloid.config.plan import describe_plan
from colloid.config.served_models import policy_model, served_models
from colloid.config.sglang import EngineKind, engine_options, sglang_options
from colloid.data.opening import context_length
from colloid.errors import ConfigError, HookError
from colloid.rewards.worker import SHARED
from colloid.rollout.context import get_model_url
from colloid.rollout.model_urls import model_url, router_urls, set_model_urls
from colloid.rollout.servers import fleet_config

TWO = """
sglang:
  - name: actor
    server_groups:
      - {worker_type: regular, num_gpus: 2, overrides: {max_running_requests: 4, log-level: WARNING}}
      - {worker_type: regular, num_gpus: 2, num_gpus_per_engine: 2, overrides: {max_running_requests: 8}}
      - {worker_type: placeholder, num_gpus: 3}
  - name: judge
    model_path: JUDGE
    update_weights: false
    num_gpus_per_engine: 2
    server_groups: [{worker_type: regular, num_gpus: 4}]
"""
PAIR = """
sglang:
  - name: actor
    server_groups:
      - {worker_type: prefill, num_gpus: 2, num_gpus_per_engine: 2}
      - {worker_type: decode, num_gpus: 4}
"""


@pytest.fixture
def plan(tmp_path, tiny_model_dir):
    """`plan(YAML, *flags)` -> the resolved options, of a run or with `--dry-run`."""
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "1 + 1 =", "label": "2"}))

    def make(config, *flags, run=False):
        path = tmp_path / "servers.yaml"
        path.write_text(config.replace("JUDGE", str(tiny_model_dir("llama"))))
        given = ["--hf-checkpoint", str(tiny_model_dir()), "--prompt-data", str(data), "--outputs-dir", str(tmp_path)]
        return parse([*given, "--sglang-config", str(path), *([] if run else ["--dry-run"]), *flags])

    return make


def one(text: str, head: str = "name: actor") -> str:
    return f"sglang:\n  - {{{head}, {text}}}\n"


def error_of(plan, config, *flags, run=False) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(config, *flags, run=run)
    return str(caught.value)


def test_models_have_groups_of_engines_and_the_slots_are_their_sum(plan, tiny_model_dir):
    args = plan(TWO)
    actor, judge = args.sglang_models
    assert (args.rollout_num_gpus, args.num_engines) == (11, 5)
    assert policy_model(args) is actor and actor.model_path is None
    assert [group.num_engines for group in actor.groups] == [2, 1, 0]
    assert actor.groups[0].overrides == {"max_running_requests": 4, "log_level": "warning"}
    assert (judge.update_weights, judge.model_path, judge.num_engines) == (False, str(tiny_model_dir("llama")), 2)
    assert not args.warnings or all("judge" not in text for text in args.warnings)


def test_without_a_file_there_is_the_policy_with_equal_engines():
    args = parse(["--dry-run", "--num-layers", "2", "--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "2"])
    (model,) = args.sglang_models
    assert (model.name, model.num_engines, model.update_weights, model.model_path) == ("default", 2, True, None)


def test_the_plan_shows_each_group_with_its_slots(plan):
    text = describe_plan(plan(TWO))
    assert "12 device slots" in text
    assert "2 × embedded, 1 slot each" in text and "2 × embedded, 2 slots each" in text and "frozen" in text
    assert "none, a placeholder of 3 slots" in text
    assert (
        "this host: trainer rank 0 on slot 0; actor engines 0-1 on slots 1-2; actor engine 2 on slots 3-4; "
        "placeholders 0-2 on slots 5-7; judge engines 0-1 on slots 8-11 (2 each)"
    ) in text
    assert "2 processes: sglang-router" in text


def test_overrides_go_before_the_command_line_and_what_is_the_policys_is_not_for_others(plan, tiny_model_dir):
    args = plan(
        TWO, "--sglang-max-running-requests", "64", "--sglang-context-length", "99", "--sglang-random-seed", "3"
    )
    actor, judge = fleet_config(args, "key"), fleet_config(args, "key", args.sglang_models[1])
    assert [engine.options["max-running-requests"] for engine in actor.engines] == [4, 4, 8]
    assert [engine.options["log-level"] for engine in actor.engines[:2]] == ["warning"] * 2
    assert {engine.options["context-length"] for engine in actor.engines} == {99}
    assert {engine.model_path for engine in actor.engines} == {str(tiny_model_dir())}
    assert len(judge.engines) == 2
    for engine in judge.engines:
        assert engine.model_path == str(tiny_model_dir("llama"))
        assert engine.options["max-running-requests"] == 64 and engine.options["random-seed"] == 3
        assert "context-length" not in engine.options
    assert actor.engines[0].log_dir != judge.engines[0].log_dir


def test_the_shortest_context_of_the_policys_engines_bounds_its_requests(plan):
    groups = (
        "[{worker_type: regular, num_gpus: 1, overrides: {context_length: 40}}, {worker_type: regular, num_gpus: 1}]"
    )
    assert context_length(plan(one(f"server_groups: {groups}"))) == 40
    assert context_length(plan(one(f"server_groups: {groups}"), "--sglang-context-length", "30")) == 30
    message = error_of(plan, one(f"server_groups: {groups}"), "--rollout-max-context-len", "50")
    assert "context_length 40 is less than --rollout-max-context-len 50" in message


def test_a_flag_of_the_command_line_can_be_taken_back_and_names_are_those_of_sglang(plan):
    config = one("server_groups: [{worker_type: regular, num_gpus: 1, overrides: {enable_fp32_lm_head: false}}]")
    args = plan(config, "--sglang-enable-fp32-lm-head")
    assert "enable-fp32-lm-head" not in fleet_config(args, "key").engines[0].options
    more = one(
        "server_groups: [{worker_type: regular, num_gpus: 2, num_gpus_per_engine: 2, "
        "overrides: {data_parallel_size: 2, enable_dp_attention: true, dtype: float32}}]"
    )
    args = plan(more, "--rollout-engine", "sglang", "--bf16")
    (group,) = args.sglang_models[0].groups
    options = sglang_options(args, EngineKind(group.num_gpus_per_engine, group.overrides))
    assert (options["dp-size"], options["dtype"], options["tp-size"]) == (2, "float32", 2)


def test_the_policy_is_the_model_of_the_checkpoint_and_a_frozen_copy_of_it_says_so(plan, tiny_model_dir):
    group = "server_groups: [{worker_type: regular, num_gpus: 1}]"
    config = f"""
sglang:
  - {{name: judge, model_path: JUDGE, {group}}}
  - {{name: trained, model_path: {tiny_model_dir()}, {group}}}
  - {{name: start, update_weights: false, {group}}}
"""
    args = plan(config)
    assert policy_model(args).name == "trained" and policy_model(args).model_path is None
    assert [model.update_weights for model in args.sglang_models] == [False, True, False]
    assert any("'judge' keeps its weights" in text for text in args.warnings)
    assert fleet_config(args, "key", args.sglang_models[2]).engines[0].model_path == str(tiny_model_dir())


GROUP = "server_groups: [{worker_type: regular, num_gpus: 1}]"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("a: 1", ["unknown key 'a'", "sglang"]),
        ("sglang: {name: a}", ["list of models"]),
        ("sglang: [3]", ["sglang[0]", "mapping"]),
        (f"sglang: [{{{GROUP}}}]", ["sglang[0] has no name"]),
        (f"sglang: [{{name: a/b, {GROUP}}}]", ["'a/b'", "letters"]),
        (f"sglang: [{{name: a, {GROUP}}}, {{name: a, {GROUP}}}]", ["two models are named 'a'"]),
        (one("server_groups: []"), ["model 'actor'", "list of groups"]),
        (one("server_gruops: []"), ["unknown key 'server_gruops'", "did you mean 'server_groups'?"]),
        (one("server_groups: [{num_gpus: 1}]"), ["server_groups[0] has no worker_type", "placeholder"]),
        (one("server_groups: [{worker_type: regular}]"), ["server_groups[0] has no num_gpus"]),
        (one("server_groups: [{worker_type: regulr, num_gpus: 1}]"), ["'regulr'", "did you mean regular?"]),
        (one("server_groups: [{worker_type: regular, num_gpus: 0}]"), ["num_gpus: 0 is too small"]),
        (one("server_groups: [{worker_type: regular, num_gpu: 1}]"), ["'num_gpu'", "did you mean 'num_gpus'?"]),
        (
            one("server_groups: [{worker_type: regular, num_gpus: 3, num_gpus_per_engine: 2}]"),
            ["num_gpus 3 is not a multiple of num_gpus_per_engine 2"],
        ),
        (
            one("server_groups: [{worker_type: regular, num_gpus: 1, overrides: {max_runing_requests: 2}}]"),
            ["SGLang has no option 'max_runing_requests'", "did you mean 'max_running_requests'?"],
        ),
        (
            one("server_groups: [{worker_type: regular, num_gpus: 1, overrides: {max_running_requests: no}}]"),
            ["max_running_requests", "whole number"],
        ),
        (
            one("server_groups: [{worker_type: regular, num_gpus: 1, overrides: {tp_size: 2}}]"),
            ["tp_size cannot be given", "num_gpus_per_engine"],
        ),
        (
            one("server_groups: [{worker_type: regular, num_gpus: 1, overrides: {port: 2}}]"),
            ["port cannot be given", "chosen"],
        ),
        (
            one("server_groups: [{worker_type: placeholder, num_gpus: 1, overrides: {log_level: info}}]"),
            ["placeholder starts no engine"],
        ),
        (one("server_groups: [{worker_type: placeholder, num_gpus: 1}]"), ["policy 'actor' has no engine"]),
        (one("server_groups: [{worker_type: prefill, num_gpus: 1}]"), ["in pairs", "none of decode"]),
        (
            one("server_groups: [{worker_type: prefill, num_gpus: 1}, {worker_type: decode, num_gpus: 1}, "
                "{worker_type: regular, num_gpus: 1}]"),
            ["in pairs", "regular ones"],
        ),
        (
            one("server_groups: [{worker_type: regular, num_gpus: 1, overrides: {model_path: /a}}, "
                "{worker_type: regular, num_gpus: 1, overrides: {model_path: /b}}]"),
            ["different models", "/a", "/b"],
        ),
        (one(f"update_weights: false, {GROUP}"), ["no model is the policy"]),
        (one(f"update_weights: true, model_path: JUDGE, {GROUP}"), ["update_weights: true", "--hf-checkpoint"]),
        (f"sglang: [{{name: a, {GROUP}}}, {{name: b, {GROUP}}}]", ["'a', 'b'", "one model is trained"]),
        (PAIR, ["prefill and decode groups", "need SGLang", "--rollout-engine sglang"]),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_what_is_allowed(plan, config, words):
    message = error_of(plan, config)
    assert all(word in message for word in words), message


def test_the_slots_of_all_groups_sum_up_to_the_given_number(plan):
    assert plan(TWO, "--rollout-num-gpus", "11").rollout_num_gpus == 11
    message = error_of(plan, TWO, "--rollout-num-gpus", "12")
    assert "2 (actor, regular) + 2 (actor, regular) + 3 (actor, placeholder) + 4 (judge, regular) = 11" in message
    assert "--rollout-num-gpus 12" in message


def test_a_frozen_model_must_be_there_and_be_one_that_the_engine_serves(plan, tmp_path):
    frozen = one(f"update_weights: false, model_path: {tmp_path}/none, {GROUP}", "name: judge")
    config = f"{frozen}  - {{name: actor, {GROUP}}}\n"
    assert plan(config).num_engines == 2, "a plan needs no model"
    assert "no such directory" in error_of(plan, config, run=True)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "config.json").write_text('{"model_type": "gpt2"}')
    assert "does not serve it" in error_of(plan, config, run=True)


def test_engines_that_prefill_and_decode_are_planned_and_refused_on_a_cpu(plan, monkeypatch):
    args = plan(PAIR, "--rollout-engine", "sglang", "--router-prefill-policy", "random")
    assert "1 × sglang prefill, 2 slots each" in describe_plan(args)
    config = fleet_config(args, "key")
    assert config.router.options == {"pd_disaggregation": True, "prefill_policy": "random"}
    prefill, *decode = (engine.options for engine in config.engines)
    assert (prefill["disaggregation-mode"], prefill["tp-size"]) == ("prefill", 2)
    assert prefill["disaggregation-bootstrap-port"] > 0
    assert [options["disaggregation-mode"] for options in decode] == ["decode"] * 4
    monkeypatch.setattr(sglang_installed, "check", lambda args: None)
    message = error_of(plan, PAIR, "--rollout-engine", "sglang", "--device", "cpu", run=True)
    assert "pinned memory" in message
    replay = error_of(plan, PAIR, "--rollout-engine", "sglang", "--use-rollout-routing-replay")
    assert "--use-rollout-routing-replay" in replay
    assert "--router-decode-policy" in error_of(plan, TWO, "--router-decode-policy", "random")


def test_overrides_that_the_installed_sglang_lacks_are_refused(plan):
    config = one("server_groups: [{worker_type: regular, num_gpus: 1, overrides: {schedule_policy: lpm}}]")
    args = plan(config, "--rollout-engine", "sglang")
    assert sglang_installed._unknown(args, "0.0", ["--schedule-policy"]) is None
    message = sglang_installed._unknown(args, "0.0", ["--schedule-policies"])
    assert "'actor': schedule_policy" in message and "--sglang-schedule-policies" in message


def test_overrides_that_the_embedded_engine_has_no_use_for_are_warned_of(plan):
    config = one("server_groups: [{worker_type: regular, num_gpus: 1, overrides: {schedule_policy: lpm}}]")
    args = plan(config)
    assert any("no use for schedule_policy" in text for text in args.warnings)
    assert "schedule-policy" not in engine_options(args, EngineKind(1, args.sglang_models[0].groups[0].overrides))


def test_a_hook_asks_for_a_model_by_its_name_and_an_unknown_one_is_an_error_that_lists_them(plan):
    args = plan(TWO)
    with pytest.raises(HookError, match="no model is served yet"):
        model_url(router_urls(args), "default", "/generate")
    set_model_urls(args, "actor", {"judge": "http://127.0.0.1:5", "actor": "http://127.0.0.1:4"}, "key")
    assert args.sglang_model_routers == {"actor": ("127.0.0.1", 4), "judge": ("127.0.0.1", 5)}
    assert (args.sglang_router_ip, args.sglang_router_port) == ("127.0.0.1", 4)
    urls = router_urls(args)
    for name in ("default", "policy", "actor"):
        assert model_url(urls, name, "/generate") == "http://127.0.0.1:4/generate"
    assert model_url(urls, "judge", "v1/completions") == "http://127.0.0.1:5/v1/completions"
    with pytest.raises(HookError, match="no model 'ref'; there is 'actor' \\(the policy\\), 'judge'"):
        model_url(urls, "ref", "/generate")
    assert "key" not in str(args.as_dict()["rollout_api_key"])


def test_in_a_rewards_worker_process_a_hook_need_not_hand_in_args(plan, monkeypatch):
    """Functions of prompts and responses have none."""
    args = plan(TWO)
    set_model_urls(args, "actor", {"actor": "http://127.0.0.1:4", "judge": "http://127.0.0.1:5"}, "key")
    monkeypatch.setitem(SHARED, "args", args)
    assert get_model_url(None, "judge") == "http://127.0.0.1:5/generate"
    assert get_model_url() == get_model_url(args) == "http://127.0.0.1:4/generate"


TEACHER = f"""
sglang:
  - {{name: actor, {GROUP}}}
  - {{name: teacher, model_path: JUDGE, update_weights: false, server_groups: [{{worker_type: regular, num_gpus: 2}}]}}
"""


def test_a_frozen_model_of_that_name_is_the_teacher(plan, tiny_model_dir):
    behind_engine = ("--use-opd", "--opd-type", "sglang")
    args = plan(TEACHER, *behind_engine)
    assert [model.name for model in served_models(args)] == ["actor", "teacher"]
    assert "teacher          the model 'teacher'" in describe_plan(args)
    added = plan(one(GROUP), *behind_engine, "--opd-teacher-load", str(tiny_model_dir("llama")))
    teacher = served_models(added)[1]
    assert (teacher.name, teacher.num_engines, teacher.update_weights) == ("teacher", 1, False)
    assert fleet_config(added, "key", teacher).engines[0].model_path == str(tiny_model_dir("llama"))
    for other in ("--rm-url", "--opd-teacher-load"):
        value = "http://a:1" if other == "--rm-url" else str(tiny_model_dir("llama"))
        assert "two teachers" in error_of(plan, TEACHER, *behind_engine, other, value)
    assert "needs a teacher" in error_of(plan, one(GROUP), *behind_engine)


SIZES = one(
    "server_groups: [{worker_type: placeholder, num_gpus: 3}, {worker_type: regular, num_gpus: 2}, "
    "{worker_type: regular, num_gpus: 6, num_gpus_per_engine: PER_ENGINE, overrides: {OVERRIDES}}]"
)


def sizes(per_engine: int, overrides: str = "") -> str:
    return SIZES.replace("PER_ENGINE", str(per_engine)).replace("OVERRIDES", overrides)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (sizes(3), "among 3 / 1 = 3 ranks (num_gpus_per_engine 3, --sglang-attn-dp-size 1)"),
        (sizes(2, "dp_size: 2"), "dp_size 2 makes 2 copies of the model in one engine"),
        (sizes(2, "attn_dp_size: 4"), "num_gpus_per_engine 2 is no multiple of attn_dp_size 4"),
        (sizes(2, "pipeline_parallel_size: 2"), "pp_size 2 is not supported yet"),
        (sizes(2, "ep_size: 2"), "ep_size 2, --sglang-moe-dp-size 1: the model has no experts"),
    ],
)
def test_a_group_that_cannot_be_divided_so_is_refused_with_the_equation(plan, config, words):
    message = error_of(plan, config, "--rollout-engine", "sglang")
    assert "model 'actor': server_groups[2]: " in message and words in message


def test_a_group_is_divided_by_its_own_sizes_alone(plan):
    halves = ("--sglang-dp-size", "2", "--sglang-enable-dp-attention", "--rollout-engine", "sglang")
    alone = "server_groups: [{worker_type: regular, num_gpus: 4, num_gpus_per_engine: 2}]"
    plan(one(alone), *halves)
    plan(sizes(2, "dp_size: 1"), *halves[:-2], "--rollout-engine", "embedded")
    assert "server_groups[1]: num_gpus_per_engine 1 is no multiple" in error_of(plan, sizes(2), *halves)
    frozen = "  - {name: judge, model_path: JUDGE, update_weights: false, server_groups: [{worker_type: regular, "
    plan(one(alone) + frozen + "num_gpus: 5, num_gpus_per_engine: 5}]}\n", *halves)
