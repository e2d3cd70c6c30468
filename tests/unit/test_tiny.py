"""The tiny models that other tests stand on."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_tiny_model_loads_with_its_head_tied_as_asked(tiny_model_dir, family, tied):
    path = tiny_model_dir(family, tied=tied)
    assert path == tiny_model_dir(family, tied=tied)
    config = json.loads((path / "config.json").read_text())
    assert config["model_type"] == family
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert all(value.std() > 0 for value in model.parameters())
    assert sum(value.numel() for value in model.parameters()) < 500_000


def test_tiny_tokenizer_round_trips_text_and_templates_a_chat(tiny_model_dir):
    path = tiny_model_dir()
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = "What is 7 + 8? Größe 数 🙂"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "7 + 8?"}, {"role": "assistant", "content": "It is"}],
        tokenize=False,
        continue_final_message=True,
    )
    assert chat == "<|im_start|>user\n7 + 8?<|im_end|>\n<|im_start|>assistant\nIt is"
    assert tokenizer.eos_token == "<|im_end|>"
    assert len(tokenizer) <= json.loads((path / "config.json").read_text())["vocab_size"]
