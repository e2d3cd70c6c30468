"""A loss and a reducer of one's own, the old actor, Adam without moments and the trainer's hooks, on two ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.parallel.ranks import run_ranks
from tests.parallel.trainer_cases import ranks_of_options

pytestmark = pytest.mark.timeout(300)

HOOKS = '''
import pathlib
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel


def note(*what):
    with (pathlib.Path(__file__).parent / f"calls_{dist.get_rank()}.txt").open("a") as file:
        file.write(" ".join(map(str, what)) + "\\n")


def policy_gradient(args, batch, logits, sum_of_sample_mean):
    """The built-in loss once more, with KL and entropy."""
    everything = (logits / args.rollout_temperature).log_softmax(-1)
    lengths = batch["response_lengths"]
    responses = [tokens[-length:] for tokens, length in zip(batch["unconcat_tokens"], lengths, strict=True)]
    log_probs = everything.gather(1, torch.cat(responses)[:, None])[:, 0]
    old, ref = torch.cat(batch["log_probs"]), torch.cat(batch["ref_log_probs"])
    advantages = torch.cat(batch["advantages"]).float()
    ratio = torch.exp(log_probs - old)
    bounded = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip)
    pg_loss = sum_of_sample_mean(torch.maximum(-ratio * advantages, -bounded * advantages))
    k = log_probs - ref
    kl_loss = sum_of_sample_mean((torch.exp(-k) - 1 + k).clamp(-10, 10))
    entropy = sum_of_sample_mean(-(everything.exp() * everything).sum(-1))
    loss = pg_loss + args.kl_loss_coef * kl_loss - args.entropy_coef * entropy
    assert batch["tokens"].shape == (1, sum(batch["total_lengths"])) and len(batch["rewards"]) == len(lengths)
    return loss, {"pg_loss": pg_loss, "kl_loss": kl_loss, "entropy_loss": entropy}


def samples(args, batch, logits, sum_of_sample_mean):
    """A loss that needs neither log-probs nor advantages."""
    assert not {"log_probs", "advantages"} & batch.keys()
    ones = [torch.ones_like(mask) for mask in batch["loss_masks"]]
    return (logits * 0).sum(), {"sum_of_ones": sum_of_sample_mean(ones)}


def same_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    def reduce(x):
        parts = list(zip(x.split(response_lengths), loss_masks, strict=True))
        sums = [(part * mask).sum() for part, mask in parts]
        counts = [1 if calculate_per_token_loss else mask.sum().clamp(min=1) for _, mask in parts]
        return sum(total / count for total, count in zip(sums, counts, strict=True))
    return reduce


def by_ten(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda x: (x * torch.cat(loss_masks)).sum() / 10


def custom_megatron_init(args):
    note("init", args.seed, dist.get_world_size())


class Provided(GPTModel):
    def forward(self, *args, **kwargs):
        if not hasattr(self, "noted"):
            self.noted = note("forward")
        return super().forward(*args, **kwargs)


def custom_model_provider(pre_process, post_process, vp_stage=None, *, build):
    note("provider", pre_process, post_process, vp_stage)
    model = build()
    model.__class__ = Provided  # as if it had been built as one
    model.embedding.word_embeddings.weight.requires_grad = False
    return model


def before_log_prob(args, model, store_prefix):
    note("before_log_prob", repr(store_prefix), len(model), type(model[0]).__name__)


def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    note("before_train_step", rollout_id, step_id, type(opt_param_scheduler).__name__)
    for group in optimizer.param_groups:
        group["lr"] = 0.125 if step_id else 0.0


def rollout_data_postprocess(args, rollout_id, rollout_data):
    note("postprocess", rollout_id, *sorted(rollout_data))
    rollout_data["loss_masks"] = [mask * (row > 0) for row, mask in enumerate(rollout_data["loss_masks"])]


def where_uncertain(args, rollout_id, rollout_data):
    pairs = zip(rollout_data["loss_masks"], rollout_data["entropy"], strict=True)
    rollout_data["loss_masks"] = [mask * (entropy > 0) for mask, entropy in pairs]


def half(args, rollout_id, rollout_data):
    rollout_data["advantages"] = [values / 2 for values in rollout_data["advantages"]]
'''
LOSS = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01}
LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {},
    "TP2": {"tensor_model_parallel_size": 2},
    "TP2 SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2": {"pipeline_model_parallel_size": 2},
    "CP2": {"context_parallel_size": 2},
}
SIZES = (1, 8)


@pytest.fixture(scope="module")
def results(tiny_model_dir, tmp_path_factory) -> list[dict[str, Any]]:
    """[rank][name]."""
    small = {"hidden": 32, "layers": 2}
    model, other = (tiny_model_dir("qwen3", seed=seed, **small) for seed in (0, 1))
    place = tmp_path_factory.mktemp("options")
    hooks = place / "hooks.py"
    hooks.write_text(HOOKS)
    steps: dict[str, dict[str, Any]] = {}

    def step(name: str, *, size: int = 3, per_token: bool = False, **options: Any) -> None:
        if per_token:
            options["calculate_per_token_loss"] = True
        steps[name] = {"model": model, "options": options, "micro_batch_size": size, "per_token": per_token}

    full = LOSS | {"ref_load": other}
    own = full | {"loss_type": "custom_loss", "custom_loss_function_path": f"{hooks}:policy_gradient"}
    for layout, options in LAYOUTS.items():
        step(f"{layout} built-in", **full, **options)
        step(f"{layout} custom", **own, **options)
    for size in SIZES:
        step(f"custom {size}", size=size, **own)
    step("recomputed", **full, recompute_loss_function=True)
    step("custom recomputed", **own, recompute_loss_function=True)
    step(
        "without advantages",
        loss_type="custom_loss",
        custom_loss_function_path=f"{hooks}:samples",
        disable_compute_advantages_and_returns=True,
    )
    for per_token in (False, True):
        name = "tokens" if per_token else "rollouts"
        step(f"default {name}", per_token=per_token, **full)
        options = full | {"custom_pg_loss_reducer_function_path": f"{hooks}:same_reducer"}
        step(f"reducer {name}", size=1, per_token=per_token, **options)
    for size in SIZES:
        step(f"by ten {size}", size=size, custom_pg_loss_reducer_function_path=f"{hooks}:by_ten")
    step("plain")
    step("padded", data_pad_size_multiplier=96, padded_vocab_size=1000)
    step("padded TP2 SP", data_pad_size_multiplier=96, **LAYOUTS["TP2 SP"])
    step("halved", rollout_data_postprocess_path=f"{hooks}:half")
    step("custom entropy", use_rollout_entropy=True, **own)
    for layout, options in LAYOUTS.items():
        hook = {"rollout_data_postprocess_path": f"{hooks}:where_uncertain"} if layout == "DP2" else {}
        step(f"{layout} entropy", use_rollout_entropy=True, **hook, **options)
    once = {"weight_decay": 0.1, "lr": 1e-3, "adam_eps": 1e-4}
    without = once | {"use_stateless_adam": True}
    optimizers = {
        f"{kind}{name}": options | extra
        for kind, options in (("reset", once | {"reset_optimizer_states": True}), ("stateless", without))
        for name, extra in (
            ("", {}),
            (" distributed", {"use_distributed_optimizer": True}),
            (" bf16", {"bf16": True}),
        )
    }
    optimizers["adam"] = once
    resumed = {"use_stateless_adam": True, "use_distributed_optimizer": True}
    calls = {
        "weights": ("trained_weights", {"model": model, "runs": optimizers}),
        "old actor": ("old_actor", {"model": model, "directory": place / "old"}),
        "hooks": ("with_hooks", {"model": model, "hooks": hooks}),
        "resume": ("resume", {"model": model, "directory": place / "float32", "options": resumed}),
        "resume bf16": ("resume", {"model": model, "directory": place / "bf16", "options": resumed | {"bf16": True}}),
    }
    return run_ranks(ranks_of_options, 2, tmp_path_factory.mktemp("ranks"), timeout=240.0, steps=steps, calls=calls)


def difference(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """Largest, over the tensors, of the largest difference by the largest value of the tensor."""
    assert found.keys() == wanted.keys()
    scale = max(float(np.abs(wanted[name]).max()) for name in wanted)
    return max(float(np.abs(found[name] - wanted[name]).max()) for name in wanted) / scale


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_policy_gradient_as_a_custom_loss_has_the_built_in_gradient(results, layout):
    for rank in results:
        found, wanted = rank[f"{layout} custom"], rank[f"{layout} built-in"]
        assert difference(found["gradients"], wanted["gradients"]) < 1e-6
        for name in ("loss", "pg_loss", "kl_loss", "entropy_loss", "grad_norm"):
            assert found["metrics"][f"train/{name}"] == pytest.approx(
                wanted["metrics"][f"train/{name}"], rel=1e-5, abs=1e-7
            )


def test_a_custom_loss_does_not_depend_on_micro_batches(results):
    for size in SIZES:
        assert difference(results[0][f"custom {size}"]["gradients"], results[0]["DP2 custom"]["gradients"]) < 1e-6


def test_recomputing_the_loss_changes_no_bit_of_the_gradient(results):
    for name, plain in (("recomputed", "DP2 built-in"), ("custom recomputed", "DP2 custom")):
        found, wanted = results[0][name]["gradients"], results[0][plain]["gradients"]
        assert all(np.array_equal(found[each], wanted[each]) for each in wanted)


def test_sum_of_sample_mean_has_the_denominators_of_the_global_batch(results):
    metrics = results[0]["without advantages"]["metrics"]
    # Of eight rollouts one was removed: it counts, with a loss of 0.
    assert metrics["train/sum_of_ones"] == pytest.approx(7 / 8, abs=1e-6)


def test_a_reducer_that_says_the_default_changes_nothing(results):
    for kind in ("rollouts", "tokens"):
        found, wanted = results[0][f"reducer {kind}"], results[0][f"default {kind}"]
        assert difference(found["gradients"], wanted["gradients"]) < 1e-6
        assert found["metrics"]["train/pg_loss"] == pytest.approx(wanted["metrics"]["train/pg_loss"], abs=1e-6)


def test_a_reducer_is_of_the_policy_loss_and_does_not_depend_on_micro_batches(results):
    plain = results[0]["plain"]["gradients"]
    first = results[0]["by ten 1"]["gradients"]
    assert difference(first, plain) > 0.05
    assert all(difference(results[0][f"by ten {size}"]["gradients"], first) < 1e-6 for size in SIZES)


def test_what_a_hook_makes_of_the_data_is_trained(results):
    plain, halved = (results[0][name]["gradients"] for name in ("plain", "halved"))
    assert difference({name: 2 * values for name, values in halved.items()}, plain) < 1e-6


def test_padding_of_packs_and_of_the_vocabulary_changes_no_gradient(results):
    plain, padded = results[0]["plain"]["gradients"], results[0]["padded"]["gradients"]
    embedding = "embedding.word_embeddings.weight"
    rows = len(plain[embedding])
    assert len(padded[embedding]) == 1000 > rows and not padded[embedding][rows:].any()
    cut = {name: values[:rows] if name == embedding else values for name, values in padded.items()}
    assert difference(cut, plain) < 1e-6
    sequence_parallel = results[0]["padded TP2 SP"]["metrics"]
    for name in ("train/loss", "train/grad_norm"):
        assert sequence_parallel[name] == pytest.approx(results[0]["plain"]["metrics"][name], rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_entropy_before_the_rollout_is_logged_and_hooks_see_it(results, layout):
    for rank in results:
        metrics = rank[f"{layout} entropy"]["metrics"]
        # Nothing was trained between the two passes, and every token's is above 0.
        assert metrics["train/rollout_entropy"] == pytest.approx(metrics["train/entropy_loss"], rel=1e-5)
        assert metrics["train/rollout_entropy"] > 0.1
    assert "train/rollout_entropy" not in results[0]["plain"]["metrics"]
    custom = results[0]["custom entropy"]["metrics"]
    assert custom["train/rollout_entropy"] == pytest.approx(metrics["train/rollout_entropy"], rel=1e-5)
    assert difference(results[0]["DP2 entropy"]["gradients"], results[0]["plain"]["gradients"]) < 1e-6


@pytest.mark.parametrize("name", ["", " distributed", " bf16"])
def test_adam_without_moments_is_adam_that_forgets_before_every_step(results, name):
    weights = results[0]["weights"]
    found, wanted = weights[f"stateless{name}"], weights[f"reset{name}"]
    assert difference(found, wanted) < (5e-3 if "bf16" in name else 5e-7)
    assert difference(found, weights["adam"]) > 1e-3


@pytest.mark.parametrize("name", ["resume", "resume bf16"])
def test_a_run_without_moments_resumes_bit_by_bit(results, name):
    result = results[0][name]
    (straight, checksums, _), (resumed, same, _) = result["straight"], result["resumed"]
    assert checksums == same
    assert {k: v for k, v in straight.items() if "perf/" not in k} == {
        k: v for k, v in resumed.items() if "perf/" not in k
    }


def test_old_log_probs_are_those_of_the_weights_that_were_synced(results):
    kept, plain = (results[0]["old actor"][name] for name in ("kept", "plain"))
    first, second, third = kept["log_probs"]
    assert np.array_equal(first, plain["log_probs"][0])
    assert np.array_equal(first, second), "two rollouts were trained, and nothing was synced"
    assert np.abs(second - plain["log_probs"][1]).max() > 1e-3
    assert np.abs(third - second).max() > 1e-3
    assert abs(kept["metrics"][1]["train/step_0/ppo_kl"]) > 1e-4
    assert abs(kept["metrics"][2]["train/step_0/ppo_kl"]) < 1e-6, "synced just before"


def test_train_data_is_saved_by_sample(results):
    saved = results[1]["old actor"]["kept"]["saved"]
    assert (saved["rollout_id"], saved["rank"]) == (0, 1)
    data = saved["rollout_data"]
    known = "advantages log_probs loss_masks response_lengths rewards rollout_log_probs steps tokens total_lengths"
    assert " ".join(sorted(data)) == known
    assert len({len(values) for values in data.values()}) == 1
    for tokens, length, response, mask, log_probs in zip(
        *(data[name] for name in ("tokens", "total_lengths", "response_lengths", "loss_masks", "log_probs")),
        strict=True,
    ):
        assert len(tokens) == length and len(mask) == len(log_probs) == response


def test_hooks_get_their_arguments_and_have_their_effect(results):
    known = "advantages log_probs loss_masks ref_log_probs response_lengths rewards rollout_log_probs steps tokens"
    for rank in results:
        hooks = rank["hooks"]
        assert hooks["calls"] == [
            "init 1234 2",
            "provider True True None",
            "before_log_prob 'ref_' 1 DistributedDataParallel",
            "forward",
            "before_log_prob '' 1 DistributedDataParallel",
            f"postprocess 4 {known} total_lengths",
            "before_train_step 4 0 OptimizerParamScheduler",
            "before_train_step 4 1 OptimizerParamScheduler",
        ]
        assert hooks["metrics"]["train/step_1/lr"] == 0.125
    # The first rank alone exports.
    assert results[0]["hooks"]["untouched"] == {"model.embed_tokens.weight"}
