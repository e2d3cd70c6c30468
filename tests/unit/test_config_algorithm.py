"""Options of estimators and losses: what contradicts itself is an error, what has no effect is said."""

from pathlib import Path

import pytest

from colloid.config import parse
from colloid.config.plan import describe_plan
from colloid.config.schema import loss
from colloid.errors import ConfigError


def plan(text):
    return parse(["--dry-run", "--device", "cpu", "--num-layers", "1", "--hidden-size", "8", *text.split()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--policy-loss sapo --sapo-tau-neg 0", "--sapo-tau-neg 0.0 must be greater than 0"),
        ("--sapo-tau-pos 0", "--sapo-tau-pos 0.0 must be greater than 0"),
        ("--eps-clip-c 1", "--eps-clip-c 1.0 must be greater than 1"),
        ("--gamma 1.1", "--gamma.* must be at most 1"),
        ("--use-unbiased-kl", "add --use-kl-loss"),
        ("--use-tis --tis-clip-low 3", "--tis-clip-low 3.0 is greater than --tis-clip 2.0"),
        ("--use-tis --use-rollout-logprobs", "leave one out"),
        ("--rs-lower-bound 2 --rs-upper-bound 1", "--rs-lower-bound 2.0 is greater than --rs-upper-bound 1.0"),
        ("--use-tis --tis-level word", "choose one of: token, sequence, geometric"),
        ("--freeze-params-name-list ( ", "no regular expression"),
        ("--freeze-params-name-list a --only-train-params-name-list b", "exclude each other"),
        ("--use-opd", "--use-opd needs --opd-type: megatron"),
        ("--use-opd --opd-type sglang", "needs a teacher: .*--rm-url URL.*--opd-teacher-load DIR"),
        ("--use-opd --opd-type sglang --rm-url http://a:1 --opd-teacher-load .", "two teachers: leave one out"),
        ("--use-opd --opd-type sglang --rm-url http://a:1 --opd-teacher-ckpt-step 1", "is for --opd-type megatron"),
        ("--use-opd --opd-type sglang --rm-url localhost:30000", "must be an address like http://127.0.0.1:30000"),
        (
            "--use-opd --opd-type sglang --rm-url http://a:1 --rm-type remote_rm",
            "cannot be that of --rm-type remote_rm",
        ),
        ("--rm-type remote_rm --rm-url localhost:30000", "must be an address like http://127.0.0.1:30000"),
        ("--use-opd --opd-type megatron", "needs --opd-teacher-load DIR"),
        ("--loss-type custom_loss", "needs --custom-loss-function-path"),
        ("--loss-type sft_loss --use-kl-loss --use-tis", "leave out --use-kl-loss, --use-tis"),
        ("--loss-type sft_loss --use-rollout-entropy", "leave out --use-rollout-entropy"),
        ("--loss-type sft_loss --n-samples-per-prompt 4", "--n-samples-per-prompt 4: in SFT a conversation is one"),
        ("--loss-type sft_loss --debug-rollout-only", "nothing else to run"),
        ("--rollout-function-path colloid.rollout.sft.generate_rollout", "it needs --loss-type sft_loss"),
    ],
)
def test_what_cannot_be_is_an_error(options, message):
    with pytest.raises(ConfigError, match=message):
        plan(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--kl-coef 0.1", "--kl-coef 0.1 has no effect with --advantage-estimator grpo"),
        ("--gamma 0.9 --advantage-estimator rloo", "--gamma 0.9 has no effect with --advantage-estimator rloo"),
        ("--sapo-tau-pos 2", "have no effect: the policy loss is ppo"),
        ("--policy-loss sapo --eps-clip 0.1", "sapo does not clip"),
        ("--policy-loss gmpo --eps-clip-c 3", "--eps-clip-c 3.0 has no effect"),
        ("--advantage-estimator rloo --disable-grpo-std-normalization", "no effect with --advantage-estimator rloo"),
        ("--ref-update-interval 2", "--ref-update-interval 2 has no effect"),
        ("--tis-clip 3", "have no effect without --use-tis"),
        ("--use-tis --tis-mode truncate --tis-clip-low 0.5", "--tis-clip-low 0.5 has no effect"),
        ("--rs-level sequence", "--rs-level sequence has no effect"),
        ("--opsm-delta 0.1", "--opsm-delta 0.1 has no effect"),
        ("--use-opsm", "--use-opsm has no effect with one step a rollout"),
        ("--advantage-estimator rloo --n-samples-per-prompt 1", "a group of one has advantage 0"),
    ],
)
def test_what_has_no_effect_is_said(options, message):
    assert any(message in warning for warning in plan(options).warnings)


@pytest.mark.parametrize(
    "options",
    [
        "--advantage-estimator reinforce_plus_plus --kl-coef 0.1 --gamma 0.9 --n-samples-per-prompt 1",
        "--policy-loss sapo --sapo-tau-pos 2",
        "--use-tis --tis-clip 3 --tis-clip-low 0.5 --rs-level sequence --rs-lower-bound 0.1",
        "--use-opsm --opsm-delta 0.1 --use-rollout-logprobs",
        "--advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4 --eps-clip-c 3",
    ],
)
def test_what_has_an_effect_is_not_warned_of(options):
    assert not [warning for warning in plan(options).warnings if "effect" in warning or "advantage" in warning]


def test_the_plan_names_a_teacher_behind_an_engine():
    behind_engine = "--use-opd --opd-type sglang"
    assert "teacher          http://a:1/generate\n" in describe_plan(
        plan(f"{behind_engine} --rm-url http://a:1/generate")
    )
    own = describe_plan(plan(f"{behind_engine} --opd-teacher-load /models/teacher"))
    assert "teacher          1 × embedded on /models/teacher, frozen, behind a router of its own\n" in own
    assert "teacher  " not in describe_plan(plan("--use-opd --opd-type megatron --opd-teacher-load /models/teacher"))


def test_the_page_on_algorithms_has_every_option_and_choice():
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    for option in (*loss.ALGORITHM, *loss.CORRECTION):
        if option.built != () and option.flag != "--loss-type":
            assert f"`{option.flag}" in page, option.flag
            for choice in option.built or option.choices:
                assert f"`{choice}`" in page or f"{option.flag} {choice}" in page, (option.flag, choice)
