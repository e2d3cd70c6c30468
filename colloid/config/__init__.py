"""Options: from a command line and config files to one checked object. Imports neither torch nor Ray."""

from colloid.config.args import Args
from colloid.config.derive import resolve_num_rollout
from colloid.config.parse import parse, parse_args

__all__ = ["Args", "parse", "parse_args", "resolve_num_rollout"]
