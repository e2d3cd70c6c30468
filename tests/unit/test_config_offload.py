"""Who gives memory back: what follows from the options, and what is refused."""

import pytest

from colloid.config import parse
from colloid.config.plan import describe_plan
from colloid.errors import ConfigError

PLAN = ["--dry-run", "--num-layers", "2", "--device", "cpu"]
SGLANG = ["--rollout-engine", "sglang"]


def plan(*argv: str, entry: str = "train"):
    return parse([*PLAN, *argv], entry)


def error_of(*argv: str, entry: str = "train") -> str:
    with pytest.raises(ConfigError) as caught:
        plan(*argv, entry=entry)
    return str(caught.value)


@pytest.mark.parametrize(
    ("argv", "train", "rollout"),
    [
        ("", False, False),
        ("--colocate", True, True),
        ("--colocate --no-offload-train", False, True),
        ("--colocate --no-offload-rollout", True, False),
        ("--offload", True, True),
        ("--offload --no-offload-rollout", True, False),
        ("--offload-train", True, False),
        ("--offload-rollout", False, True),
        ("--colocate --update-weights-interval 5", True, True),
        ("--colocate --debug-rollout-only", False, False),
        ("--colocate --rollout-engine sglang", True, False),
    ],
)
def test_colocated_both_give_memory_back_unless_they_are_told_not_to(argv, train, rollout):
    args = plan(*argv.split())
    assert (args.offload_train, args.offload_rollout) == (train, rollout)


def test_the_plan_says_who_gives_memory_back():
    assert "memory           the trainer gives" in describe_plan(plan("--colocate"))
    assert "  memory  " not in describe_plan(plan())


def test_what_cannot_be_given_back_is_refused_or_where_nobody_asked_for_it_said():
    assert any("--offload-rollout is off, as SGLang" in text for text in plan("--colocate", *SGLANG).warnings)
    text = error_of("--offload-rollout", *SGLANG)
    assert "SGLang gives its memory back on CUDA alone" in text and "--offload-train works" in text
    assert "this run has no trainer that could use the memory" in error_of("--offload", "--debug-rollout-only")
    text = error_of("--release-train")
    assert "--offload-train gives back" in text


def test_asynchronous_training_says_why_neither_can_do_without_its_memory():
    for flag in ("--offload", "--offload-train", "--offload-rollout"):
        text = error_of(flag, entry="train_async")
        assert text.startswith(f"{flag}: train_async.py generates while it trains") and "use train.py" in text
    assert "--colocate: train_async.py generates while it trains" in error_of("--colocate", entry="train_async")
    args = plan("--no-offload-train", "--update-weights-interval", "5", entry="train_async")
    assert not args.offload_train and not args.offload_rollout
