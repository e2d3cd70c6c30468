"""How weights come to the engines.

| transport | mode | how |
|---|---|---|
| tensor | full | through shared memory: a ring, or for SGLang a file a bucket |
| gloo, nccl | full | broadcast in a process group of trainer rank 0 and all engines |
| disk | full | a Hugging Face directory, which the engines read |
| disk | delta | what changed, in files; the engines apply it to what they hold |
"""

from __future__ import annotations

from colloid.weights.broadcast_transport import BroadcastSender
from colloid.weights.delta_transport import DeltaSender
from colloid.weights.disk_transport import DiskSender
from colloid.weights.senders import SendOptions, WeightSender
from colloid.weights.sglang_tensor import SGLangTensorSender
from colloid.weights.tensor_transport import TensorSender


def make_sender(options: SendOptions) -> WeightSender:
    """The sender that the options ask for."""
    if options.mode == "delta":
        return DeltaSender(options)
    if options.transport == "disk":
        return DiskSender(options)
    if options.transport in ("gloo", "nccl"):
        return BroadcastSender(options.transport, options.buffer_size, options.pause_mode)
    if options.engine == "sglang":
        return SGLangTensorSender(options.buffer_size, options.pause_mode)
    return TensorSender(options.buffer_size, options.pause_mode, keep=options.keep_buffers)
