"""Options of nodes, of the ranks' environment, and of how an engine divides its GPUs."""

import subprocess
import sys

import pytest

from colloid.cluster.placement import shared_directories
from colloid.config.cluster import train_environment
from colloid.config.placement import Node, demand_of
from colloid.config.planner import place
from colloid.config.weight_transport import settle_transport
from colloid.engines.addresses import lasting_port
from colloid.errors import ConfigError
from tests.unit.test_config_resolve import plan

EIGHT = ("--rollout-engine", "sglang", "--rollout-num-gpus", "8", "--rollout-num-gpus-per-engine", "8")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--sglang-dp-size 3 --sglang-enable-dp-attention", "8 is no multiple of --sglang-dp-size 3"),
        ("--sglang-attn-dp-size 3", "8 is no multiple of --sglang-attn-dp-size 3"),
        ("--sglang-dp-size 2", "--sglang-enable-dp-attention"),
        ("--sglang-dp-size 2 --sglang-attn-dp-size 2", "say the same of attention"),
        ("--sglang-pp-size 2", "--sglang-pp-size 2 is not supported yet"),
        ("--sglang-ep-size 3 --num-experts 6", "8 is no multiple of --sglang-ep-size 3"),
        ("--sglang-ep-size 8 --num-experts 12", "--sglang-ep-num-redundant-experts = 12 cannot be divided"),
        ("--sglang-ep-size 2 --sglang-moe-dp-size 2", "2 × --sglang-moe-dp-size 2 = 4 must be --rollout-num-gpus-per"),
        ("--num-attention-heads 12", "the model's 12 attention heads cannot be divided among 8 / 1 = 8 ranks"),
    ],
)  # fmt: skip
def test_an_engine_that_cannot_be_divided_so_is_refused_with_the_equation(given, words):
    with pytest.raises(ConfigError) as raised:
        plan(*EIGHT, *given.split())
    assert words in str(raised.value)


@pytest.mark.parametrize(
    "given",
    [
        "--sglang-dp-size 4 --sglang-enable-dp-attention --num-attention-heads 12",
        "--sglang-attn-dp-size 8",
        "--sglang-ep-size 8 --num-experts 12 --sglang-ep-num-redundant-experts 4",
        "--sglang-ep-size 4 --sglang-moe-dp-size 2",
    ],
)
def test_divisions_that_work_are_taken(given):
    plan(*EIGHT, *given.split())


def test_the_ranks_environment_is_names_and_values():
    args = plan("--train-env-vars", '{"NCCL_SOCKET_IFNAME": "eth0", "NCCL_NVLS_ENABLE": 0}')
    assert train_environment(args) == {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_NVLS_ENABLE": "0"}
    for wrong, words in (
        ('["A"]', "must be a JSON object"),
        ('{"A": null}', "the value of A"),
        ('{"CUDA_VISIBLE_DEVICES": "0"}', "CUDA_VISIBLE_DEVICES is set by the run"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan("--train-env-vars", wrong)


def test_tensor_groups_across_nodes_are_warned_of():
    def warned(gpus: str, tensor: str) -> bool:
        given = ("--actor-num-nodes", "2", "--actor-num-gpus-per-node", gpus, "--tensor-model-parallel-size", tensor)
        return any("lie across nodes" in text for text in plan(*given).warnings)

    assert warned("6", "4") and not warned("8", "4") and not warned("8", "16")


def test_weights_go_by_broadcast_where_an_engine_is_on_another_host_than_the_sender():
    nodes = [Node("10.0.0.1", (0, 1)), Node("10.0.0.2", (0, 1))]
    for count, transport in (("2", "gloo"), ("1", "tensor")):
        args = plan("--rollout-num-gpus", count)
        settle_transport(args, place(nodes, demand_of(args)))
        assert args.update_weight_transport == transport
    asked = plan("--rollout-num-gpus", "2", "--update-weight-transport", "tensor")
    with pytest.raises(
        ConfigError, match="rank 0, which sends the weights, is on 10.0.0.1, and engines are on 10.0.0.2"
    ):
        settle_transport(asked, place(nodes, demand_of(asked)))


def test_what_all_nodes_must_see_is_the_run_directory_and_what_lies_elsewhere(tmp_path):
    run = ("--outputs-dir", str(tmp_path / "outputs"), "--run-name", "run")
    run_dir = str(tmp_path / "outputs/run")
    assert shared_directories(plan(*run, "--save-interval", "1")) == [run_dir]
    elsewhere = plan(*run, "--save", str(tmp_path / "saved"), "--update-weight-transport", "disk")
    assert shared_directories(elsewhere) == [run_dir, str(tmp_path / "saved")]


RANK = """
import sys, datetime, psutil, torch, torch.distributed as dist
from colloid.training import rendezvous
rank, method = int(sys.argv[1]), sys.argv[2]
rendezvous.join(method, rank, 2, "gloo", datetime.timedelta(seconds=60))
total = torch.tensor(rank + 1)
dist.all_reduce(total)
port = int(method.rsplit(":", 1)[1])
listening = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"]
print(int(total), {address.ip for address in listening if address.port == port})
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.timeout(120)
def test_ranks_of_several_hosts_meet_at_a_store_that_listens_on_rank_0s_address_alone():
    method = f"tcp://127.0.0.1:{lasting_port('127.0.0.1')}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(rank), method], stdout=subprocess.PIPE, text=True
        )
        for rank in (1, 0)
    ]
    try:
        said = [rank.communicate(timeout=100)[0].strip() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert said == ["3 set()", "3 {'127.0.0.1'}"]
