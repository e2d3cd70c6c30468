"""Options of the trainer, its checkpoints, and weight updates."""

from colloid.config.option import FLAG, opt

_NO_MTP = (
    "layers of multi-token prediction are no part of the policy: neither trainer nor embedded engine builds them, and "
    "an exported model is without them; leave the option out"
)
MTP = {"built": (), "at_run": True, "refused": _NO_MTP}

CHECKPOINTS = (
    opt("--hf-checkpoint", "str", None, "Hugging Face directory of the model: config, tokenizer, start weights."),
    opt(
        "--load",
        "str",
        None,
        "Checkpoints to go on from, or a Hugging Face directory to start from; nothing there: a fresh start.",
    ),
    opt(
        "--ref-load",
        "str",
        None,
        "Reference model: a Hugging Face directory, or checkpoints of this model.",
        shown="the start model",
    ),
    opt("--ref-ckpt-step", "int", None, "Its step, where it is checkpoints.", low=0),
    opt("--save", "str", None, "Where checkpoints go.", shown="checkpoints/ of the run, with --save-interval"),
    opt(
        "--save-interval",
        "int",
        None,
        "Save each that many rollouts.",
        low=1,
        aliases=("--persistent-save-interval",),
        shown="at the end, with --save",
    ),
    opt("--no-save-optim", FLAG, None, "Leave the optimizer out of checkpoints."),
    opt("--async-save", FLAG, None, "Write checkpoints while training goes on."),
    opt(
        "--save-hf",
        "str",
        None,
        "With each save, also write this Hugging Face directory; {rollout_id} in it is replaced.",
    ),
)

TRAINING = (
    opt("--lr", "float", 1e-6, "Learning rate.", low=0),
    opt("--clip-grad", "float", 1.0, "Largest norm of the gradient; 0: no clipping.", low=0),
    opt("--log-probs-chunk-size", "int", -1, "Tokens a chunk of the log-prob head; -1: chosen for you.", low=-1),
    opt("--recompute-loss-function", FLAG, None, "Recompute head and loss in the backward pass."),
    opt(
        "--megatron-config-path",
        "str",
        None,
        "YAML with the sections `actor` and `critic`: options of the optimizer and its schedule, for that role.",
    ),
    opt(
        "--padded-vocab-size",
        "int",
        None,
        "Rows of the embedding and of the head in the trainer.",
        low=1,
        shown="the vocabulary, up to a multiple of --make-vocab-size-divisible-by and the tensor-parallel ranks",
    ),
    opt(
        "--only-train-params-name-list",
        "str",
        None,
        "Train only parameters whose name one of these regular expressions is found in (Megatron's or Hugging Face's).",
        nargs="*",
    ),
    opt("--freeze-params-name-list", "str", None, "Do not train such parameters.", nargs="*"),
    opt(
        "--freeze-indexer",
        FLAG,
        None,
        "Do not train the indexer of sparse attention.",
        built=(),
        refused="no supported model has sparse attention; --freeze-params-name-list freezes parameters by their names",
    ),
    opt(
        "--allgather-cp",
        FLAG,
        None,
        "Context parallelism by all-gather.",
        built=(),
        at_run=True,
        refused="there is no choice: under --context-parallel-size keys and values are gathered on a CPU, and passed "
        "round by Transformer Engine with CUDA",
    ),
    opt(
        "--mtp-num-layers",
        "int",
        None,
        "Layers of multi-token prediction.",
        low=0,
        field="TransformerConfig.mtp_num_layers",
        **MTP,
    ),
    opt(
        "--mtp-loss-scaling-factor",
        "float",
        0.2,
        "Weight of its loss.",
        low=0,
        field="TransformerConfig.mtp_loss_scaling_factor",
        **MTP,
    ),
    opt("--enable-mtp-training", FLAG, None, "Train it.", built=(), refused=_NO_MTP),
    opt("--reset-optimizer-states", FLAG, None, "Forget the optimizer's moments before each rollout."),
    opt("--use-stateless-adam", FLAG, None, "Adam without moments: each update is the first one of a fresh Adam."),
)

WEIGHTS = (
    opt(
        "--update-weight-transport",
        "str",
        "auto",
        "How weights come to the engines: shared memory (tensor), a process group (nccl, gloo), files (disk); auto: "
        "disk for --update-weight-mode delta, else tensor.",
        choices=("auto", "tensor", "nccl", "gloo", "disk"),
    ),
    opt(
        "--update-weight-mode",
        "str",
        "full",
        "All weights, or what changed since the update before (through files).",
        choices=("full", "delta"),
    ),
    opt("--update-weight-buffer-size", "size", 512 * 1024**2, "Bytes of a bucket of weights.", low=1),
    opt(
        "--update-weight-disk-dir",
        "str",
        None,
        "Directory of weights on disk, where all engines can read it.",
        shown="weights in the run directory",
    ),
    opt("--update-weight-disk-keep-files", FLAG, None, "Keep each version's directory after its update."),
    opt(
        "--update-weight-local-checkpoint-dir",
        "str",
        None,
        "The whole checkpoint that deltas are made against, and that engines load which do not apply deltas.",
        shown="base in --update-weight-disk-dir",
    ),
    opt(
        "--update-weight-delta-encoding",
        "str",
        "xor",
        "What a delta holds of a changed element: its difference to the old one, or its new value.",
        choices=("xor", "overwrite"),
    ),
    opt(
        "--update-weight-delta-checksum",
        "str",
        "xxh3-128",
        "The checksum of a delta's blocks and of what they make.",
        choices=("xxh3-128", "blake3", "adler32"),
    ),
    opt("--check-weight-update-equal", FLAG, None, "Compare all tensors after each update."),
    opt(
        "--keep-old-actor",
        FLAG,
        None,
        "Keep a host copy of the weights that the engines have; the old log-probs are theirs.",
    ),
    opt(
        "--release-train",
        FLAG,
        None,
        "End the trainer after the weight update.",
        built=(),
        refused="its processes would have to start again for every rollout; --offload-train gives back all of their "
        "memory but that of the libraries",
    ),
)
