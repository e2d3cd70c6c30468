"""The quick start's task, reward and report."""

import asyncio
import json

import pyarrow
import pyarrow.parquet
import pytest

from colloid.data.sample import Sample
from colloid.observe.metrics import MetricsWriter
from examples.quickstart import make_task, report
from examples.quickstart.reward import reward_func


def made(path, *options):
    make_task.main(["--output", str(path), *options])
    return {name: [json.loads(line) for line in open(path / f"{name}.jsonl")] for name in ("train", "heldout")}


def numbers(row):
    return [int(text) for text in row["prompt"][1]["content"].split(":")[1].strip(" ?").split(",")]


def test_rows_are_a_prefilled_chat_with_the_largest_number_as_label(tmp_path):
    rows = made(tmp_path)
    assert (len(rows["train"]), len(rows["heldout"])) == (2000, 100)
    for row in rows["train"] + rows["heldout"]:
        assert [message["role"] for message in row["prompt"]] == ["system", "user", "assistant"]
        assert row["prompt"][0]["content"] == "" and row["prompt"][2]["content"] == "The largest number is"
        assert len(set(numbers(row))) == 3 and all(1 <= number <= 99 for number in numbers(row))
        assert row["label"] == str(max(numbers(row)))


def test_no_three_numbers_are_in_both_files_or_twice_in_any_order(tmp_path):
    rows = made(tmp_path)
    triples = [frozenset(numbers(row)) for row in rows["train"] + rows["heldout"]]
    assert len(set(triples)) == len(triples)


def test_the_seed_makes_the_files_and_more_training_rows_leave_the_held_out_ones(tmp_path):
    first, again = made(tmp_path / "a"), made(tmp_path / "b", "--train", "50")
    assert again["heldout"] == first["heldout"] and again["train"] == first["train"][:50]
    assert made(tmp_path / "c", "--seed", "1")["heldout"] != first["heldout"]


@pytest.mark.parametrize(
    ("response", "status", "expected"),
    [
        (" 94.", Sample.Status.COMPLETED, 1.0),
        (" 94", Sample.Status.COMPLETED, 1.0),
        (" 94.<|im_end|>", Sample.Status.COMPLETED, 1.0),
        (" 94.", Sample.Status.TRUNCATED, 0.0),
        (" 54.", Sample.Status.COMPLETED, 0.0),
        (" 94..", Sample.Status.COMPLETED, 0.0),
        (" 94, of course.", Sample.Status.COMPLETED, 0.0),
        (" 094", Sample.Status.COMPLETED, 0.0),
        ("", Sample.Status.COMPLETED, 0.0),
    ],
)
def test_reward_is_for_the_right_number_alone(response, status, expected):
    sample = Sample(response=response, label="94", status=status)
    reward = asyncio.run(reward_func(None, sample))
    assert reward == expected and isinstance(reward, float)


def write_answers(run_dir, rollout_id, answers):
    (run_dir / "rollouts").mkdir(exist_ok=True)
    rows = [
        {"prompt": json.dumps(make_task.make_row(key)["prompt"]), "response": text, "reward": reward}
        for key, (text, reward) in answers.items()
    ]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), run_dir / "rollouts" / f"eval_heldout_{rollout_id}.parquet"
    )


def test_report_shows_scores_and_what_became_right_first(tmp_path, monkeypatch, capsys):
    with MetricsWriter(tmp_path) as writer:
        writer.log(0, {"eval/heldout": 0.39})
        for step, reward in enumerate([0.3, 0.4, 0.5, 0.8, 0.9]):
            writer.log(step, {"rollout/raw_reward": reward})
        writer.log(5, {"eval/heldout": 0.85})
    write_answers(tmp_path, 2, {(1, 2, 3): (" 3.", 1.0), (9, 5, 4): (" 4.", None)})
    write_answers(tmp_path, 10, {(1, 2, 3): (" 3.", 1.0), (9, 5, 4): (" 9.", 1.0)})
    monkeypatch.setattr("sys.argv", ["report", str(tmp_path)])
    report.main()
    shown = capsys.readouterr().out
    assert "0.40 -> 0.73" in shown and "39% -> 85%" in shown
    rows = [line.split() for line in shown.splitlines() if "." in line and "'" in line]
    assert rows == [["9,", "5,", "4", "'4.'", "+", "'9.'"], ["1,", "2,", "3", "+", "'3.'", "+", "'3.'"]]
    assert "--continue" in shown and "tensorboard --logdir" in shown


def test_report_without_recorded_answers_still_shows_the_scores(tmp_path):
    assert report.scores(tmp_path) == "" and report.answers(tmp_path) == ""
