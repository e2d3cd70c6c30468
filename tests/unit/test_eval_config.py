"""`--eval-config` and its like: what a set has, where it comes from, and how mistakes are named."""

from __future__ import annotations

import pytest

from colloid.config import parse
from colloid.config.eval_config import evaluates_only, has_trainer
from colloid.errors import ConfigError


@pytest.fixture
def plan(tmp_path):
    """`plan(*flags, config=YAML)` -> the resolved options."""

    def make(*flags, config=None):
        if config is not None:
            path = tmp_path / "eval.yaml"
            path.write_text(config)
            flags = (*flags, "--eval-config", str(path))
        return parse(["--dry-run", "--prompt-data", "x.jsonl", *flags], "train")

    return make


NESTED = """
eval:
  defaults:
    temperature: 0.7
    max_response_len: 64
    rm_type: dapo
    metadata_overrides: {split: test, kind: a}
  datasets:
    - name: aime
      path: aime.jsonl@[0:30]
      rm_type: math
      n_samples_per_eval_prompt: 16
      stop: ["###"]
      stop_token_ids: 7
      prompt_key: question
      metadata_overrides: {kind: b}
    - {name: judged, path: j.parquet, custom_rm_path: judge.py, temperature: null, top_k: 20, reward_key: total}
    - {name: plain, path: p.jsonl}
"""


def test_a_set_has_its_own_settings_then_the_defaults_then_the_options(plan):
    args = plan(
        *("--eval-top-p", "0.9", "--n-samples-per-eval-prompt", "2", "--rollout-max-prompt-len", "99"),
        *("--label-key", "answer", "--eval-prompt-data", "line", "l.jsonl", "--reward-key", "score"),
        *("--rollout-temperature", "0.5", "--custom-generate-function-path", "g.py"),
        config=NESTED,
    )
    line, aime, judged, plain = args.eval_datasets
    assert [one.name for one in args.eval_datasets] == ["line", "aime", "judged", "plain"]
    assert (line.temperature, line.n_samples_per_eval_prompt, line.rm_type, line.stop) == (0.5, 2, None, None)
    assert (aime.temperature, aime.top_p, aime.max_response_len, aime.max_prompt_len) == (0.7, 0.9, 64, 99)
    assert (aime.path, aime.n_samples_per_eval_prompt, aime.rm_type) == ("aime.jsonl@[0:30]", 16, "math")
    assert (aime.stop, aime.stop_token_ids, aime.input_key, aime.label_key) == (["###"], [7], "question", "answer")
    assert aime.metadata_overrides == {"split": "test", "kind": "b"}
    assert (judged.custom_rm_path, judged.rm_type, judged.top_k, judged.temperature) == (["judge.py"], None, 20, 0.7)
    assert (judged.reward_key, plain.reward_key, plain.rm_type) == ("total", "score", "dapo")
    assert plain.custom_generate_function_path == "g.py"


@pytest.mark.parametrize(
    "config",
    [
        "eval: {datasets: {a: {path: a.jsonl}, b: b.jsonl}}",
        "datasets: [{name: a, path: a.jsonl}, {name: b, path: b.jsonl}]",
    ],
)
def test_sets_may_be_a_mapping_by_name_and_the_key_eval_left_out(plan, config):
    assert [(one.name, one.path) for one in plan(config=config).eval_datasets] == [("a", "a.jsonl"), ("b", "b.jsonl")]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("eval: {datasets: [{name: a, path: a, temprature: 1}]}", "set 'a': unknown key 'temprature'; did you mean"),
        ("eval: {default: {}, datasets: []}", "unknown key 'default'; did you mean 'defaults'?"),
        ("eval: {defaults: {n_sample: 2}, datasets: []}", "defaults: unknown key 'n_sample'"),
        ("eval: {datasets: []}\nmore: 1", "unknown key 'more'"),
        ("eval: {defaults: {path: x}, datasets: []}", "defaults: 'path' belongs to a set"),
        ("eval: {datasets: [{name: a}]}", "set 'a' has no path"),
        ("eval: {datasets: [{path: a}]}", r"datasets\[0\] has no name"),
        ("eval: {datasets: []}", "has no datasets"),
        ("eval: {datasets: 3}", "must be a list of sets or a mapping"),
        ("eval: [1]", "eval must be a mapping"),
        ("eval: {datasets: [{name: a, path: a, temperature: -1}]}", "set 'a': temperature: -1 is too small"),
        ("eval: {datasets: [{name: a, path: a, n_samples_per_eval_prompt: 1.5}]}", "1.5 is not a whole number"),
        ("eval: {datasets: [{name: a, path: a, rm_type: maths}]}", "did you mean math?"),
        ("eval: {datasets: [{name: a, path: a, rm_type: math, custom_rm_path: r.py}]}", "two rewards; give one"),
        ("eval: {datasets: [{name: a, path: a}, {name: a, path: b}]}", "the name 'a' comes twice"),
        ("eval: {datasets: [{name: a/b, path: a}]}", "has a / in it"),
        ("eval: {datasets: [{name: a, path: a, min_new_tokens: 9, max_response_len: 8}]}", "at least 9 new tokens"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_place(plan, config, words):
    with pytest.raises(ConfigError, match=rf"(?s)eval.yaml.*{words}|evaluation sets: .*{words}"):
        plan(config=config)


def test_a_name_of_the_line_and_of_the_file_may_not_be_the_same(plan):
    with pytest.raises(ConfigError, match="'a' comes twice"):
        plan("--eval-prompt-data", "a", "x", config="datasets: {a: y}")


def test_missing_files_and_functions_of_sets_are_found_before_anything_starts(tmp_path, tiny_model_dir):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "label": "1"}\n')
    start = ["--hf-checkpoint", str(tiny_model_dir()), "--prompt-data", str(tmp_path / "p.jsonl")]
    start += ["--outputs-dir", str(tmp_path / "outputs"), "--eval-config", str(tmp_path / "eval.yaml")]
    for text, words in [
        ("datasets: {a: none.jsonl}", "set 'a': none.jsonl: there is no such file"),
        (f"datasets: {{a: '{tmp_path}/p.jsonl@[x]'}}", "no slice of rows"),
        (f"datasets: {{a: {{path: {tmp_path}/p.jsonl, custom_rm_path: none.py}}}}", "no file .*none.py"),
        (f"datasets: {{a: {{path: {tmp_path}/p.jsonl, custom_generate_function_path: no.py:f}}}}", "no file .*no.py"),
    ]:
        (tmp_path / "eval.yaml").write_text(text)
        with pytest.raises(ConfigError, match=words):
            parse(start, "train")


def test_the_ninth_command_names_its_sets_both_ways(plan):
    line = "--eval-prompt-data aime aime.jsonl --eval-prompt-data gsm8k gsm8k.jsonl --n-samples-per-eval-prompt 16"
    one = plan(*line.split())
    other = plan(*line.replace(" --eval-prompt-data gsm8k", " gsm8k").split())
    assert one.eval_datasets == other.eval_datasets
    assert [(it.name, it.path, it.n_samples_per_eval_prompt) for it in one.eval_datasets] == [
        ("aime", "aime.jsonl", 16),
        ("gsm8k", "gsm8k.jsonl", 16),
    ]
    assert plan("--eval-prompt-data", "data/aime.jsonl@[0:5]").eval_datasets[0].name == "aime"
    assert not {"n_samples_per_eval_prompt", "eval_prompt_data"} & set(one.unread())
    with pytest.raises(ConfigError, match="a name goes before each file, and a.jsonl is a file's"):
        plan("--eval-prompt-data", "a.jsonl", "--eval-prompt-data", "b.jsonl")


def test_evaluation_alone_needs_neither_prompts_nor_a_trainer(tmp_path, tiny_model_dir):
    held = tmp_path / "held.jsonl"
    held.write_text('{"prompt": "a", "label": "1"}\n')
    start = ["--hf-checkpoint", str(tiny_model_dir()), "--num-rollout", "0", "--outputs-dir", str(tmp_path / "outputs")]
    args = parse([*start, "--eval-prompt-data", "held", str(held)], "train")
    assert evaluates_only(args) and not has_trainer(args)
    assert not evaluates_only(parse([*start[:2], *start[4:], "--prompt-data", str(held)], "train"))
    with pytest.raises(ConfigError, match="--num-rollout 0 .* needs an evaluation set"):
        parse([*start, "--prompt-data", str(held)], "train")
    with pytest.raises(ConfigError, match="--skip-eval-before-train leaves nothing to do"):
        parse([*start, "--eval-prompt-data", "held", str(held), "--skip-eval-before-train"], "train")


def test_an_interval_without_a_set_is_warned_of(plan):
    assert any("--eval-interval 5 has no effect" in text for text in plan("--eval-interval", "5").warnings)
    assert not any(
        "--eval-interval" in text for text in plan("--eval-interval", "5", config="datasets: {a: b}").warnings
    )
