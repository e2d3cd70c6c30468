"""How the ranks are divided: what follows from the options, and what is refused with its numbers."""

from __future__ import annotations

import pytest

from colloid.config import parse
from colloid.config.args import Args
from colloid.config.layout import data_parallel_rank, data_parallel_size
from colloid.config.megatron_fields import transformer_fields
from colloid.errors import ConfigError

MODEL = "--num-layers 8 --hidden-size 64 --num-attention-heads 12 --num-query-groups 4 --ffn-hidden-size 96"
MIXTURE = MODEL + " --num-experts 8 --moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-layer-freq 1"


def plan(options: str, model: str = MODEL) -> Args:
    return parse(["--dry-run", "--device", "cpu", *model.split(), *options.split()])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--tensor-model-parallel-size 3", ["--tensor-model-parallel-size 3", "4 query groups"]),
        ("--tensor-model-parallel-size 8", ["12 attention heads nor its 4 query groups"]),
        ("--pipeline-model-parallel-size 3", ["--pipeline-model-parallel-size 3", "8 layers", "--decoder-first"]),
        ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 3", ["8 layers", "the 3 of", "= 5"]),
        ("--decoder-last-pipeline-num-layers 3", ["--pipeline-model-parallel-size above 1"]),
        ("--actor-num-gpus-per-node 6 --tensor-model-parallel-size 4", ["= 6 trainer ranks", "= 4"]),
        ("--actor-num-gpus-per-node 2 --context-parallel-size 4", ["= 2 trainer ranks", "context 4"]),
        ("--num-layers-per-virtual-pipeline-stage 2", ["--num-layers-per-virtual", "size above 1"]),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
            ["3 × --pipeline-model-parallel-size 2 = 6", "8 layers"],
        ),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3",
            ["2 pipeline stages × 3 virtual ones = 6", "8 layers"],
        ),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--num-layers-per-virtual-pipeline-stage 2",
            ["say the same"],
        ),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
            ["--no-overlap-p2p-communication", "gradients are wrong without an error"],
        ),
        ("--expert-model-parallel-size 3", ["--expert-model-parallel-size 3", "8 experts"]),
        ("--expert-model-parallel-size 2 --actor-num-gpus-per-node 3", ["3 trainer ranks", "expert 2", "= 2"]),
        ("--tensor-model-parallel-size 2 --expert-model-parallel-size 2", ["needs --sequence-parallel"]),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
            ["--expert-tensor-parallel-size 1", "wrong without an error", "--expert-model-parallel-size 2"],
        ),
        (
            "--expert-model-parallel-size 2 --moe-token-dispatcher-type allgather",
            ["--moe-token-dispatcher-type allgather", "alltoall alone"],
        ),
    ],
)
def test_what_does_not_divide_or_is_known_to_be_wrong_is_refused(options, words):
    with pytest.raises(ConfigError) as caught:
        plan(options, MIXTURE if "expert" in options else MODEL)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        "--num-layers-per-virtual-pipeline-stage 2",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--virtual-pipeline-model-parallel-size 2",
    ],
)
def test_virtual_stages_can_be_said_in_three_ways_and_overlap(options):
    fields = transformer_fields(plan("--pipeline-model-parallel-size 2 " + options))
    assert fields["virtual_pipeline_model_parallel_size"] == 2
    assert (fields["overlap_p2p_comm"], fields["batch_p2p_comm"]) == (True, False)


def test_without_virtual_stages_nothing_overlaps():
    fields = transformer_fields(plan("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 1"))
    assert not {"virtual_pipeline_model_parallel_size", "overlap_p2p_comm", "batch_p2p_comm"} & fields.keys()


def test_uneven_stages_are_passed_on():
    fields = transformer_fields(plan("--pipeline-model-parallel-size 3 --decoder-last-pipeline-num-layers 2"))
    assert fields["num_layers_in_last_pipeline_stage"] == 2


def test_sequence_parallelism_of_one_rank_is_off_with_a_warning():
    args = plan("--sequence-parallel")
    assert not args.sequence_parallel and not transformer_fields(args)["sequence_parallel"]
    assert any("--sequence-parallel has no effect" in text for text in args.warnings)
    assert transformer_fields(plan("--sequence-parallel --tensor-model-parallel-size 2"))["sequence_parallel"]


def test_ranks_that_share_the_model_or_the_sequences_train_the_same_part():
    args = plan(
        "--tensor-model-parallel-size 2 --context-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--actor-num-gpus-per-node 16"
    )
    assert data_parallel_size(args) == 2
    assert [data_parallel_rank(args, rank) for rank in range(16)] == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4


def test_the_default_number_of_ranks_is_the_least_that_the_layout_divides():
    assert plan("--pipeline-model-parallel-size 2 --expert-model-parallel-size 2", MIXTURE).world_size == 4
    assert plan("--tensor-model-parallel-size 4 --context-parallel-size 2").world_size == 8
