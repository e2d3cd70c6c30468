"""Several nodes: a real Ray cluster of small nodes on this host, each with a loopback address of its own.

pytest tests/e2e/test_nodes.py               placement, engines on other nodes, a run over two nodes
pytest -m slow tests/e2e/test_nodes.py       and nodes that go while a run goes on
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from colloid.cluster import placement as cluster_placement
from colloid.cluster.engine_hosts import NODE_GONE, EngineHosts, launch_on
from colloid.config.placement import Demand
from colloid.config.planner import place
from colloid.config.sglang_installed import find_python
from colloid.engines.control import EngineControl
from colloid.engines.launch import EngineConfig, launch_engine
from colloid.errors import ConfigError, EngineError
from tests.e2e.running import ROOT, metrics_of, tiny_arguments, write_sums

SGLANG = find_python(Namespace(rollout_engine_python=None))
NODES = {"127.0.0.9": 2, "127.0.0.10": 2, "127.0.0.12": 2}
SLOTS = sum(NODES.values())
FAKE_SERVER = """
import http.server, json, sys, time
words = sys.argv[1:]
options = {word[2:]: words[index + 1] for index, word in enumerate(words[:-1]) if word.startswith("--")}
print(json.dumps(options), flush=True)
if "fail" in options["model-path"]:
    sys.exit("no such model")
if options.get("node-rank", "0") != "0":
    time.sleep(600)
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer((options["host"], int(options["port"])), Healthy).serve_forever()
"""


@contextlib.contextmanager
def ray_cluster(sizes: dict[str, int]) -> Iterator[tuple[str, Callable[[str], None]]]:
    """The address of a cluster whose nodes have these loopback addresses and as many slots; and what ends a node."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=0, node_ip_address="127.0.0.1", include_dashboard=False)
        nodes = {
            address: cluster.add_node(num_cpus=size, node_ip_address=address, include_dashboard=False)
            for address, size in sizes.items()
        }
        yield cluster.address, lambda address: cluster.remove_node(nodes[address])
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def cluster():
    """Three nodes; this process is the driver."""
    with ray_cluster(NODES) as (address, remove):
        import ray

        environment = {"env_vars": {"PYTHONPATH": str(ROOT)}}
        ray.init(address=address, _node_ip_address="127.0.0.1", runtime_env=environment, log_to_driver=False)
        yield remove
        ray.shutdown()


@pytest.fixture
def server(tmp_path) -> str:
    """An interpreter whose SGLang is a server that is always healthy."""
    (tmp_path / "modules/sglang").mkdir(parents=True)
    (tmp_path / "modules/sglang/__init__.py").touch()
    (tmp_path / "modules/sglang/launch_server.py").write_text(FAKE_SERVER)
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={tmp_path}/modules\nexec {sys.executable} \"$@\"\n"
    )  # fmt: skip
    python.chmod(0o755)
    return str(python)


def _options(tmp_path: Path, **more) -> Namespace:
    unset = ("save", "hf_checkpoint", "load", "ref_load", "init_checkpoint")
    values = dict.fromkeys((*unset, "opd_teacher_load", "num_gpus_per_node"))
    values |= {"run_dir": str(tmp_path), "update_weight_transport": "gloo", "device": "cpu", "num_restarts": 0}
    return Namespace(**values | more)


def _reserve(tmp_path: Path, demand: Demand):
    nodes = cluster_placement.nodes_of_cluster("cpu", None, free=True)
    return cluster_placement.granted(_options(tmp_path), place(nodes, demand))


def _free() -> int:
    return sum(len(node.slots) for node in cluster_placement.nodes_of_cluster("cpu", None, free=True))


@contextlib.contextmanager
def _reserved(tmp_path: Path, demand: Demand):
    from ray.util.placement_group import remove_placement_group

    _wait_for(lambda: _free() == SLOTS)
    reservation = _reserve(tmp_path, demand)
    try:
        yield reservation
    finally:
        remove_placement_group(reservation.group)


def _config(tmp_path: Path, python: str, place_=(), model: str = "/model", **options) -> EngineConfig:
    return EngineConfig(
        model, tmp_path / "logs", "a-secret", kind="sglang", python=python, place=place_, options=options
    )


def _started_with(log: Path) -> dict[str, str]:
    return json.loads(log.read_text().splitlines()[0])


@pytest.mark.timeout(180)
def test_processes_are_on_the_nodes_that_the_plan_says_in_the_order_of_their_numbers(cluster, tmp_path):
    import ray

    with _reserved(tmp_path, Demand(2, 1, (1,))) as slots:
        assert [node.address for node in slots.placement.nodes][:3] == ["127.0.0.1", "127.0.0.9", "127.0.0.10"]
        places = [*slots.placement.ranks, *(share for engine in slots.placement.engines for share in engine)]
        where = ray.remote(lambda: ray.util.get_node_ip_address())
        found = ray.get([where.options(**slots.on_node(share.node)).remote() for share in places], timeout=120)
        assert found == ["127.0.0.9", "127.0.0.10", "127.0.0.9"]
        assert not slots.one_host and slots.rendezvous(tmp_path, 0).startswith("tcp://127.0.0.9:")
        assert launch_on(slots, "cpu") is not launch_engine
        assert slots.where(slots.placement.ranks[1]) == " on node 127.0.0.10"
        assert _free() == SLOTS - 3  # engines hold their slots as well


@pytest.mark.timeout(180)
def test_an_engine_on_another_node_serves_there_and_its_end_is_known(cluster, tmp_path, server):
    with _reserved(tmp_path, Demand(0, 1, (2, 2))) as slots:
        hosts = EngineHosts(slots, "cpu")
        engine = hosts.launch(_config(tmp_path, server, slots.placement.engines[1]), "engine_1", 1)
        failing = hosts.launch(_config(tmp_path, server, slots.placement.engines[0], "/fail"), "engine_0", 0)
        url = engine.wait_until_ready()
        assert url.startswith("http://127.0.0.10:") and EngineControl(url).get("/health") == {}
        assert engine.exit_code is None and engine.log_path == tmp_path / "logs/engine_1.log"
        with pytest.raises(EngineError, match="127.0.0.9(.|\n)*no such model"):
            failing.wait_until_ready()
        os.kill(engine.pid, signal.SIGKILL)
        _wait_for(lambda: engine.exit_code is not None)
        assert engine.exit_code == -signal.SIGKILL
        assert engine.how_it_ended().startswith("ended with -9 on node 127.0.0.10; the end of its log")
        failing.stop()
        engine.stop()


@pytest.mark.timeout(180)
def test_a_wide_engine_is_a_server_a_node_and_an_end_of_one_is_the_engines(cluster, tmp_path, server):
    with _reserved(tmp_path, Demand(0, 1, (6,))) as slots:
        wide = slots.placement.engines[0]
        assert [(slots.placement.nodes[share.node].address, share.slots) for share in wide] == [
            ("127.0.0.9", (0, 1)),
            ("127.0.0.10", (0, 1)),
            ("127.0.0.12", (0, 1)),
        ]
        config = _config(tmp_path, server, wide, **{"tp-size": 6})
        engine = EngineHosts(slots, "cpu").launch(config, "wide", 0)
        assert engine.wait_until_ready().startswith("http://127.0.0.9:")
        parts = [tmp_path / f"logs/wide{part}.log" for part in ("", "_part_1", "_part_2")]
        _wait_for(lambda: all(part.exists() and part.read_text() for part in parts))
        started = [_started_with(part) for part in parts]
        assert [one["node-rank"] for one in started] == ["0", "1", "2"]
        assert {(one["nnodes"], one["tp-size"]) for one in started} == {("3", "6")}
        (meeting,) = {one["dist-init-addr"] for one in started}
        assert meeting.startswith("127.0.0.9:") and [one["host"] for one in started][1] == "127.0.0.10"
        assert engine.exit_code is None
        engine.terminate()
        _wait_for(lambda: engine.exit_code is not None)
        engine.stop()


@pytest.mark.timeout(180)
def test_what_does_not_fit_and_what_a_node_does_not_see_are_errors(cluster, tmp_path, monkeypatch):
    _wait_for(lambda: _free() == SLOTS)
    with pytest.raises(ConfigError, match=r"1 × 4 = 4 slots .* there are 3 nodes × 2 = 6"):
        _reserve(tmp_path, Demand(1, 4))
    monkeypatch.setattr(cluster_placement._Markers, "__enter__", lambda markers: markers)  # nobody sees them then
    with pytest.raises(ConfigError, match=rf"node 127.0.0.9 does not see {tmp_path} as the driver does"):
        _reserve(tmp_path, Demand(1, 2))


@pytest.mark.timeout(240)
def test_an_engine_goes_with_its_node_and_is_started_anew_on_another(cluster, tmp_path, server):
    with _reserved(tmp_path, Demand(0, 1, (2, 2))) as slots:
        hosts = EngineHosts(slots, "cpu")
        config = _config(tmp_path, server, slots.placement.engines[1])
        engine = hosts.launch(config, "engine_1", 1)
        assert engine.wait_until_ready().startswith("http://127.0.0.10:")
        cluster("127.0.0.10")
        _wait_for(lambda: engine.exit_code is not None)
        assert engine.exit_code == NODE_GONE and "on node 127.0.0.10, which is gone" in engine.how_it_ended()
        engine.stop()
        other = hosts.launch(config, "engine_1", 1)
        assert other.wait_until_ready().startswith("http://127.0.0.12:")
        other.stop()


def _wait_for(fact: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


class _Training:
    """`train.py` in a process of its own, as a driver of a cluster."""

    def __init__(self, directory: Path, address: str, *arguments: object):
        self._output = directory / "output.txt"
        self.run_dir = directory / "outputs/run"
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(ROOT / "train.py"), *map(str, arguments), "--run-name", "run"],
                cwd=directory,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "RAY_ADDRESS": address},
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def rollouts(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def wait_for_rollouts(self, count: int, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while self.rollouts() < count:
            assert self._process.poll() is None and time.monotonic() < deadline, self.output[-5000:]
            time.sleep(0.1)

    def wait(self, seconds: float = 300) -> int:
        return self._process.wait(seconds)

    def __enter__(self):
        return self

    def __exit__(self, *_rest):
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_over_two_nodes_trains_and_its_engines_get_the_weights(tmp_path, tiny_model_dir):
    data = write_sums(tmp_path / "data.jsonl", 16)
    arguments = [*tiny_arguments(tiny_model_dir("qwen3"), data), "--num-rollout", 2, "--check-weight-update-equal"]
    arguments += ["--actor-num-nodes", 2, "--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 2]
    with (
        ray_cluster({"127.0.0.2": 2, "127.0.0.3": 2}) as (address, _),
        _Training(tmp_path, address, *arguments, "--train-env-vars", '{"COLLOID_TEST": "1"}') as training,
    ):
        assert training.wait(600) == 0, training.output[-5000:]
    assert len(metrics_of(training.run_dir)) == 2
    placed = "127.0.0.2 … 127.0.0.3 (2 nodes): trainer ranks 0-1 on slot 0; engines 0-1 on slot 1"
    assert placed in training.output
    assert re.search(r"weight version 3: \d+ tensors equal on all engines \(2\)", training.output)
    assert all(f"engine http://127.0.0.{host}:" in training.output for host in (2, 3))
    assert not [path.name for path in training.run_dir.iterdir() if path.name.startswith(".node-check")]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(SGLANG is None, reason="needs SGLang: bash scripts/install_sglang_cpu.sh")
def test_the_real_sglang_over_two_nodes_is_one_engine(tmp_path, tiny_model_dir):
    data = write_sums(tmp_path / "data.jsonl", 16)
    arguments = [*tiny_arguments(tiny_model_dir("qwen3"), data), "--num-rollout", 2, "--check-weight-update-equal"]
    arguments += ["--rollout-num-gpus", 2, "--rollout-num-gpus-per-engine", 2, "--rollout-engine", "sglang"]
    arguments += ["--rollout-engine-python", SGLANG, "--sglang-max-total-tokens", 2048]
    arguments += ["--sglang-mem-fraction-static", 0.1]
    with (
        ray_cluster({"127.0.0.2": 1, "127.0.0.3": 1, "127.0.0.4": 1}) as (address, _),
        _Training(tmp_path, address, *arguments) as training,
    ):
        assert training.wait(1500) == 0, training.output[-5000:]
    assert "(2 nodes): engine 0 on slot 0 (2 slots over 2 nodes)" in training.output
    for step in metrics_of(training.run_dir):
        assert step["train/train_rollout_logprob_abs_diff"] < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trainers_node_that_goes_ends_the_run_and_is_named(tmp_path, tiny_model_dir):
    data = write_sums(tmp_path / "data.jsonl", 16)
    arguments = [*tiny_arguments(tiny_model_dir("qwen3"), data), "--num-rollout", 100000]
    arguments += ["--actor-num-nodes", 2, "--actor-num-gpus-per-node", 1]
    with (
        ray_cluster({"127.0.0.2": 2, "127.0.0.3": 1}) as (address, remove),
        _Training(tmp_path, address, *arguments) as training,
    ):
        training.wait_for_rollouts(1)
        remove("127.0.0.3")
        assert training.wait(120) == 1
    assert "error: trainer rank 1 on node 127.0.0.3" in training.output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_engines_node_that_goes_is_made_up_for_on_another(tmp_path, tiny_model_dir):
    data = write_sums(tmp_path / "data.jsonl", 16)
    arguments = [*tiny_arguments(tiny_model_dir("qwen3"), data), "--num-rollout", 100000, "--rollout-num-gpus", 2]
    with (
        ray_cluster({"127.0.0.2": 2, "127.0.0.3": 1, "127.0.0.4": 1}) as (address, remove),
        _Training(tmp_path, address, *arguments, "--use-fault-tolerance", "--check-weight-update-equal") as training,
    ):
        training.wait_for_rollouts(1)
        remove("127.0.0.3")
        _wait_for(lambda: "serves, in the place of one that was lost" in training.output, 200)
        training.wait_for_rollouts(training.rollouts() + 2)
    assert "on node 127.0.0.3, which is gone" in training.output
    assert "engine http://127.0.0.4:" in training.output
