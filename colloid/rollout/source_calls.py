"""What a rollout asks of a data source, whoever wrote it: answers are checked, and errors name it."""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
from typing import Any

from colloid.data.groups import Group, flatten
from colloid.data.sample import Sample, Status
from colloid.data.source import RolloutDataSource, RolloutDataSourceWithBuffer
from colloid.errors import ColloidError, ConfigError, DataError, HookError

logger = logging.getLogger(__name__)


def prepare_source(args: Any, source: Any) -> None:
    """Gives a user's source what its constructor left out, and checks that it can do what the options ask.

    Raises:
        ConfigError: it lacks a method, or keeps no samples or has no buffer and an option needs that.
    """
    name = type(source).__name__
    missing = [method for method in ("save", "load", "__len__") if not hasattr(source, method)]
    if missing:
        raise ConfigError(
            f"--data-source-path: the class {name} lacks {', '.join(missing)}; add what is missing, or inherit from "
            "colloid.RolloutDataSource, which has it"
        )
    if isinstance(source, RolloutDataSource):
        source.args = source.args or args
    if args.partial_rollout and not keeps_samples(source):
        raise ConfigError(
            f"--partial-rollout: the data source {name} keeps no samples, so what is aborted could not go on later. "
            "Leave --partial-rollout out, or take --data-source-path colloid.RolloutDataSourceWithBuffer (or a class "
            "that inherits from it), or give the class an add_samples(self, groups) whose groups get_samples hands out "
            "again"
        )
    if args.buffer_filter_path and not isinstance(source, RolloutDataSourceWithBuffer):
        raise ConfigError(
            f"--buffer-filter-path {args.buffer_filter_path}: the data source {name} is no "
            "RolloutDataSourceWithBuffer, and so has no buffer to filter; leave the option out, or inherit from that"
        )
    if isinstance(source, RolloutDataSourceWithBuffer):
        source.load_buffer_filter(args)
    if args.over_sampling_batch_size > args.rollout_batch_size and not keeps_samples(source):
        logger.warning(
            "the data source %s keeps no samples: what --over-sampling-batch-size %d generates beyond the %d groups of "
            "a rollout is thrown away (rollout/num_discarded_groups)",
            *(name, args.over_sampling_batch_size, args.rollout_batch_size),
        )


def take_groups(source: Any, count: int) -> list[Group]:
    """Exactly `count` groups.

    Raises:
        DataError: `get_samples` returned something else.
        HookError: it raised.
    """
    found = _call(source, "get_samples", count)
    items = source.complete(found) if isinstance(found, list) and hasattr(source, "complete") else found
    if not isinstance(items, list) or len(items) != count or not all(_is_group(item) for item in items):
        shape = [len(item) if isinstance(item, list) else type(item).__name__ for item in items or ()]
        raise DataError(
            f"{type(source).__name__}.get_samples({count}) must return {count} groups (lists of Samples); "
            f"it returned {len(shape)}: {shape}"
        )
    return items


def check_groups(groups: Any, name: str) -> None:
    """What a rollout function (`name`) returned, a list of groups; samples without a status are COMPLETED.

    Raises:
        HookError: it is something else, or holds a sample that was aborted.
    """
    if not isinstance(groups, list) or not groups or not all(_is_group(group) for group in groups):
        head = [type(group).__name__ for group in groups[:3]] if isinstance(groups, list) else type(groups).__name__
        raise HookError(f"{name} must return groups, a list of lists of Samples, and returned {head}")
    for sample in (sample for group in groups for sample in flatten(group)):
        if sample.status is Status.ABORTED:
            raise HookError(
                f"{name} returned sample {sample.index}, which was aborted: give its group to data_source.add_samples, "
                "and return finished ones"
            )
        if sample.status is Status.PENDING:
            sample.status = Status.COMPLETED


def give_back(source: Any, groups: list[Group]) -> None:
    """Groups that were drawn and are not trained now; a source that keeps none is told all the same."""
    if groups and hasattr(source, "add_samples"):
        _call(source, "add_samples", groups)


def mark_consumed(source: Any, groups: list[Group]) -> None:
    """Tells a source that keeps books of what it handed out (a user's class need not)."""
    if hasattr(source, "mark_consumed"):
        source.mark_consumed(groups)


def keeps_samples(source: Any) -> bool:
    """Whether what is given back comes again: there is an `add_samples`, and it does something.

    A class may say so itself, with an attribute `keeps_samples` beside its `add_samples`.
    """
    for kind in type(source).__mro__:
        said = vars(kind).get("keeps_samples")
        if isinstance(said, bool):
            return said
        if "add_samples" in vars(kind):
            return not _does_nothing(vars(kind)["add_samples"])
    return False


def _does_nothing(method: Any) -> bool:
    """Whether a function's body is empty, or only raises. Where there is no source text, it is taken to work."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    empty = (ast.Pass, ast.Raise)
    return isinstance(tree, ast.FunctionDef) and all(
        isinstance(line, empty)
        or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
        or (isinstance(line, ast.Return) and (line.value is None or isinstance(line.value, ast.Constant)))
        for line in tree.body
    )


def _is_group(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and all(isinstance(sample, Sample) for sample in flatten(item))


def _call(source: Any, method: str, *values: Any) -> Any:
    try:
        return getattr(source, method)(*values)
    except ColloidError:
        raise
    except Exception as error:  # A user's class may raise anything.
        kind = type(source)
        where = inspect.getsourcefile(kind) or kind.__module__
        raise HookError(f"--data-source-path {where}: {kind.__name__}.{method} raised {error!r}") from error
