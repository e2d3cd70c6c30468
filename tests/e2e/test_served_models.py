"""A policy behind two groups of engines and a frozen judge beside it: the reward asks the judge, in its worker process,
also where the judge was lost and replaced; and only the policy's engines ever get new weights.
"""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.running import run_training, tiny_arguments, write_sums

SERVERS = """
sglang:
  - name: actor
    server_groups:
      - {{worker_type: regular, num_gpus: 1, overrides: {{max_running_requests: 3}}}}
      - {{worker_type: regular, num_gpus: 1, overrides: {{max_running_requests: 5, context_length: 200}}}}
  - name: judge
    model_path: {judge}
    update_weights: false
    server_groups: [{{worker_type: regular, num_gpus: 1}}]
"""
HOOKS = '''
import json
import os

from colloid.engines.control import EngineControl
from colloid.rollout import get_model_url, post


async def reward_func(args, sample):
    """The judge's mean log-prob of the response."""
    payload = {
        "input_ids": sample.tokens,
        "sampling_params": {"temperature": 0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": len(sample.tokens) - sample.response_length - 1,
    }
    entries = (await post(get_model_url(args, "judge"), payload))["meta_info"]["input_token_logprobs"][1:]
    assert [entry[1] for entry in entries] == sample.tokens[-sample.response_length :]
    return sum(entry[0] for entry in entries) / len(entries)


async def sample_hook(args, sample):
    """What the judge says next; asked for in the rollout itself."""
    payload = {"input_ids": sample.tokens, "sampling_params": {"temperature": 0, "max_new_tokens": 3}}
    answer = await post(get_model_url(args, "judge", "/generate"), payload)
    sample.metadata |= {"tokens": sample.tokens, "next": answer["output_ids"]}


def process_all_samples(args, all_samples, data_source):
    """Notes what every engine of every model holds."""
    found = {}
    for name in args.sglang_model_routers:
        router = EngineControl(get_model_url(args, name, ""), args.rollout_api_key)
        engines = sorted(worker["url"] for worker in router.get("/workers")["workers"])
        found[name] = []
        for url in engines:
            engine = EngineControl(url, args.rollout_api_key)
            info = engine.get("/server_info")
            held = engine.post("/weights_checker", {"action": "checksum"})
            found[name].append({**held, **{key: info[key] for key in ("max_running_requests", "context_length")}})
    with open("engines.jsonl", "a") as file:
        if not file.tell():
            with open(f"{args.run_dir}/engines/judge/engine_0.ready.json") as ready:
                os.kill(json.load(ready)["pid"], 9)
        file.write(json.dumps(found) + "\\n")
'''


def mean_log_prob(model, tokens, length):
    with torch.inference_mode():
        log_probs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return float(log_probs[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[-length:].mean())


@pytest.mark.timeout(400)
def test_two_groups_of_the_policy_follow_the_trainer_and_a_frozen_judge_rewards_also_after_it_was_killed(
    tmp_path, tiny_model_dir
):
    import pyarrow.parquet

    judge = tiny_model_dir("llama")
    (tmp_path / "servers.yaml").write_text(SERVERS.format(judge=judge))
    (tmp_path / "hooks.py").write_text(HOOKS)
    ended = run_training(
        tmp_path,
        *tiny_arguments(tiny_model_dir(), write_sums(tmp_path / "data.jsonl", 8)),
        *("--sglang-config", "servers.yaml", "--custom-rm-path", "hooks.py:reward_func"),
        *("--rollout-sample-hook-path", "hooks.py", "--rollout-all-samples-process-path", "hooks.py"),
        *("--num-rollout", 2, "--check-weight-update-equal", "--use-fault-tolerance", "--run-name", "run"),
        timeout=350,
    )
    assert ended.code == 0, ended.output[-5000:]
    assert "never read" not in ended.output

    first, second = (json.loads(line) for line in (tmp_path / "engines.jsonl").read_text().splitlines())
    for found in (first, second):
        assert sorted(engine["max_running_requests"] for engine in found["actor"]) == [3, 5]
        assert {engine["context_length"] for engine in found["actor"]} == {200, 1024}
        one, other = found["actor"]
        assert one["checksums"] == other["checksums"] and one["weight_version"] == other["weight_version"]
        assert len(found["judge"]) == 1
    assert int(second["actor"][0]["weight_version"]) == int(first["actor"][0]["weight_version"]) + 1
    assert second["actor"][0]["checksums"] != first["actor"][0]["checksums"]
    assert second["judge"] == first["judge"]

    lines = [json.loads(line) for line in (tmp_path / "outputs/run/metrics.jsonl").read_text().splitlines()]
    assert [line["rollout/num_failed_samples"] for line in lines] == [0, 0]
    assert [line["engine/judge/replaced"] for line in lines] == [0, 1]
    assert [line["engine/replaced"] for line in lines] == [0, 0]
    rows = pyarrow.parquet.read_table(tmp_path / "outputs/run/rollouts/000001.parquet").to_pylist()
    model = AutoModelForCausalLM.from_pretrained(judge, dtype=torch.float32)
    assert len(rows) == 16
    for row in rows:
        metadata = json.loads(row["metadata"])
        assert row["reward"] == pytest.approx(
            mean_log_prob(model, metadata["tokens"], row["response_length"]), abs=1e-3
        )
    with torch.inference_mode():
        greedy = model.generate(torch.tensor([metadata["tokens"]]), max_new_tokens=3, do_sample=False)
    assert metadata["next"] == greedy[0, -len(metadata["next"]) :].tolist()
