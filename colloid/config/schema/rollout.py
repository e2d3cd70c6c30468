"""Options of generation, evaluation, asynchronous training, and the hooks into them."""

from colloid.config.option import FLAG, opt

ROLLOUT = (
    opt("--rollout-temperature", "float", 1.0, "Sampling temperature; 0: greedy.", low=0),
    opt("--rollout-top-p", "float", 1.0, "Nucleus sampling.", low=1e-6, high=1),
    opt("--rollout-top-k", "int", -1, "Sample among the k likeliest tokens; -1: all.", low=-1),
    opt("--rollout-max-response-len", "int", 1024, "Tokens a response.", low=1),
    opt("--rollout-max-prompt-len", "int", None, "Longer prompts are left out, and counted.", low=1, shown="no limit"),
    opt("--rollout-max-context-len", "int", None, "Tokens of prompt and response together.", low=2, shown="no limit"),
    opt("--rollout-stop", "str", None, "Texts that end a response.", nargs="+"),
    opt("--rollout-stop-token-ids", "int", None, "Token ids that end a response.", nargs="+"),
    opt("--rollout-skip-special-tokens", FLAG, None, "Leave special tokens out of the response's text."),
    opt("--sglang-server-concurrency", "int", 512, "Requests in flight an engine.", low=1),
    opt("--max-turns", "int", None, "Turns of a conversation; for the generate function.", low=1),
    opt("--agent-endpoint-host", "str", "127.0.0.1", "Address at which agents with a loop of their own are served."),
    opt("--partial-rollout", FLAG, None, "Aborted samples go on in a later rollout."),
    opt(
        "--mask-offpolicy-in-partial-rollout",
        FLAG,
        None,
        "Train of continued samples only what is new.",
    ),
    opt(
        "--rollout-data-transport",
        "str",
        "object-store",
        "How samples come to the trainer.",
        choices=("object-store", "nixl"),
        built=("object-store",),
        refused="samples are arrays in the host's memory, which Ray's object store shares among a host's processes; "
        "NIXL moves what is in the memory of GPUs",
    ),
    opt(
        "--model-name", "str", None, "The model's family: compared with that of --hf-checkpoint, from which it follows."
    ),
)

EVALUATION = (
    opt(
        "--eval-interval",
        "int",
        None,
        "Evaluate each that many rollouts.",
        low=1,
        shown="before the first rollout and after the last",
    ),
    opt(
        "--eval-prompt-data", "str", None, "Evaluation sets: pairs of name and file, or a file.", nargs="+", repeat=True
    ),
    opt("--skip-eval-before-train", FLAG, None, "No evaluation before training."),
    opt("--n-samples-per-eval-prompt", "int", 1, "Samples a prompt.", low=1),
    opt("--eval-input-key", "str", None, "Key of the prompt.", shown="--input-key"),
    opt("--eval-label-key", "str", None, "Key of the label.", shown="--label-key"),
    opt("--eval-tool-key", "str", None, "Key of the tools.", shown="--tool-key"),
    opt("--eval-temperature", "float", None, "Sampling temperature.", low=0, shown="--rollout-temperature"),
    opt("--eval-top-p", "float", None, "Nucleus sampling.", low=1e-6, high=1, shown="--rollout-top-p"),
    opt("--eval-top-k", "int", None, "Sample among the k likeliest tokens.", low=-1, shown="--rollout-top-k"),
    opt("--eval-max-response-len", "int", None, "Tokens a response.", low=1, shown="--rollout-max-response-len"),
    opt(
        "--eval-max-prompt-len",
        "int",
        None,
        "Longer prompts are left out, and counted.",
        low=1,
        shown="--rollout-max-prompt-len",
    ),
    opt(
        "--eval-max-context-len",
        "int",
        None,
        "Tokens of prompt and response together.",
        low=2,
        shown="--rollout-max-context-len",
    ),
    opt("--eval-min-new-tokens", "int", None, "Least tokens of a response.", low=0, shown="0"),
    opt("--eval-config", "str", None, "YAML: evaluation sets with their own settings (docs/evaluation.md)."),
    opt(
        "--eval-function-path",
        "str",
        None,
        "`(args, rollout_id, data_source, evaluation=True) -> RolloutFnEvalOutput`: evaluates.",
        shown="--rollout-function-path",
    ),
)

ASYNC = (
    opt("--async-buffer-size", "int", 1, "Rollouts that may be finished or running ahead of the trainer.", low=1),
    opt("--update-weights-interval", "int", 1, "Rollouts between two weight updates.", low=1),
    opt(
        "--max-staleness",
        "int",
        None,
        "Weight updates that a trained token may be old.",
        low=0,
        shown="train_async.py: what the two above make of it; train.py: no bound",
    ),
    opt(
        "--pause-mode",
        "str",
        "retract",
        "What a weight update does to running requests: they go on with the cache as it is, or computed anew; they "
        "start anew; or it waits for them.",
        choices=("in_place", "retract", "abort", "drain"),
    ),
)

HOOKS = (
    opt(
        "--custom-generate-function-path",
        "str",
        None,
        "`async (args, sample, sampling_params[, evaluation]) -> Sample`, or `async (args, samples, evaluation)`.",
    ),
    opt(
        "--dynamic-sampling-filter-path",
        "str",
        None,
        "`(args, samples, **kw) -> DynamicFilterOutput or bool`: which groups are kept.",
    ),
    opt(
        "--rollout-function-path",
        "str",
        "colloid.rollout.generate.generate_rollout",
        "Function that makes a rollout.",
    ),
    opt("--rollout-sample-hook-path", "str", (), "Function called with each finished sample.", repeat=True),
    opt("--rollout-sample-filter-path", "str", None, "Function that sets `sample.remove_sample`."),
    opt("--rollout-all-samples-process-path", "str", None, "Function called with all samples of a rollout."),
    opt(
        "--rollout-data-postprocess-path",
        "str",
        None,
        "`(args, rollout_id, rollout_data)`: called on the trainer's ranks once log-probs and advantages are known.",
    ),
    opt("--buffer-filter-path", "str", None, "Function that chooses groups from the buffer."),
    opt(
        "--custom-rollout-log-function-path",
        "str",
        None,
        "`(rollout_id, args, samples, extra_metrics, rollout_time) -> bool`: logs a rollout; True: nothing else does.",
    ),
    opt(
        "--custom-eval-rollout-log-function-path",
        "str",
        None,
        "`(rollout_id, args, data, extra_metrics) -> bool`: the same of an evaluation.",
    ),
    opt(
        "--custom-model-provider-path",
        "str",
        None,
        "`(pre_process, post_process, vp_stage=None) -> model`: builds the policy.",
    ),
    opt("--custom-megatron-init-path", "str", None, "`(args)`: called on each rank once Megatron is set up."),
    opt(
        "--custom-megatron-before-log-prob-hook-path",
        "str",
        None,
        "`(args, model, store_prefix)`: called before log-probs are computed.",
    ),
    opt(
        "--custom-megatron-before-train-step-hook-path",
        "str",
        None,
        "`(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)`: called before an optimizer step.",
    ),
    opt(
        "--custom-update-weight-post-write-path",
        "str",
        None,
        "`(args, version_dir, rollout_engines)`: called once weights are on disk, before the engines read them.",
    ),
)
