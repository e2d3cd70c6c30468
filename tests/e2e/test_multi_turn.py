"""Command 4 of what users bring: a function that holds conversations of several turns with tools, with a tiny model."""

import json
import subprocess
import sys

import pytest

from tests.e2e.running import ROOT, metrics_of, run_training, write_sums

CUSTOM_GENERATE = '''
"""As users write it: a loop over samples and turns that appends messages to the prompt."""

from colloid.rollout import generate_single


def extract_tool_call(response):
    """A random model calls no tools: here a text of some lengths is a call."""
    return {"text": response[:8]} if len(response) % 5 else None


def execute_tool(call):
    return f"{len(call['text'])} letters: {call['text']}"


def compute_reward(conversation, sample):
    return float(len(conversation) % 4 == 0)


async def custom_generate(args, samples, evaluation=False):
    for sample in samples:
        conversation = sample.prompt
        for turn in range(args.max_turns):
            response = await generate_single(conversation)
            conversation.append({"role": "assistant", "content": response})
            tool_call = extract_tool_call(response)
            if tool_call is None:
                break
            conversation.append({"role": "tool", "content": execute_tool(tool_call)})
        sample.response = conversation[-1]["content"]
        sample.reward = compute_reward(conversation, sample)
    return samples
'''


def test_the_command_stands_as_it_is_with_dry_run(tmp_path):
    (tmp_path / "custom_generate.py").write_text(CUSTOM_GENERATE)
    write_sums(tmp_path / "agent.jsonl", 32, messages=True)
    command = f"""
source {ROOT}/scripts/models/qwen3-4B.sh
{sys.executable} {ROOT}/train.py --custom-generate-function-path custom_generate.py --max-turns 5 \\
    --prompt-data agent.jsonl ${{MODEL_ARGS[@]}} --dry-run
"""
    ended = subprocess.run(["bash", "-ec", command], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.timeout(900)
def test_the_command_trains_what_was_sampled_in_every_turn(tmp_path, tiny_model_dir):
    (tmp_path / "custom_generate.py").write_text(CUSTOM_GENERATE)
    write_sums(tmp_path / "agent.jsonl", 16, messages=True)
    ended = run_training(
        tmp_path,
        *("--custom-generate-function-path", "custom_generate.py", "--max-turns", 5, "--prompt-data", "agent.jsonl"),
        *("--hf-checkpoint", tiny_model_dir("qwen3"), "--rollout-batch-size", 4, "--n-samples-per-prompt", 2),
        *(
            "--rollout-max-response-len",
            12,
            "--num-rollout",
            2,
            "--lr",
            1e-3,
            "--log-multi-turn",
            "--run-name",
            "turns",
        ),
    )
    assert ended.code == 0, ended.output
    lines = metrics_of(tmp_path / "outputs/turns")
    assert len(lines) == 2
    for line in lines:
        assert line["multi_turn/turns/max"] == 5 and line["multi_turn/turns/mean"] > 2
        assert line["multi_turn/inserted_tokens/mean"] > 10 and line["multi_turn/branches"] == 0
        assert line["train/train_rollout_logprob_abs_diff"] < 1e-4, "so the mean importance ratio is 1 within 1e-3"
        assert line["rollout/num_failed_samples"] == 0 and "rollout/num_text_only_samples" not in line
    assert lines[0]["train/grad_norm"] > 0
    assert "never read" not in ended.output
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(tmp_path / "outputs/turns/rollouts/000000.parquet").to_pylist()
    conversations = [json.loads(row["metadata"])["messages"] for row in rows]
    assert max(map(len, conversations)) == 11
    assert [json.loads(row["prompt"]) for row in rows] == [messages[:1] for messages in conversations]
