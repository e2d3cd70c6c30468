"""Options of logging, debugging, and services outside the run."""

from colloid.config.option import FLAG, OFF, SWITCH, opt

LOGGING = (
    opt("--use-tensorboard", FLAG, None, "Accepted: TensorBoard events are always written."),
    opt(
        "--tb-project-name",
        "str",
        None,
        "TensorBoard events go to OUTPUTS_DIR/tensorboard/PROJECT/EXPERIMENT.",
        shown="the run directory",
    ),
    opt("--tb-experiment-name", "str", None, "The last part of that.", shown="the run's name"),
    opt("--use-wandb", FLAG, None, "Log to Weights & Biases too (pip install 'colloid[wandb]')."),
    opt(
        "--wandb-mode",
        "str",
        None,
        "Its mode.",
        choices=("online", "offline", "disabled"),
        shown="WANDB_MODE, or online",
    ),
    opt("--wandb-dir", "str", None, "Where it keeps its files.", shown="the run directory"),
    opt("--wandb-key", "str", None, "Its key; never shown or saved.", shown="WANDB_API_KEY, or that of `wandb login`"),
    opt("--wandb-host", "str", None, "Its server.", shown="WANDB_BASE_URL, or https://api.wandb.ai"),
    opt("--wandb-team", "str", None, "Its team (entity).", shown="that of the key"),
    opt("--wandb-group", "str", None, "Group of the run, and with a random suffix its name.", shown="no group"),
    opt("--wandb-project", "str", None, "Its project.", shown="colloid"),
    opt("--wandb-run-id", "str", None, "Its run to go on with.", shown="a new one; resumed: that of the run"),
    opt(
        "--disable-wandb-random-suffix",
        OFF,
        None,
        "No random suffix of the group.",
        dest="wandb_random_suffix",
    ),
    opt("--wandb-always-use-train-step", FLAG, None, "Curves over the optimizer's steps rather than over rollouts."),
    opt(
        "--utilization-interval",
        "float",
        5.0,
        "Seconds between two looks at processors, memory, disks, network, GPUs and the run's processes; 0: none.",
        low=0,
    ),
    opt("--log-multi-turn", FLAG, None, "Log turns, inserted tokens and branches of conversations."),
    opt("--log-passrate", FLAG, None, "Log pass@k of rollouts; evaluations always have it."),
    opt("--log-reward-category", "str", None, "Log the shares of the values that dict rewards have under this key."),
    opt("--log-correct-samples", FLAG, None, "Log how many samples are right, and how long right and wrong ones are."),
)

DEBUG = (
    opt("--debug-rollout-only", FLAG, None, "Only generate: no trainer."),
    opt("--debug-train-only", FLAG, None, "Only train, on saved rollouts: no engines."),
    opt("--save-debug-rollout-data", "str", None, "Save each rollout's samples to this path, with `{rollout_id}`."),
    opt("--load-debug-rollout-data", "str", None, "Train on rollouts that were saved so."),
    opt("--load-debug-rollout-data-subsample", "float", None, "On this share of their groups.", low=0, high=1),
    opt(
        "--save-debug-train-data",
        "str",
        None,
        "Save what each rank trains on to this path, with `{rollout_id}` and `{rank}`.",
    ),
    opt("--dump-details", "str", None, "Directory: save both there, as rollout_data/… and train_data/…."),
    opt("--save-rollouts", SWITCH, True, "Write the samples of rollouts and evaluations to `rollouts/*.parquet`."),
    opt(
        "--use-pytorch-profiler",
        FLAG,
        None,
        "Write traces of training (torch.profiler) to `profiles/` of the run, for Perfetto or chrome://tracing.",
    ),
    opt("--profile", FLAG, None, "Accepted beside that."),
    opt("--profile-step-start", "int", 10, "First rollout that is profiled.", low=0),
    opt("--profile-step-end", "int", 12, "The one after the last.", low=1),
    opt("--profile-ranks", "int", [0], "Trainer ranks that record a profile or their memory.", nargs="+", low=0),
    opt(
        "--profile-target",
        "str",
        ["train_overall"],
        "What is profiled, a file each: all that is trained of a rollout, or of that the optimizer steps or the passes "
        "before them.",
        nargs="+",
        choices=("train_overall", "train_actor", "train_log_probs"),
    ),
    opt(
        "--record-memory-history",
        FLAG,
        None,
        "Record every allocation of trainer ranks, from before the model is built.",
    ),
    opt(
        "--memory-recorder",
        "str",
        "torch",
        "How: torch (CUDA's allocator) or memray (the host's memory; pip install 'colloid[memray]').",
        choices=("torch", "memray"),
    ),
    opt("--memory-snapshot-dir", "str", None, "Where recordings go.", shown="memory in the run directory"),
    opt(
        "--memory-snapshot-num-steps",
        "int",
        None,
        "Rollouts after which a recording ends.",
        low=1,
        shown="at the end of the run",
    ),
)

SERVICES = (
    opt(
        "--http-proxy",
        "str",
        None,
        "Proxy, http://…, of requests that leave the run: to the servers at --rm-url and --rollout-buffer-url.",
    ),
    opt(
        "--use-distributed-post",
        FLAG,
        None,
        "Send requests from several hosts.",
        built=(),
        refused="one process sends all requests, since it alone knows which are to be aborted, repeated or held back "
        "while weights change; what else would keep it busy runs beside it (graders, --num-data-workers)",
    ),
    opt(
        "--rollout-buffer-url",
        "str",
        None,
        "A server that makes the rollouts: it generates with the run's engines and hands out finished, graded "
        "trajectories.",
    ),
    opt(
        "--fetch-trajectory-retry-times",
        "int",
        -1,
        "Failed requests to it, one after another, after which it is given up; -1: as long as half an hour.",
        low=-1,
    ),
    opt(
        "--min-batch-collection-ratio",
        "float",
        1.0,
        "Share of a rollout's groups that is trained where it is given up.",
        low=0,
        high=1,
    ),
    opt("--rollout-task-type", "str", "math", "Which of its tasks it is to do."),
    opt(
        "--loss-mask-type",
        "str",
        "qwen",
        "Accepted: masks of SFT follow from the chat template, whatever it is.",
        choices=("qwen", "qwen3", "qwen3_5", "distill_qwen"),
    ),
)
