"""What the options say about how weights are sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from colloid.config.rundir import weights_disk_dir
from colloid.hooks import bind, load_hook
from colloid.weights.senders import SendOptions


def send_options(args: Any) -> SendOptions:
    """Of a trainer rank.

    Raises:
        HookError: `--custom-update-weight-post-write-path` names no function.
    """
    hook = args.custom_update_weight_post_write_path
    local = args.update_weight_local_checkpoint_dir
    return SendOptions(
        transport=args.update_weight_transport,
        mode=args.update_weight_mode,
        buffer_size=args.update_weight_buffer_size,
        # A drained engine has nothing to retract.
        pause_mode="retract" if args.pause_mode == "drain" else args.pause_mode,
        model_path=Path(args.hf_checkpoint),
        disk_dir=Path(weights_disk_dir(args)),
        keep_files=bool(args.update_weight_disk_keep_files),
        local_dir=Path(local).absolute() if local else None,
        delta_encoding=args.update_weight_delta_encoding,
        delta_checksum=args.update_weight_delta_checksum,
        post_write=bind(load_hook(hook, "update_weight_post_write"), args) if hook else None,
        engine=args.rollout_engine,
        keep_buffers=not args.offload_train,
    )
