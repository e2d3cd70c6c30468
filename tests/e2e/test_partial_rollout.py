"""Samples that one rollout aborts go on in a later one, also across a resume."""

import json

import pyarrow.parquet
import pytest

from tests.e2e.running import metrics_of, run_training, tiny_arguments, write_sums

LENGTH = 48


@pytest.mark.timeout(900)
def test_aborted_samples_go_on_in_later_rollouts_and_after_a_resume(tmp_path, tiny_model_dir):
    data = write_sums(tmp_path / "data.jsonl", 9)
    arguments = [
        *(value for value in tiny_arguments(tiny_model_dir("qwen3"), data)),
        *("--partial-rollout", "--over-sampling-batch-size", 8, "--save-interval", 1),
        *("--rollout-stop-token-ids", *range(3, 250, 9)),  # so that lengths differ
    ]
    arguments[arguments.index("--rollout-max-response-len") + 1] = LENGTH
    first = run_training(tmp_path, *arguments, "--num-rollout", 2, "--run-name", "run")
    assert first.code == 0, first.output
    run_dir = tmp_path / "outputs/run"
    (state,) = (run_dir / "checkpoints/iter_0000001/rollout").glob("*data_source*.json")
    waiting = [sample for group in json.loads(state.read_text())["buffer"] for sample in group]
    partial = {s["index"]: s for s in waiting if s["response_length"] and s["status"] in ("aborted", "pending")}
    assert partial, "samples wait half way at the resume"

    second = run_training(
        tmp_path, *arguments, "--num-rollout", 5, "--start-rollout-id", 3, "--load", run_dir / "checkpoints"
    )
    assert second.code == 0, second.output
    metrics = metrics_of(run_dir)
    assert [line["step"] for line in metrics] == [0, 1, 3, 4], "numbered as asked for"
    assert metrics[2]["rollout/num_continued_samples"] > 0
    for line in metrics:
        drawn, kept = line["rollout/num_submitted_groups"], 4
        assert drawn == kept + line["rollout/num_filtered_groups"] + line["rollout/num_carried_groups"]
        assert line["rollout/num_discarded_groups"] == 0
    rows = [
        row
        for rollout_id in (0, 1, 3, 4)
        for row in pyarrow.parquet.read_table(run_dir / f"rollouts/{rollout_id:06d}.parquet").to_pylist()
    ]
    assert len({row["index"] for row in rows}) == len(rows) == 4 * 16
    assert all(0 < row["response_length"] <= LENGTH for row in rows)
    mixed = [row for row in rows if row["oldest_weight_version"] < row["newest_weight_version"]]
    continued = [row for row in mixed if row["index"] in partial]
    assert continued
    for row in continued:
        assert row["oldest_weight_version"] == min(partial[row["index"]]["weight_versions"])
        assert row["response_length"] >= partial[row["index"]]["response_length"]
