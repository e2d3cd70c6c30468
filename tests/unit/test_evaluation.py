"""Evaluation in the manager, against a fake engine: each set as it says, other functions, and what is logged."""

from __future__ import annotations

import asyncio
import json

import pytest

from colloid.config import parse
from colloid.errors import DataError, HookError
from colloid.rollout.evaluate import evaluation_metrics, evaluation_output
from colloid.rollout.manager import RolloutManager
from colloid.rollout.types import RolloutFnEvalOutput
from tests.fake_engine import FakeEngine


@pytest.fixture
def run_args(tiny_model_dir, tmp_path):
    """`run_args(*flags, config=YAML)` -> the options of a small run; a.jsonl, b.jsonl and data.jsonl are in place."""

    def make(*flags, config=None):
        for name, count in (("data", 4), ("a", 3), ("b", 2)):
            rows = [{"prompt": f"{name}{i}", "ask": f"?{name}{i}", "label": str(i)} for i in range(count)]
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if config is not None:
            (tmp_path / "eval.yaml").write_text(config.replace("DIR", str(tmp_path)))
            flags = (*flags, "--eval-config", tmp_path / "eval.yaml")
        base = [
            *("--hf-checkpoint", tiny_model_dir(), "--prompt-data", tmp_path / "data.jsonl"),
            *("--rollout-batch-size", 2, "--n-samples-per-prompt", 2, "--rollout-max-response-len", 6),
            *("--outputs-dir", tmp_path / "outputs", "--num-rollout", 2),
        ]
        return parse([str(word) for word in (*base, *flags)], "train")

    return make


def with_manager(args, body, engine=None):
    engine = engine or FakeEngine(lambda payload: [40, 41])

    async def run():
        async with engine.serve():
            manager = RolloutManager(args)
            await manager.start(engine.url, [engine.url], "key")
            try:
                return await body(manager)
            finally:
                await manager.close()

    return asyncio.run(run())


def evaluate(args, engine=None):
    return with_manager(args, lambda manager: manager.evaluate(0), engine)


SETS = """
eval:
  defaults: {max_response_len: 4}
  datasets:
    - {name: own reward, path: DIR/a.jsonl, custom_rm_path: DIR/f.py:judge, reward_key: total, temperature: 0.0}
    - {name: random, path: "DIR/b.jsonl@[0:1]", rm_type: random, n_samples_per_eval_prompt: 3, min_new_tokens: 2}
    - {name: as the run, path: DIR/b.jsonl, top_k: 5, stop: [X], input_key: ask}
    - name: generated
      path: DIR/b.jsonl
      custom_generate_function_path: DIR/f.py:generate
      custom_rm_path: DIR/f.py:judge
      reward_key: other
      metadata_overrides: {split: test}
"""

FUNCTIONS = """
async def judge(args, sample, **kw):
    return {"total": 2.0 + len(sample.metadata), "other": float(sample.metadata.get("split") == "test"), "kind": "k"}

async def generate(args, sample, sampling_params, evaluation=False):
    assert evaluation
    sample.append_response_tokens([7, 8, 9], log_probs=[-1.0] * 3, weight_version=3)
    sample.response = "made"
    return sample
"""


def test_each_set_is_sampled_generated_and_graded_as_it_says(run_args, tmp_path, tokens_of):
    (tmp_path / "f.py").write_text(FUNCTIONS)
    (tmp_path / "run.py").write_text("async def custom_rm(args, sample, **kw):\n    return 0.25\n")
    engine = FakeEngine(lambda payload: [40, 41])
    args = run_args(
        *("--custom-rm-path", tmp_path / "run.py", "--eval-prompt-data", "line", tmp_path / "a.jsonl"),
        *("--log-reward-category", "kind", "--rollout-max-prompt-len", 50),
        config=SETS,
    )
    metrics = evaluate(args, engine)
    assert metrics["eval/line"] == metrics["eval/as the run"] == 0.25
    assert metrics["eval/own reward"] == 2.0 and metrics["eval/generated"] == 1.0
    assert metrics["eval/own reward/error_cat/k"] == 1.0 and "eval/line/error_cat/k" not in metrics
    assert metrics["eval/generated/response_length"] == 3.0 and metrics["eval/line/response_length"] == 2.0
    assert 0 <= metrics["eval/random"] <= 1 and "eval/random/pass@3" in metrics and "eval/line/pass@1" not in metrics
    by_prompt = {}
    for request in engine.requests:
        by_prompt.setdefault(tuple(request["input_ids"]), []).append(request["sampling_params"])
    assert {len(found) for found in by_prompt.values()} == {1, 2, 3}, "a0 to a2 in two sets, b0 in one of 3 samples"
    (asked,) = by_prompt[tokens_of("?b1")]
    assert (asked["top_k"], asked["stop"], asked["max_new_tokens"]) == (5, ["X"], 4)
    assert {params["min_new_tokens"] for params in by_prompt[tokens_of("b0")]} == {2}
    assert sorted(params["max_new_tokens"] for params in by_prompt[tokens_of("a0")]) == [4, 6]
    assert {params["temperature"] for params in by_prompt[tokens_of("a0")]} == {0.0, 1.0}
    assert (tmp_path / "outputs" / args.run_name / "rollouts" / "eval_own_reward_000000.parquet").exists()


@pytest.fixture
def tokens_of(tiny_model_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir())
    return lambda text: tuple(tokenizer(text)["input_ids"])


def test_a_row_that_lacks_what_the_reward_of_its_set_needs_is_named(run_args, tmp_path):
    args = run_args(
        "--rm-type", "random", config="datasets: {a: {path: DIR/x.jsonl, rm_type: math}}".replace("x.", "a.")
    )
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(DataError, match="a.jsonl.*no label .* the reward 'math' needs one"):
        RolloutManager(args)


EVALUATES = """
import colloid
from colloid.rollout.generate import generate_rollout

def eval_function(args, rollout_id, data_source, evaluation=False):
    assert evaluation
    return {"own": {"rewards": [1.0, None, 0.5]}}

async def as_usual(args, rollout_id, data_source, evaluation=False):
    output = await generate_rollout(args, rollout_id, data_source, evaluation=True)
    return colloid.RolloutFnEvalOutput(output.data, {"eval/more": 3.0})

def bad(args, rollout_id, data_source, evaluation=False):
    return {"own": {"rewards": [1.0], "samples": []}}

def raises(args, rollout_id, data_source, evaluation=False):
    raise RuntimeError("no")

def log_rollout(rollout_id, args, samples, extra_metrics, rollout_time):
    assert len(samples) == 4 and rollout_time > 0 and "rollout/num_submitted_groups" in extra_metrics
    extra_metrics["mine/number"] = rollout_id + 1.0
    return args.rm_type == "random"

def log_evaluation(rollout_id, args, data, extra_metrics):
    extra_metrics["mine/sets"] = float(len(data))
    return args.rm_type == "random"
"""


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "evaluates.py"
    path.write_text(EVALUATES)
    return lambda name: f"{path}:{name}"


def test_a_function_may_bring_sets_of_its_own(run_args, functions):
    metrics = evaluate(run_args("--eval-function-path", functions("eval_function")))
    assert metrics.pop("perf/eval_time") >= 0 and metrics == {"eval/own": 0.75}


def test_a_function_may_add_to_what_the_default_does(run_args, functions, tmp_path):
    sets = ("--eval-prompt-data", "a", tmp_path / "a.jsonl")
    metrics = evaluate(run_args(*sets, "--eval-function-path", functions("as_usual")))
    assert metrics["eval/more"] == 3.0 and "eval/a" in metrics


@pytest.mark.parametrize(("name", "words"), [("bad", "must be of one length"), ("raises", "RuntimeError: no")])
def test_a_function_that_fails_is_named(run_args, functions, name, words):
    with pytest.raises(HookError, match=f"--eval-function-path .*{name}.*{words}"):
        evaluate(run_args("--eval-function-path", functions(name)))


@pytest.mark.parametrize("output", [None, [1.0], {"a": [1.0]}, {"a": {"rewards": ["x"]}}, {"a": {}}])
def test_what_is_no_evaluation_is_refused(output):
    with pytest.raises(HookError, match="^f"):
        evaluation_output(output, "f")
    assert evaluation_output(RolloutFnEvalOutput({"a": {"rewards": []}}), "f").data == {"a": {"rewards": []}}


def test_what_was_not_measured_is_not_logged_as_zero():
    assert evaluation_metrics({"a": {"rewards": [None]}, "b": {"rewards": [], "truncated": [], "samples": []}}) == {}


@pytest.mark.parametrize("reward", ["random", "f1"])
def test_log_functions_replace_the_metrics_where_they_return_true(run_args, functions, tmp_path, reward):
    args = run_args(
        *("--rm-type", reward, "--eval-prompt-data", "a", tmp_path / "a.jsonl"),
        *("--custom-rollout-log-function-path", functions("log_rollout")),
        *("--custom-eval-rollout-log-function-path", functions("log_evaluation")),
    )

    async def body(manager):
        return (await manager.generate(1, 3)).metrics, await manager.evaluate(1)

    rollout, evaluation = with_manager(args, body)
    assert rollout["mine/number"] == 2.0 and evaluation["mine/sets"] == 1.0
    assert ("rollout/raw_reward" in rollout) == ("eval/a" in evaluation) == (reward == "f1")
    if reward == "random":
        assert set(rollout) == {"mine/number"} and set(evaluation) == {"mine/sets", "perf/eval_time"}
