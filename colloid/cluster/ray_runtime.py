"""Ray for one run: started on this host, bound to loopback, or joined where a cluster runs.

On one host Ray is an implementation detail: no dashboard, no address but 127.0.0.1, and as many CPUs as the run has
device slots, whatever the machine has. A cluster that exists (`RAY_ADDRESS`) is joined as it is.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

DIRECTORY_VARIABLE = "COLLOID_DIRECTORY"
"""Where the driver was started."""


def is_joined() -> bool:
    """Whether the run joins a cluster that runs already."""
    return bool(os.environ.get("RAY_ADDRESS"))


def enter_directory() -> None:
    """Has a process of the run on a cluster work where the driver does, so that relative paths mean the same."""
    directory = os.environ.get(DIRECTORY_VARIABLE, "")
    if os.path.isdir(directory):  # where it is not, the run's directories are missed by name
        os.chdir(directory)


def start_ray(num_slots: int, working_directory: str) -> None:
    """Starts Ray on loopback with `num_slots` CPUs, or joins the cluster that `RAY_ADDRESS` names."""
    assert "ray" not in sys.modules, "Ray reads its environment when it is imported, and this sets it"
    environment = {
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
    }
    joins = is_joined()
    if not joins:
        # Ray resolves 127.0.0.1 to the host's outer address, and binds everything to all interfaces, unless it is
        # told that this machine cannot be part of a cluster.
        environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.update({key: value for key, value in environment.items() if key not in os.environ})
    import ray

    path = os.pathsep.join(filter(None, [working_directory, os.environ.get("PYTHONPATH", "")]))
    variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONPATH": path}
    worker_environment: dict[str, Any] = {"env_vars": variables}
    if joins:
        variables[DIRECTORY_VARIABLE] = os.getcwd()
        worker_environment["worker_process_setup_hook"] = f"{__name__}.{enter_directory.__name__}"
        ray.init(runtime_env=worker_environment, log_to_driver=True)
        return
    # It says at each start that it uses a token, which is the default.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    ray.init(
        address="local",  # else Ray joins whatever cluster was started on this host last
        num_cpus=num_slots,
        num_gpus=None,
        include_dashboard=False,
        log_to_driver=True,
        logging_level="warning",
        runtime_env=worker_environment,
        _node_ip_address="127.0.0.1",
        _temp_dir=os.environ.get("RAY_TMPDIR"),
    )
