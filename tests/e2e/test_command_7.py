"""What users add when something goes wrong: each option alone and all together has its effect in both programs, or an
error that says why not.
"""

from __future__ import annotations

import json

import pytest

from colloid.config import parse
from colloid.config.megatron_fields import transformer_fields
from colloid.errors import ConfigError
from colloid.rollout.servers import fleet_config
from tests.e2e.running import run_training, write_sums

PROGRAMS = ("train", "train_async")


def plan(entry, *options):
    given = ["--dry-run", "--device", "cpu", "--num-layers", "2", "--prompt-data", "data.jsonl", *options]
    return parse(given, entry)


def tolerance(args):
    return fleet_config(args, "key").tolerance is not None


def memory_of_an_engine(args):
    return fleet_config(args, "key").engines[0].options["mem-fraction-static"]


@pytest.mark.parametrize("entry", PROGRAMS)
@pytest.mark.parametrize(
    ("options", "effect", "expected"),
    [
        (["--use-fault-tolerance"], tolerance, True),
        (["--sglang-mem-fraction-static", "0.85"], memory_of_an_engine, 0.85),
        (["--rollout-batch-size", "16"], lambda args: (args.rollout_batch_size, args.global_batch_size), (16, 128)),
        (["--update-weights-interval", "5"], lambda args: args.update_weights_interval, 5),
        (["--recompute-activations"], lambda args: transformer_fields(args)["recompute_granularity"], "selective"),
        (["--micro-batch-size", "1"], lambda args: args.micro_batch_size, 1),
        (["--num-data-workers", "4"], lambda args: args.num_data_workers, 4),
        (["--streaming-data"], lambda args: args.streaming_data, True),
        (
            ["--sequence-parallel", "--tensor-model-parallel-size", "2"],
            lambda args: transformer_fields(args)["sequence_parallel"],
            True,
        ),
    ],
)
def test_each_option_alone_has_its_effect(entry, options, effect, expected):
    assert effect(plan(entry, *options)) == expected


@pytest.mark.parametrize("entry", PROGRAMS)
def test_sequence_parallel_without_tensor_parallel_ranks_is_off_with_a_word(entry):
    args = plan(entry, "--sequence-parallel")
    assert not args.sequence_parallel
    assert any(
        "--sequence-parallel has no effect with --tensor-model-parallel-size 1" in text for text in args.warnings
    )


def test_colocate_is_for_the_program_in_which_trainer_and_engines_take_turns():
    assert plan("train", "--colocate", "--actor-num-gpus-per-node", "2").rollout_num_gpus == 2
    with pytest.raises(ConfigError, match="generates while it trains.*use train.py"):
        plan("train_async", "--colocate")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("entry", PROGRAMS)
def test_all_together_run(entry, tmp_path, tiny_model_dir):
    data = write_sums(tmp_path / "data.jsonl", 96)
    ended = run_training(
        tmp_path,
        *("--use-fault-tolerance", "--sglang-mem-fraction-static", 0.85, "--rollout-batch-size", 16),
        *("--update-weights-interval", 5, "--recompute-activations", "--micro-batch-size", 1, "--sequence-parallel"),
        *("--num-data-workers", 4, "--streaming-data", *(["--colocate"] if entry == "train" else [])),
        *("--hf-checkpoint", tiny_model_dir(), "--prompt-data", data, "--rm-type", "random"),
        *("--n-samples-per-prompt", 2, "--rollout-max-response-len", 4, "--num-rollout", 6, "--run-name", "run"),
        entry=f"{entry}.py",
        timeout=350,
    )
    assert ended.code == 0, ended.output[-5000:]
    assert "--sequence-parallel has no effect" in ended.output and "never read" not in ended.output
    lines = [json.loads(line) for line in (tmp_path / "outputs/run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(6))
    for line in lines:
        assert line["train/grad_norm"] > 0 and line["engine/alive"] == 1 and line["engine/replaced"] == 0
    updates = [line["step"] for line in lines if "perf/update_weights_bytes" in line]
    assert updates == [4, 5], "after five rollouts, and after the last"
