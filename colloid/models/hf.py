"""A model's `config.json`: where it is, and what it says, in one spelling. Plain data in, plain data out."""

from __future__ import annotations

import json
import os
from typing import Any

from colloid.errors import ConfigError


def read_hf_config(directory: str) -> dict[str, Any]:
    """The `config.json` of a model directory.

    Raises:
        ConfigError: it is missing, or no JSON object.
    """
    path = os.path.join(directory, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must be a JSON object")
    return config


def find_model(name: str) -> str | None:
    """The directory of a model: itself, or its snapshot in the local Hugging Face cache. Nothing is downloaded."""
    if os.path.isdir(name):
        return name
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        return None
    home = os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    folder = os.path.join(
        os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"), f"models--{name.replace('/', '--')}"
    )
    try:
        with open(os.path.join(folder, "refs", "main"), encoding="utf-8") as file:
            snapshot = os.path.join(folder, "snapshots", file.read().strip())
    except OSError:
        return None
    return snapshot if os.path.isfile(os.path.join(snapshot, "config.json")) else None


def need(config: dict[str, Any], key: str) -> Any:
    """A value that a config must have.

    Raises:
        ConfigError: it has none.
    """
    if config.get(key) is None:
        raise ConfigError(f"config.json of the model has no {key!r}")
    return config[key]


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters in one spelling: `rope_theta`, `rope_type`, and what the type needs."""
    old = {key: value for key, value in (config.get("rope_scaling") or {}).items() if value is not None}
    rope = {**old, **(config.get("rope_parameters") or {})}
    rope.setdefault("rope_theta", config.get("rope_theta") or config.get("default_theta") or 10000.0)
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    return rope


def expert_layers(config: dict[str, Any]) -> list[int]:
    """1 for each layer with experts, 0 for each dense one. Every spelling: a list of types, a number of dense first
    layers, or (Qwen) a step and exceptions.

    Raises:
        ConfigError: it is not said.
    """
    layers = range(need(config, "num_hidden_layers"))
    if config.get("mlp_layer_types"):
        return [int(kind == "sparse") for kind in config["mlp_layer_types"]]
    if "n_routed_experts" in config:
        first = 1 if config.get("model_type") == "glm4_moe_lite" else None
        first = config.get("first_k_dense_replace", first)
        if first is None:
            raise ConfigError("config.json of the model has neither 'first_k_dense_replace' nor 'mlp_layer_types'")
        return [int(layer >= first) for layer in layers]
    dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    return [int(layer not in dense and (layer + 1) % step == 0) for layer in layers]
