"""Names, values and duplicates on a command line and in config files."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colloid.config.files import read_config
from colloid.config.option import BOOLEANS, Option
from colloid.config.tables import tables
from colloid.config.tokens import parse_mapping, parse_tokens
from colloid.errors import ConfigError
from colloid.models.facts import MODELS, command_line

OPTIONS = [option for option in tables().options if option.kind != "pattern"]


def error_of(argv: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_tokens(argv)
    return str(caught.value)


def values_of(option: Option) -> st.SearchStrategy:
    """(words on a command line, the value that they stand for)."""
    if option.kind in BOOLEANS:
        return st.sampled_from([([name], value) for name, value in option.names.items()])
    low = -(10**6) if option.low is None else option.low
    high = 10**6 if option.high is None else option.high
    one: st.SearchStrategy
    if option.choices:
        one = st.sampled_from(option.choices)
    elif option.kind in ("int", "size"):
        one = st.integers(int(low), int(high))
    elif option.kind == "float":
        one = st.floats(low, high, allow_nan=False)
    elif option.kind == "bool":
        one = st.booleans()
    elif option.kind == "json":
        one = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3)
    else:
        one = st.text(max_size=12).filter(lambda text: not text.startswith("--"))

    def words(value) -> list[str]:
        return [json.dumps(value) if option.kind == "json" else str(value)]

    if option.is_list:
        least = 1 if option.nargs == "+" else 0
        lists = st.lists(one, min_size=least, max_size=3)
        return lists.map(lambda items: ([option.flag, *(word for item in items for word in words(item))], items))
    return one.map(lambda value: ([option.flag, *words(value)], [value] if option.repeat else value))


@st.composite
def command_lines(draw) -> tuple[list[str], dict]:
    options = draw(st.lists(st.sampled_from(OPTIONS), unique_by=lambda option: option.dest, max_size=8))
    argv, expected = [], {}
    for option in options:
        words, value = draw(values_of(option))
        argv += words
        expected[option.dest] = value
    return argv, expected


@given(command_lines())
@settings(max_examples=300, deadline=None)
def test_what_is_written_is_what_is_parsed(line):
    argv, expected = line
    assert parse_tokens(argv) == expected


@given(command_lines())
@settings(max_examples=100, deadline=None)
def test_a_line_given_twice_is_the_line_unless_something_adds_up(line):
    argv, expected = line
    twice = parse_tokens(argv + argv)
    repeatable = {option.dest for option in OPTIONS if option.repeat}
    assert twice == {dest: value * 2 if dest in repeatable else value for dest, value in expected.items()}


def test_every_spelling_belongs_to_one_option():
    spellings = [name for option in OPTIONS for name in option.names]
    assert not [name for name in set(spellings) if spellings.count(name) > 1]


@given(st.sampled_from(sorted(tables().by_name)).filter(lambda name: len(name) > 6), st.data())
@settings(max_examples=200, deadline=None)
def test_an_abbreviation_is_never_taken(name, data):
    short = name[: data.draw(st.integers(4, len(name) - 1))]
    if short not in tables().by_name:
        assert "unknown option" in error_of([short, "1"])


@given(st.lists(st.text(max_size=8), max_size=6))
@settings(max_examples=200, deadline=None)
def test_any_words_give_options_or_a_config_error(words):
    try:
        values = parse_tokens(words)
    except ConfigError:
        return
    assert values.keys() <= tables().by_dest.keys()


@given(command_lines())
@settings(max_examples=100, deadline=None)
def test_a_config_file_says_the_same_as_the_line(line):
    _, expected = line
    content = {dest.replace("_", "-"): value for dest, value in expected.items() if value is not None}
    values, others = parse_mapping(content, "run.yaml")
    assert (values, others) == ({dest: value for dest, value in expected.items()}, {})


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("--rolout-batch-size", "--rollout-batch-size"),
        ("--rollout-batch", "--rollout-batch-size"),
        ("--advantage-estimater", "--advantage-estimator"),
        ("--tensor-model-paralel-size", "--tensor-model-parallel-size"),
        ("--mem-fraction-static", "--sglang-mem-fraction-static"),
        ("--sglang-mem-fraction", "--sglang-mem-fraction-static"),
        ("--cache-threshold", "--router-cache-threshold"),
        ("--hf_checkpoint", "--hf-checkpoint"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest(word, nearest):
    message = error_of([word, "1"])
    assert word in message and nearest in message


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--lr", "fast"], ["--lr", "'fast'", "number"]),
        (["--lr", "nan"], ["--lr", "nan"]),
        (["--lr"], ["--lr", "value"]),
        (["--lr", "--colocate"], ["--lr", "value"]),
        (["--lr", "1", "2"], ["'2'", "--lr"]),
        (["--colocate", "yes"], ["'yes'", "--colocate"]),
        (["--colocate=true"], ["--colocate", "no value"]),
        (["--n-samples-per-prompt", "0"], ["--n-samples-per-prompt", "at least 1"]),
        (["--rollout-top-p", "1.5"], ["--rollout-top-p", "at most 1"]),
        (["--n-samples-per-prompt", "2.5"], ["--n-samples-per-prompt", "whole number"]),
        (["--kl-loss-type", "k4"], ["--kl-loss-type", "k4", "low_var_kl"]),
        (["--sglang-log-level", "loud"], ["--sglang-log-level", "loud", "warning"]),
        (["--sglang-mem-fraction-static", "1.5"], ["--sglang-mem-fraction-static", "at most 1"]),
        (["--router-policy", "best"], ["--router-policy", "best", "round_robin"]),
        (["--tensor-model-parallel-size", "0"], ["--tensor-model-parallel-size", "at least 1"]),
        (["--rollout-stop"], ["--rollout-stop", "at least one"]),
        (["--apply-chat-template-kwargs", "{"], ["--apply-chat-template-kwargs", "JSON"]),
        (["--moe-layer-freq", "__import__('os')"], ["--moe-layer-freq"]),
    ],
)
def test_a_wrong_value_is_an_error_with_the_value_and_what_is_allowed(argv, words):
    message = error_of(argv)
    assert all(word in message for word in words), message


def test_given_twice_is_fine_when_equal_or_repeatable_and_else_an_error():
    assert parse_tokens(["--lr", "1e-6", "--lr", "0.000001"]) == {"lr": 1e-6}
    message = error_of(["--lr", "1e-6", "--lr", "2e-6"])
    assert "1e-6" in message and "2e-6" in message
    assert "twice" in error_of(["--offload-train", "--no-offload-train"])
    sets = ["--eval-prompt-data", "a", "a.jsonl", "--eval-prompt-data", "b", "b.jsonl"]
    assert parse_tokens(sets) == {"eval_prompt_data": ["a", "a.jsonl", "b", "b.jsonl"]}


def test_values_are_read_as_their_owners_read_them():
    argv = "--sglang-log-level INFO --sglang-context-length 8K --sglang-max-total-tokens 2k --rollout-top-k -1"
    argv += " --moe-layer-freq [0]*3+[1]*2 --disable-bias-linear --no-rope-fusion"
    assert parse_tokens(argv.split()) == {
        "sglang_log_level": "info",
        "sglang_context_length": 8192,
        "sglang_max_total_tokens": 2000,
        "rollout_top_k": -1,
        "moe_layer_freq": [0, 0, 0, 1, 1],
        "add_bias_linear": False,
        "apply_rope_fusion": False,
    }


@pytest.mark.parametrize("model", sorted(MODELS))
def test_the_arguments_of_every_model_parse(model):
    values = parse_tokens(command_line(model))
    assert values["hidden_size"] == MODELS[model].flags["--hidden-size"]


def test_the_tables_of_other_projects_are_whole():
    flags = [option.flag for option in tables().options]
    assert len(flags) == len(set(flags))
    counts = {name: sum(option.category == name for option in tables().options) for name in ("sglang", "router")}
    assert counts == {"sglang": 530, "router": 98}  # 532 and 99 rows, less those that are options of colloid's own


def test_a_config_file_is_checked_like_the_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("lr: 1e-6\ncolocate: true\nrollout_batch_size: 4\nrollout-stop: [a, b]\nrun-name: 2024\n")
    values, _ = parse_mapping(read_config(str(path), "--config"), str(path))
    assert values == {
        "lr": 1e-6,
        "colocate": True,
        "rollout_batch_size": 4,
        "rollout_stop": ["a", "b"],
        "run_name": "2024",
    }
    for text, words in [
        ("rolout-batch-size: 4", ["rolout-batch-size", "--rollout-batch-size", "run.yaml"]),
        ("lr: [1, 2]", ["lr", "one value"]),
        ("lr: 1\nlr: 2", ["lr", "twice"]),
        ("lr: 1\nLR: 2", ["LR"]),
        ("rollout-batch-size: 4\nrollout_batch_size: 4", ["same option"]),
        ("- lr", ["mapping"]),
        ("lr: {", ["cannot be read"]),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            parse_mapping(read_config(str(path), "--config"), str(path))
        assert all(word in str(caught.value) for word in words), caught.value


def test_evaluation_sets_in_a_file_may_be_a_mapping():
    expected = {"eval_prompt_data": ["a", "a.jsonl", "b", "b.jsonl"]}
    for value in (
        {"a": "a.jsonl", "b": "b.jsonl"},
        [["a", "a.jsonl"], ["b", "b.jsonl"]],
        ["a", "a.jsonl", "b", "b.jsonl"],
    ):
        assert parse_mapping({"eval-prompt-data": value}, "run.yaml") == (expected, {})


def test_toml_says_the_same_as_yaml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('lr = 1e-6\ncolocate = true\n"rollout-batch-size" = 4\n')
    values, _ = parse_mapping(read_config(str(path), "--config"), str(path))
    assert values == {"lr": 1e-6, "colocate": True, "rollout_batch_size": 4}


def test_parsing_and_help_import_nothing_heavy():
    code = (
        "import sys\n"
        "from colloid.config import parse_args\n"
        "try: parse_args(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'ray', 'yaml', 'numpy', 'transformers', 'megatron', 'asyncio'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    for argv in (["--help"], ["--help-megatron"], ["--num-layers", "2", "--dry-run"]):
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout
