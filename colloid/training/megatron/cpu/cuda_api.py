"""`torch.cuda` on a machine without CUDA: one device, one stream, nothing to wait for, one random generator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


class Stream:
    """Work on a CPU is done when the call returns, so there is nothing to order or wait for."""

    def __init__(self, *_args: Any, **_kwargs: Any):
        pass

    def wait_stream(self, _stream: Stream) -> None:
        pass

    def wait_event(self, _event: Event) -> None:
        pass

    def record_event(self, _event: Event | None = None) -> Event:
        return Event()

    def synchronize(self) -> None:
        pass


class Event:
    """An event that has always happened."""

    def __init__(self, *_args: Any, **_kwargs: Any):
        pass

    def record(self, _stream: Stream | None = None) -> None:
        pass

    def wait(self, _stream: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _end: Event) -> float:
        return 0.0

    def query(self) -> bool:
        return True


def install() -> None:
    """Replaces what Megatron asks of `torch.cuda`. `torch.cuda.is_available()` stays False."""
    cuda = torch.cuda
    stream = Stream()
    answers = {
        "current_device": 0,
        "device_count": 1,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "current_stream": stream,
        "default_stream": stream,
        "synchronize": None,
        "empty_cache": None,
        "set_device": None,
        "reset_peak_memory_stats": None,
        "nvtx_range_push": None,
    }
    for name, answer in answers.items():
        setattr(cuda, name, _constant(answer))
    cuda.Stream, cuda.Event, cuda.stream = Stream, Event, _stream_context
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.default_generators = (torch.default_generator,)
    # Megatron sets the state of its random-number tracker through this.
    cuda._lazy_call = lambda callback, **_kwargs: callback()


def _constant(answer: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: answer


@contextlib.contextmanager
def _stream_context(_stream: Stream | None = None) -> Iterator[None]:
    yield
