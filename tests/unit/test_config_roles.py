"""Options of the roles, and what a critic demands of the rest."""

import pytest

from colloid.config import parse
from colloid.config.plan import describe_plan
from colloid.config.roles import role_args
from colloid.errors import ConfigError
from tests.parallel.rollouts import make_args

PPO = "--advantage-estimator ppo"


def plan(text):
    return parse(["--dry-run", "--device", "cpu", "--num-layers", "2", "--hidden-size", "8", *text.split()])


def with_roles(tmp_path, content, more=PPO):
    (tmp_path / "roles.yaml").write_text(content)
    return plan(f"{more} --megatron-config-path {tmp_path / 'roles.yaml'}")


def test_each_role_has_its_own_options_and_else_those_of_all(tmp_path):
    content = "critic: {lr: 1.0e-4, --lr-warmup-iters: 3}\nactor: {weight_decay: 0}"
    args = with_roles(tmp_path, content, f"{PPO} --lr 1e-5 --lr-warmup-fraction 0.5 --num-rollout 10")
    actor, critic = role_args(args, "actor"), role_args(args, "critic")
    assert (actor.lr, actor.weight_decay, actor.lr_warmup_iters) == (1e-5, 0.0, 5)
    assert (critic.lr, critic.weight_decay, critic.lr_warmup_iters) == (1e-4, 0.1, 3)
    assert critic.lr_warmup_fraction is None and actor.lr_warmup_fraction == 0.5
    assert "lr_warmup_iters" in critic.given and "weight_decay" in actor.given
    assert args.lr == 1e-5 and "weight_decay" not in args.given


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("teacher: {lr: 1}", "unknown role 'teacher'; the roles are actor, critic"),
        ("critic: 3", "critic must be a mapping"),
        ("critic: {lrr: 1}", "critic: unknown option 'lrr'"),
        ("critic: {lr: fast}", "critic: lr: 'fast' is not a number"),
        ("critic: {lr: -1}", "must be at least 0"),
        ("critic: {hidden_size: 16}", "critic: --hidden-size is for all roles; what may differ: adam_beta1"),
        ("critic: {seed: 16}", "critic: --seed is for all roles"),
        ("critic: {lr: 1, LR: 2}", "unknown option 'LR'"),
        ("critic: {lr: 1.0e-3, min_lr: 1}", "critic: --min-lr 1.0 is greater than --lr 0.001"),
        ("actor: {lr_warmup_iters: 2, lr_warmup_fraction: 0.1}", "actor: --lr-warmup-fraction and --lr-warmup-iters"),
    ],
)
def test_what_cannot_be_is_an_error(tmp_path, content, message):
    with pytest.raises(ConfigError, match=message):
        with_roles(tmp_path, content)


def test_what_a_critic_does_not_work_with_yet_is_said():
    options = "--custom-advantage-function-path m.f"
    plan(options)
    with pytest.raises(ConfigError, match="not supported yet with"):
        plan(f"{PPO} {options}")


@pytest.mark.parametrize("size", ["tensor_model_parallel_size", "context_parallel_size"])
def test_both_roles_have_one_layout_and_a_file_that_says_otherwise_is_told_why(tmp_path, size):
    plan(f"{PPO} --actor-num-gpus-per-node 2 --{size.replace('_', '-')} 2")
    with pytest.raises(ConfigError, match="is for all roles: the rank of the critic .* hand each other its values"):
        with_roles(tmp_path, f"critic: {{{size}: 2}}")


def test_what_has_no_effect_is_said(tmp_path):
    warnings = with_roles(
        tmp_path, "critic: {lr: 1}", "--value-clip 0.1 --lambd 0.9 --num-critic-only-steps 3"
    ).warnings
    text = "\n".join(warnings)
    for part in ("--value-clip has no effect", "--lambd has", "--num-critic-only-steps has", "there is no critic"):
        assert part in text
    assert "not trained in any" in "\n".join(plan(f"{PPO} --num-critic-only-steps 5 --num-rollout 5").warnings)
    assert not with_roles(tmp_path, "critic: {lr: 1}", f"{PPO} --value-clip 0.1 --lambd 0.9").warnings


def test_the_plan_shows_the_critic():
    assert "critic           2 more, on the same slots" in describe_plan(plan(f"{PPO} --actor-num-gpus-per-node 2"))
    assert "critic" not in describe_plan(plan(""))


def test_checkpoints_without_a_critic_are_refused_with_the_way_out(tmp_path, tiny_model_dir):
    model = tiny_model_dir("qwen3")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("0")
    checkpoint = tmp_path / "iter_0000000"
    (checkpoint / "trainer").mkdir(parents=True)
    (checkpoint / "meta.json").write_text('{"format": 1, "rollout_id": 0, "weight_version": 1}')
    make_args(model, load=tmp_path)
    with pytest.raises(ConfigError, match="iter_0000000 has no critic.*convert_torch_dist_to_hf"):
        make_args(model, load=tmp_path, advantage_estimator="ppo")
    (checkpoint / "critic").mkdir()
    assert make_args(model, load=tmp_path, advantage_estimator="ppo").resume_from == str(checkpoint)
    for name in ("metadata.json", ".metadata"):
        (checkpoint / "trainer" / name).touch()
    with pytest.raises(ConfigError, match="ppo starts from a Hugging Face directory"):
        make_args(model, load=tmp_path, finetune=True, advantage_estimator="ppo")
