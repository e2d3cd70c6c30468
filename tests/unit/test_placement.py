"""Who gets which slot: facts that hold for every cluster, and how a plan reads."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colloid.config.placement import Demand, Node, Placement, Share, by_number, demand_of
from colloid.config.placement_text import describe_placement, ranges
from colloid.config.plan import describe_plan
from colloid.config.planner import place
from colloid.errors import ConfigError
from tests.unit.test_config_resolve import plan


def _nodes(count: int, size: int = 8) -> list[Node]:
    return [Node(f"10.{index // 256}.{index % 256}.7", tuple(range(size))) for index in range(count)]


@st.composite
def clusters(draw) -> tuple[list[Node], Demand]:
    """A cluster of up to 512 nodes, of one size or of mixed ones, and something to be placed on it."""
    size = draw(st.sampled_from([1, 2, 4, 6, 8]))
    count = draw(st.integers(1, 512))
    mixed = draw(st.booleans())
    nodes = _nodes(count, size)
    if mixed:
        odd = draw(st.lists(st.integers(0, count - 1), max_size=5))
        nodes = [Node(n.address, n.slots[: draw(st.integers(0, size))]) if i in odd else n for i, n in enumerate(nodes)]
    trainer = draw(st.integers(0, count))
    each = draw(st.integers(1, size))
    width = draw(st.sampled_from([1, 2, 4, 8, 16, 32]))
    engines = (width,) * draw(st.integers(0, max(1, count * size // width)))
    if draw(st.booleans()):
        engines += (1,) * draw(st.integers(0, 4))
    frozen = (1,) * draw(st.integers(0, 2))
    return nodes, Demand(trainer, each, engines, frozen, draw(st.booleans()))


def _shares(placement: Placement) -> list[Share]:
    return [share for place_ in (*placement.engines, *placement.frozen) for share in place_]


def _slots(shares) -> list[tuple[int, int]]:
    return [(share.node, slot) for share in shares for slot in share.slots]


@settings(max_examples=80, deadline=None)
@given(clusters())
def test_slots_are_given_once_engines_are_whole_and_colocated_ones_share_wholly(case):
    nodes, demand = case
    try:
        found = place(nodes, demand)
    except ConfigError as error:
        assert "the run needs" in str(error) and "there are" in str(error)
        return
    trainer, engines = _slots(found.ranks), _slots(_shares(found))
    assert len(trainer) == len(set(trainer)) == demand.num_ranks
    assert len(engines) == len(set(engines)) == sum(demand.engines) + sum(demand.frozen)
    for node, slot in {*trainer, *engines}:
        assert slot in found.nodes[node].slots

    largest = max(len(node.slots) for node in found.nodes)
    for size, place_ in zip(demand.engines + demand.frozen, found.engines + found.frozen, strict=True):
        own = set(_slots(place_))
        assert len(own) == size
        assert len({len(share.slots) for share in place_}) == 1
        assert own <= set(trainer) or not own & set(trainer)
        shared = own <= set(trainer)
        assert shared <= demand.colocate
        if not shared:
            assert len(place_) == 1 or (size > largest and all(s.slots == found.nodes[s.node].slots for s in place_))
    assert not set(_slots(s for p in found.frozen for s in p)) & set(trainer)

    assert [share.node for share in found.ranks] == sorted(share.node for share in found.ranks)
    by_node = Counter(share.node for share in found.ranks)
    assert all(count % demand.trainer_slots_per_node == 0 for count in by_node.values())
    assert place(reversed(nodes), demand) == found


@settings(max_examples=30, deadline=None)
@given(clusters())
def test_a_plan_reads_back_as_what_it_is_and_is_short(case):
    nodes, demand = case
    try:
        found = place(nodes, demand)
    except ConfigError:
        return
    lines = describe_placement(found)
    if len(set(len(node.slots) for node in nodes)) == 1 and len(set(demand.engines)) == 1:
        assert len(lines) <= 8, lines
    assert "trainer rank" in "".join(lines) or not demand.num_ranks


@pytest.mark.parametrize(
    ("count", "demand", "lines"),
    [
        (
            1,
            Demand(1, 8, (2,) * 4, colocate=True),
            ["10.0.0.7: trainer ranks 0-7 on slots 0-7; engines 0-3 on slots 0-7 (2 each)"],
        ),
        (
            2,
            Demand(2, 8, (8, 8), colocate=True),
            ["10.0.0.7 … 10.0.1.7 (2 nodes): trainer ranks 0-15 on slots 0-7; engines 0-1 on slots 0-7 (8 each)"],
        ),
        (
            8,
            Demand(4, 8, (8,) * 4),
            [
                "10.0.0.7 … 10.0.3.7 (4 nodes): trainer ranks 0-31 on slots 0-7",
                "10.0.4.7 … 10.0.7.7 (4 nodes): engines 0-3 on slots 0-7 (8 each)",
            ],
        ),
        (
            3,
            Demand(1, 8, (4,) * 6, colocate=True),
            [
                "10.0.0.7: trainer ranks 0-7 on slots 0-7; engines 0-1 on slots 0-7 (4 each)",
                "10.0.1.7 … 10.0.2.7 (2 nodes): engines 2-5 on slots 0-7 (4 each)",
            ],
        ),
        (
            512,
            Demand(256, 8, (32,) * 64),
            [
                "10.0.0.7 … 10.0.255.7 (256 nodes): trainer ranks 0-2047 on slots 0-7",
                "10.1.0.7 … 10.1.255.7 (256 nodes): engines 0-63 on slots 0-7 (32 slots over 4 nodes each)",
            ],
        ),
        (
            2,
            Demand(2, 4, (4, 4)),
            ["10.0.0.7 … 10.0.1.7 (2 nodes): trainer ranks 0-7 on slots 0-3; engines 0-1 on slots 4-7 (4 each)"],
        ),
        (2, Demand(2, 4, (8,)), ["10.0.0.7: trainer ranks 0-7 on slots 0-7", "10.0.1.7: engine 0 on slots 0-7"]),
    ],
)
def test_colocated_separate_mixed_and_wide_engines(count, demand, lines):
    assert describe_placement(place(_nodes(count), demand)) == lines


def test_addresses_and_gpus_are_in_the_order_of_their_numbers():
    nodes = [Node("10.0.0.10", (10, 2, 1)), Node("10.0.0.9", (0,)), Node("gpu-10", (0,)), Node("gpu-9", (0,))]
    ordered = by_number(nodes)
    assert [node.address for node in ordered] == ["10.0.0.9", "10.0.0.10", "gpu-9", "gpu-10"]
    assert ordered[1].slots == (1, 2, 10)


def test_the_numbers_of_the_granted_gpus_take_the_place_of_the_planned_ones():
    found = place(_nodes(2, 4), Demand(1, 2, (2,), (1,)))
    granted = found.with_slots([(7, 5, 10, 2), (3,)])
    assert [share.slots for share in granted.ranks] == [(2,), (5,)]
    assert granted.engines[0][0].slots == (7, 10) and granted.frozen[0][0] == Share(1, (3,))


@pytest.mark.parametrize(
    ("demand", "words"),
    [
        (
            Demand(2, 8, (8,)),
            "2 × 8 = 16 slots of trainer ranks and 1 engine × 8 = 8 slots: at least 24; there are 2 nodes × 8 = 16",
        ),
        (Demand(1, 16), "--actor-num-gpus-per-node 16 is more than any node has, 8"),
        (Demand(2, 6, (4,) * 3, colocate=True), "Only 2 of 3 engines fit: an engine of 4 slots lies within one"),
        (Demand(0, 1, (12,)), "12 slots are more than a node has (8), so an engine takes whole free nodes"),
    ],
)
def test_what_does_not_fit_is_an_error_with_its_numbers(demand, words):
    with pytest.raises(ConfigError) as raised:
        place(_nodes(2), demand)
    assert words in str(raised.value)


def test_the_options_say_what_is_to_be_placed():
    args = plan("--actor-num-nodes", "2", "--actor-num-gpus-per-node", "4", "--rollout-num-gpus", "8")
    assert demand_of(args) == Demand(2, 4, (1,) * 8)
    teacher = plan("--use-opd", "--opd-type", "sglang", "--opd-teacher-load", "/t", "--colocate")
    assert demand_of(teacher) == Demand(1, 1, (1,), (1,), colocate=True)


def test_a_plan_for_a_cluster_is_made_on_any_machine():
    wide = (
        "--tensor-model-parallel-size",
        "8",
        "--actor-num-nodes",
        "64",
        "--actor-num-gpus-per-node",
        "8",
        "--rollout-num-gpus",
        "512",
    )
    text = describe_plan(plan(*wide, "--rollout-num-gpus-per-engine", "16", "--num-gpus-per-node", "8"))
    assert "placement        node 0 … node 63 (64 nodes): trainer ranks 0-511 on slots 0-7\n" in text
    assert "node 64 … node 127 (64 nodes): engines 0-31 on slots 0-7 (16 slots over 2 nodes each)" in text
    assert "placement        this host: trainer ranks 0-1 on slots 0-1; engine 0 on slot 2\n" in describe_plan(
        plan("--actor-num-gpus-per-node", "2")
    )


def test_numbers_are_written_as_ranges():
    assert ranges((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8" and ranges(()) == ""
