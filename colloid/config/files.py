"""Config files: YAML or TOML with the options' names as keys, checked like the options."""

from __future__ import annotations

import os
from typing import Any

from colloid.errors import ConfigError


def read_config(path: str, option: str) -> dict[str, Any]:
    """Keys and values of a file, as they stand there.

    Raises:
        ConfigError: it is missing, not well-formed, no mapping, or has a key twice.
    """
    if not os.path.isfile(path):
        raise ConfigError(f"{option} {path}: there is no such file")
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in (".yaml", ".yml", ".toml"):
        raise ConfigError(f"{option} {path}: the file must end in .yaml, .yml or .toml")
    try:
        content = _read_toml(path) if suffix == ".toml" else _read_yaml(path)
    except (ValueError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path} cannot be read: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{option} {path} must be a mapping of option names to values, not a {type(content).__name__}"
        )
    return {str(key): value for key, value in content.items()}


def _read_toml(path: str) -> Any:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib
    with open(path, "rb") as file:
        return tomllib.load(file)


def _read_yaml(path: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Takes no key twice."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = {str(key) for key in keys if keys.count(key) > 1}
            if twice:
                raise ValueError(f"key given twice: {', '.join(sorted(twice))} (line {node.start_mark.line + 1})")
            return super().construct_mapping(node, deep)

    with open(path, encoding="utf-8") as file:
        try:
            return yaml.load(file, Loader)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error
