"""`--max-restarts`: when a run begins again, from what, and that the new process is the old one's successor."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from colloid.checkpoints import write_checkpoint
from colloid.config import parse
from colloid.config.parse import given_options, parse_given
from colloid.config.restart import Restart, options_to_go_on
from colloid.errors import ConfigError, DataError, HookError, ProcessDied
from colloid.loop import log_interrupted
from colloid.observe.metrics import STEP_TIME, MetricsWriter, read_metrics
from colloid.restarts import RESTARTS_FILE, Restarts, taken_over
from tests.e2e.running import write_sums

DIED = ProcessDied("trainer rank 1 (pid 7 on here) ended")


@pytest.fixture
def given(tiny_model_dir, tmp_path, monkeypatch):
    """`given(…)` -> options of a run, as they were read; in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    data = write_sums(tmp_path / "data.jsonl", 8)
    fixed = ["--hf-checkpoint", tiny_model_dir("qwen3"), "--prompt-data", data, "--rm-type", "math"]
    return lambda *more: given_options([str(word) for word in (*fixed, "--rollout-batch-size", 2, *more)])


def begun(given: dict, restart: Restart | None = None):
    """The options of a run that has begun: its directory is not empty."""
    args = parse_given(given, restart=restart)
    os.makedirs(args.run_dir, exist_ok=True)
    with open(os.path.join(args.run_dir, "args.yaml"), "w"):
        return args


def save(args, rollout_id: int) -> None:
    def write(directory):
        (directory / "trainer").mkdir()

    write_checkpoint(Path(args.save), rollout_id, {"weight_version": rollout_id + 2}, write)


def test_without_a_checkpoint_a_run_begins_as_it_began_in_its_directory(given):
    options = given("--max-restarts", 1)
    args = begun(options)
    restart = Restarts(args, options).next(DIED)
    assert restart.number == 1 and restart.options == options
    again = parse_given(restart.options, restart=restart)
    assert (again.run_dir, again.run_name, again.resume_from) == (args.run_dir, args.run_name, None)
    with pytest.raises(ConfigError, match="holds a run already"):
        parse_given({**options, "run_name": args.run_name})


@pytest.mark.parametrize("save_options", [("--save-interval", 1), ("--save", "elsewhere", "--save-interval", 1)])
def test_a_run_goes_on_from_the_last_checkpoint_that_it_wrote_itself(given, save_options):
    options = given("--max-restarts", 2, "--start-rollout-id", 0, *save_options)
    args = begun(options)
    restarts = Restarts(args, options)
    save(args, 0)
    save(args, 1)
    first = restarts.next(DIED)
    args = begun(first.options, first)
    assert args.resume_from == os.path.join(args.save, "iter_0000001")
    assert args.start_rollout_id is None and args.num_restarts == 1
    second = Restarts(args, first.options).next(DIED)
    assert parse_given(second.options, restart=second).resume_from == args.resume_from, "none was written since"
    assert Restarts(begun(second.options, second), second.options).next(DIED) is None, "two were allowed"
    lines = [json.loads(line) for line in Path(args.run_dir, RESTARTS_FILE).read_text().splitlines()]
    assert [(line["restart"], line["from"]) for line in lines] == [(1, args.resume_from), (2, args.resume_from)]
    assert all("trainer rank 1 (pid 7 on here)" in line["reason"] for line in lines)


def test_a_later_checkpoint_that_was_there_before_is_not_gone_on_from(given):
    options = given("--run-name", "run", "--save-interval", 1)
    args = begun(options)
    for rollout_id in range(3):
        save(args, rollout_id)
    options = given("--load", args.save, "--ckpt-step", 0, "--save-interval", 1, "--max-restarts", 1)
    args = begun(options)
    restart = Restarts(args, options).next(DIED)
    assert parse_given(restart.options, restart=restart).resume_from.endswith("iter_0000000")


def test_what_a_run_started_from_is_left_out_when_it_goes_on_and_what_it_does_not_save_is_not_loaded():
    given = {"lr": 1.0, "finetune": True, "ckpt_step": 3, "load": "a", "no_load_optim": True, "no_load_rng": True}
    assert options_to_go_on(given, "b", {}) == {"lr": 1.0, "load": "b"}
    assert options_to_go_on({"no_save_optim": True}, "b", {}) == {
        "no_save_optim": True,
        "no_load_optim": True,
        "load": "b",
    }


def test_what_followed_from_the_start_stays_unless_it_was_given():
    followed = {"hf_checkpoint": "/model", "ref_load": "/start"}
    assert options_to_go_on({"ref_ckpt_step": 3}, "b", followed) == {**followed, "load": "b"}
    given = {"hf_checkpoint": "org/model", "ref_load": "r", "ref_ckpt_step": 3}
    assert options_to_go_on(given, "b", followed) == {**given, "load": "b"}


@pytest.mark.parametrize("model_is_given", [True, False])
def test_a_run_that_goes_on_keeps_its_model_and_its_reference(given, tiny_model_dir, tmp_path, model_is_given):
    start = str(shutil.copytree(tiny_model_dir("qwen3"), tmp_path / "start"))
    options = given("--max-restarts", 1, "--save-interval", 1, "--load", start)
    if not model_is_given:
        del options["hf_checkpoint"]
    args = begun(options)
    restarts = Restarts(args, options)
    save(args, 0)
    restart = restarts.next(DIED)
    again = parse_given(restart.options, restart=restart)
    assert again.resume_from == os.path.join(args.save, "iter_0000000")
    assert again.ref_load == args.ref_load == start
    assert again.hf_checkpoint == args.hf_checkpoint == (str(tiny_model_dir("qwen3")) if model_is_given else start)


@pytest.mark.parametrize("error", [ConfigError("x"), DataError("x"), HookError("x")])
def test_a_mistake_of_the_users_is_not_made_again(given, error):
    options = given("--max-restarts", 5)
    assert Restarts(begun(options), options).next(error) is None


def test_no_restart_without_the_option(given):
    options = given("--save-interval", 1)
    assert Restarts(begun(options), options).next(DIED) is None


def test_what_a_restart_would_lose_is_said(given, tiny_model_dir):
    assert "from the start" in " ".join(parse_given(given("--max-restarts", 1)).warnings)
    assert "from the start" in " ".join(parse_given(given("--max-restarts", 1, "--save", "x")).warnings)
    lossy = given("--max-restarts", 1, "--save-interval", 1, "--no-save-optim")
    assert "--no-save-optim" in " ".join(parse_given(lossy).warnings)
    whole = parse_given(given("--max-restarts", 1, "--save-interval", 1))
    assert not [text for text in whole.warnings if "--max-restarts" in text]


def test_a_rollout_that_was_saved_and_not_logged_is_logged_by_the_run_that_goes_on(given):
    args = begun(given("--save-interval", 1, "--num-rollout", 4))
    saved = {"train/loss": 0.1, STEP_TIME: 2.0}
    with MetricsWriter(args.run_dir) as writer:
        writer.log(0, {"train/loss": 0.5, STEP_TIME: 1.0})
        writer.log(1, {"eval/held_out": 0.3})  # before rollout 1: no line of the rollout itself
    run = SimpleNamespace(start_rollout_id=2, saved_metrics=saved)
    for _ in range(2):
        with MetricsWriter(args.run_dir, 1) as writer:
            log_interrupted(args, run, writer, {"weight_version": 3.0})
    assert read_metrics(args.run_dir)[2:] == [{"step": 1, **saved, "weight_version": 3.0}], "once"


def test_a_run_in_another_directory_does_not_log_what_came_before(given):
    args = begun(given("--save-interval", 1, "--num-rollout", 4))
    run = SimpleNamespace(start_rollout_id=2, saved_metrics={STEP_TIME: 2.0})
    with MetricsWriter(args.run_dir, 1) as writer:
        log_interrupted(args, run, writer, {})
    assert read_metrics(args.run_dir) == []


PROGRAM = """
import os, sys
from colloid.config.restart import Restart
from colloid.loop import log_interrupted
from colloid.observe.metrics import STEP_TIME, MetricsWriter, read_metrics
from colloid.restarts import Beginning, taken_over
before, beginning = taken_over(), Beginning.now()
number = before.number if before else 0
print(number, os.getpid(), sys.argv[1:], before.options if before else None, len(os.listdir("/dev/fd")), flush=True)
assert "COLLOID_RESTART" not in os.environ and "CHANGED" not in os.environ
if number < 3:
    os.environ["CHANGED"] = "1"
    leaked = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(leaked, True)
    beginning.begin_again(Restart(number + 1, "run", "name", {"key": "secret", "number": number}, 1.5))
sys.exit(7)
"""


def test_the_new_process_has_the_id_the_command_line_and_the_environment_of_the_old_one(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-X", "utf8", str(program), "--option", "a b"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 7, ended.stderr
    lines = [line.split(" ", 2) for line in ended.stdout.splitlines()]
    assert [line[0] for line in lines] == ["0", "1", "2", "3"]
    assert len({line[1] for line in lines}) == 1
    assert all(line[2].startswith("['--option', 'a b']") for line in lines)
    assert "{'key': 'secret', 'number': 2}" in lines[3][2]
    assert len({line[2].rsplit(" ", 1)[1] for line in lines}) == 1, "no open file is left to the next one"


def test_a_process_that_nobody_left_anything_begins_anew(monkeypatch):
    monkeypatch.delenv("COLLOID_RESTART", raising=False)
    assert taken_over() is None


def test_a_command_line_is_read_as_before():
    with pytest.raises(ConfigError):
        parse(["--max-restarts", "-1"])
