"""Prompts from JSONL: rendered, tokenised, filtered; bad rows name file and line."""

from __future__ import annotations

import json
import logging

import pytest

from colloid.data.prompts import PromptFormat, load_prompts
from colloid.errors import DataError
from tests.tiny import make_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def load_one(tmp_path, tokenizer, row, **options):
    return load_prompts(write(tmp_path / "d.jsonl", row), tokenizer, PromptFormat(**options)).rows[0]


MESSAGES = [{"role": "user", "content": "What is 1 + 2?"}]


def test_text_is_taken_as_it_is(tmp_path, tokenizer):
    row = load_one(tmp_path, tokenizer, {"prompt": "What is 1 + 2?", "label": "3"})
    assert row.prompt == "What is 1 + 2?" and row.label == "3"
    assert tokenizer.decode(row.token_ids) == "What is 1 + 2?"


def test_messages_are_rendered_without_being_asked_and_stay_the_samples_prompt(tmp_path, tokenizer):
    row = load_one(tmp_path, tokenizer, {"prompt": MESSAGES})
    assert row.prompt == MESSAGES
    assert tokenizer.decode(row.token_ids) == "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"


def test_with_the_chat_template_a_text_is_one_user_message(tmp_path, tokenizer):
    by_text = load_one(tmp_path, tokenizer, {"prompt": "What is 1 + 2?"}, apply_chat_template=True)
    by_messages = load_one(tmp_path, tokenizer, {"prompt": MESSAGES}, apply_chat_template=True)
    assert by_text.token_ids.tolist() == by_messages.token_ids.tolist()
    assert by_text.prompt == tokenizer.decode(by_text.token_ids)


def test_special_tokens_of_the_template_are_single_ids(tmp_path, tokenizer):
    row = load_one(tmp_path, tokenizer, {"prompt": MESSAGES})
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") == row.token_ids[0]


def test_a_last_assistant_message_is_continued(tmp_path, tokenizer):
    messages = [*MESSAGES, {"role": "assistant", "content": "The answer is"}]
    row = load_one(tmp_path, tokenizer, {"prompt": messages})
    assert tokenizer.decode(row.token_ids).endswith("<|im_start|>assistant\nThe answer is")
    assert row.prompt == messages


def test_messages_without_a_template_are_an_error(tmp_path, tokenizer):
    bare = make_tiny_tokenizer(tmp_path / "bare")
    bare.chat_template = None
    with pytest.raises(DataError, match="d.jsonl:1: .*no chat template"):
        load_one(tmp_path, bare, {"prompt": MESSAGES})


BAD_ROWS = [
    ('{"prompt": "a"', "not JSON"),
    ('["a"]', "must be a JSON object"),
    ({"question": "a", "answer": "b"}, "no key 'prompt'; the row has 'question', 'answer'. .*--input-key"),
    ({"prompt": 3}, "must be a text or a list of messages, and is a number: 3"),
    ({"prompt": ""}, "empty text"),
    ({"prompt": []}, "empty list"),
    ({"prompt": [{"role": "user"}]}, "must hold messages"),
    ({"prompt": "a", "metadata": [1]}, "'metadata' must be an object"),
    ({"prompt": "a", "tools": {}}, "'tools' must be a list"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_a_bad_row_is_an_error_with_file_and_line(tmp_path, tokenizer, row, message):
    path = write(tmp_path / "bad.jsonl", {"prompt": "fine"}, "", row)
    with pytest.raises(DataError, match=f"bad.jsonl:3: .*{message}"):
        load_prompts(path, tokenizer, PromptFormat())


def test_a_required_label_that_is_missing_is_an_error(tmp_path, tokenizer):
    path = write(tmp_path / "d.jsonl", {"prompt": "a", "label": "1"}, {"prompt": "b", "answer": "1"})
    with pytest.raises(DataError, match="d.jsonl:2: no label under 'label'; the row has 'prompt', 'answer'"):
        load_prompts(path, tokenizer, PromptFormat(require_label=True))


def test_a_missing_file_is_an_error(tmp_path, tokenizer):
    with pytest.raises(DataError, match="--prompt-data .*none.jsonl: there is no such file"):
        load_prompts(tmp_path / "none.jsonl", tokenizer, PromptFormat())


def test_long_prompts_are_left_out_and_counted(tmp_path, tokenizer, caplog):
    path = write(tmp_path / "d.jsonl", {"prompt": "What is 1 + 2?"}, {"prompt": "What is 1 + 2? " * 20})
    limit = len(tokenizer("What is 1 + 2?")["input_ids"])
    with caplog.at_level(logging.WARNING):
        dataset = load_prompts(path, tokenizer, PromptFormat(max_tokens=limit))
    assert len(dataset) == 1 and dataset.num_filtered == 1
    assert "1 of 2 prompts are longer" in caplog.text
    with pytest.raises(DataError, match="all 2 prompts are longer than 1 tokens"):
        load_prompts(path, tokenizer, PromptFormat(max_tokens=1))


def test_an_empty_file_is_an_error(tmp_path, tokenizer):
    with pytest.raises(DataError, match="no rows"):
        load_prompts(write(tmp_path / "d.jsonl", ""), tokenizer, PromptFormat())


def test_the_fingerprint_changes_with_the_data(tmp_path, tokenizer):
    rows = [{"prompt": "a", "label": "1"}, {"prompt": "b", "label": "2"}]
    prints = {
        load_prompts(write(tmp_path / f"{name}.jsonl", *given), tokenizer, PromptFormat()).fingerprint
        for name, given in {"x": rows, "y": rows, "z": rows[::-1]}.items()
    }
    assert len(prints) == 2
