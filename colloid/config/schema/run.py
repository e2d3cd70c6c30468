"""Options of the run as a whole, of its processes and devices."""

from colloid.config.option import FLAG, SWITCH, opt

RUN = (
    opt(
        "--config",
        "str",
        None,
        "A YAML or TOML file with the same keys as the options; options on the command line win.",
    ),
    opt(
        "--custom-config-path",
        "str",
        None,
        "A YAML file whose keys become attributes of `args`; a key that names an option is checked like it.",
    ),
    opt("--outputs-dir", "str", "outputs", "Where run directories are made."),
    opt("--run-name", "str", None, "Name of the run directory.", shown="date and time"),
    opt(
        "--device",
        "str",
        "auto",
        "Where training runs; auto: CUDA where there is a device.",
        choices=("auto", "cuda", "cpu"),
    ),
    opt("--deterministic", FLAG, None, "Same arguments and seed: the same run, bit by bit."),
    opt("--dry-run", FLAG, None, "Print the resolved options and the plan of processes, and end."),
    opt("--seed", "int", 1234, "Seed of the trainer.", low=0),
    opt("--train-backend", "str", "megatron", "The trainer.", choices=("megatron",)),
    opt("--slime-imports", FLAG, None, "Hook files may import slime's names."),
)

CLUSTER = (
    opt("--actor-num-nodes", "int", 1, "Nodes of the trainer.", low=1),
    opt(
        "--actor-num-gpus-per-node",
        "int",
        None,
        "Trainer ranks a node; on CPU each is a process.",
        low=1,
        shown="1 on CPU, all GPUs on CUDA",
    ),
    opt(
        "--rollout-num-gpus",
        "int",
        None,
        "Device slots of the rollout engines.",
        low=1,
        shown="1 on CPU; with --colocate the trainer's",
    ),
    opt("--rollout-num-gpus-per-engine", "int", 1, "Device slots of one engine.", low=1),
    opt(
        "--num-gpus-per-node",
        "int",
        None,
        "GPUs of a node of the cluster: no more are used of any, and --dry-run plans for such nodes.",
        low=1,
        shown="all",
    ),
    opt("--colocate", FLAG, None, "Trainer and engines share their device slots."),
    opt("--offload", FLAG, None, "Both of the following."),
    opt(
        "--offload-train",
        SWITCH,
        None,
        "The trainer gives its memory back while the engines generate.",
        shown="on with --colocate",
    ),
    opt(
        "--offload-rollout",
        SWITCH,
        None,
        "The engines give their memory back while the trainer trains.",
        shown="on with --colocate",
    ),
    opt(
        "--rollout-engine",
        "str",
        "auto",
        "The engine that generates; auto: SGLang where there are CUDA devices and it is installed, else the embedded "
        "one.",
        choices=("auto", "embedded", "sglang"),
    ),
    opt(
        "--rollout-engine-python",
        "str",
        None,
        "The Python interpreter that has SGLang.",
        shown="this one, else .venv-sglang/bin/python",
    ),
    opt(
        "--rollout-router",
        "str",
        "sglang-router",
        "The router's package; both take --router-*.",
        choices=("sglang-router", "smg"),
    ),
    opt(
        "--sglang-router-port",
        "int",
        None,
        "Port of the run's router, or of the one at --sglang-router-ip.",
        low=1,
        high=65535,
        shown="a free one",
    ),
    opt("--sglang-router-ip", "str", None, "Address of a router that runs already: the run's engines register there."),
    opt("--sglang-config", "str", None, "YAML: several models, and the groups of engines of each (docs/engines.md)."),
    opt(
        "--rollout-external-engine-addrs",
        "str",
        None,
        "Engines that run already: host:port of each, or @FILE with one a line, which is read again when it changes.",
        nargs="+",
    ),
    opt(
        "--distributed-backend",
        "str",
        None,
        "Backend of torch.distributed.",
        choices=("nccl", "gloo"),
        shown="gloo on CPU, nccl on CUDA",
    ),
    opt("--distributed-timeout-minutes", "int", 10, "Deadline of a collective operation.", low=1),
    opt("--train-env-vars", "json", {}, "Environment variables of the trainer ranks, as a JSON object."),
)

FAULTS = (
    opt("--use-fault-tolerance", FLAG, None, "Replace engines that fail."),
    opt("--rollout-health-check-interval", "float", 30.0, "Seconds between two health checks.", low=0),
    opt(
        "--rollout-health-check-timeout",
        "float",
        30.0,
        "Seconds until a health check must be answered.",
        low=0,
    ),
    opt("--rollout-health-check-first-wait", "float", 0.0, "Seconds before the first health check.", low=0),
    opt("--max-restarts", "int", 0, "How often a run that failed may go on from its last checkpoint.", low=0),
)
