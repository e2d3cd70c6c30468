"""A mixture of experts trained with replayed experts: the engine's, or those of the log-probs before the first step."""

import json

import pytest

from tests.e2e.running import metrics_of, run_training, write_sums
from tests.parallel.family_models import make_family
from tests.tiny import make_tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Routed among groups, with a dense first layer."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = make_tiny_tokenizer(path, 300)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return make_family(path, "deepseek_v3", vocab_size=300, num_hidden_layers=2, **ends)


@pytest.mark.timeout(400)
def test_both_ways_of_replay_train_a_mixture_of_experts(tmp_path, model):
    data, seen = write_sums(tmp_path / "data.jsonl", 8), {}
    for name, rollouts in (("use-rollout-routing-replay", 2), ("use-routing-replay", 1)):
        saved = tmp_path / name
        ended = run_training(
            tmp_path,
            *("--hf-checkpoint", model, "--prompt-data", data, "--rm-type", "random", "--lr", 1e-2),
            *("--rollout-batch-size", 4, "--n-samples-per-prompt", 4, "--rollout-max-response-len", 8),
            *("--num-steps-per-rollout", 2, "--num-rollout", rollouts, "--run-name", name, f"--{name}"),
            *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1),
            *("--save-debug-rollout-data", f"{saved}_{{rollout_id}}.jsonl"),
            timeout=180,
        )
        assert ended.code == 0, ended.output
        seen[name] = metrics_of(tmp_path / "outputs" / name)
        for rollout, line in enumerate(seen[name]):
            assert line["train/step_0/train_rollout_logprob_abs_diff"] < 1e-5
            for row in (tmp_path / f"{name}_{rollout}.jsonl").read_text().splitlines():
                sample = json.loads(row)
                experts = sample["rollout_routed_experts"]
                if name == "use-routing-replay":
                    assert experts is None
                else:
                    assert len(experts) == len(sample["tokens"]) - 1 and len(experts[0]) == 2
                    assert experts[0][0] == [0, 0, 0, 0] and len(set(experts[0][1])) == 4
    # Before the first step engine and trainer choose the same experts.
    engine, trainer = (lines[0]["train/step_1/grad_norm"] for lines in seen.values())
    assert engine == pytest.approx(trainer, rel=1e-3)
