"""Weights & Biases: the metrics of a run as one W&B run, which a resumed run goes on with.

W&B's own step counts calls and cannot go back, as a resumed run does. So the points of each curve carry their place in
metrics of their own: `rollout/step`, `eval/step` and `train/step`.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from colloid.config.args import redacted
from colloid.config.tracking import WandbOptions
from colloid.errors import ConfigError

STATE_FILE = "wandb_run.json"
"""In the run directory: id, name and group of the W&B run, and how many rows it has."""

CURVES = {
    "train/*": "train/step",
    "rollout/*": "rollout/step",
    "multi_turn/*": "rollout/step",
    "passrate/*": "rollout/step",
    "staleness/*": "rollout/step",
    "data/*": "rollout/step",
    "perf/*": "rollout/step",
    "eval/*": "eval/step",
}
"""Metrics -> the one that they are drawn over."""


class WandbTracker:
    """One W&B run.

    Args:
        run_dir: the run's own directory: holds `STATE_FILE`, and W&B's files unless the options say where.
        resumed: go on with the W&B run that `STATE_FILE` names, where there is one.

    Raises:
        ConfigError: the W&B run cannot be started.
    """

    def __init__(self, options: WandbOptions, run_dir: str | Path, *, resumed: bool):
        import wandb

        self._options = options
        state = _state(options, Path(run_dir), resumed)
        directory = options.directory or str(run_dir)
        os.makedirs(directory, exist_ok=True)
        settings: dict[str, Any] = {"api_key": options.key, "base_url": options.host}
        try:
            with _without_secrets():
                self._run = wandb.init(
                    project=options.project,
                    entity=options.team,
                    id=state["id"],
                    name=state["name"],
                    group=state["group"],
                    resume="allow",
                    dir=directory,
                    mode=options.mode,
                    config=options.config,
                    settings=wandb.Settings(**{key: value for key, value in settings.items() if value is not None}),
                )
        except (wandb.errors.Error, ValueError) as error:
            raise ConfigError(
                f"--use-wandb: W&B cannot be used: {error}. Give its key (--wandb-key, WANDB_API_KEY or `wandb "
                "login`), or keep its files here with --wandb-mode offline (`wandb sync` uploads them later)"
            ) from error
        self._path, self._state = Path(run_dir) / STATE_FILE, state
        _write(self._path, state)
        for step in dict.fromkeys(CURVES.values()):
            self._run.define_metric(step)
        for pattern, step in CURVES.items():
            self._run.define_metric(pattern, step_metric=step)

    @property
    def run_id(self) -> str:
        """Of the W&B run."""
        return self._run.id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One W&B row; uploaded in the background."""
        train_step = step * self._options.steps_per_rollout
        shown = train_step if self._options.always_use_train_step else step
        row = {**values, "rollout/step": shown, "eval/step": shown, "train/step": train_step}
        # Offline, W&B would count a resumed run's rows from 0 again, and they would hide those before when uploaded.
        self._run.log(row, step=max(self._run.step, self._state["num_rows"]), commit=True)
        self._state["num_rows"] = self._run.step
        _write(self._path, self._state)

    def close(self) -> None:
        """Waits until W&B has everything. A run that fails before is marked so by W&B when the process ends."""
        self._run.finish()


def _state(options: WandbOptions, run_dir: Path, resumed: bool) -> dict[str, Any]:
    path = run_dir / STATE_FILE
    if resumed and path.exists():
        state = json.loads(path.read_text())
        return state if options.run_id in (None, state["id"]) else {**state, "id": options.run_id, "num_rows": 0}
    group = options.group
    if group and options.random_suffix:
        group = f"{group}_{_new_id()}"
    return {"id": options.run_id or _new_id(), "name": group or options.run_name, "group": group, "num_rows": 0}


def _new_id() -> str:
    return secrets.token_hex(4)


def _write(path: Path, state: dict[str, Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(state))
    os.replace(temporary, path)


@contextmanager
def _without_secrets() -> Iterator[None]:
    """W&B keeps the command line that it finds when a run starts: inside, there are no keys in it."""
    words = sys.argv
    sys.argv = redacted_words(words)
    try:
        yield
    finally:
        sys.argv = words


def redacted_words(words: list[str]) -> list[str]:
    """A command line without the values of options that are secrets."""
    shown: list[str] = []
    option = ""
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            option = name[2:]
            word = f"{name}={redacted(option, value)}" if equals else word
        elif option:
            word = str(redacted(option, word))
        shown.append(word)
    return shown
