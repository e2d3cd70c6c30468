"""Loads a user's function or class by path, and calls it so that its errors name it.

A path is `module.attr`, `path/to/file.py` or `path/to/file.py:attr`. In a bare file, in this order: the canonical name
of the kind, the file's stem, the one object defined there whose signature fits; else an error that lists the
candidates. Keyword arguments that the object does not declare are not passed. Files are imported once a process, so
that two hooks of one file share its state.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from colloid.errors import ColloidError, HookError
from colloid.hook_kinds import KINDS, HookKind


class Hook:
    """A user's function, ready to be called.

    Attributes:
        path: as the user gave it.
        name: the function and its file, for messages.
        target: the function itself.
        is_async: calling it gives a coroutine.
    """

    def __init__(self, path: str, kind: HookKind, target: Callable[..., Any]):
        self.path, self.kind, self.target = path, kind, target
        code = inspect.unwrap(target)
        self.name = f"{kind.option} {path} ({getattr(code, '__qualname__', repr(code))})"
        function = code if inspect.isroutine(code) else type(code).__call__
        self._coroutine = inspect.iscoroutinefunction(function)
        self.is_async = self._coroutine or kind.runs == "async"
        self._parameters = _parameters(target)

    def __call__(self, *positional: Any, **keywords: Any) -> Any:
        """Calls the function; of a coroutine function the result is a coroutine.

        Raises:
            HookError: the function raised; names the hook, the place in its file and the sample.
        """
        keywords = self._declared(keywords)
        if self._coroutine:
            return self._await(positional, keywords)
        if self.is_async:
            return asyncio.to_thread(self._call, positional, keywords)
        return self._call(positional, keywords)

    def _call(self, positional: tuple, keywords: dict[str, Any]) -> Any:
        try:
            return self.target(*positional, **keywords)
        except ColloidError:
            raise
        except Exception as error:
            raise self._failed(error, positional) from error

    async def _await(self, positional: tuple, keywords: dict[str, Any]) -> Any:
        try:
            return await self.target(*positional, **keywords)
        except ColloidError:
            raise
        except Exception as error:
            raise self._failed(error, positional) from error

    def _declared(self, keywords: dict[str, Any]) -> dict[str, Any]:
        parameters = self._parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return keywords
        names = {name for name, parameter in parameters.items() if parameter.kind is not parameter.POSITIONAL_ONLY}
        return {name: value for name, value in keywords.items() if name in names}

    def _failed(self, error: Exception, positional: tuple) -> HookError:
        sample = next((text for value in positional if (text := _sample_text(value))), "")
        file = getattr(inspect.unwrap(self.target), "__code__", None)
        frames = traceback.extract_tb(error.__traceback__)
        inside = [frame for frame in frames if file is not None and frame.filename == file.co_filename] or frames[-1:]
        where = f" at {inside[-1].filename}:{inside[-1].lineno}" if inside else ""
        return HookError(
            f"{self.name} failed{f' on {sample}' if sample else ''}{where}: {type(error).__name__}: {error}"
        )


class BoundHook:
    """A hook that is given `args` by itself, at the place where its signature has it."""

    def __init__(self, hook: Hook, args: Any):
        self.hook, self.path, self.name, self.is_async = hook, hook.path, hook.name, hook.is_async
        form = hook.kind.forms[0]
        self._args, self._place = args, form.index("args") if "args" in form else None

    def __call__(self, *positional: Any, **keywords: Any) -> Any:
        if self._place is None:
            return self.hook(*positional, **keywords)
        return self.hook(*positional[: self._place], self._args, *positional[self._place :], **keywords)


def bind(hook: Hook, args: Any) -> BoundHook:
    """The hook without its parameter `args`: what is below the top is handed this."""
    return BoundHook(hook, args)


def load_hook(path: str, kind: str) -> Hook:
    """The function that `path` names.

    Args:
        kind: a key of `KINDS`.

    Raises:
        HookError: the file or module is missing or raises, or there is no such function, or it cannot be called as
            this kind is.
    """
    row = KINDS[kind]
    target = _find(path, row)
    if inspect.isclass(target):
        raise HookError(f"{row.option} {path} is a class; give a function of {_signature(row)}")
    if not callable(target):
        raise HookError(f"{row.option} {path} is no function: {target!r}")
    hook = Hook(path, row, target)
    if not _callable_as(target, row):
        raise HookError(f"{hook.name} cannot be called as {_signature(row)}: it is {_shown(target)}")
    if row.runs == "sync" and hook._coroutine:
        raise HookError(f"{hook.name} must be a plain function, not `async def`")
    return hook


def load_hook_or_class(path: str, kind: str) -> Hook | type:
    """The function that `path` names, or the class, where this kind has a form that is one; like `load_hook`."""
    row = KINDS[kind]
    target = _find(path, row)
    if not inspect.isclass(target):
        return load_hook(path, kind)
    missing = [name for name in row.class_methods if not callable(getattr(target, name, None))]
    if missing or not row.class_methods:
        what = f"the class lacks the method {', '.join(missing)}" if missing else "a function is expected, not a class"
        raise HookError(f"{row.option} {path}: {what}")
    return target


def load_class(path: str, kind: str) -> type:
    """The class that `path` names; like `load_hook`."""
    row = KINDS[kind]
    target = _find(path, row)
    if not inspect.isclass(target):
        raise HookError(f"{row.option} {path} must be a class, and is {type(target).__name__}")
    missing = [name for name in row.methods if not callable(getattr(target, name, None))]
    if missing:
        raise HookError(f"{row.option} {path}: the class lacks the method {', '.join(missing)}")
    return target


def _find(path: str, row: HookKind) -> Any:
    file, colon, attribute = path.rpartition(":")
    if colon and file.endswith(".py"):
        return _attribute(_import_file(file, row), attribute, path, row)
    if path.endswith(".py"):
        return _choose(_import_file(path, row), path, row)
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise HookError(f"{row.option} {path}: give module.function, path/to/file.py or path/to/file.py:function")
    module = _import_module(path, row, optional=True)
    if module is not None:
        return _choose(module, path, row)
    return _attribute(_import_module(module_name, row), attribute, path, row)


def _import_file(path: str, row: HookKind) -> ModuleType:
    full = os.path.realpath(path)
    if not os.path.isfile(full):
        raise HookError(f"{row.option}: there is no file {os.path.abspath(path)}")
    stem = os.path.splitext(os.path.basename(full))[0]
    name = f"{stem}_{hashlib.sha256(full.encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    _add_to_path(os.path.dirname(full))
    spec = importlib.util.spec_from_file_location(name, full)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _import_failed(f"{row.option} {path}", error) from error
    return module


def _import_module(name: str, row: HookKind, optional: bool = False) -> ModuleType | None:
    _add_to_path(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not (name == missing or name.startswith(missing + ".")):
            raise _import_failed(f"{row.option} {name}", error) from error
        if optional:
            return None
        raise HookError(f"{row.option}: there is no module {missing!r} (looked for {name})") from error
    except Exception as error:
        raise _import_failed(f"{row.option} {name}", error) from error


def _import_failed(what: str, error: Exception) -> HookError:
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{error.filename}:{error.lineno}"
    else:
        where = f"{frames[-1].filename}:{frames[-1].lineno}"
    return HookError(f"{what} cannot be imported: {type(error).__name__} at {where}: {error}")


def _add_to_path(directory: str) -> None:
    """So that a hook's file can import its neighbours, as a script can. Last, so that it hides nothing."""
    if directory not in sys.path:
        sys.path.append(directory)


def _attribute(module: ModuleType, attribute: str, path: str, row: HookKind) -> Any:
    if hasattr(module, attribute):
        return getattr(module, attribute)
    names = ", ".join(sorted(_defined(module))) or "nothing"
    raise HookError(f"{row.option} {path}: there is no {attribute!r} in {module.__file__}; it defines {names}")


def _choose(module: ModuleType, path: str, row: HookKind) -> Any:
    defined = _defined(module)
    stem = os.path.splitext(os.path.basename(module.__file__ or ""))[0]
    for name in (*row.names, stem):
        if name in vars(module) and callable(getattr(module, name)):
            return getattr(module, name)
    fitting = {name: item for name, item in defined.items() if _fits(item, row)}
    named = {name: item for name, item in fitting.items() if any(_same_names(item, form) for form in row.forms)}
    named |= {name: item for name, item in fitting.items() if set(row.keywords) & set(_parameters(item))}
    for group in (fitting, named):
        if len(group) == 1:
            return next(iter(group.values()))
    candidates = ", ".join(sorted(named or fitting or defined)) or "nothing"
    raise HookError(
        f"{row.option} {path}: which one? Name it {row.names[0]}, or give {path}:NAME. The file defines {candidates}; "
        f"the signature is {_signature(row)}"
    )


def _defined(module: ModuleType) -> dict[str, Any]:
    """Public functions and classes that the module defines itself."""
    return {
        name: item
        for name, item in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(item) or inspect.isclass(item))
        and item.__module__ == module.__name__
    }


def _fits(item: Any, row: HookKind) -> bool:
    if inspect.isclass(item) and row.class_methods:
        return all(callable(getattr(item, name, None)) for name in row.class_methods)
    if inspect.isclass(item) != row.is_class:
        return False
    if row.is_class:
        return all(callable(getattr(item, name, None)) for name in row.methods)
    if (row.runs == "async") != inspect.iscoroutinefunction(item) and row.runs != "both":
        return False
    return _callable_as(item, row)


def _callable_as(target: Callable[..., Any], row: HookKind) -> bool:
    return any(_accepts(target, form) for form in row.forms) or bool(set(row.keywords) & set(_parameters(target)))


def _parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # some built-in callables have none
        return {
            "args": inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
            "kwargs": inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
        }


def _accepts(target: Callable[..., Any], form: tuple[str, ...]) -> bool:
    """Whether it can be called with the form's positional arguments; keyword-only ones are then given by name."""
    signature = inspect.Signature(list(_parameters(target).values()))
    keyword_only = {name: None for name, item in signature.parameters.items() if item.kind is item.KEYWORD_ONLY}
    try:
        signature.bind(*form, **keyword_only)
    except TypeError:
        return False
    return True


def _same_names(target: Callable[..., Any], form: tuple[str, ...]) -> bool:
    return tuple(_parameters(target))[: len(form)] == form


def _signature(row: HookKind) -> str:
    prefix = "async " if row.runs == "async" else ""
    return " or ".join(f"`{prefix}({', '.join(form)})`" for form in row.forms)


def _shown(target: Callable[..., Any]) -> str:
    return f"{getattr(target, '__name__', target)}{inspect.Signature(list(_parameters(target).values()))}"


def _sample_text(value: Any) -> str:
    if isinstance(value, list) and value and hasattr(value[0], "group_index"):
        return f"the group {value[0].group_index} (samples {', '.join(str(item.index) for item in value[:8])})"
    if hasattr(value, "group_index") and hasattr(value, "index"):
        return f"sample {value.index} (group {value.group_index})"
    return ""
