"""Utilisation of hosts, GPUs and processes: real processes, and a stand-in of NVIDIA's library."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
import types

import pynvml
import pytest

from colloid.cluster.utilization import Utilization, with_own_names
from colloid.observe.curves import MOST, stand_outs, utilization_metrics
from colloid.observe.devices import GIB, Devices, open_devices
from colloid.observe.processes import RoleUse, RunProcesses, role_of
from colloid.observe.utilization import HostSampler, HostUse

HOST = ("cpu_percent", "cpu_percent_max", "memory_percent", "memory_gib")
BURN = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
SLEEP = "import time; time.sleep(60)"


def child(code: str, *names: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code, *names])


def end(*processes: subprocess.Popen) -> None:
    for process in processes:
        process.kill()
        process.wait(10)


class FakeNvml(types.SimpleNamespace):
    """Two GPUs: the second one is cut up (MIG), so that it tells no utilisation, and knows no power."""

    def __init__(self) -> None:
        super().__init__(NVMLError=pynvml.NVMLError, NVML_TEMPERATURE_GPU=pynvml.NVML_TEMPERATURE_GPU, open=0)

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return f"gpu {index}"

    def nvmlDeviceGetUtilizationRates(self, handle):
        if handle == "gpu 1":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return types.SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return types.SimpleNamespace(total=80 * GIB, used=20 * GIB, free=60 * GIB)

    def nvmlDeviceGetPowerUsage(self, handle):
        if handle == "gpu 1":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 431_500

    def nvmlDeviceGetTemperature(self, handle, sensor):
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return 55


def test_gpus_tell_what_they_know():
    nvml = FakeNvml()
    devices = Devices(nvml)
    first, second = devices.sample().values()
    assert first == {
        "utilization": 87.0,
        "memory_utilization": 40.0,
        "memory_gib": 20.0,
        "memory_percent": 25.0,
        "power_watts": 431.5,
        "temperature": 55.0,
    }
    assert second == {"memory_gib": 20.0, "memory_percent": 25.0, "temperature": 55.0}
    devices.close()
    assert nvml.open == 0


def test_the_stand_in_has_functions_that_the_real_library_has():
    for name in (name for name in dir(FakeNvml) if name.startswith("nvml")):
        assert callable(getattr(pynvml, name)), name


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")
def test_without_a_driver_there_are_no_gpus_and_only_a_run_that_uses_some_is_warned(caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    assert open_devices(expected=False) is None and not caplog.messages
    assert open_devices(expected=True) is None and "NVML" in caplog.text
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_devices(expected=True) is None and "pip install 'colloid[gpu]'" in caplog.text


@pytest.mark.parametrize(
    ("line", "role"),
    [
        (["ray::TrainWorker.train"], "trainer"),
        (["ray::CriticWorker"], "critic"),
        (["ray::RolloutActor.generate"], "rollout"),
        (["python", "-c", "import runpy", "77", "colloid.engines.embedded", "--port", "0"], "engine"),
        (["sglang::scheduler_TP0"], "engine"),
        (["/env/bin/python", "-c", "x", "77", "sglang.launch_server", "--model-path", "m"], "engine"),
        (["python", "-c", "x", "77", "sglang_router.launch_router"], "router"),
        (["python", "-m", "colloid.data.worker"], "data"),
        (["ray::IDLE"], "other"),
        ([], "other"),
    ],
)
def test_the_role_of_a_process_follows_from_its_command_line(line, role):
    assert role_of(line) == role


def test_processes_of_the_run_are_found_by_descent_and_one_that_ends_is_left_out():
    engine, router = child(BURN, "colloid.engines.embedded"), child(SLEEP, "sglang_router")
    try:
        processes = RunProcesses(os.getpid())
        processes.sample()
        time.sleep(0.5)
        found = processes.sample()
        assert {"driver", "engine", "router"} <= found.keys()
        assert found["engine"].cpu_percent > 5 > found["router"].cpu_percent
        assert found["driver"].rss_gib == found["driver"].rss_gib_max > 0.01
        os.kill(router.pid, signal.SIGKILL)
        router.wait(10)
        assert "router" not in processes.sample()
        assert "driver" not in RunProcesses(os.getpid(), "other").sample()
    finally:
        end(engine, router)


def test_a_step_is_told_of_its_own_time_alone():
    sampler = HostSampler(RunProcesses(os.getpid()), interval=0.05, gpus=False, name="here")
    try:
        time.sleep(0.3)
        first = sampler.take()
        busy = child(BURN, "colloid.engines.embedded")
        try:
            time.sleep(0.6)
            second = sampler.take()
        finally:
            end(busy)
        sampler.take()
        third = sampler.take()
    finally:
        sampler.close()
    assert first.name == "here" and all(first.host[name] >= 0 for name in HOST)
    assert "engine" not in first.processes and "engine" not in third.processes
    assert second.processes["engine"].cpu_percent > 5
    assert second.host["cpu_percent"] <= second.host["cpu_percent_max"] <= 100
    sampler.close()


def uses(count: int, gpus: int = 0) -> list[HostUse]:
    roles = {"trainer": RoleUse(2, 4.0, 3.0, 150.0)}
    return [
        HostUse(
            f"node-{index}",
            {"cpu_percent": float(index % 100), "memory_percent_max": 50.0},
            {
                str(gpu): {"utilization": 90.0 - (index == 7 and gpu == 3) * 80, "memory_percent": 40.0}
                for gpu in range(gpus)
            },
            roles,
        )
        for index in range(count)
    ]


def test_few_hosts_have_curves_of_their_own():
    metrics = utilization_metrics(uses(2, gpus=2))
    assert metrics["perf/host/node-1/cpu_percent"] == 1.0
    assert metrics["perf/device/node-1:0/utilization"] == 90.0
    assert metrics["perf/process/trainer/rss_gib"] == 8.0 and metrics["perf/process/trainer/rss_gib_max"] == 3.0
    assert metrics["perf/process/trainer/cpu_percent"] == 300.0
    assert stand_outs(uses(2, gpus=2)) == []


def test_the_number_of_curves_does_not_grow_with_the_cluster():
    large, larger = utilization_metrics(uses(64, gpus=8)), utilization_metrics(uses(512, gpus=8))
    assert large.keys() == larger.keys() and len(larger) < 20
    assert larger["perf/host/cpu_percent/max"] == 99.0 and larger["perf/device/utilization/min"] == 10.0
    assert larger["perf/process/trainer/rss_gib"] == 2048.0
    text = " ".join(stand_outs(uses(512, gpus=8)))
    assert "busiest host node-99 (99%" in text and "idlest GPU node-7:3 (busy 10% of the time)" in text
    assert not any(name.count("/") > 3 for name in larger) and MOST >= 8


def test_nodes_on_one_machine_are_told_apart():
    assert [use.name for use in with_own_names([HostUse("a"), HostUse("b"), HostUse("a")])] == ["a", "b", "a-2"]


NODES = """
import os, time
import ray
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address)
from colloid.cluster import utilization
watched = utilization.Utilization(1.0, False, os.getcwd(), joined=True)

def hosts():
    return len({name.split("/")[2] for name in watched.take() if name.startswith("perf/host/")})

assert hosts() == 2, "two nodes on one machine"
cluster.remove_node(second)
end = time.monotonic() + 60
while hosts() != 1:
    assert time.monotonic() < end
    time.sleep(0.2)
cluster.add_node(num_cpus=1)
utilization.NODES_EVERY = 0.0
assert hosts() == 2, "a node that joins"
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_each_node_of_a_cluster_is_watched_also_one_that_joins_and_not_one_that_is_gone(tmp_path):
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    command = [sys.executable, "-c", NODES]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_run_on_one_host_is_watched_by_a_thread_of_the_driver():
    before = {thread.name for thread in __import__("threading").enumerate()}
    watched = Utilization(interval=60, gpus=False, run_dir="unused", joined=False)
    try:
        metrics = watched.take()
    finally:
        watched.close()
    assert "utilization" not in before
    assert any(name.startswith("perf/host/") for name in metrics) and "perf/process/driver/rss_gib" in metrics
    assert all(name.startswith("perf/") for name in metrics), "what differs between two runs that are the same"
