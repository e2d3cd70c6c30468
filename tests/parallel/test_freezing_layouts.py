"""Frozen parameters under every parallel layout: they stay bit by bit, and the others move as on one rank, also where a
rank has nothing to train and where activations are recomputed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parallel.family_models import VOCAB, make_family
from tests.parallel.freezing_cases import refused, train_frozen, train_frozen_critic
from tests.parallel.layouts import CP, DISTRIBUTED, EP, OVERLAPPED, PP, RECOMPUTED, SP, TP, run_layouts
from tests.parallel.ranks import run_ranks

pytestmark = pytest.mark.timeout(300)


FROZEN: dict[str, tuple[str, dict[str, str], str]] = {
    "embedding": ("qwen3", {"freeze_params_name_list": r"embedding\.word"}, "embed_tokens"),
    "all but a layer": ("qwen3", {"only_train_params_name_list": r"decoder\.layers\.1\."}, r"^(?!model\.layers\.1\.)"),
    "half of the experts": ("qwen3_moe", {"freeze_params_name_list": r"experts\.[0-3]\."}, r"experts\.[0-3]\."),
}
"""Name -> (model, options, what of Hugging Face's names is then frozen)."""
LAYOUTS: dict[tuple[str, str], tuple[int, dict[str, Any]]] = {
    ("embedding", "recomputed"): (1, RECOMPUTED),
    ("all but a layer", "recomputed"): (1, RECOMPUTED),
    ("embedding", "TP2 SP"): (2, TP | SP | RECOMPUTED),
    ("embedding", "PP2"): (2, PP | RECOMPUTED),
    ("embedding", "CP2 distributed"): (2, CP | DISTRIBUTED),
    ("all but a layer", "PP2"): (2, PP | OVERLAPPED),
    ("half of the experts", "EP2"): (2, EP),
    ("half of the experts", "EP2 distributed"): (2, EP | DISTRIBUTED),
    ("all but a layer", "TP2 PP2 SP"): (4, TP | PP | SP | RECOMPUTED | DISTRIBUTED),
}
PATTERNS = ["lienar_fc2", r"layers\.7\.", "."]


@pytest.fixture(scope="module")
def results(tiny_model_dir, tmp_path_factory) -> list[dict[Any, Any]]:
    """[rank][layout]."""
    place = tmp_path_factory.mktemp("frozen")
    dense = tiny_model_dir("qwen3", hidden=32, layers=2)
    models = {"qwen3": dense, "qwen3_moe": make_family(place / "experts", "qwen3_moe", num_hidden_layers=2)}

    def layout(frozen: str, name: str, size: int, options: dict[str, Any], **more: Path) -> tuple[Any, int, dict]:
        family, patterns, _ = FROZEN[frozen]
        arguments = {"model": models[family], "vocab": VOCAB if family == "qwen3_moe" else 512}
        return (frozen, name), size, arguments | {"case": train_frozen, "options": patterns | options} | more

    made = [layout(*key, *each) for key, each in LAYOUTS.items()]
    alone = [layout(frozen, "one rank", 1, {}) for frozen in FROZEN]
    frozen = FROZEN["embedding"][1] | PP
    wrong = {"case": refused, "model": dense, "options": PP, "patterns": PATTERNS}
    critic = {"case": train_frozen_critic, "model": dense, "options": frozen | RECOMPUTED}
    waves = [alone, made[:2], made[2:4], made[4:6], made[6:8], made[8:9]]
    waves.append([("wrong", 2, wrong), ("critic", 2, critic)])
    waves.append([layout("all but a layer", "saved", 4, TP | PP | DISTRIBUTED, save=place / "saved")])
    waves.append([layout("half of the experts", "saved", 4, PP | EP, save=place / "experts saved")])
    waves.append(
        [
            layout("all but a layer", "resumed", 2, DISTRIBUTED, load=place / "saved"),
            layout("half of the experts", "resumed", 1, {}, load=place / "experts saved"),
            (
                "other patterns",
                1,
                wrong | {"options": DISTRIBUTED | {"resume_from": place / "saved"}, "patterns": ["embed"]},
            ),
        ]
    )
    return run_ranks(run_layouts, 4, tmp_path_factory.mktemp("layouts"), timeout=250, waves=waves)


def of(results: list[dict[Any, Any]], name: Any) -> list[dict[str, Any]]:
    return [ranks[name] for ranks in results if name in ranks]


@pytest.mark.parametrize("key", LAYOUTS, ids=", ".join)
def test_frozen_parameters_stay_and_the_others_move_as_on_one_rank(key, results):
    ranks, wanted = of(results, key), of(results, (key[0], "one rank"))[0]
    for rank in ranks:
        assert rank["metrics"] == pytest.approx(wanted["metrics"], rel=1e-5, abs=2e-6)
    assert_moved(ranks[0], FROZEN[key[0]][2])
    assert_close(ranks[0]["after"], wanted["after"])


@pytest.mark.parametrize("frozen", FROZEN)
def test_one_rank_trains_all_but_what_is_frozen(frozen, results):
    assert_moved(of(results, (frozen, "one rank"))[0], FROZEN[frozen][2])


@pytest.mark.parametrize("frozen", ["embedding", "all but a layer"])
def test_the_gradient_under_full_recompute_is_the_one_without(frozen, results):
    found, wanted = (of(results, (frozen, name))[0]["gradients"] for name in ("recomputed", "one rank"))
    assert found.keys() == wanted.keys() and "embedding.word_embeddings.weight" not in found
    for name, gradient in wanted.items():
        assert gradient.any()
        assert np.linalg.norm(found[name] - gradient) <= 1e-5 * np.linalg.norm(gradient), name


@pytest.mark.parametrize("frozen", ["all but a layer", "half of the experts"])
def test_a_checkpoint_with_frozen_parameters_goes_on_under_another_layout(frozen, results):
    saved, ranks = of(results, (frozen, "saved"))[0], of(results, (frozen, "resumed"))
    for rank in ranks:
        assert rank["metrics"] == pytest.approx(saved["next"]["metrics"], rel=1e-5, abs=2e-6)
    assert_close(ranks[0]["after"], saved["next"]["after"])


def test_a_pattern_that_no_rank_has_is_an_error_with_near_names_on_all_ranks(results):
    first, second = of(results, "wrong")
    assert first == second and len(first) == len(PATTERNS)
    misspelt, no_layer, everything = first
    assert misspelt.startswith("--freeze-params-name-list: no parameter's name has 'lienar_fc2'; near it are decoder.l")
    assert "linear_fc2.weight" in misspelt.partition("near it are")[2].partition(",")[0]
    assert "'layers\\\\.7\\\\.'; near it are decoder.layers." in no_layer
    assert everything.endswith("freezes every parameter: nothing would be trained")


def test_a_checkpoint_whose_optimizer_trained_other_parameters_is_refused_with_the_way_out(results):
    (message,) = of(results, "other patterns")[0]
    assert "only one of the two has optimizer.state." in message and "--no-load-optim" in message


def test_of_a_critic_the_same_is_frozen_and_its_head_is_trained(results):
    _, last = of(results, "critic")
    assert not np.array_equal(last["before"]["head"], last["after"]["head"])
    assert_moved(of(results, "critic")[0], "embed_tokens")


def assert_moved(found: dict[str, Any], frozen: str) -> None:
    """What is frozen is as it was, bit by bit; nothing else is."""
    still = {name for name, before in found["before"].items() if np.array_equal(before, found["after"][name])}
    assert still == {name for name in found["before"] if re.search(frozen, name)}


def assert_close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_allclose(found[name], tensor, rtol=0, atol=2e-5, err_msg=name)
