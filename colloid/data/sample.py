"""`Sample`: one response to one prompt, with everything that training needs to know of it.

Invariant: the arrays over the response (`loss_mask`, `rollout_log_probs`, `weight_versions`) have `response_length`
entries or are None, and `tokens[-response_length:]` are the response's ids. They grow together, through
`append_response_tokens` alone. Training reads only these: text is for people, and nothing is ever re-tokenised.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass, field
from typing import Any


class Status(str, enum.Enum):
    """Where a sample is in its life."""

    PENDING = "pending"
    """Not generated yet, or not to its end."""
    COMPLETED = "completed"
    """Ended by a stop token, a stop string, or its own loop."""
    TRUNCATED = "truncated"
    """Ended by a length limit."""
    ABORTED = "aborted"
    """Stopped from outside; may go on later."""
    FAILED = "failed"
    """Generation or grading failed; has no vote in its group, and its mask is 0."""


@dataclass
class Sample:
    """One response to one prompt. Field names are those that hooks of users rely on."""

    Status = Status

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    """Siblings that one rollout was split into share it, and weigh as one rollout in the loss. None: `index`."""
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    """Prompt ids, then response ids."""
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    """One entry a response token: 1 is trained, 0 (tool output) is not. None: all 1."""
    weight_versions: list[int] = field(default_factory=list)
    """The weight version that each response token was sampled with (one entry a token)."""
    rollout_log_probs: list[float] | None = None
    """The engine's log-prob of each response token, at the sampling temperature."""
    rollout_routed_experts: Any = None
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    teacher_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    session_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None
    non_generation_time: float = 0.0

    def append_response_tokens(
        self,
        token_ids: list[int],
        *,
        log_probs: list[float] | None = None,
        weight_version: int | list[int] | None = None,
        trained: bool = True,
    ) -> None:
        """Appends ids to the response, together with their mask, log-probs and weight versions.

        Args:
            token_ids: the ids exactly as sampled (or, with `trained=False`, as inserted).
            log_probs: one a token. Tokens that were not sampled have none: 0.0 is stored, and never read (mask 0).
            weight_version: of all these tokens, or one a token; None: unknown, stored as -1.
            trained: the mask of these tokens.

        Raises:
            ValueError: an array has another length than `token_ids`, or log-probs come after tokens without.
        """
        count = len(token_ids)
        if log_probs is not None and len(log_probs) != count:
            raise ValueError(f"{len(log_probs)} log-probs for {count} tokens of sample {self.index}")
        versions = weight_version if isinstance(weight_version, list) else [_version(weight_version)] * count
        if len(versions) != count:
            raise ValueError(f"{len(versions)} weight versions for {count} tokens of sample {self.index}")
        if self.loss_mask is None:
            self.loss_mask = [1] * self.response_length
        if log_probs is None and not trained:
            log_probs = [0.0] * count
        if log_probs is not None:
            if self.rollout_log_probs is None:
                if any(self.loss_mask):
                    raise ValueError(f"sample {self.index}: log-probs for its later tokens only")
                self.rollout_log_probs = [0.0] * self.response_length
            self.rollout_log_probs.extend(log_probs)
        elif self.rollout_log_probs is not None:
            if any(self.loss_mask):
                raise ValueError(f"sample {self.index}: trained tokens without log-probs after tokens with")
            self.rollout_log_probs = None
        self.tokens = self.tokens + list(token_ids)
        self.loss_mask.extend([int(trained)] * count)
        self.weight_versions.extend(versions)
        self.response_length += count

    def reset_response(self) -> None:
        """Back to the bare prompt: what was generated so far is dropped."""
        if self.response_length:
            self.tokens = self.tokens[: -self.response_length]
        self.response, self.response_length, self.reward = "", 0, None
        self.loss_mask, self.rollout_log_probs, self.weight_versions = None, None, []
        self.status = Status.PENDING

    def get_reward_value(self, key: Any = None) -> float:
        """The reward as a number; `key` picks one of a dict reward, None: `score`, where it has that. The run's options
        may be given in its place: then it is `--reward-key`.

        Raises:
            ValueError: there is no reward, or it is a dict and `key` names none of its entries.
        """
        key = key if key is None or isinstance(key, str) else key.reward_key
        if isinstance(self.reward, dict):
            key = reward_entry(self.reward, key)
            if key not in self.reward:
                raise ValueError(
                    f"sample {self.index}: the reward has the keys {sorted(self.reward)}, "
                    f"and --reward-key is {key!r}: set it to one of them"
                )
            return float(self.reward[key])
        if self.reward is None:
            raise ValueError(f"sample {self.index} has no reward")
        return float(self.reward)

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON where metadata and reward are), the status by its value."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["status"] = self.status.value
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """The inverse of `to_dict`. Unknown keys are an error."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ValueError(f"unknown Sample fields {unknown}")
        return cls(**{**data, "status": Status(data.get("status", Status.PENDING))})


def reward_entry(reward: dict[str, Any], key: str | None) -> str | None:
    """The key of a dict reward that is trained on: the given one, else `score` where there is one."""
    return "score" if key is None and "score" in reward else key


def _version(value: int | str | None) -> int:
    return -1 if value is None else int(value)
