"""Logging, progress and the summary."""

import logging
import re
import subprocess
import sys
import warnings

import pytest

from colloid.observe import logs
from colloid.observe.logs import NOT_ON_CONSOLE, setup_logging, warn_once
from colloid.observe.metrics import MetricsWriter
from colloid.observe.progress import Progress, duration
from colloid.observe.summary import eval_before_after, reward_before_after, sparkline, summary, time_by_part

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"


@pytest.fixture
def logging_restored():
    root, colloid = logging.getLogger(), logging.getLogger("colloid")
    levels = root.level, colloid.level
    yield
    for name in ("", "py.warnings"):
        logs._replace_handlers(logging.getLogger(name), [])
    logging.getLogger("py.warnings").propagate = True
    logging.captureWarnings(False)
    root.setLevel(levels[0])
    colloid.setLevel(levels[1])


def test_records_go_to_file_with_time_and_process_and_to_console_short(tmp_path, capsys, logging_restored):
    setup_logging(tmp_path, "trainer 0")
    setup_logging(tmp_path, "trainer 0")
    logging.getLogger("colloid.loop").info("two\nlines")
    logging.getLogger("colloid.loop").warning("careful")
    logging.getLogger("library").info("chatter")
    logging.getLogger("colloid.loop").debug("detail")
    logging.getLogger("colloid.loop").info("error", extra=NOT_ON_CONSOLE)
    text = (tmp_path / "log.txt").read_text()
    assert re.fullmatch(
        rf"{STAMP} INFO trainer 0 colloid\.loop: two\n    lines\n{STAMP} WARNING trainer 0 colloid\.loop: careful\n"
        rf"{STAMP} INFO trainer 0 colloid\.loop: error\n",
        text,
    )
    assert re.fullmatch(r"\d\d:\d\d:\d\d two\nlines\n\d\d:\d\d:\d\d warning: careful\n", capsys.readouterr().err)


def test_python_warnings_and_tracebacks_are_in_the_file(tmp_path, capsys, logging_restored):
    setup_logging(tmp_path, "driver")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old api", stacklevel=1)
    try:
        raise KeyError("lost")
    except KeyError:
        logging.getLogger("colloid").exception("it failed")
    text = (tmp_path / "log.txt").read_text()
    assert "old api" in text and "    KeyError: 'lost'" in text
    console = capsys.readouterr().err
    assert "old api" not in console and "KeyError: 'lost'" in console


def test_a_log_file_that_cannot_be_written_is_reported_once(tmp_path, capfd, logging_restored):
    (tmp_path / "log.txt").symlink_to("/dev/full")
    setup_logging(tmp_path, "driver", console=False)
    for _ in range(2):
        logging.getLogger("colloid").info("text")
    error = capfd.readouterr().err
    assert error.count("log.txt cannot be written") == 1 and "Traceback" not in error


def test_the_same_warning_comes_once(caplog):
    logger = logging.getLogger("colloid.test_once")
    for number in (1, 1, 2):
        warn_once(logger, "value %d", number)
    assert [record.getMessage() for record in caplog.records] == ["value 1", "value 2"]


def test_progress_without_a_terminal_is_a_line_a_rollout(caplog):
    now = iter([0.0, 10.0, 30.0])
    progress = Progress(total=12, start=2, bar=False, clock=lambda: next(now))
    with caplog.at_level(logging.INFO, "colloid"):
        progress.update({"rollout/raw_reward": 0.25, "perf/rollout_tokens_per_sec": 1234.5, "perf/step_time": 9.96})
        progress.update({})
    progress.close()
    assert [record.getMessage() for record in caplog.records] == [
        "rollout 3/12  reward 0.250  tokens/s 1234  10.0 s  1:30 min left",
        "rollout 4/12  2:00 min left",
    ]


def test_progress_on_a_terminal_is_a_bar(capsys):
    progress = Progress(total=4, start=1, bar=True)
    progress.update({"rollout/raw_reward": 0.5})
    progress.close()
    assert "2/4" in (shown := capsys.readouterr().err) and "reward=0.500" in shown


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (125, "2:05 min"), (11220, "3:07 h")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def make_run(run_dir):
    with MetricsWriter(run_dir) as writer:
        writer.log(0, {"eval/heldout": 0.4, "eval/heldout/truncated_ratio": 0.1})
        for step, reward in enumerate([0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.8]):
            times = {"perf/rollout_time": 3.0, "perf/train_time": 5.0, "perf/update_weights_time": 1.0}
            writer.log(step, {"rollout/raw_reward": reward, "perf/step_time": 10.0, **times})
        writer.log(7, {"eval/heldout": 0.85, "eval/heldout/truncated_ratio": 0.0, "perf/eval_time": 30.0})


def test_summary_shows_rewards_scores_times_and_outputs(tmp_path):
    run_dir = tmp_path / "outputs" / "name"
    make_run(run_dir)
    text = summary(run_dir)
    assert "reward     0.200 -> 0.800   (mean of the first and last 3 of 7 rollouts)" in text
    assert "held out   0.400 -> 0.850   (heldout)" in text
    assert "truncated" not in text
    assert re.search(r"^training +35\.0 +35%$", text, re.M)
    assert re.search(r"^evaluation +30\.0 +30%$", text, re.M)
    assert re.search(r"^rest +7\.0 +7%$", text, re.M)
    assert re.search(r"^all +100\.0 +1:40 min, 7 rollouts$", text, re.M)
    assert f"tensorboard --logdir {tmp_path / 'outputs'}" in text
    assert "metrics.jsonl" in text and "checkpoints  " not in text.split("outputs in")[1]


def test_summary_is_a_command_too_and_says_when_there_is_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "colloid.observe.summary", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "No metrics" in done.stdout


def test_numbers_behind_the_summary():
    records = [
        {"step": 0, "rollout/raw_reward": 0.0},
        {"step": 0, "eval/b": None},
        {"step": 1, "rollout/raw_reward": 1.0},
    ]
    assert reward_before_after(records) == (0.5, 0.5)
    assert reward_before_after([]) is None
    assert eval_before_after(records) == {}
    overlapping = [{"perf/step_time": 5.0, "perf/rollout_time": 4.0, "perf/train_time": 4.0}]
    assert time_by_part(overlapping) == {"generation": 4.0, "training": 4.0}


def test_sparkline():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""
