"""Options that are known and refused: each says why."""

from __future__ import annotations

import re

import pytest

from colloid.config import megatron, parse
from colloid.config.help import help_text, markdown
from colloid.config.megatron_refused import REASONS, reason
from colloid.config.tables import tables
from colloid.errors import ConfigError

REFUSED = [
    row for row in tables().options if row.built is not None and (not row.built or set(row.choices) - set(row.built))
]


def error_of(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(["--device", "cpu", "--num-layers", "2", "--prompt-data", "none.jsonl", *argv])
    return str(caught.value)


def test_every_option_that_is_refused_says_why():
    silent = [row.flag for row in REFUSED if not row.refused]
    assert not silent, silent


def test_a_reason_continues_a_sentence_and_none_promises():
    for row in REFUSED:
        assert not row.refused.endswith(".") and "yet" not in row.refused, (row.flag, row.refused)


def test_options_that_a_reason_points_to_exist_and_work():
    for row in REFUSED:
        for flag in re.findall(r"--[a-z0-9-]+[a-z0-9]", row.refused):
            named = tables().by_name.get(flag)
            assert named is not None, (row.flag, flag)
            assert named.built != () or flag == "--mtp-num-layers", (row.flag, flag)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--use-distributed-post", ["--use-distributed-post is not supported: one process sends all requests"]),
        ("--rollout-data-transport nixl", ["nixl is not supported (what works: object-store)", "Ray's object store"]),
        ('--multimodal-keys {"image":"images"}', ["--multimodal-keys", "read text alone"]),
        ("--freeze-indexer", ["no supported model has sparse attention", "--freeze-params-name-list"]),
    ],
)
def test_the_error_gives_the_reason(argv, words):
    message = error_of(*argv.split())
    assert all(word in message for word in words), message


def test_several_refused_options_are_one_line_each():
    message = error_of("--freeze-indexer", "--use-distributed-post")
    assert [line.split()[0] for line in message.splitlines()] == ["--freeze-indexer", "--use-distributed-post"]


def test_documentation_and_help_give_the_reasons():
    page = markdown()
    for row in REFUSED:
        assert row.refused.replace("|", "\\|") in page, row.flag
    assert "not supported: --freeze-indexer (no supported model" in help_text("")


def test_every_reason_of_a_megatron_option_is_some_options():
    used = {row.refused for row in megatron.options() if row.built is not None}
    assert {text for _, text in REASONS} == used
    assert reason("cuda_graph_scope") != reason("muon_momentum")


def test_what_is_only_compared_or_accepted_counts_as_read():
    argv = "--profile --use-pytorch-profiler --model-name x --rollout-data-transport object-store"
    args = parse(["--dry-run", "--num-layers", "2", "--device", "cpu", *argv.split()])
    assert args.unread() == ["num_layers", "use_pytorch_profiler"], "what the ranks read is left"
