"""Options of rewards: what follows from them, and rules between them."""

from __future__ import annotations

from colloid.config.args import Args


def resolve_rewards(args: Args) -> None:
    """Makes `custom_rm_path` a text where it is one path, as hooks know it."""
    if isinstance(args.custom_rm_path, list) and len(args.custom_rm_path) == 1:
        args.custom_rm_path = args.custom_rm_path[0]


def _paths(args: Args) -> list[str]:
    paths = args.custom_rm_path or []
    return [paths] if isinstance(paths, str) else list(paths)


def _custom(args: Args) -> str | None:
    paths, weights = _paths(args), args.custom_rm_weights
    if weights is not None and len(weights) != len(paths):
        return f"--custom-rm-weights has {len(weights)} values for {len(paths)} --custom-rm-path; give one each"
    if len(set(paths)) < len(paths):
        return f"--custom-rm-path names a function twice: {' '.join(paths)}"
    if args.custom_rm_model_path and not paths:
        return f"--custom-rm-model-path {args.custom_rm_model_path} needs the class that it is for: --custom-rm-path"
    if args.group_rm and not paths:
        return (
            "--group-rm hands whole groups to --custom-rm-path, and none is given; built-in rewards judge each sample "
            "by itself"
        )
    return None


def _remote(args: Args) -> str | None:
    if args.rm_type in ("remote_rm", "boxed_remote_rm") and not args.rm_url:
        return f"--rm-type {args.rm_type} needs --rm-url, the address of the reward server"
    if args.rm_url and not args.rm_url.startswith(("http://", "https://")):
        return f"--rm-url {args.rm_url} must begin with http:// or https://"
    return None


RULES = (_custom, _remote)
