"""A run's processes: who listens where, and that all of them end with the driver."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.running import start_training, tiny_arguments, write_sums

LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Ray's own; they end too, but only once a report to the dead cluster has timed out, after a minute or so."""


def _wait_for_metrics(run_dir: Path, process, output: Path) -> None:
    deadline = time.monotonic() + 400
    while not (run_dir / "metrics.jsonl").exists() or not (run_dir / "metrics.jsonl").read_text():
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)


@pytest.mark.timeout(900)
def test_all_processes_listen_on_loopback_and_die_with_a_killed_driver(tmp_path, tiny_model_dir):
    data = write_sums(tmp_path / "data.jsonl", 16)
    arguments = tiny_arguments(tiny_model_dir("qwen3"), data)
    process = start_training(tmp_path, *arguments, "--num-rollout", 100000, "--run-name", "run")
    try:
        _wait_for_metrics(tmp_path / "outputs/run", process, tmp_path / "output.txt")
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        agents = [member.pid for member in family if member.name() in RAY_AGENTS]
        listening = [
            (member.name(), connection.laddr.ip)
            for member in family
            for connection in member.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert any("router" in name for name, _ in listening), listening
        assert not [(name, ip) for name, ip in listening if ip not in LOOPBACK]
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(30)
    own = [member for member in family if member.pid not in agents]
    _, alive = psutil.wait_procs(own, timeout=120)
    alive = [member for member in alive if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]
    assert not alive, alive
