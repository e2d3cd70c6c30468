"""A tiny random model of a real family, as a Hugging Face directory. Made offline: its tokenizer is trained here.

    python examples/tiny_model.py outputs/tiny [--family qwen3] [--hidden 64] [--layers 2] [--vocab 512] [--seed 0]

The weights are larger than a real initialisation's, and norms and biases are random too, so that a test that leaves one
of them out, or mixes two up, sees it in the logits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = ("qwen3", "qwen2", "llama")


def make_tiny_model(
    path: str | Path,
    family: str = "qwen3",
    *,
    tied: bool = True,
    vocab: int = 512,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    max_position: int = 1024,
    seed: int = 0,
    initializer_range: float = 0.1,
) -> Path:
    """Writes config, float32 safetensors, generation config and tokenizer to `path`; returns it.

    Args:
        family: `qwen3` (per-head norms of queries and keys), `qwen2` (biases on queries, keys, values) or `llama`.
        tied: whether the output projection is the embedding.
        vocab: rows of the embedding, at least 259 (bytes and special tokens); the tokenizer has at most as many tokens.
    """
    import torch
    import transformers

    path = Path(path)
    tokenizer = make_tiny_tokenizer(path, vocab)
    name = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}[family]
    options = {} if family == "qwen2" else {"head_dim": hidden // heads}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_position,
        initializer_range=initializer_range,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForCausalLM")(config).float()
        with torch.no_grad():
            for key, value in model.named_parameters():
                if "norm" in key or key.endswith("bias"):
                    value.add_(0.2 * torch.randn_like(value))
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(path)
    return path


def make_tiny_tokenizer(path: str | Path, vocab: int = 512):
    """A byte-level BPE tokenizer with a ChatML template, trained on sums; saved to `path` and returned."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [f"What is {a} + {b}? The answer is {a + b}." for a in range(60) for b in range(0, 60, 3)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)
    return fast


def main() -> None:
    """Writes a model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="directory; made if need be")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3", help="default: %(default)s")
    for name, default in (("hidden", 64), ("layers", 2), ("vocab", 512), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    options = vars(parser.parse_args())
    print(make_tiny_model(**options))


if __name__ == "__main__":
    main()
