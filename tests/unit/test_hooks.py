"""Loading a user's functions by path, calling them, and the errors in which they are named."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from colloid.data.sample import Sample
from colloid.errors import EngineError, HookError
from colloid.hook_kinds import KINDS
from colloid.hooks import bind, load_class, load_hook

GENERATE = "async def {name}(args, sample, sampling_params, evaluation=False):\n    return '{name}'\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write_file(text: str, name: str = "hook.py") -> str:
        Path(name).write_text(text)
        return name

    return write_file


def error_of(path: str, kind: str) -> str:
    with pytest.raises(HookError) as caught:
        load_hook(path, kind)
    return str(caught.value)


def test_the_three_spellings_of_a_path_name_the_same_function(write, tmp_path):
    write("def keep(args, samples, **kw):\n    return args\n", "filters_of_mine.py")
    for path in ("filters_of_mine.keep", "filters_of_mine.py:keep", str(tmp_path / "filters_of_mine.py")):
        hook = load_hook(path, "dynamic_filter")
        assert (hook("args", []), hook.path) == ("args", path)


def test_a_bare_file_is_searched_for_the_canonical_name_then_the_stem_then_the_one_that_fits(write):
    others = "def extract_tool_call(text):\n    pass\ndef execute_tool(call):\n    pass\n"
    both = GENERATE.format(name="generate") + GENERATE.format(name="mine")
    for text, name, expected in [
        (others + GENERATE.format(name="custom_generate") + both, "a.py", "custom_generate"),
        (others + both, "mine.py", "generate"),
        (others + GENERATE.format(name="x") + GENERATE.format(name="stem"), "stem.py", "stem"),
        (others + GENERATE.format(name="odd"), "b.py", "odd"),
    ]:
        assert asyncio.run(load_hook(write(text, name), "custom_generate")(1, 2, 3)) == expected


def test_imported_and_private_functions_are_no_candidates(write):
    write(GENERATE.format(name="imported"), "library_of_mine.py")
    text = "from library_of_mine import imported\n" + GENERATE.format(name="_private") + GENERATE.format(name="mine")
    assert load_hook(write(text), "custom_generate").target.__name__ == "mine"


def test_several_candidates_are_an_error_that_lists_them(write):
    path = write(GENERATE.format(name="one") + GENERATE.format(name="two") + "def helper(x):\n    pass\n")
    message = error_of(path, "custom_generate")
    assert "one, two" in message and "helper" not in message and f"{path}:NAME" in message
    assert "which one" in error_of(write("x = 1\n", "none.py"), "custom_generate")


def test_the_second_form_of_generate_loads(write):
    path = write("async def custom_generate(args, samples, evaluation=False):\n    return samples\n")
    assert asyncio.run(load_hook(path, "custom_generate")("args", [1], evaluation=True)) == [1]


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("none.py", None, ["no file", "none.py"]),
        ("none.py:f", None, ["no file"]),
        ("hook.py:nothing", "def f(args, samples): pass\n", ["'nothing'", "defines f"]),
        ("no_such_module_x.f", None, ["no module", "no_such_module_x"]),
        ("function", None, ["module.function"]),
        ("hook.py", "def f(:\n", ["SyntaxError", "hook.py:1"]),
        ("hook.py", "\nraise ValueError('at import')\n", ["ValueError", "hook.py:2", "at import"]),
        ("hook.py", "import no_such_library_x\n", ["no_such_library_x", "hook.py:1"]),
        ("hook.py:f", "f = 3\n", ["is no function: 3"]),
        ("hook.py:f", "def f(one): pass\n", ["cannot be called", "(args, samples)", "f(one)"]),
        ("hook.py:f", "def f(a, b, c): pass\n", ["cannot be called", "f(a, b, c)"]),
        ("hook.py:f", "async def f(args, samples): pass\n", ["plain function"]),
    ],
)
def test_what_cannot_be_loaded_names_option_file_and_reason(write, path, text, words):
    if text is not None:
        write(text)
    message = error_of(path, "dynamic_filter")
    assert "--dynamic-sampling-filter-path" in message and all(word in message for word in words), message


def test_keywords_that_a_hook_does_not_declare_are_not_passed(write):
    plain = load_hook(write("def f(args, samples):\n    return 'plain'\n", "one.py"), "dynamic_filter")
    some = load_hook(write("def f(args, samples, *, a):\n    return a\n", "two.py"), "dynamic_filter")
    every = load_hook(write("def f(args, samples, **kw):\n    return kw\n", "three.py"), "dynamic_filter")
    assert (plain(0, [], a=1, b=2), some(0, [], a=1, b=2), every(0, [], a=1, b=2)) == ("plain", 1, {"a": 1, "b": 2})


@pytest.mark.parametrize("prefix", ["", "async "])
def test_a_hook_that_raises_names_itself_its_file_and_the_sample(write, prefix):
    path = write(f"{prefix}def reward_func(args, sample, **kw):\n    x = 1\n    return x / 0\n")
    hook = load_hook(path, "custom_rm")
    sample = Sample(index=17, group_index=2)
    with pytest.raises(HookError) as caught:
        asyncio.run(hook(None, sample)) if prefix else hook(None, sample)
    message = str(caught.value)
    for word in ("--custom-rm-path hook.py", "reward_func", "hook.py:3", "sample 17 (group 2)", "ZeroDivisionError"):
        assert word in message, message
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_error_of_the_system_inside_a_hook_stays_what_it_is(write):
    path = write(
        "from colloid.errors import EngineError\n"
        "async def generate(args, sample, sampling_params):\n    raise EngineError('http://127.0.0.1:1 died')\n"
    )
    with pytest.raises(EngineError, match="died"):
        asyncio.run(load_hook(path, "custom_generate")(1, 2, 3))


def test_a_plain_function_where_a_coroutine_is_due_runs_beside_the_loop(write):
    path = write(
        "import threading\ndef generate(args, sample, sampling_params):\n    return threading.current_thread().name\n"
    )
    hook = load_hook(path, "custom_generate")
    assert hook.is_async and asyncio.run(hook(1, 2, 3)) != "MainThread"


def test_binding_puts_args_where_the_signature_has_it(write):
    buffer = load_hook(
        write("def buffer_filter(args, rollout_id, buffer, n):\n    return args, rollout_id, buffer, n\n"),
        "buffer_filter",
    )
    bound = bind(buffer, "ARGS")
    assert bound(1, [2], 3) == ("ARGS", 1, [2], 3) and bound.path == "hook.py"
    log = write(
        "def f(rollout_id, args, samples, extra, time):\n    return rollout_id, args, samples, extra, time\n", "log.py"
    )
    assert bind(load_hook(log, "rollout_log"), "ARGS")(1, 2, 3, 4) == (1, "ARGS", 2, 3, 4)


def test_two_hooks_of_a_file_share_its_state_and_a_file_sees_its_neighbours(write):
    write("VALUE = 5\n", "neighbour_of_hook.py")
    write(
        "import neighbour_of_hook\nseen = []\n"
        "def one(args, samples):\n    seen.append(neighbour_of_hook.VALUE)\n    return seen\n"
        "def two(args, samples):\n    return seen\n"
    )
    assert load_hook("hook.py:one", "dynamic_filter")(0, []) == load_hook("hook.py:two", "dynamic_filter")(0, []) == [5]


def test_classes_load_by_what_they_can_do(write):
    path = write("class Helper:\n    pass\nclass Mine:\n    def get_samples(self, n):\n        return []\n")
    assert load_class(path, "data_source").__name__ == "Mine"
    with pytest.raises(HookError, match="lacks the method get_samples"):
        load_class("hook.py:Helper", "data_source")


def test_every_kind_names_an_option_that_exists():
    from colloid.config.tables import tables

    assert [kind.option for kind in KINDS.values() if kind.option not in tables().by_name] == []
