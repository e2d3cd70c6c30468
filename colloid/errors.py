"""The error model of colloid, on one page.

* A user's mistake (options, data, a hook of theirs) is a `ConfigError`, `DataError` or `HookError`. It says what is
  wrong, the value given, what is allowed and how to fix it; `train.py` prints it without a traceback and exits with 2.
* A part that failed at run time is an `EngineError`, `WeightSyncError`, `CheckpointError`, `ProcessDied`,
  `ProcessFailed` or `DeadlineExceeded`. It names the culprit (an address, a rank, sample ids); the run ends with 1,
  goes on from its last checkpoint (`--max-restarts`), or survives where it can.
* A bad rollout is not an error: it is a status on its `Sample`, and it is counted.
"""


class ColloidError(Exception):
    """Base of all errors whose message is written for the user."""


class ConfigError(ColloidError, ValueError):
    """The options contradict each other, or one has a value that is not allowed."""


class DataError(ColloidError, ValueError):
    """A data file is missing, or a row of it cannot be used. Names the file and the line."""


class HookError(ColloidError):
    """A function of the user's could not be loaded, or raised. Names the hook, its file and the sample."""


class EngineError(ColloidError, RuntimeError):
    """An engine (or the router) died, hung or answered garbage. Names its address."""


class WeightSyncError(ColloidError, RuntimeError):
    """An engine does not hold the trainer's weights after an update. Lists what is missing, extra or different."""


class CheckpointError(ColloidError, RuntimeError):
    """A checkpoint could not be written whole, or does not fit the run that loads it."""


class ProcessDied(ColloidError, RuntimeError):
    """A process of the run ended while something waited for it. Says what was waited for."""


class ProcessFailed(ColloidError, RuntimeError):
    """A process of the run raised what nobody expected. Names it, and those that have not answered by then."""


class DeadlineExceeded(ColloidError, TimeoutError):
    """A wait ended without what it waited for. Names what is missing, and for how long it was waited for."""


def written_for_user(error: BaseException) -> ColloidError | None:
    """The error of this module that `error` is, or was raised from.

    Ray puts an exception of its own around what another process raised, and keeps the original as `cause`.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ColloidError) and not hasattr(seen, "cause"):
            return seen
        seen = getattr(seen, "cause", None) or seen.__cause__
    return None
