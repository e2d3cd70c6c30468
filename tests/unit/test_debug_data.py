"""Saved rollouts: read back as they were written, thinned by groups; and the options around them."""

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colloid.config import parse
from colloid.data.sample import Sample, Status
from colloid.errors import ConfigError, DataError
from colloid.rollout.debug import LoadedRollouts, subsample
from colloid.rollout.record import load_rollout, save_rollout

PLAN = ["--dry-run", "--num-layers", "2", "--device", "cpu"]


def make_samples(num_groups=4, size=2):
    samples = []
    for index in range(num_groups * size):
        sample = Sample(group_index=index // size, index=index, prompt="Wie weit?", tokens=[5, 6], label={"meter": 3})
        sample.append_response_tokens([7, 8 + index], log_probs=[-1 / 3, -0.1 * index], weight_version=index)
        sample.reward, sample.status = float(index % 3), Status.COMPLETED
        samples.append(sample)
    samples[1].status, samples[1].reward = Status.FAILED, None
    samples[2].remove_sample = True
    return samples


def test_samples_are_read_back_as_they_were(tmp_path):
    samples = make_samples()
    samples[0].metadata = {"Straße": [1.5, None], "array": np.arange(3)}
    save_rollout(tmp_path / "new" / "0.jsonl", samples)
    samples[0].metadata["array"] = [0, 1, 2]
    assert load_rollout(tmp_path / "new" / "0.jsonl") == samples
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["0.jsonl"]


@given(values=st.lists(st.floats(width=64, allow_nan=False, allow_infinity=False), max_size=5))
@settings(deadline=None)
def test_floats_are_read_back_bit_by_bit(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("floats") / "0.jsonl"
    save_rollout(path, [Sample(index=0, rollout_log_probs=values, response_length=len(values))])
    assert np.array_equal(np.asarray(load_rollout(path)[0].rollout_log_probs), np.asarray(values))


def test_what_json_cannot_hold_and_what_is_no_sample_are_named(tmp_path):
    path = tmp_path / "0.jsonl"
    with pytest.raises(DataError, match="sample 3 .*holds what JSON cannot"):
        save_rollout(path, [Sample(index=3, metadata={"object": object()})])
    assert not list(tmp_path.iterdir())
    save_rollout(path, make_samples()[:2])
    path.write_text(path.read_text() + '{"indx": 1}\n')
    with pytest.raises(DataError, match=r"0.jsonl:3 is no sample .*unknown Sample fields \['indx'\]"):
        load_rollout(path)
    with pytest.raises(DataError, match="no-such.jsonl cannot be read"):
        load_rollout(tmp_path / "no-such.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="empty.jsonl holds no samples"):
        load_rollout(tmp_path / "empty.jsonl")


@given(
    num_groups=st.integers(1, 12),
    size=st.integers(1, 4),
    num_steps=st.integers(1, 4),
    share=st.floats(0.01, 1.0),
)
@settings(deadline=None)
def test_a_share_of_a_rollout_is_whole_groups_that_fill_the_steps(num_groups, size, num_steps, share):
    samples = [Sample(index=index, group_index=index // size) for index in range(num_groups * size)]
    possible = [n for n in range(1, max(1, round(share * num_groups)) + 1) if n * size % num_steps == 0]
    if not possible:
        with pytest.raises(DataError, match="does not fill"):
            subsample(samples, share, num_steps)
        return
    assert subsample(samples, share, num_steps) == samples[: max(possible) * size]


def test_loaded_rollouts_are_scheduled_with_the_rewards_of_their_groups(tmp_path, tiny_model_dir):
    save_rollout(tmp_path / "0.jsonl", make_samples())
    argv = [
        *("--hf-checkpoint", tiny_model_dir(), "--load-debug-rollout-data", tmp_path / "{rollout_id}.jsonl"),
        *("--rollout-batch-size", 4, "--n-samples-per-prompt", 2, "--actor-num-gpus-per-node", 2),
        *("--load-debug-rollout-data-subsample", 0.5, "--outputs-dir", tmp_path / "outputs", "--use-kl-loss"),
        *("--advantage-estimator", "grpo"),
    ]
    args = parse([str(word) for word in argv])
    assert args.num_rollout == 1 and args.debug_train_only
    result = asyncio.run(LoadedRollouts(args).generate(0))
    assert [len(batch.micro_batches[0]) for batch in result.batches] == [1, 1]
    rows = {}
    for batch in result.batches:
        rows |= dict(zip(batch.samples.sample_ids.tolist(), batch.samples.rewards.tolist(), strict=True))
    assert sorted(rows) == [0, 1, 2, 3]
    assert rows[0] == rows[1] == 0 and rows[2] == -rows[3] > 0
    assert result.metrics["rollout/num_failed_samples"] == result.metrics["rollout/num_removed_samples"] == 1
    assert not any(name.startswith("perf/") for name in result.metrics)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--debug-train-only", "needs --load-debug-rollout-data"),
        ("--load-debug-rollout-data x --num-rollout 1 --debug-rollout-only", "exclude each other"),
        ("--load-debug-rollout-data x --num-rollout 1 --save-debug-rollout-data y", "nothing is"),
        ("--load-debug-rollout-data /none/{rollout_id}.jsonl", "no such file as /none/0.jsonl for rollout 0"),
        ("--load-debug-rollout-data x{id} --num-rollout 1", "only {rollout_id} may stand in braces"),
        ("--save-debug-rollout-data y.jsonl", "needs {rollout_id} in it"),
        ("--load-debug-rollout-data-subsample 0.5", "no --load-debug-rollout-data to take it of"),
        ("--load-debug-rollout-data x --num-rollout 1 --load-debug-rollout-data-subsample 0", "share above 0"),
        ("--log-probs-max-tokens-per-gpu 9", "needs --use-dynamic-batch-size"),
        ("--use-dynamic-batch-size --max-tokens-per-gpu 9 --log-probs-max-tokens-per-gpu 8", "is less than"),
    ],
)
def test_options_that_make_no_sense_together_are_errors(argv, words):
    with pytest.raises(ConfigError) as caught:
        parse([*PLAN, *argv.split()])
    assert words in str(caught.value)


def test_the_number_of_rollouts_is_that_of_the_files(tmp_path):
    for rollout_id in (0, 1, 2, 4):
        (tmp_path / f"{rollout_id:03d}.jsonl").write_text("{}")
    path = str(tmp_path / "{rollout_id:03d}.jsonl")
    assert parse([*PLAN, "--load-debug-rollout-data", path]).num_rollout == 3
    assert parse([*PLAN, "--load-debug-rollout-data", str(tmp_path / "001.jsonl")]).num_rollout == 1


def test_a_missing_file_is_named_before_anything_starts(tmp_path, tiny_model_dir):
    save_rollout(tmp_path / "0.jsonl", make_samples())
    argv = ["--hf-checkpoint", str(tiny_model_dir()), "--outputs-dir", str(tmp_path / "outputs"), "--num-rollout", "2"]
    with pytest.raises(ConfigError, match=r"no such file as .*1.jsonl for rollout 1"):
        parse([*argv, "--load-debug-rollout-data", str(tmp_path / "{rollout_id}.jsonl")])


def test_the_plan_says_what_is_left_out(tmp_path):
    from colloid.config.plan import describe_plan

    (tmp_path / "0.jsonl").write_text(json.dumps({}))
    train_only = describe_plan(parse([*PLAN, "--load-debug-rollout-data", str(tmp_path / "{rollout_id}.jsonl")]))
    assert "engines          none" in train_only and "router           none" in train_only
    assert "plan (cpu, 1 device slots" in train_only
    assert "trainer          none" in describe_plan(parse([*PLAN, "--debug-rollout-only"]))
