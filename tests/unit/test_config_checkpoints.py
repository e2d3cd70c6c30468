"""What `--load` and `--ref-load` are, by what lies there."""

from __future__ import annotations

from pathlib import Path

import pytest

from colloid.config import parse
from colloid.errors import ConfigError


@pytest.fixture
def place(tiny_model_dir, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(tiny_model_dir("qwen3"))
    (tmp_path / "data.jsonl").write_text('{"prompt": "1 + 1 =", "label": "2"}\n')
    return tmp_path


def run(*argv: str):
    return parse(["--prompt-data", "data.jsonl", "--hf-checkpoint", "model", "--rm-type", "math", *argv])


def torch_dist(directory: Path) -> str:
    directory.mkdir(parents=True)
    for name in ("metadata.json", ".metadata"):
        (directory / name).write_text("{}")
    return str(directory)


def of_a_run(root: Path, step: int) -> Path:
    checkpoint = root / f"iter_{step:07d}"
    torch_dist(checkpoint / "trainer")
    (checkpoint / "meta.json").write_text("{}")
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))
    return checkpoint


def converted(root: Path) -> Path:
    torch_dist(root / "release")
    (root / "latest_checkpointed_iteration.txt").write_text("release")
    return root / "release"


def test_run_goes_on_from_its_checkpoint_and_takes_only_the_weights_with_finetune(place):
    of_a_run(place / "saved", 3), of_a_run(place / "saved", 7)
    args = run("--load", "saved")
    assert (args.resume_from, args.init_checkpoint) == ("saved/iter_0000007", "model")
    args = run("--load", "saved", "--finetune")
    assert (args.resume_from, args.init_checkpoint) == (None, "saved/iter_0000007/trainer")
    args = run("--load", "saved", "--finetune", "--ckpt-step", "3")
    assert args.init_checkpoint == "saved/iter_0000003/trainer"
    assert run("--load", "saved/iter_0000003").resume_from == "saved/iter_0000003"


def test_converted_model_and_one_of_megatron_itself_are_start_weights(place):
    converted(place / "converted")
    assert run("--load", "converted").init_checkpoint == "converted/release"
    assert run("--load", "converted/release").init_checkpoint == "converted/release"
    assert run("--load", "converted").resume_from is None
    torch_dist(place / "foreign" / "iter_0000100")
    (place / "foreign" / "latest_checkpointed_iteration.txt").write_text("100")
    assert run("--load", "foreign").init_checkpoint == "foreign/iter_0000100"


def test_reference_and_teacher_are_a_model_or_a_checkpoint_and_its_step_can_be_chosen(place):
    of_a_run(place / "saved", 3), of_a_run(place / "saved", 7)
    converted(place / "converted")
    assert run("--ref-load", "saved").ref_load == "saved/iter_0000007/trainer"
    assert run("--ref-load", "saved", "--ref-ckpt-step", "3").ref_load == "saved/iter_0000003/trainer"
    assert run("--ref-load", "saved/iter_0000003").ref_load == "saved/iter_0000003/trainer"
    assert run("--ref-load", "converted").ref_load == "converted/release"
    assert run("--ref-load", "model").ref_load == "model"
    teacher = ("--use-opd", "--opd-type", "megatron", "--opd-teacher-load", "saved")
    assert run(*teacher).opd_teacher_load == "saved/iter_0000007/trainer"
    assert run(*teacher, "--opd-teacher-ckpt-step", "3").opd_teacher_load == "saved/iter_0000003/trainer"


def test_checkpoint_without_a_model_is_an_error_that_says_what_is_missing(place):
    (place / "old" / "iter_0000001").mkdir(parents=True)
    (place / "old" / "latest_checkpointed_iteration.txt").write_text("1")
    for option in ("--load", "--ref-load"):
        with pytest.raises(
            ConfigError, match=f"{option} old/iter_0000001 holds no model in Megatron's torch_dist format"
        ):
            run(option, "old")


def test_run_from_the_weights_of_another_has_a_directory_of_its_own(place):
    of_a_run(place / "outputs" / "first" / "checkpoints", 3)
    assert run("--load", "outputs/first/checkpoints").run_dir == "outputs/first"
    assert run("--load", "outputs/first/checkpoints", "--finetune").run_dir != "outputs/first"
