"""The model's arguments, where weights come from, the run directory, and what Megatron-Core is given."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import colloid.training.megatron  # noqa: F401  (it must come before megatron.core, in whatever process)
from colloid.config import parse
from colloid.config.megatron import PASSED_ON
from colloid.config.megatron_fields import ddp_fields, optimizer_fields, transformer_fields
from colloid.config.tables import tables
from colloid.errors import ConfigError
from colloid.models.derive import model_arguments
from colloid.models.families import unsupported
from colloid.models.hf import find_model

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A working directory with a model, its data, and nothing else."""
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1 + 1", "label": "2"}\n')
    return tmp_path


def make_model(path: Path, **changes) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(QWEN3 | changes))
    return path


def run(*argv: str):
    return parse(["--prompt-data", "data.jsonl", "--hf-checkpoint", "model", "--device", "cpu", *argv])


def error_of(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        run(*argv)
    return str(caught.value)


def has(message: str, *words: str) -> bool:
    assert all(word in message for word in words), message
    return True


def test_a_short_command_runs(place):
    args = run()
    assert args.hf_config == QWEN3 and args.model_type == "qwen3"
    assert args.init_checkpoint == args.ref_load == args.hf_checkpoint == "model"
    assert (args.num_layers, args.hidden_size, args.ffn_hidden_size, args.kv_channels) == (2, 64, 192, 32)
    assert (args.num_attention_heads, args.num_query_groups, args.rotary_base) == (4, 2, 1000000)
    assert (args.norm_epsilon, args.vocab_size, args.qk_layernorm, args.add_qkv_bias) == (1e-6, 512, True, False)
    assert (args.untie_embeddings_and_output_weights, args.swiglu, args.add_bias_linear) == (False, True, False)
    assert args.unread() == ["prompt_data"]


def test_given_model_arguments_are_compared_as_numbers(place):
    args = run("--norm-epsilon", "0.000001", "--rotary-base", "1000000", "--qk-layernorm", "--num-layers", "2")
    assert args.unread() == ["prompt_data"]


def test_options_whose_effect_is_on_others_count_as_read(place):
    argv = "--actor-num-nodes 1 --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --global-batch-size 256 --num-epoch 1"
    assert run(*argv.split(), "--run-name", "x", "--sglang-mem-fraction-static", "0.4").unread() == ["prompt_data"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--num-layers 3", ["--num-layers 3", "2", "config.json"]),
        ("--rotary-base 10000 --num-query-groups 4", ["--rotary-base 10000", "1000000", "--num-query-groups 4"]),
        ("--norm-epsilon 1e-5", ["--norm-epsilon 1e-05", "1e-06"]),
        ("--untie-embeddings-and-output-weights", ["--untie-embeddings-and-output-weights", "False"]),
        ("--add-qkv-bias", ["--add-qkv-bias", "add_qkv_bias=False"]),
    ],
)
def test_a_mismatch_with_the_model_names_both_values(place, argv, words):
    assert has(error_of(*argv.split()), *words)


def test_a_missing_model_says_how_to_get_it(place):
    for name in ("nowhere/nothing", "./nothing"):
        with pytest.raises(ConfigError) as caught:
            parse(["--prompt-data", "data.jsonl", "--hf-checkpoint", name])
        assert has(str(caught.value), name, "no such directory", "hf download")
    with pytest.raises(ConfigError, match="--hf-checkpoint DIR"):
        parse(["--prompt-data", "data.jsonl"])
    (place / "empty").mkdir()
    with pytest.raises(ConfigError, match="no config.json"):
        parse(["--prompt-data", "data.jsonl", "--hf-checkpoint", "empty"])


def test_a_model_is_found_in_the_local_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert find_model("Org/Name") is None
    snapshot = make_model(tmp_path / "models--Org--Name" / "snapshots" / "abc")
    (tmp_path / "models--Org--Name" / "refs").mkdir()
    (tmp_path / "models--Org--Name" / "refs" / "main").write_text("abc")
    assert find_model("Org/Name") == str(snapshot)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, ["gpt2", "qwen3"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, ["yarn"]),
        ({"hidden_act": "gelu"}, ["gelu"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_by_a_run_and_not_by_a_plan(place, changes, words):
    make_model(place / "other", **changes)
    argv = ["--prompt-data", "data.jsonl", "--hf-checkpoint", "other"]
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    assert has(str(caught.value), "not supported yet", *words)
    assert parse([*argv, "--dry-run"]).model_type == (QWEN3 | changes)["model_type"]


def test_what_only_a_plan_may_have_is_refused_by_a_run(place):
    assert has(error_of("--mtp-num-layers", "1"), "--mtp-num-layers 1 is not supported: layers of multi-token")
    assert run("--mtp-num-layers", "1", "--dry-run")


def test_missing_files_are_errors_before_anything_starts(place):
    assert has(error_of("--eval-prompt-data", "a", "none.jsonl"), "none.jsonl", "no such file")
    assert has(error_of("--custom-rm-path", "none.py"), "--custom-rm-path none.py", "no file")
    assert has(error_of("--custom-rm-path", "none.py:f"), "no file")
    with pytest.raises(ConfigError, match="--prompt-data none.jsonl: there is no such file"):
        parse(["--prompt-data", "none.jsonl", "--hf-checkpoint", "model"])
    with pytest.raises(ConfigError, match="--prompt-data FILE"):
        parse(["--hf-checkpoint", "model"])


def test_both_spellings_of_rotary_parameters_are_read():
    old = model_arguments(QWEN3 | {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE})
    new = model_arguments(QWEN3 | {"rope_theta": None, "rope_parameters": {"rope_theta": 500000.0, **LLAMA3_ROPE}})
    assert old == new
    assert (old["rotary_base"], old["use_rope_scaling"], old["rope_scaling_factor"]) == (500000, True, 32.0)
    llama = QWEN3 | {"model_type": "llama", "rope_scaling": LLAMA3_ROPE}
    assert unsupported(llama) == []


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_configs_that_transformers_writes_are_understood(tiny_model_dir, family):
    config = json.loads((tiny_model_dir(family) / "config.json").read_text())
    arguments = model_arguments(config)
    assert unsupported(config) == []
    assert (arguments["add_qkv_bias"], arguments["qk_layernorm"]) == (family == "qwen2", family == "qwen3")
    assert (arguments["num_query_groups"], arguments["kv_channels"]) == (2, 16)


def test_load_takes_checkpoints_a_model_or_nothing(place):
    assert run("--load", "none").resume_from is None
    (place / "empty").mkdir()
    assert run("--load", "empty").resume_from is None
    make_model(place / "trained")
    args = run("--load", "trained")
    assert (args.resume_from, args.init_checkpoint, args.ref_load) == (None, "trained", "trained")
    make_model(place / "larger", hidden_size=128)
    assert has(error_of("--load", "larger"), "another model", "128", "64")
    checkpoints = place / "saved"
    (checkpoints / "iter_0000007").mkdir(parents=True)
    (checkpoints / "iter_0000003").mkdir()
    for step in (3, 7):
        (checkpoints / f"iter_000000{step}" / "meta.json").write_text("{}")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("7\n")
    assert run("--load", "saved").resume_from == "saved/iter_0000007"
    assert run("--load", "saved", "--ckpt-step", "3").resume_from == "saved/iter_0000003"
    assert has(error_of("--load", "saved", "--ckpt-step", "4"), "iter_0000004", "iter_0000003, iter_0000007")
    (place / "junk").mkdir()
    (place / "junk" / "notes.txt").write_text("")
    assert has(error_of("--load", "junk"), "neither checkpoints", "nor a Hugging Face model")
    assert has(error_of("--load", "data.jsonl"), "is a file")


def test_the_run_directory_is_new_or_goes_on(place):
    args = run("--run-name", "first", "--save-interval", "5")
    assert (args.run_dir, args.save) == ("outputs/first", "outputs/first/checkpoints")
    assert run("--run-name", "first").save is None
    (place / "outputs" / "first").mkdir(parents=True)
    args.write_yaml("outputs/first/args.yaml")
    assert has(error_of("--run-name", "first"), "outputs/first", "--run-name", "--load outputs/first/checkpoints")
    first = place / "outputs" / "first" / "checkpoints"
    (first / "iter_0000004").mkdir(parents=True)
    (first / "iter_0000004" / "meta.json").write_text("{}")
    (first / "latest_checkpointed_iteration.txt").write_text("4")
    args = run("--load", "outputs/first/checkpoints", "--save-interval", "5")
    assert (args.run_dir, args.run_name, args.save) == ("outputs/first", "first", "outputs/first/checkpoints")
    assert args.resume_from == "outputs/first/checkpoints/iter_0000004"
    assert run("--load", "outputs/first/checkpoints", "--run-name", "second").run_dir == "outputs/second"
    assert has(error_of("--run-name", "a/b"), "a/b", "allowed")
    assert run().run_dir != run("--load", "outputs/first/checkpoints").run_dir


def test_default_names_of_runs_are_free(place):
    name = run().run_name
    (place / "outputs" / name).mkdir(parents=True)
    assert run().run_name != name


def test_megatron_is_given_what_was_given_or_follows_from_the_model(place):
    args = run(
        "--attention-softmax-in-fp32", "--no-masked-softmax-fusion", "--overlap-grad-reduce", "--adam-eps", "1e-4"
    )
    transformer, optimizer, ddp = transformer_fields(args), optimizer_fields(args), ddp_fields(args)
    assert transformer["attention_softmax_in_fp32"] is True and transformer["masked_softmax_fusion"] is False
    assert (transformer["layernorm_epsilon"], transformer["num_query_groups"]) == (1e-6, 2)
    assert (transformer["hidden_dropout"], transformer["attention_dropout"]) == (0.0, 0.0)
    assert "recompute_granularity" not in transformer and "bf16" not in transformer
    assert optimizer == {"lr": 1e-6, "weight_decay": 0.1, "adam_beta2": 0.98, "clip_grad": 1.0, "adam_eps": 1e-4}
    assert ddp == {"overlap_grad_reduce": True}
    args = run("--recompute-activations", "--use-distributed-optimizer", "--accumulate-allreduce-grads-in-fp32")
    assert transformer_fields(args)["recompute_granularity"] == "selective"
    assert ddp_fields(args) == {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True}


def test_fields_that_options_name_exist_in_megatron_core():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    classes = {
        c.__name__: {field.name for field in dataclasses.fields(c)}
        for c in (TransformerConfig, MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    }
    missing = [
        option.field
        for option in tables().options
        if option.field and option.field.split(".")[1] not in classes[option.field.split(".")[0]]
    ]
    assert missing == []
    assert tables().by_dest.keys() >= PASSED_ON
