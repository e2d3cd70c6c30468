"""Rules about nodes and the environment of trainer ranks."""

from __future__ import annotations

from collections.abc import Callable

from colloid.config.args import Args

OWN_VARIABLES = ("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What a run sets, or what would contradict its placement."""


def _train_env_vars(args: Args) -> str | None:
    variables = args.train_env_vars
    if not isinstance(variables, dict):
        return f"--train-env-vars must be a JSON object of names and values, not {variables!r}"
    wrong = [name for name, value in variables.items() if isinstance(value, (dict, list, bool)) or value is None]
    if wrong:
        return f"--train-env-vars: the value of {', '.join(wrong)} must be a text or a number"
    own = [name for name in variables if name in OWN_VARIABLES]
    if own:
        return f"--train-env-vars: {', '.join(own)} {'is' if len(own) == 1 else 'are'} set by the run: leave it out"
    return None


def train_environment(args: Args) -> dict[str, str]:
    """Environment variables of the trainer ranks."""
    return {name: str(value) for name, value in args.train_env_vars.items()}


RULES: tuple[Callable[[Args], str | None], ...] = (_train_env_vars,)


def warnings(args: Args) -> list[str]:
    """What is allowed, but probably not meant."""
    size, tensor = args.actor_num_gpus_per_node, args.tensor_model_parallel_size
    if args.actor_num_nodes > 1 and size % tensor and tensor % size:
        return [
            f"--actor-num-gpus-per-node {size} is no multiple of --tensor-model-parallel-size {tensor}: some "
            "tensor-parallel groups lie across nodes, which is slow"
        ]
    return []
