"""Groups: the samples of one prompt. What is finished of them, copies, and their plain form."""

from __future__ import annotations

import copy
from typing import Any

from colloid.data.sample import Sample, Status

Group = list[Sample]

_FLAT = ("tokens", "loss_mask", "weight_versions", "rollout_log_probs")
_DEEP = ("prompt", "label", "reward", "metadata", "train_metadata", "apply_chat_template_kwargs")
_ENDED = (Status.COMPLETED, Status.TRUNCATED)


def flatten(group: list) -> list[Sample]:
    """The samples of a group whose elements may be lists (one rollout in several parts)."""
    return [sample for item in group for sample in (item if isinstance(item, list) else [item])]


def has_ended(sample: Sample) -> bool:
    """Whether nothing is left to generate: it came to its end, or failed. It may still have to be graded."""
    return sample.status in _ENDED or sample.status is Status.FAILED


def is_finished_sample(sample: Sample) -> bool:
    """Whether a sample can be trained as it is: generated to the end and graded, or failed."""
    return sample.status is Status.FAILED or (sample.status in _ENDED and sample.reward is not None)


def is_finished(group: Group) -> bool:
    """Whether every sample of the group is finished."""
    return all(is_finished_sample(sample) for sample in flatten(group))


def is_partial(sample: Sample) -> bool:
    """Whether generation was stopped after some tokens, and is to go on."""
    return not has_ended(sample) and sample.response_length > 0


def reset_unfinished(group: Group) -> None:
    """Makes an unfinished group bare prompts again, whole: redoing only its long samples would favour short ones."""
    if not is_finished(group):
        for sample in flatten(group):
            sample.reset_response()


def copy_sample(sample: Sample) -> Sample:
    """A copy that nothing reaches which is done to the original afterwards."""
    twin = object.__new__(type(sample))
    twin.__dict__.update(sample.__dict__)
    for name in _FLAT:
        values = getattr(sample, name)
        if values is not None:
            setattr(twin, name, list(values))
    for name in _DEEP:
        value = getattr(sample, name)
        if not (value is None or isinstance(value, (str, int, float))):
            setattr(twin, name, copy.deepcopy(value))
    return twin


def restore_sample(sample: Sample, earlier: Sample) -> None:
    """Makes `sample` what it was when `earlier` was copied from it."""
    sample.__dict__.clear()
    sample.__dict__.update(copy_sample(earlier).__dict__)


def copy_group(group: Group) -> Group:
    """Copies of the samples, see `copy_sample`."""
    return [copy_sample(sample) for sample in flatten(group)]


def to_dicts(group: Group) -> list[dict[str, Any]]:
    return [sample.to_dict() for sample in flatten(group)]


def from_dicts(group: list[dict[str, Any]]) -> Group:
    return [Sample.from_dict(data) for data in group]
