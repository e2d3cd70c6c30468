"""Does every engine hold the trainer's weights, tensor for tensor?

Embedded engines are asked for the checksum of each tensor, all at once. SGLang keeps tensors fused and split among
ranks, so its own way is taken: its checksums are noted, it fills everything with random values, is sent all tensors
once more, and must have the same checksums again. So a tensor that differs is found, and one that the trainer does not
send; its list of names tells of those that it would ignore. Where that fails on the way, random values are left.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from colloid.engines.checksums import tensor_checksum
from colloid.engines.control import EngineControl
from colloid.errors import WeightSyncError
from colloid.weights.buckets import make_buckets
from colloid.weights.engine_update import EngineUpdate
from colloid.weights.equality import NAMES_SHOWN, check_equal
from colloid.weights.senders import NamedTensors
from colloid.weights.sglang_tensor import SharedStorage, num_ranks, open_update, send_bucket

FUSED: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"\.experts\.\d+\.(gate|up)_proj\.weight$", ".experts.w13_weight"),
        (r"\.experts\.\d+\.down_proj\.weight$", ".experts.w2_weight"),
        (r"\.[qkv]_proj\.", ".qkv_proj."),
        (r"\.(gate|up)_proj\.", ".gate_up_proj."),
        (r"\.(q_a_proj|kv_a_proj_with_mqa)\.", ".fused_qkv_a_proj_with_mqa."),
    )
)
"""Hugging Face's names of tensors -> those that SGLang's models keep them under."""


def check_weights(
    engines: Sequence[EngineControl], kind: str, version: int, tensors: NamedTensors, buffer_size: int
) -> int:
    """Compares all tensors; returns how many there are.

    Args:
        kind: of the engines.
        version: that they have.
        tensors: the trainer's; all are read.

    Raises:
        WeightSyncError: lists tensors that an engine lacks, that it has besides, and that differ.
    """
    if kind == "sglang":
        return _check_sglang(engines, version, tensors, buffer_size)
    with ThreadPoolExecutor(max(1, len(engines)), thread_name_prefix="check") as threads:
        answers = [threads.submit(engine.post, "/weights_checker", {"action": "checksum"}) for engine in engines]
        trainer = {name: tensor_checksum(tensor) for name, tensor in tensors}
        for engine, answer in zip(engines, answers, strict=True):
            check_equal(trainer, answer.result()["checksums"], f"engine {engine.url}")
    return len(trainer)


def _check_sglang(engines: Sequence[EngineControl], version: int, tensors: NamedTensors, buffer_size: int) -> int:
    sent: list[str] = []
    memory = SharedStorage()
    ranks = [num_ranks(engine) for engine in engines]
    with EngineUpdate(engines, version, "retract", begins=False) as update:
        before = _checksums(update)
        update.post("reset", "/weights_checker", {"action": "reset_tensors"})
        with open_update(update):
            for bucket in make_buckets(tensors, buffer_size):
                send_bucket(update, ranks, memory, bucket, flush=not sent)
                sent += bucket.names
        after = _checksums(update)
    for engine, held, now in zip(engines, before, after, strict=True):
        _compare(engine, sent, held, now)
    return len(sent)


def _checksums(update: EngineUpdate) -> list[list[dict[str, str]]]:
    """Of each engine, of each rank: SGLang's name -> checksum."""
    answers = update.post("checksums", "/weights_checker", {"action": "checksum"})
    return [[rank["checksums"] for rank in answer["ranks"]] for answer in answers]


def _compare(engine: EngineControl, sent: list[str], held: list[dict[str, str]], now: list[dict[str, str]]) -> None:
    names = {name for rank in held for name in rank}
    pairs = list(zip(held, now, strict=True))
    different = sorted({name for before, after in pairs for name in before if before[name] != after.get(name)})
    ignored = [name for name in sent if not names & set(possible_names(name))]
    problems = [
        f"{len(found)} {what} ({', '.join(found[:NAMES_SHOWN])}{', …' if len(found) > NAMES_SHOWN else ''})"
        for what, found in (("that it does not have", ignored), ("different, or not sent", different))
        if found
    ]
    if problems:
        raise WeightSyncError(
            f"engine {engine.url} does not hold the trainer's weights: of {len(sent)} tensors {'; '.join(problems)}"
        )


def possible_names(name: str) -> Iterable[str]:
    """What SGLang may call the tensor that holds the one of that Hugging Face name; a tied head is the embedding."""
    yield name
    for pattern, fused in FUSED:
        if pattern.search(name):
            yield pattern.sub(fused, name)
    if name == "lm_head.weight":
        yield "model.embed_tokens.weight"
