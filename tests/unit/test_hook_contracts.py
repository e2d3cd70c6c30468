"""Each kind of hook: its signature as users write it, where it is found in a file, what it is given, how it fails; and
that it has a test of what it does, and a section with a runnable file in `docs/customization.md`.
"""

from __future__ import annotations

import ast
import asyncio
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import colloid.rollout
from colloid.data.sample import Sample
from colloid.errors import HookError
from colloid.hook_kinds import KINDS
from colloid.hooks import load_class, load_hook, load_hook_or_class

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/customization.md").read_text()

SIGNATURES = {
    "rollout_function": ["args, rollout_id, data_source, evaluation=False"],
    "eval_function": ["args, rollout_id, data_source, evaluation=False"],
    "custom_generate": [
        *("args, sample, sampling_params", "args, sample, sampling_params, evaluation=False"),
        "args, samples, evaluation=False",
    ],
    "custom_rm": ["args, sample, **kw", "args, samples, **kw", "prompts, responses, **columns"],
    "custom_reward_post_process": ["args, samples"],
    "custom_convert_samples": ["args, samples"],
    "buffer_filter": ["args, rollout_id, buffer, num_samples"],
    "dynamic_filter": ["args, samples, **kw"],
    "rollout_sample_filter": ["args, data"],
    "rollout_all_samples": ["args, all_samples, data_source"],
    "rollout_sample_hook": ["args, sample, *, rollout_id=None, evaluation=False"],
    "rollout_data_postprocess": ["args, rollout_id, rollout_data"],
    "rollout_log": ["rollout_id, args, samples, extra_metrics, rollout_time"],
    "eval_rollout_log": ["rollout_id, args, data, extra_metrics"],
    "custom_loss": ["args, batch, logits, sum_of_sample_mean"],
    "custom_advantage": ["args, rollout_data"],
    "custom_tis": [
        "args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kw"
    ],
    "pg_loss_reducer": ["total_lengths, response_lengths, loss_masks, calculate_per_token_loss"],
    "model_provider": ["pre_process, post_process, vp_stage=None"],
    "megatron_init": ["args"],
    "before_log_prob": ["args, model, store_prefix"],
    "before_train_step": ["args, rollout_id, step_id, model, optimizer, opt_param_scheduler"],
    "update_weight_post_write": ["args, version_dir, rollout_engines"],
}
"""Those of functions; a data source is a class."""

EFFECTS = {
    "rollout_function": "unit/test_rollout_hooks.py::"
    "test_a_rollout_function_with_prompts_of_its_own_returns_a_bare_list",
    "eval_function": "unit/test_evaluation.py::test_a_function_may_bring_sets_of_its_own",
    "custom_generate": "unit/test_multi_turn.py::test_a_function_of_the_whole_group_trains_what_it_sampled",
    "custom_rm": "unit/test_rewards_custom.py::test_forms_are_told_apart_by_their_parameters",
    "custom_reward_post_process": "unit/test_rewards_docs.py::test_the_pages_functions_reward",
    "custom_convert_samples": "unit/test_convert.py::test_train_data_of_ones_own_becomes_columns",
    "data_source": "unit/test_rollout_hooks.py::test_a_data_source_of_ones_own",
    "buffer_filter": "unit/test_source.py::test_exactly_the_groups_that_the_filter_returns_leave_the_buffer",
    "dynamic_filter": "unit/test_filters.py::test_a_filter_may_return_a_bool_and_nothing_else",
    "rollout_sample_filter": "unit/test_rollout_hooks.py::"
    "test_hooks_see_every_sample_once_and_what_they_change_is_trained",
    "rollout_all_samples": "unit/test_rollout_hooks.py::"
    "test_hooks_see_every_sample_once_and_what_they_change_is_trained",
    "rollout_sample_hook": "unit/test_rollout_hooks.py::"
    "test_hooks_see_every_sample_once_and_what_they_change_is_trained",
    "rollout_data_postprocess": "unit/test_trainer_hooks.py::"
    "test_masks_and_advantages_of_a_hook_are_taken_and_denominators_stay",
    "rollout_log": "unit/test_evaluation.py::test_log_functions_replace_the_metrics_where_they_return_true",
    "eval_rollout_log": "unit/test_evaluation.py::test_log_functions_replace_the_metrics_where_they_return_true",
    "custom_loss": "unit/test_trainer_hooks.py::test_metrics_of_a_custom_loss_are_summed_over_micro_batches",
    "custom_advantage": "unit/test_custom_algorithms.py::test_a_custom_advantage_is_set_for_every_sample_of_the_step",
    "custom_tis": "unit/test_custom_algorithms.py::test_a_custom_correction_sees_samples_and_changes_loss_and_mask",
    "pg_loss_reducer": "unit/test_trainer_hooks.py::test_a_reducer_gets_the_samples_and_is_divided_by_the_global_batch",
    "model_provider": "e2e/test_customization.py::test_functions_of_ones_own",
    "megatron_init": "e2e/test_customization.py::test_functions_of_ones_own",
    "before_log_prob": "e2e/test_customization.py::test_functions_of_ones_own",
    "before_train_step": "e2e/test_customization.py::test_functions_of_ones_own",
    "update_weight_post_write": "engine/test_weight_transports.py::test_kept_files_are_those_that_the_hook_knows",
}
"""The test that shows what a hook of each kind does."""

CASES = [(kind, signature) for kind, signatures in SIGNATURES.items() for signature in signatures]
BESIDE = "from colloid import Sample\n\ndef extract(text):\n    return text\n\nclass Beside:\n    pass\n\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write_file(name: str, text: str) -> str:
        Path(name).write_text(text)
        return name

    return write_file


def function(kind, signature, name, body="return locals()"):
    return f"{'async ' if KINDS[kind].runs == 'async' else ''}def {name}({signature}):\n    {body}\n\n"


def called(hook, *positional, **keywords):
    result = hook(*positional, **keywords)
    return asyncio.run(result) if hook.is_async else result


def positional_names(signature):
    parts = [part.strip() for part in signature.partition(", *,")[0].split(",")]
    return [part for part in parts if "=" not in part and "*" not in part]


@pytest.mark.parametrize(("kind", "signature"), CASES)
def test_a_bare_file_has_its_function_under_the_usual_name_the_files_name_or_as_the_only_one_that_fits(
    write, kind, signature
):
    usual, other = KINDS[kind].names[0], KINDS[kind].names[-1]
    odd, stem = (function(kind, signature, name) for name in ("odd", "stem"))
    files = {
        "usual.py": (BESIDE + odd + function(kind, signature, usual), usual),
        "other.py": (BESIDE + odd + function(kind, signature, other), other),
        "stem.py": (BESIDE + odd + stem, "stem"),
        "only.py": (BESIDE + odd, "odd"),
    }
    for name, (text, expected) in files.items():
        assert load_hook_or_class(write(name, text), kind).target.__name__ == expected
    two = write("two.py", BESIDE + odd + function(kind, signature, "even"))
    with pytest.raises(HookError, match="even, odd") as caught:
        load_hook(two, kind)
    assert KINDS[kind].option in str(caught.value) and "two.py:NAME" in str(caught.value)
    assert load_hook("two.py:even", kind).target.__name__ == "even"


@pytest.mark.parametrize(("kind", "signature"), CASES)
def test_a_function_is_given_what_it_declares_and_its_failure_names_it_its_file_and_the_sample(write, kind, signature):
    names = positional_names(signature)
    values = {name: f"the {name}" for name in names}
    sample = Sample(index=17, group_index=2)
    values |= {key: value for key, value in {"sample": sample, "samples": [sample]}.items() if key in names}
    declared = re.findall(r"(\w+)(?:=\w+)?", signature.partition(", *,")[2].partition("**")[0])
    keywords = dict.fromkeys([*declared, "not_declared"], 5)
    hook = load_hook(write("given.py", function(kind, signature, "given")), kind)
    seen = called(hook, *values.values(), **keywords)
    assert {name: seen[name] for name in (*names, *declared)} == {**values, **dict.fromkeys(declared, 5)}
    assert "'not_declared': 5" in str(seen) if "**" in signature else "not_declared" not in str(seen)

    bad = load_hook(write("fails.py", "\n" + function(kind, signature, "fails", "return 1 / 0")), kind)
    with pytest.raises(HookError) as caught:
        called(bad, *values.values(), **dict.fromkeys(declared))
    words = [KINDS[kind].option, "fails.py", "fails.py:3", "(fails)", "ZeroDivisionError"]
    words += ["sample 17 (group 2)"] * ("sample" in names) + ["the group 2"] * ("samples" in names)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("kind", SIGNATURES)
def test_a_function_that_cannot_be_called_so_is_refused_with_the_signature(write, kind):
    path = write("wrong.py", function(kind, "a, b, c, d, e, f, g, h, i", "wrong"))
    with pytest.raises(HookError, match=f"{KINDS[kind].option} .*cannot be called as .*wrong"):
        load_hook(f"{path}:wrong", kind)


def test_a_reward_may_be_a_model_and_a_data_source_is_a_class(write):
    model = (
        "class Judge:\n    def __init__(self, model_path):\n        pass\n"
        "    def compute_reward(self, prompts, responses):\n        pass\n"
    )
    assert load_hook_or_class(write("judge.py", BESIDE + model), "custom_rm").__name__ == "Judge"
    usual = model.replace("Judge", "CustomRewardModel") + model + function("custom_rm", "args, sample", "reward_func")
    assert load_hook_or_class(write("usual.py", usual), "custom_rm").__name__ == "CustomRewardModel"
    batch = "def judge(completions, **kwargs):\n    return [1.0]\n"
    assert load_hook(write("trl.py", batch), "custom_rm").target.__name__ == "judge"
    source = "from colloid import RolloutDataSource\n\nclass Mine(RolloutDataSource):\n    pass\n"
    assert load_class(write("source.py", source), "data_source").__name__ == "Mine"


def test_every_kind_has_a_signature_and_a_test_of_what_it_does():
    assert set(SIGNATURES) | {"data_source"} == set(EFFECTS) == set(KINDS)
    for kind, place in EFFECTS.items():
        file, _, name = place.partition("::")
        defined = {node.name for node in ast.parse((ROOT / "tests" / file).read_text()).body if hasattr(node, "name")}
        assert name in defined, f"{kind}: {place}"


def shown(kind):
    """The Python blocks of the sections that are about the option."""
    heads = re.findall(rf"^\| [^|]*`{re.escape(KINDS[kind].option)}`[^|]*\|", PAGE, re.MULTILINE)
    row = re.search(rf"^\|.*`{re.escape(KINDS[kind].option)}`.*\(#([\w-]+)\)", PAGE, re.MULTILINE)
    assert heads and row, f"{KINDS[kind].option} has no row in the table of docs/customization.md"
    heading = row.group(1).replace("-", " ").capitalize()
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return re.findall(r"```python\n(.*?)```", section.group(1), re.DOTALL)


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_page_shows_a_file_that_is_found_as_it_stands(write, kind):
    (block,) = shown(kind)
    path = write(f"shown_{kind}.py", block)
    if KINDS[kind].is_class:
        load_class(path, kind)
    else:
        assert load_hook_or_class(path, kind).target.__name__ in block


def test_the_names_that_functions_import_are_there_and_on_the_page():
    of_colloid = ("Sample", "RolloutFnTrainOutput", "RolloutFnEvalOutput", "DynamicFilterOutput")
    of_colloid += ("RolloutDataSource", "RolloutDataSourceWithBuffer")
    for package, names in ((colloid, of_colloid), (colloid.rollout, ("generate_single", "get_model_url", "post"))):
        assert [name for name in names if not callable(getattr(package, name)) or f"`{name}`" not in PAGE] == []


def page_functions(kind):
    found = {}
    exec(shown(kind)[0], found)
    return SimpleNamespace(**found)


def test_the_pages_evaluation_and_log_functions_work():
    data = page_functions("eval_function").eval_function(None, 1, None, evaluation=True)
    assert data == {"parity": {"rewards": [1.0, 0.0, 1.0, 0.0], "truncated": [False] * 4}}
    logs, extra = page_functions("rollout_log"), {}
    assert logs.log_eval_rollout_data(1, None, data, extra) is False
    samples = [Sample(response=text) for text in ("a", "a", "b", "c")]
    assert logs.log_rollout_data(1, None, samples, extra, 0.5) is False
    assert extra == {"eval/parity/best": 1.0, "rollout/different_responses": 0.75}


def test_the_pages_filter_and_shaping_work():
    samples = [Sample(reward=reward, status=Sample.Status.TRUNCATED) for reward in (1.0, 0.0)]
    found = page_functions("dynamic_filter").dynamic_filter(None, samples)
    assert (found.keep, found.reason, found.keep_when_insufficient) == (False, "cut_off", True)
    assert page_functions("custom_reward_post_process").post_process(None, samples) == ([1.0, 0.0], [0.5, -0.5])


def test_the_pages_formulas_train():
    from colloid.algorithms.objective import ObjectiveConfig
    from colloid.training.custom import custom_correction
    from colloid.training.step_loss import LossChoice, StepLoss
    from tests.unit.test_custom_algorithms import advantages_of, correction_inputs
    from tests.unit.test_trainer_hooks import ADVANTAGES, PARTS, STEP, reduced

    shown_here = page_functions("custom_loss")
    advantages = advantages_of(lambda data: shown_here.custom_advantage(None, data))
    assert [len(values) for values in advantages] == [len(part.loss_mask) for part in PARTS]
    corrected, kept, metrics = custom_correction(lambda **given: shown_here.custom_tis(None, **given), PARTS[1])(
        torch.ones(len(PARTS[1].loss_mask)), correction_inputs(PARTS[1])
    )
    assert corrected.unique().tolist() == [1.0] and metrics == {}
    choice = LossChoice(
        "custom_loss", ObjectiveConfig(), custom_loss=lambda *given: shown_here.custom_loss(None, *given)
    )
    logits = torch.zeros(len(PARTS[1].loss_mask), 512, requires_grad=True)
    loss, _ = StepLoss(choice, replace(STEP), True, 0.5)(1, PARTS[1], logits, None)
    loss.backward()
    assert (logits.grad.abs().sum(1) > 0).equal(PARTS[1].loss_mask & (ADVANTAGES[1] != 0))
    assert torch.isfinite(reduced(shown_here.pg_loss_reducer)[0])
