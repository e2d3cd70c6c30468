"""Options of the algorithm: advantages, losses, corrections."""

from colloid.config.option import FLAG, OFF, opt

LEVELS = ("token", "sequence", "geometric")

ALGORITHM = (
    opt(
        "--advantage-estimator",
        "str",
        "grpo",
        "How advantages are made of rewards.",
        choices=("grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"),
    ),
    opt(
        "--policy-loss",
        "str",
        None,
        "Policy loss.",
        choices=("ppo", "gspo", "cispo", "gmpo", "sapo"),
        shown="what the estimator implies",
    ),
    opt(
        "--loss-type",
        "str",
        "policy_loss",
        "What is trained.",
        choices=("policy_loss", "sft_loss", "custom_loss"),
    ),
    opt(
        "--eps-clip",
        "float",
        0.2,
        "Clip range of the ratio, downwards (and upwards, unless --eps-clip-high is given).",
        low=0,
    ),
    opt("--eps-clip-high", "float", None, "Clip range of the ratio, upwards.", low=0, shown="--eps-clip"),
    opt(
        "--eps-clip-c", "float", None, "Lower bound of the loss of negative advantages (dual clip).", low=1, shown="off"
    ),
    opt("--use-kl-loss", FLAG, None, "Add the KL to the reference model to the loss."),
    opt("--kl-loss-coef", "float", 0.0, "Its coefficient.", low=0),
    opt("--kl-loss-type", "str", "low_var_kl", "Its estimator.", choices=("k1", "k2", "k3", "low_var_kl")),
    opt("--use-unbiased-kl", FLAG, None, "Weigh it by the ratio."),
    opt(
        "--kl-coef",
        "float",
        0.0,
        "Coefficient of the KL penalty in the rewards of tokens (ppo, reinforce_plus_plus and its baseline form).",
        low=0,
    ),
    opt("--entropy-coef", "float", 0.0, "Coefficient of the entropy bonus."),
    opt("--calculate-per-token-loss", FLAG, None, "Every token weighs the same, rather than every rollout."),
    opt(
        "--disable-grpo-std-normalization",
        OFF,
        None,
        "Do not divide by the group's standard deviation.",
        dest="grpo_std_normalization",
    ),
    opt("--disable-rewards-normalization", OFF, None, "Leave rewards as they are.", dest="rewards_normalization"),
    opt("--normalize-advantages", FLAG, None, "Whiten advantages over the unmasked tokens of a step's global batch."),
    opt("--gamma", "float", 1.0, "Discount of a token's return (ppo, reinforce_plus_plus).", low=0, high=1),
    opt("--lambd", "float", 1.0, "λ of GAE (ppo).", low=0, high=1),
    opt("--value-clip", "float", 0.2, "How far a rollout moves the critic's values before its loss is clipped.", low=0),
    opt("--num-critic-only-steps", "int", 0, "Rollouts at the start in which only the critic learns.", low=0),
    opt("--sapo-tau-pos", "float", 1.0, "τ of SAPO for positive advantages; above 0.", low=0),
    opt("--sapo-tau-neg", "float", 1.05, "τ of SAPO for negative advantages; above 0.", low=0),
    opt(
        "--disable-compute-advantages-and-returns",
        OFF,
        None,
        "No log-probs and advantages before training, for losses that do without.",
        dest="compute_advantages_and_returns",
    ),
    opt(
        "--custom-advantage-function-path",
        "str",
        None,
        "`(args, rollout_data)`: fills advantages and returns.",
    ),
    opt(
        "--custom-loss-function-path",
        "str",
        None,
        "The loss of --loss-type custom_loss: `(args, batch, logits, sum_of_sample_mean) -> (loss, metrics)`.",
    ),
    opt(
        "--custom-pg-loss-reducer-function-path",
        "str",
        None,
        "How the policy loss is summed: `(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> "
        "callable(tensor) -> scalar`.",
    ),
    opt(
        "--ref-update-interval",
        "int",
        None,
        "Rollouts after which the reference becomes the policy, each time.",
        low=1,
        shown="never",
    ),
    opt(
        "--use-rollout-entropy",
        FLAG,
        None,
        "Compute the entropy of each token's distribution before the rollout's first step: for hooks (`entropy`), and "
        "logged as train/rollout_entropy.",
    ),
)

CORRECTION = (
    opt(
        "--use-rollout-logprobs",
        FLAG,
        None,
        "The engine's log-probs are the behaviour policy's; the trainer does not compute them.",
    ),
    opt(
        "--use-tis",
        FLAG,
        None,
        "Multiply the policy loss by the bounded ratio of trainer over engine (truncated importance sampling).",
    ),
    opt("--tis-clip", "float", 2.0, "Upper bound of that ratio.", low=0),
    opt("--tis-clip-low", "float", 0.0, "Lower bound of that ratio.", low=0),
    opt(
        "--tis-level",
        "str",
        "token",
        "Ratio of a token, of its whole sequence (the product), or the geometric mean of the sequence's.",
        choices=LEVELS,
    ),
    opt(
        "--tis-mode",
        "str",
        "clip",
        "How it is bounded: clip to both bounds, truncate at the upper one, or mask (0 outside of them).",
        choices=("clip", "truncate", "mask"),
    ),
    opt(
        "--custom-tis-function-path",
        "str",
        None,
        "With --use-tis, in place of the built-in correction: `(args, *, pg_loss, train_log_probs, rollout_log_probs, "
        "loss_masks, total_lengths, response_lengths, **kw) -> (pg_loss, loss_masks, metrics)`.",
    ),
    opt("--rs-level", "str", "token", "Whose ratio the bounds of rejection are for; as --tis-level.", choices=LEVELS),
    opt("--rs-lower-bound", "float", None, "Reject tokens (or samples) whose ratio is lower.", low=0, shown="off"),
    opt("--rs-upper-bound", "float", None, "Reject tokens (or samples) whose ratio is higher.", low=0, shown="off"),
    opt(
        "--rs-veto-threshold",
        "float",
        None,
        "Reject samples in which any token's own ratio is lower.",
        low=0,
        shown="off",
    ),
    opt(
        "--get-mismatch-metrics",
        FLAG,
        None,
        "Log how trainer and engine differ (KL, chi squared, perplexities), under train/mismatch_…",
    ),
    opt("--use-opsm", FLAG, None, "Mask sequences with a negative advantage that are too far off policy."),
    opt("--opsm-delta", "float", 1e-4, "From which mean of old - new log-probs on they are.", low=0),
    opt(
        "--use-routing-replay",
        FLAG,
        None,
        "Train a mixture of experts with the experts that were chosen when the log-probs before the first step were "
        "computed.",
    ),
    opt(
        "--use-rollout-routing-replay",
        FLAG,
        None,
        "Compute log-probs and train with the experts that the engine chose for every token.",
    ),
)

DISTILLATION = (
    opt("--use-opd", FLAG, None, "Distil a teacher on the policy's own samples, on top of any estimator."),
    opt(
        "--opd-type",
        "str",
        None,
        "Where the teacher runs: megatron, in the trainer, on host copies of its weights (a model of the same shape); "
        "sglang, behind an engine: the server at --rm-url, or one that the run starts on --opd-teacher-load.",
        choices=("sglang", "megatron"),
    ),
    opt("--opd-kl-coef", "float", 1.0, "What of (old - teacher's log-prob) is subtracted from advantages.", low=0),
    opt(
        "--opd-teacher-load",
        "str",
        None,
        "The teacher: a Hugging Face directory; with --opd-type megatron also a checkpoint.",
    ),
    opt("--opd-teacher-ckpt-step", "int", None, "The step of the teacher's checkpoint.", low=0, shown="the last"),
)
