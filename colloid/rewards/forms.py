"""The forms of `--custom-rm-path`, told apart by the parameters.

| form | looks like | called |
|---|---|---|
| SAMPLE | `[async] (args, sample, **kw) -> float or dict` | once a sample; several coroutines at a time in a worker |
| GROUP | `[async] (args, samples, **kw) -> list` | once a group (`--group-rm`) |
| MODEL | a class with `compute_reward(prompts, responses) -> list[float]` | in batches; made once in a worker |
| BATCH | `[async] (prompts, responses, **columns) -> list[float]` | in batches |
"""

from __future__ import annotations

import enum
import inspect


class Form(str, enum.Enum):
    """How a user's reward is called."""

    SAMPLE = "sample"
    GROUP = "group"
    MODEL = "model"
    BATCH = "batch"

    @property
    def batched(self) -> bool:
        """Whether it takes prompts and responses rather than Samples."""
        return self in (Form.MODEL, Form.BATCH)


def reward_form(path: str, group_rm: bool = False) -> Form:
    """The form of the function or class at `path`, which is imported.

    Raises:
        HookError: it cannot be loaded, or be called as any form; or it takes groups without `--group-rm`, or single
            samples with it.
    """
    from colloid.errors import HookError
    from colloid.hooks import load_hook_or_class

    target = load_hook_or_class(path, "custom_rm")
    if inspect.isclass(target):
        return Form.MODEL
    names = list(inspect.signature(target.target).parameters)
    if "responses" in names or "completions" in names:
        return Form.BATCH
    second = names[1] if len(names) > 1 else ""
    if group_rm:
        if second == "sample":
            raise HookError(
                f"--custom-rm-path {path} takes one sample, and --group-rm hands over whole groups: write "
                "`async (args, samples, **kw) -> list`, or leave --group-rm out"
            )
        return Form.GROUP
    if second == "samples":
        raise HookError(
            f"--custom-rm-path {path} takes `samples`: give --group-rm for whole groups, or write "
            "`async (args, sample, **kw) -> float`"
        )
    return Form.SAMPLE


def constructor_takes_path(model_class: type) -> bool:
    """Whether the class is made with the path of a model, or with nothing."""
    if model_class.__init__ is object.__init__:
        return False
    parameters = list(inspect.signature(model_class).parameters.values())
    return any(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.VAR_POSITIONAL) for one in parameters)
