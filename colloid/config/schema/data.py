"""Options of prompts, batch sizes and rewards."""

from colloid.config.option import FLAG, OFF, opt

DATA = (
    opt(
        "--prompt-data",
        "str",
        None,
        "Prompts: JSONL or Parquet files, or directories of Hugging Face datasets; `path@[a:b]` for a slice of rows.",
        nargs="+",
    ),
    opt("--prompt-data-weights", "float", None, "Draw from the files by these weights, one each.", nargs="+", low=0),
    opt("--input-key", "str", "prompt", "Key of the prompt in a row: a text, or a list of messages."),
    opt("--label-key", "str", "label", "Key of the label in a row."),
    opt("--metadata-key", "str", "metadata", "Key of a row's metadata."),
    opt("--tool-key", "str", "tools", "Key of a row's tools."),
    opt(
        "--multimodal-keys",
        "json",
        None,
        "Keys of images and the like, as a JSON object.",
        built=(),
        refused="the supported models (docs/models.md) read text alone; take rows whose prompts are text",
    ),
    opt("--apply-chat-template", FLAG, None, "Render prompts with the model's chat template."),
    opt("--apply-chat-template-kwargs", "json", {}, "Arguments of the chat template, as a JSON object."),
    opt("--rollout-shuffle", FLAG, None, "Shuffle the prompts, anew each epoch."),
    opt("--rollout-seed", "int", 42, "Seed of shuffling and of sampling."),
    opt("--num-rollout", "int", None, "Rollouts of the run.", low=0, shown="as many as --num-epoch takes"),
    opt("--num-epoch", "int", None, "Passes over the prompts, where --num-rollout is not given.", low=1, shown="1"),
    opt("--start-rollout-id", "int", None, "First rollout.", low=0, shown="0, or where the checkpoint ends"),
    opt(
        "--disable-rollout-global-dataset",
        OFF,
        None,
        "No data set: the rollout or generate function brings its own prompts.",
        dest="rollout_global_dataset",
    ),
    opt("--data-source-path", "str", "colloid.RolloutDataSourceWithBuffer", "Class that hands out prompts."),
    opt("--num-data-workers", "int", 0, "Processes that parse and tokenise rows.", low=0),
    opt("--streaming-data", FLAG, None, "Read the data as it is needed, in constant memory."),
    opt("--streaming-window", "int", 8192, "Rows that --rollout-shuffle shuffles together while streaming.", low=1),
    opt("--skip-bad-rows", FLAG, None, "Count bad rows rather than fail."),
)

BATCH = (
    opt("--rollout-batch-size", "int", None, "Prompts a rollout.", low=1, shown="32"),
    opt("--n-samples-per-prompt", "int", None, "Samples a prompt.", low=1, shown="8"),
    opt("--global-batch-size", "int", None, "Samples an optimizer step.", low=1, shown="derived"),
    opt("--num-steps-per-rollout", "int", None, "Optimizer steps a rollout.", low=1, shown="derived"),
    opt("--micro-batch-size", "int", 1, "Samples a forward pass.", low=1),
    opt(
        "--over-sampling-batch-size",
        "int",
        None,
        "Prompts that are asked for at a time.",
        low=1,
        shown="the rollout batch size",
    ),
    opt("--use-dynamic-batch-size", FLAG, None, "Fill micro-batches by tokens."),
    opt("--max-tokens-per-gpu", "int", None, "Tokens a micro-batch, for each of the ranks that share it.", low=1),
    opt(
        "--log-probs-max-tokens-per-gpu",
        "int",
        None,
        "The same where only log-probs are computed.",
        low=1,
        shown="--max-tokens-per-gpu",
    ),
    opt("--balance-data", FLAG, None, "Accepted: tokens are always spread evenly over the ranks."),
    opt("--balance-by-flops", FLAG, None, "Spread operations evenly rather than tokens."),
    opt(
        "--data-pad-size-multiplier",
        "int",
        None,
        "A rank's tokens of a micro-batch are padded to a multiple of this, so that fewer sizes occur.",
        low=1,
        shown="no more padding than the ranks need",
    ),
)

RM_TYPES = ("math", "random", "dapo", "deepscaler", "gpqa", "f1", "ifbench", "remote_rm")

REWARDS = (
    opt(
        "--rm-type",
        "str",
        None,
        "Built-in reward.",
        choices=(*RM_TYPES, *(f"boxed_{name}" for name in RM_TYPES)),
        shown="math where rows have labels",
    ),
    opt(
        "--custom-rm-path",
        "str",
        None,
        "Reward: `async (args, sample, **kw) -> float or dict`; a class with `compute_reward(prompts, responses)`; or "
        "functions `(prompts, responses, **columns) -> list[float]`, of several the sum.",
        nargs="+",
    ),
    opt("--custom-rm-model-path", "str", None, "What a reward model's class is made with.", shown="--hf-checkpoint"),
    opt("--custom-rm-weights", "float", None, "Weights of the rewards of --custom-rm-path.", nargs="+", shown="1 each"),
    opt("--reward-key", "str", None, "Key of the value, where rewards are dicts.", shown="score, where there is one"),
    opt("--eval-reward-key", "str", None, "The same in evaluation.", shown="--reward-key"),
    opt("--group-rm", FLAG, None, "--custom-rm-path takes whole groups: `async (args, samples, **kw) -> list`."),
    opt(
        "--rm-url",
        "str",
        None,
        "Address of the reward server of `remote_rm`, or with --opd-type sglang of the teacher's.",
    ),
    opt("--custom-reward-post-process-path", "str", None, "`(args, samples) -> (raw_rewards, rewards)`."),
    opt("--custom-convert-samples-to-train-data-path", "str", None, "`(args, samples) -> dict[str, list]`."),
)
