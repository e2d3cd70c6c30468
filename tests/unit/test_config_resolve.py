"""What follows from the given options, and the rules between them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from colloid.config import derive, parse, resolve_num_rollout
from colloid.config.args import REDACTED, Args, redacted
from colloid.config.checks import not_supported
from colloid.config.megatron import optimizer_fields
from colloid.config.tables import tables
from colloid.errors import ConfigError

PLAN = ["--dry-run", "--num-layers", "2", "--device", "cpu"]


def plan(*argv: str) -> Args:
    return parse([*PLAN, *argv])


def error_of(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(*argv)
    return str(caught.value)


def has(message: str, *words: str) -> bool:
    assert all(word in message for word in words), message
    return True


@pytest.mark.parametrize(
    ("argv", "prompts", "samples", "batch", "steps"),
    [
        ("", 32, 8, 256, 1),
        ("--rollout-batch-size 16", 16, 8, 128, 1),
        ("--global-batch-size 64", 32, 8, 64, 4),
        ("--global-batch-size 512", 64, 8, 512, 1),
        ("--num-steps-per-rollout 2", 32, 8, 128, 2),
        ("--rollout-batch-size 4 --global-batch-size 16", 4, 8, 16, 2),
        ("--rollout-batch-size 4 --global-batch-size 16 --num-steps-per-rollout 1", 4, 4, 16, 1),
        ("--n-samples-per-prompt 4 --global-batch-size 16 --num-steps-per-rollout 2", 8, 4, 16, 2),
        (
            "--rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 16 --num-steps-per-rollout 2",
            8,
            4,
            16,
            2,
        ),
    ],
)
def test_what_is_missing_of_the_batch_sizes_is_derived(argv, prompts, samples, batch, steps):
    args = plan(*argv.split())
    found = (args.rollout_batch_size, args.n_samples_per_prompt, args.global_batch_size, args.num_steps_per_rollout)
    assert found == (prompts, samples, batch, steps)


@given(st.tuples(*[st.none() | st.integers(1, 64)] * 4))
@settings(max_examples=300, deadline=None)
def test_batch_sizes_hold_or_are_an_error_that_shows_its_numbers(sizes):
    names = ("rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "num_steps_per_rollout")
    chosen = {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
    args = Args({**tables().defaults(), **chosen}, given=chosen)
    try:
        derive.resolve_batch_sizes(args)
    except ConfigError as error:
        assert len(chosen) >= 2 and "×" in str(error)
        return
    assert args.rollout_batch_size * args.n_samples_per_prompt == args.global_batch_size * args.num_steps_per_rollout
    assert all(getattr(args, name) == size for name, size in chosen.items())


def test_contradictory_batch_sizes_show_the_equation():
    argv = "--rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 100 --num-steps-per-rollout 2"
    assert has(error_of(*argv.split()), "32 × 8 = 256", "100 × 2 = 200", "global_batch_size")
    assert has(
        error_of("--rollout-batch-size", "3", "--n-samples-per-prompt", "5", "--global-batch-size", "4"),
        "3 × 5 = 15",
        "4",
    )


@pytest.mark.parametrize(
    ("argv", "ranks", "engines", "colocate"),
    [
        ("", 1, 1, False),
        ("--actor-num-gpus-per-node 4 --rollout-num-gpus 4", 4, 4, False),
        ("--actor-num-nodes 2 --actor-num-gpus-per-node 2", 4, 1, False),
        ("--colocate --actor-num-gpus-per-node 8", 8, 8, True),
        ("--rollout-num-gpus 4 --rollout-num-gpus-per-engine 2", 1, 2, False),
        ("--rollout-num-gpus-per-engine 2", 1, 1, False),
        ("--tensor-model-parallel-size 2 --context-parallel-size 2", 4, 1, False),
    ],
)
def test_counts_of_processes(argv, ranks, engines, colocate):
    args = plan(*argv.split())
    assert (args.world_size, args.num_engines, args.colocate) == (ranks, engines, colocate)
    assert (args.device, args.params_dtype, args.distributed_backend) == ("cpu", "float32", "gloo")


def test_with_cuda_and_nothing_said_all_devices_are_shared(monkeypatch):
    monkeypatch.setattr(derive, "num_cuda_devices", lambda: 8)
    args = parse(["--dry-run", "--num-layers", "2"])
    assert (args.device, args.colocate, args.world_size, args.rollout_num_gpus) == ("cuda", True, 8, 8)
    assert (args.params_dtype, args.distributed_backend, args.transformer_impl) == (
        "bfloat16",
        "nccl",
        "transformer_engine",
    )


def test_parts_of_the_optimizer_that_need_cuda_are_refused_without_it(monkeypatch, tiny_model_dir):
    argv = ["--hf-checkpoint", str(tiny_model_dir()), "--optimizer-cpu-offload", "--exp-avg-dtype", "bfloat16"]
    with pytest.raises(ConfigError, match=r"--exp-avg-dtype, --optimizer-cpu-offload: for CUDA alone"):
        parse(argv)
    monkeypatch.setattr(derive, "num_cuda_devices", lambda: 1)
    fields = optimizer_fields(parse([*argv, "--dry-run"]))
    assert (fields["optimizer_cpu_offload"], fields["exp_avg_dtype"]) == (True, "bfloat16")


def test_defaults_of_a_short_command():
    args = plan()
    assert (args.input_key, args.label_key, args.rm_type, args.kl_loss_type) == ("prompt", "label", None, "low_var_kl")
    assert (args.lr, args.weight_decay, args.adam_beta1, args.adam_beta2) == (1e-6, 0.1, 0.9, 0.98)
    assert (args.clip_grad, args.lr_decay_style) == (1.0, "constant")
    assert (args.num_epoch, args.num_rollout, args.save, args.eval_prompt_data) == (1, None, None, [])
    assert (args.rollout_max_response_len, args.rollout_seed, args.seed) == (1024, 42, 1234)
    assert args.update_weight_buffer_size == 512 * 1024**2


def test_the_number_of_rollouts_comes_from_the_data():
    args = plan(
        "--prompt-data", "x.jsonl", "--num-epoch", "3", "--rollout-batch-size", "4", "--num-steps-per-rollout", "2"
    )
    assert resolve_num_rollout(args, 10) == 7
    assert (args.num_rollout, args.train_iters, args.lr_decay_iters) == (7, 14, 14)
    args = plan("--prompt-data", "x.jsonl")
    with pytest.raises(ConfigError, match="x.jsonl has 31 prompts.* 32"):
        resolve_num_rollout(args, 31)
    args = plan("--num-rollout", "5", "--num-epoch", "2", "--lr-warmup-fraction", "0.4")
    assert (resolve_num_rollout(args, 3), args.lr_warmup_iters) == (5, 2)
    assert any("--num-epoch 2 is ignored" in text for text in args.warnings)


def test_evaluation_settings_follow_the_rollout_unless_given():
    args = plan("--rollout-temperature", "0.7", "--reward-key", "score", "--eval-temperature", "0", "--input-key", "q")
    assert (args.eval_temperature, args.eval_top_p, args.eval_reward_key) == (0.0, 1.0, "score")
    assert (args.eval_input_key, args.eval_max_response_len) == ("q", 1024)
    assert plan("--eval-prompt-data", "a", "a.jsonl", "b", "b.jsonl").eval_prompt_data == [
        ("a", "a.jsonl"),
        ("b", "b.jsonl"),
    ]
    assert plan("--eval-prompt-data", "data/aime.jsonl").eval_prompt_data == [("aime", "data/aime.jsonl")]
    assert has(error_of("--eval-prompt-data", "a", "a.jsonl", "b"), "pairs", "3 words")
    assert has(error_of("--eval-prompt-data", "a", "1", "--eval-prompt-data", "a", "2"), "'a'", "twice")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            "--update-weight-mode delta --update-weight-transport tensor",
            ["--update-weight-mode delta", "disk", "tensor"],
        ),
        ("--update-weight-disk-dir d", ["--update-weight-disk-dir needs --update-weight-transport disk", "tensor"]),
        ("--update-weight-delta-checksum blake3", ["checksum needs --update-weight-mode delta", "full"]),
        ("--update-weight-transport nccl --device cpu", ["nccl needs CUDA", "--device cpu", "gloo"]),
        ("--update-weight-mode delta --sglang-dtype bfloat16", ["bfloat16", "float32", "leave out --sglang-dtype"]),
        ("--group-rm", ["--group-rm", "--custom-rm-path"]),
        ("--custom-rm-path a.py b.py --custom-rm-weights 1", ["1 values for 2"]),
        ("--custom-rm-model-path m", ["--custom-rm-model-path m", "--custom-rm-path"]),
        ("--rm-type remote_rm", ["remote_rm", "--rm-url"]),
        ("--rm-url localhost:1", ["localhost:1", "http://"]),
        ("--rollout-engine sglang --deterministic", ["--deterministic", "CUDA", "embedded"]),
        ("--sglang-router-ip 10.0.0.1", ["--sglang-router-ip 10.0.0.1", "--sglang-router-port"]),
        (
            "--sglang-router-ip 10.0.0.1 --sglang-router-port 80 --router-policy random",
            ["--router-policy", "runs already"],
        ),
        ("--rm-type dapoo", ["dapoo", "dapo", "math"]),
        ("--disable-compute-advantages-and-returns", ["made of advantages", "--loss-type custom_loss or sft_loss"]),
        ("--router-retry-max-retries 3", ["--router-retry-max-retries", "retries are always off"]),
        ("--sglang-port 4000", ["--sglang-port", "--sglang-router-port"]),
        ("--sglang-tp-size 2", ["--sglang-tp-size", "--rollout-num-gpus-per-engine"]),
        ("--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", ["3", "2", "multiple"]),
        ("--rollout-temperature 0", ["--rollout-temperature 0", "--eval-temperature"]),
        ("--eps-clip 0.3 --eps-clip-high 0.2", ["0.3", "0.2"]),
        ("--global-batch-size 2 --n-samples-per-prompt 2 --actor-num-gpus-per-node 4", ["2", "1 × 4 = 4"]),
        ("--tensor-model-parallel-size 2 --actor-num-gpus-per-node 3", ["3", "tensor 2"]),
        ("--over-sampling-batch-size 16", ["16", "32"]),
        ("--lr-decay-style WSD", ["--lr-wsd-decay-iters"]),
        ("--min-lr 1", ["--min-lr 1", "--lr 1e-06"]),
        ("--apply-chat-template-kwargs [1]", ["JSON object"]),
        ("--rollout-max-context-len 8 --rollout-max-prompt-len 8", ["no room"]),
    ],
)
def test_broken_rules_say_what_why_and_how(argv, words):
    assert has(error_of(*argv.split()), *words)


@pytest.mark.parametrize(
    "argv",
    [
        "--no-offload-train",
        "--update-weights-interval 1",
        "--policy-loss ppo",
        "--update-weight-mode full",
        "--kl-coef 0",
    ],
)
def test_an_option_that_says_what_is_so_anyway_is_accepted(argv):
    assert plan(*argv.split())


def test_every_option_that_is_not_built_is_refused_and_names_itself():
    other = {"int": 7, "size": 7, "float": 0.123, "str": "x", "json": {"a": 1}, "pattern": [7], "bool": True}
    for option in tables().options:
        if option.built != () or option.nargs or option.repeat:
            continue
        choices = [choice for choice in option.choices if choice != option.default]
        value = (choices or [other[option.kind]])[0] if option.takes_value else not option.default
        args = Args({**tables().defaults(), option.dest: value}, given=[option.dest])
        found = not_supported(args, at_run=False) + not_supported(args, at_run=True)
        assert any(name.startswith(option.flag) for name in found), option.flag


def test_warnings_for_what_is_probably_not_meant():
    def warned(*argv: str) -> str:
        return "\n".join(plan(*argv).warnings)

    assert "--eval-interval 5 has no effect" in warned("--eval-interval", "5")
    assert "--kl-loss-coef 0.1 has no effect" in warned("--kl-loss-coef", "0.1")
    assert "k1" in warned("--use-kl-loss", "--kl-loss-coef", "1", "--kl-loss-type", "k1")
    text = warned("--sglang-schedule-policy", "lpm", "--sglang-chunked-prefill-size", "64", "--sglang-dtype", "float32")
    assert "no use for --sglang-chunked-prefill-size, --sglang-schedule-policy" in text and "dtype" not in text


def test_pass_through_options_reach_engine_and_router():
    from colloid.config.sglang import embedded_options, router_options

    args = plan("--sglang-mem-fraction-static", "0.4", "--sglang-log-level", "INFO", "--router-policy", "random")
    assert embedded_options(args) == {"mem-fraction-static": 0.4, "log-level": "info", "dtype": "float32"}
    assert router_options(args) == {"policy": "random"}
    deterministic = plan("--deterministic", "--sglang-schedule-policy", "lpm")
    assert embedded_options(deterministic) == {"dtype": "float32", "enable-deterministic-inference": True}


def test_keys_of_a_custom_config_become_attributes_and_options_among_them_are_checked(tmp_path):
    path = tmp_path / "custom.yaml"
    path.write_text("search_url: http://localhost\nmax_turns: 5\n")
    args = plan("--custom-config-path", str(path))
    assert (args.search_url, args.max_turns) == ("http://localhost", 5)
    assert plan("--custom-config-path", str(path), "--max-turns", "3").max_turns == 3
    path.write_text("max-turns: many\n")
    assert has(error_of("--custom-config-path", str(path)), "custom.yaml", "max-turns", "many")
    path.write_text("derive: 1\n")
    assert has(error_of("--custom-config-path", str(path)), "derive", "method")


def test_flags_win_over_the_config_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("lr: 1e-5\nrollout-batch-size: 4\n")
    args = plan("--config", str(path), "--lr", "2e-5")
    assert (args.lr, args.rollout_batch_size) == (2e-5, 4)
    assert {"lr", "rollout_batch_size"} <= args.given
    path.write_text("config: other.yaml\n")
    assert has(error_of("--config", str(path)), "cannot name another")
    assert has(error_of("--config", str(tmp_path / "none.yaml")), "no such file")


def test_args_know_what_was_set_and_never_read():
    args = plan("--max-turns", "3", "--lr", "1e-5")
    assert args.unread() == ["lr", "max_turns", "num_layers"]
    assert args.lr == 1e-5
    copy = pickle.loads(pickle.dumps(args))
    assert copy.max_turns == 3 and copy == args
    assert args.unread(copy.options_read()) == ["num_layers"]
    args.mark_read("num_layers")
    assert args.unread({"max_turns"}) == []
    with pytest.raises(AttributeError, match="rolout_batch_size; the nearest is args.rollout_batch_size"):
        _ = args.rolout_batch_size
    assert not hasattr(args, "nothing") and getattr(args, "nothing", 1) == 1
    args.extra = 1
    assert args.extra == 1


def written(args: Args, path: Path) -> str:
    args.write_yaml(path)
    return path.read_text()


def test_saved_options_have_no_secrets(tmp_path):
    args = Args(
        {
            "wandb_key": "s3cret",
            "router_oracle_password": "s3cret",
            "http_proxy": "http://me:s3cret@host:1",
            "train_env_vars": {"WANDB_API_KEY": "s3cret", "A": "1"},
            "router_control_plane_api_keys": ["s3cret"],
            "input_key": "prompt",
        },
        given=["wandb_key"],
    )
    text = written(args, tmp_path / "args.yaml")
    assert "s3cret" not in text and "s3cret" not in repr(args)
    saved = yaml.safe_load(text)
    assert saved["wandb_key"] == REDACTED and saved["input_key"] == "prompt"
    assert saved["http_proxy"] == f"http://{REDACTED}@host:1" and saved["train_env_vars"]["A"] == "1"
    assert redacted("hf_token", None) is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--use-dynamic-batch-size", ["--max-tokens-per-gpu N"]),
        ("--max-tokens-per-gpu 64", ["--max-tokens-per-gpu 64", "--use-dynamic-batch-size"]),
        ("--use-dynamic-batch-size --max-tokens-per-gpu 64 --micro-batch-size 2", ["--micro-batch-size 2", "exclude"]),
        ("--sglang-dtype half", ["--sglang-dtype half", "bfloat16"]),
    ],
)
def test_options_that_need_or_exclude_each_other(argv, words):
    assert has(error_of(*argv.split()), *words)


def test_the_engine_has_the_trainers_precision_unless_told_otherwise():
    from colloid.config.sglang import embedded_options

    assert embedded_options(plan("--bf16"))["dtype"] == "bfloat16"
    assert embedded_options(plan("--bf16", "--sglang-dtype", "float"))["dtype"] == "float32"
    assert embedded_options(plan("--sglang-dtype", "auto"))["dtype"] == "float32"
