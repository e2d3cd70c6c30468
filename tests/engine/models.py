"""Small random models of the dense families, made with transformers, and an engine over them without a server."""

from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from colloid.engines.contract_generate import GenerateInput, SamplingParams
from colloid.engines.embedded.engine import Engine
from colloid.engines.embedded.model import Model
from colloid.engines.embedded.model_config import load_model_config
from colloid.engines.embedded.request import Sequence
from colloid.engines.embedded.text import Text
from colloid.engines.embedded.weights import WeightStore, load_weights

SIZES = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "max_position_embeddings": 2048}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Grouped queries (3 a key-value head, 1, 2), odd vocabularies, tied and untied embeddings, biases, llama3 RoPE.
VARIANTS = {
    "llama-gqa-tied": (
        LlamaForCausalLM,
        LlamaConfig(
            **SIZES,
            vocab_size=1003,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=True,
        ),
    ),
    "llama-mha-rope3": (
        LlamaForCausalLM,
        LlamaConfig(
            **SIZES,
            vocab_size=512,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=24,
            tie_word_embeddings=False,
            rope_parameters=LLAMA3_ROPE,
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
    "qwen2-tied": (
        Qwen2ForCausalLM,
        Qwen2Config(
            **SIZES,
            vocab_size=777,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            rope_theta=1e6,
        ),
    ),
    "qwen3-untied": (
        Qwen3ForCausalLM,
        Qwen3Config(
            **SIZES,
            vocab_size=640,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=32,
            tie_word_embeddings=False,
        ),
    ),
}


def make_model(variant: str, directory: Path, seed: int = 0) -> Path:
    """Saves a random model in float32; weights scaled so that logits differ well from each other."""
    torch.manual_seed(seed)
    model_class, config = VARIANTS[variant]
    config.bos_token_id, config.eos_token_id = 1, 2
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.08)
            if "norm" in name:
                parameter.add_(1.0)
    model.generation_config.eos_token_id = [2, 3]
    model.generation_config.bos_token_id = 1
    model.save_pretrained(directory)
    return directory


def make_engine(path: Path, dtype: torch.dtype = torch.float32, *, tokens: int = 32768, **options) -> SimpleNamespace:
    config = load_model_config(path)
    options = {"context_length": config.max_position_embeddings, "max_running": 64, **options}
    model = Model(config, dtype, options["context_length"])
    store = WeightStore(model)
    load_weights(store, path)
    text = Text(path, config.eos_token_ids)
    engine = Engine(model, text, capacity_tokens=tokens, **options)
    return SimpleNamespace(engine=engine, model=model, store=store, config=config)


def add(engine: Engine, rid: str, prompt, **params) -> list[Sequence]:
    """Queues the samples of one request."""
    request = GenerateInput(tuple(prompt), None, SamplingParams.from_json(params), rid, True)
    sequences = engine.make_sequences(request, request.input_ids, lambda sequence: None, stream=False)
    engine.add(sequences)
    return sequences


def run(engine: Engine) -> None:
    while engine.scheduler.has_work:
        engine.step()


def prompt_of(length: int, vocab: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(4, vocab, (length,), generator=generator).tolist())


def stream_of(sequence: Sequence) -> tuple[list[int], list[float]]:
    return sequence.output_ids, sequence.log_probs
