"""Rules of the trainer's own options: a loss of one's own, old log-probs, Adam without moments, saved data, hooks."""

import pytest

from colloid.config import checks, parse
from colloid.errors import ConfigError
from colloid.hook_kinds import KINDS

OWN = "--loss-type custom_loss --custom-loss-function-path a.b "
NONE = "--disable-compute-advantages-and-returns "


def plan(text):
    return parse(["--dry-run", "--device", "cpu", "--num-layers", "1", "--hidden-size", "8", *text.split()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (OWN + "--use-tis --policy-loss sapo", "leave out --policy-loss, --use-tis"),
        (NONE, "the policy loss is made of advantages"),
        (OWN + NONE + "--normalize-advantages", "leave out --normalize-advantages"),
        (OWN + NONE + "--advantage-estimator ppo", "has a critic"),
        ("--keep-old-actor --use-rollout-logprobs", "exclude each other"),
        ("--keep-old-actor --loss-type sft_loss", "has none: leave it out"),
        ("--use-stateless-adam --optimizer sgd", "needs --optimizer adam, and it is sgd"),
        ("--save-debug-train-data a.pt", "needs {rollout_id} in it"),
        ("--save-debug-train-data {rollout_id}{step}.pt", "only {rollout_id} and {rank} may stand in braces"),
        ("--save-debug-train-data {rollout_id}.pt --actor-num-gpus-per-node 2", "needs {rank} in it: 2 ranks"),
    ],
)
def test_what_does_not_go_together_is_an_error(options, message):
    with pytest.raises(ConfigError, match=message):
        plan(options)


def test_a_deterministic_resume_needs_all_weights_that_old_log_probs_are_of():
    argv = ["--dry-run", "--device", "cpu", "--num-layers", "1", "--hidden-size", "8", "--deterministic"]
    argv += ["--keep-old-actor", "--save-interval", "2", "--save", "a"]
    parse(argv)
    with pytest.raises(ConfigError, match="a resume would have other old log-probs"):
        parse(argv, "train_async")
    parse([each for each in argv if each != "--deterministic"], "train_async")
    parse([each for each in argv if each != "--keep-old-actor"], "train_async")


@pytest.mark.parametrize(
    "options",
    [
        OWN + "--advantage-estimator ppo",
        OWN + NONE,
        "--loss-type sft_loss " + NONE,
        "--save-debug-train-data {rollout_id}.pt",
        "--save-debug-train-data {rollout_id}_{rank}.pt --actor-num-gpus-per-node 2",
        "--keep-old-actor --use-tis",
        "--use-stateless-adam --no-save-optim --use-distributed-optimizer",
    ],
)
def test_what_goes_together_is_none(options):
    plan(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--custom-loss-function-path a.b", "no effect without --loss-type custom_loss"),
        ("--use-stateless-adam --reset-optimizer-states", "--reset-optimizer-states has no effect"),
        ("--use-stateless-adam --adam-beta1 0.8", "--adam-beta1 and --adam-beta2 have no effect"),
        ("--loss-type sft_loss --custom-pg-loss-reducer-function-path a.b", "has no policy loss"),
    ],
)
def test_what_has_no_effect_is_said(options, message):
    assert any(message in text for text in checks.warnings(plan(options)))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_file_of_a_hook_has_to_be_there(kind, tmp_path):
    args = plan("")
    path = str(tmp_path / "absent.py") + ":function"
    dest = KINDS[kind].option[2:].replace("-", "_")
    setattr(args, dest, [path] if isinstance(getattr(args, dest), (list, tuple)) else path)
    assert checks._hook_files(args) == f"{KINDS[kind].option} {path}: there is no file {tmp_path / 'absent.py'}"
    (tmp_path / "absent.py").touch()
    assert checks._hook_files(args) is None
