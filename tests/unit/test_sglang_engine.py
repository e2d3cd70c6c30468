"""How the real SGLang is found, started and given weights, as far as it can be said without one."""

import base64
import json
import os
import pickle
import stat
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from colloid.config import sglang_installed
from colloid.config.placement import Share
from colloid.config.sglang import sglang_options
from colloid.engines import addresses, sglang
from colloid.engines.addresses import LOWEST_PORT, lasting_port
from colloid.engines.launch import EngineConfig, EnginePart, command_line, port_share
from colloid.errors import WeightSyncError
from colloid.weights.buckets import make_buckets
from colloid.weights.check import possible_names
from colloid.weights.sglang_tensor import SHARED_MEMORY, SharedStorage, send_bucket
from tests.unit.test_config_resolve import plan


def test_the_options_reach_the_server_by_their_own_names():
    given = ["--sglang-schedule-policy", "lpm", "--sglang-disable-radix-cache", "--sglang-log-level", "WARNING"]
    args = plan("--rollout-engine", "sglang", "--rollout-num-gpus-per-engine", "2", "--rollout-num-gpus", "2", *given)
    assert sglang_options(args) == {
        "dtype": "float32",
        "tp-size": 2,
        "schedule-policy": "lpm",
        "disable-radix-cache": True,
        "log-level": "warning",
    }
    assert sglang_options(plan("--no-sglang-dllm-fdfo"))["no-dllm-fdfo"] is True
    assert json.loads(sglang_options(plan("--sglang-extra-metric-labels", '{"a": "b"}'))["extra-metric-labels"]) == {
        "a": "b"
    }


def test_a_command_line_has_flags_values_and_lists():
    options = {"dtype": "float32", "flag": True, "sizes": [1, 2]}
    assert command_line(options) == ["--dtype", "float32", "--flag", "--sizes", "1", "2"]


def test_a_server_on_a_cpu_is_told_so_and_what_the_user_gave_wins():
    server = sglang.plan({"mem-fraction-static": 0.1, "tp-size": 1}, "/model", "127.0.0.1", None)
    assert server.options["device"] == "cpu" and server.options["mem-fraction-static"] == 0.1
    assert server.url == f"http://127.0.0.1:{server.options['port']}"
    on_gpus = sglang.plan({"tp-size": 2}, "/model", "127.0.0.1", (6, 7))
    assert "device" not in on_gpus.options and on_gpus.environment["CUDA_VISIBLE_DEVICES"] == "6,7"


def test_an_engine_of_two_nodes_is_two_servers_that_meet_at_the_first():
    def server(rank: int) -> sglang.ServerPlan:
        nodes = sglang.SeveralNodes(rank, 2, "10.0.0.9:20000")
        return sglang.plan({"tp-size": 16, "ep-size": 16}, "/model", f"127.0.0.{1 + rank}", range(8), nodes)

    first, second = command_line(server(0).options), command_line(server(1).options)
    meeting = ["--nnodes", "2", "--node-rank", "{}", "--dist-init-addr", "10.0.0.9:20000"]
    for rank, line in enumerate((first, second)):
        assert " ".join(meeting).format(rank) in " ".join(line) and line[line.index("--tp-size") + 1] == "16"
        assert line[line.index("--host") + 1] == f"127.0.0.{1 + rank}"
    assert server(1).environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    on_cpu = sglang.plan({"tp-size": 2}, "/m", "127.0.0.1", None, sglang.SeveralNodes(1, 2, "127.0.0.1:20000"))
    assert "|" not in on_cpu.environment["SGLANG_CPU_OMP_THREADS_BIND"]  # one rank a node


def test_the_cores_of_a_cpu_are_shared_among_ranks():
    assert sglang.cores_of_ranks([0, 1, 2, 3], 2) == "0-1|2-3"
    assert sglang.cores_of_ranks([4], 2) == "4|4"
    with_ranks = sglang.plan({"tp-size": 2}, "/model", "127.0.0.1", None).environment
    assert "|" in with_ranks["SGLANG_CPU_OMP_THREADS_BIND"]


def test_ports_are_not_those_that_the_system_gives_away():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [lasting_port("127.0.0.1") for _ in range(20)]
    assert len(set(ports)) == 20 and all(LOWEST_PORT <= port < first for port in ports)
    rows = [port + step for port in (lasting_port("127.0.0.1", 8) for _ in range(5)) for step in range(8)]
    assert len({*rows, *ports}) == 60 and max(rows) < first


def test_processes_that_do_not_know_of_each_other_are_given_different_ports(monkeypatch):
    def ports(share: int, count: int) -> set[int]:
        found = set()
        for _ in range(40):
            monkeypatch.setattr(addresses, "_given", set())  # as in a process of its own
            first = lasting_port("127.0.0.1", count, share)
            found |= set(range(first, first + count))
        return found

    drawn = [ports(share, count) for share in range(3) for count in (1, sglang.MEETING_PORTS)]
    of_shares = [drawn[2 * share] | drawn[2 * share + 1] for share in range(3)]
    assert sum(map(len, of_shares)) == len(set().union(*of_shares))


def test_a_port_is_given_again_only_once_all_of_its_share_were(monkeypatch):
    monkeypatch.setattr(addresses, "_given", set())
    monkeypatch.setattr(addresses, "is_free", lambda host, port: True)
    found = [lasting_port("127.0.0.1", share=5) for _ in range(1000)]
    size = len(set(found))
    assert 100 < size < 1000 and len(set(found[:size])) == size


def test_engines_of_a_node_have_ports_of_their_own_also_those_of_other_models():
    def share(gpus, place, part=None, index=0):
        return port_share(EngineConfig("m", Path("logs"), "key", gpus=gpus, place=place, part=part), index)

    assert share((0, 1), (Share(0, (0, 1)),)) != share((2, 3), (Share(0, (2, 3)),))
    assert share(None, (Share(0, (4,)),)) == 1 + 4
    wide = (Share(0, (0,)), Share(1, (6,)))
    assert [share(None, wide, EnginePart(number, 2)) for number in (0, 1)] == [1, 7]
    assert share(None, (), index=3) == 4


def test_the_key_is_in_a_file_of_the_user_alone_and_not_on_the_command_line(tmp_path):
    path = sglang.write_key(tmp_path / "key.yaml", "secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and "secret" in path.read_text()
    assert "secret" not in str(command_line(sglang.plan({}, "m", "127.0.0.1", None).options))


@pytest.fixture
def python_with(tmp_path):
    """An interpreter that answers as one whose SGLang has that version and these options."""

    def make(version: str, options: list[str]) -> str:
        path = tmp_path / f"python-{version}"
        path.write_text(
            f"#!{sys.executable}\nimport json, sys\n"
            f"print({version!r} if 'metadata' in sys.argv[-1] else json.dumps({options!r}))\n"
        )
        path.chmod(0o755)
        return str(path)

    return make


def _checked(python: str, *given: str) -> str | None:
    return sglang_installed.check(plan("--rollout-engine", "sglang", "--rollout-engine-python", python, *given))


def test_options_that_the_installed_version_lacks_are_refused_with_what_is_near(python_with):
    other = python_with("0.9", ["--tp-size", "--schedule-policies"])
    assert _checked(other) is None
    found = _checked(other, "--sglang-schedule-policy", "lpm")
    assert "--sglang-schedule-policy" in found and "0.9" in found and "--sglang-schedule-policies" in found
    same = python_with(sglang_installed.TABLE_VERSION, [])
    assert _checked(same, "--sglang-schedule-policy", "lpm") is None


def test_without_sglang_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    assert "install_sglang_cpu.sh" in _checked(str(tmp_path / "no-python"))
    assert "install_sglang_cpu.sh" in _checked(sys.executable)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert sglang_installed.find_python(Namespace(rollout_engine_python=None)) is None


def test_a_bucket_is_read_from_shared_memory_as_it_was_written():
    torch.manual_seed(0)
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).to(torch.bfloat16), "c": torch.randn(2, 2, 2)}
    bucket = next(make_buckets(iter(tensors.items()), 1 << 20))
    memory = SharedStorage()
    memory.fill(bucket)
    for _ in range(2):  # each engine's handle is its own
        read = pickle.loads(base64.b64decode(memory.serialized(bucket)))
        flat = read["flattened_tensor"]
        for meta in read["metadata"]:
            tensor = flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
            assert torch.equal(tensor, tensors[meta.name])


def test_memory_of_an_update_that_fails_is_removed_though_nobody_gives_it_back():
    bucket = next(make_buckets(iter({"a": torch.arange(1000.0)}.items()), 1 << 20))
    memory, read, files = SharedStorage(), [], []

    class Update:
        version = {"weight_version": "1"}

        def post(self, what, path, payload):
            first, *_ = payload(0)["serialized_named_tensors"]  # those of the others are never taken
            read.append(pickle.loads(base64.b64decode(first))["flattened_tensor"])
            files.append(Path(SHARED_MEMORY, memory._storage._share_filename_cpu_()[1].decode().lstrip("/")))
            assert files[-1].exists()
            raise WeightSyncError("engine B is gone")

    for _ in range(2):
        with pytest.raises(WeightSyncError, match="B is gone"):
            send_bucket(Update(), [2], memory, bucket, flush=True)
    assert len(set(files)) == 2 and not any(file.exists() for file in files)
    assert all(torch.equal(flat.view(torch.float32), torch.arange(1000.0)) for flat in read), "who has it goes on"
    read.clear()  # and closes it
    memory.fill(bucket)


def test_names_are_found_under_what_sglang_fuses_them_into():
    def held(name: str) -> set[str]:
        return set(possible_names(name))

    assert "model.layers.0.self_attn.qkv_proj.weight" in held("model.layers.0.self_attn.k_proj.weight")
    assert "model.layers.0.mlp.gate_up_proj.weight" in held("model.layers.0.mlp.up_proj.weight")
    assert "model.layers.1.mlp.experts.w13_weight" in held("model.layers.1.mlp.experts.7.gate_proj.weight")
    assert "model.embed_tokens.weight" in held("lm_head.weight")
