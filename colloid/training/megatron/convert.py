"""Converts a model between its Hugging Face directory and Megatron's torch_dist format, without training anything.

Each rank holds its part of the model and no more. Alone a process holds all of it; under `torchrun` the ranks divide
it, by pipeline parallelism unless the command line says how.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from colloid.checkpoints import begin_release, check_release_directory, commit_release
from colloid.config import Args, parse
from colloid.config.model import is_torch_dist
from colloid.errors import ConfigError
from colloid.training.megatron import checkpoint, parallel
from colloid.training.megatron.checkpoint_write import CheckpointWriter
from colloid.training.megatron.config import transformer_config
from colloid.training.megatron.model import build_weights, name_map, named_parameters
from colloid.training.megatron.shards import weight_coordinates
from colloid.weights.export import Exporter
from colloid.weights.hf_directory import write_hf_directory
from colloid.weights.hf_loader import HFCheckpoint, load_parameters

logger = logging.getLogger(__name__)

PARALLEL = ("tensor", "pipeline", "expert", "context")
ROUND_BYTES = 512 * 1024**2


def hf_to_torch_dist(hf_checkpoint: str, save: str, options: Sequence[str] = ()) -> None:
    """Writes `save/release` and the marker that names it, for `--load` and `--ref-load`.

    Args:
        options: further ones of a command line: the model's arguments (they are checked), a layout.

    Raises:
        ConfigError: the weights do not fit the config, or `save` holds checkpoints already.
        CheckpointError: something could not be read or written.
    """
    args, root = _parse(hf_checkpoint, None, options), Path(save)
    check_release_directory(root)
    with _model(args) as chunks:
        load_parameters(named_parameters(chunks), name_map(args), HFCheckpoint(hf_checkpoint), weight_coordinates())
        first = dist.get_rank() == 0
        made = [begin_release(root) if first else None]
        dist.broadcast_object_list(made, src=0)
        nothing = checkpoint.Trained(rollout_id=-1, weight_version=0)
        checkpoint.save(CheckpointWriter(), made[0], nothing, chunks, None, None, _layout(args), with_rng=False)
        if first:
            logger.info("converted %s to %s", hf_checkpoint, commit_release(root))
        dist.barrier()


def torch_dist_to_hf(input_dir: str, output_dir: str, origin_hf_dir: str, options: Sequence[str] = ()) -> None:
    """Writes a Hugging Face directory in the precision of `origin_hf_dir`, with its config and tokenizer.

    Args:
        input_dir: a directory of checkpoints, one of them, or one with torch_dist files.

    Raises:
        ConfigError: the checkpoint is one of another model, or there is none.
        CheckpointError: something could not be read or written.
    """
    args, output = _parse(origin_hf_dir, input_dir, options), Path(output_dir)
    if not is_torch_dist(args.init_checkpoint):
        raise ConfigError(f"--input-dir {input_dir} holds no checkpoint in Megatron's torch_dist format")
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"--output-dir {output} is not empty: choose another one")
    with _model(args) as chunks:
        checkpoint.load_weights(Path(args.init_checkpoint), chunks)
        export = Exporter(named_parameters(chunks), name_map(args), weight_coordinates(), max_bytes=ROUND_BYTES)
        write_hf_directory(output, export(), Path(origin_hf_dir), sends=dist.get_rank() == 0)
        if dist.get_rank() == 0:
            logger.info("converted %s to %s", args.init_checkpoint, output)


def _parse(hf_checkpoint: str, load: str | None, options: Sequence[str]) -> Args:
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    words = ["--hf-checkpoint", hf_checkpoint, *options, "--actor-num-gpus-per-node", str(ranks)]
    if not any(word.startswith(f"--{kind}-") and "-parallel-size" in word for kind in PARALLEL for word in options):
        words += ["--pipeline-model-parallel-size", str(ranks)]
    if load is not None:
        words += ["--load", load, "--finetune"]
        if not Path(load).exists():
            raise ConfigError(f"there is no directory {load}")
    args = parse(words, "convert")
    args.bf16 = (args.hf_config.get("dtype") or args.hf_config.get("torch_dtype")) == "bfloat16"
    args.params_dtype = "bfloat16" if args.bf16 else "float32"
    return args


@contextmanager
def _model(args: Args) -> Iterator[list[Any]]:
    """This rank's part of the model, in a world of the ranks that `torchrun` started, or of this process alone."""
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    with tempfile.TemporaryDirectory() as directory:
        method = "env://" if "RANK" in os.environ else f"file://{directory}/rendezvous"
        parallel.initialize(rank, ranks, method, _layout(args), seed=0, device=args.device)
        try:
            yield build_weights(args, transformer_config(args))
        finally:
            parallel.shutdown()


def _layout(args: Args) -> parallel.Layout:
    return parallel.Layout(
        tensor=args.tensor_model_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        expert=args.expert_model_parallel_size,
        expert_tensor=args.expert_tensor_parallel_size,
    )
