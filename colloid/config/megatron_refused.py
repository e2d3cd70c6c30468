"""Why Megatron options that colloid knows are refused by a run, and what to take instead: one table."""

from __future__ import annotations

import re

_FAMILIES = "it builds layers of models that are not supported; docs/models.md lists those that are"
_INFERENCE = "it is about generating with Megatron, and the engines generate"
_CHECKPOINTS = "checkpoints are written and read by --save, --load and --save-interval alone, in Megatron's torch_dist"
_SCHEDULE = (
    "the length of a run is counted in rollouts: --num-rollout, --global-batch-size, --lr-warmup-iters, "
    "--lr-decay-iters, and --start-rollout-id"
)
_CAPACITY = "an expert with a capacity would drop tokens in training that were computed when they were generated"
_DATA = "Megatron's data loader does not run here: see --num-data-workers and --streaming-data"
_GRAPHS = "a CUDA graph needs shapes that stay the same, and packs differ from step to step"
_LEGACY = "nothing in Megatron-Core 0.16.1 reads it; leave it out"

REASONS: tuple[tuple[str, str], ...] = (
    (
        r"fp8|fp4|mxfp8|first_last_layers_bf16|num_layers_at_(start|end)_in_bf16|te_precision|tp_only_amax|"
        r"disable_parameter_transpose|kitchen|padding_for_quantization",
        "training in FP8 or FP4 is not built: it is bfloat16 (--bf16) or float32, which the engines' weights are too",
    ),
    (r"cuda_graph|use_te_rng_tracker|te_rng_tracker", _GRAPHS),
    (r"inference|flash_decode|mlp_chunks_for_prefill|cache_mla|symmetric_ar|batch_invariant", _INFERENCE),
    (
        r"mamba|hybrid_model|linear_|dsa_|experimental_attention|gated_attention|attention_output_gate|layernorm_1p|"
        r"zero_centered_gamma|gelu|squared_relu|geglu|encoder|relative_attention|bert|heterogeneous|qk_l2_norm|"
        r"glu_linear|activation_func_(clamp|fp8)|softmax_(scale|type)|no_rope_freq|mrope|window_|latent_size|"
        r"shared_expert_gate|post_layernorm|^normalization$|^position_embedding_type$|enable_experimental|"
        r"rotary_seq_len|mla_down",
        _FAMILIES,
    ),
    (r"^yarn_|correction_range", "YaRN's numbers follow from rope_scaling in the model's config.json"),
    (
        r"^(fp16|loss_scale|initial_loss_scale|min_loss_scale|loss_scale_window|hysteresis|fp16_lm_cross_entropy)$",
        "float16 needs a scaled loss, whose skipped steps RL cannot tell from others; take --bf16",
    ),
    (r"autocast|_dtype$|^pipeline_dtype$|preserve_fp32", "the precision of everything follows from --bf16"),
    (
        r"capacity|token_drop|padding_for",
        _CAPACITY,
    ),
    (
        r"^moe_(router_load_balancing_type|aux_loss_coeff|router_bias_update_rate|z_loss_coeff|input_jitter_eps|"
        r"router_force_load_balancing)$",
        "it would change the router by something other than the reward, or make it choose other experts than the "
        "engine's does",
    ),
    (r"^moe_enable_routing_replay$", "that is --use-routing-replay, or --use-rollout-routing-replay"),
    (r"^moe_router_topk_limited_devices$", "groups are --moe-router-num-groups and --moe-router-group-topk"),
    (r"^moe_layer_recompute$", "that is --recompute-granularity selective with --recompute-modules moe"),
    (r"upcycling", "a dense model is not made into a mixture of experts"),
    (r"^moe_apply_probs_on_input$", "the supported models weigh what experts put out, not what they take"),
    (r"^moe_extended_tp$", "that is --expert-tensor-parallel-size"),
    (r"^moe_use_legacy_grouped_gemm$", "--moe-grouped-gemm computes experts together, with CUDA"),
    (r"^moe_per_layer_logging$", "there is no loss of the router's balance that could be logged"),
    (
        r"overlap_moe|ep_overlap|delay_wgrad",
        "experts' communication is not overlapped with other computation: that has not been run",
    ),
    (
        r"moe_|deepep|hybridep",
        "experts are dispatched by all-to-all or all-gather (--moe-token-dispatcher-type); this way has not been run",
    ),
    (
        r"^tp_comm|barrier_with",
        "overlap with tensor parallelism's collectives needs Transformer Engine's user buffers, which have not been "
        "run; --sequence-parallel works",
    ),
    (
        r"fsdp|sharding|reshard|hsdp|meta_device|outer_dp|num_distributed_optimizer_instances|"
        r"suggested_communication|symmetric_registration",
        "parameters are not sharded over data-parallel ranks; --use-distributed-optimizer shards the optimizer's "
        "states, and the parallel sizes the rest",
    ),
    (r"muon|lion|no_weight_decay_cond", "the optimizers are --optimizer adam and sgd"),
    (r"^decoupled_weight_decay$", "Adam's weight decay is always decoupled (AdamW); --weight-decay 0 switches it off"),
    (
        r"^decoupled_(lr|min_lr)$|^override_opt|^use_checkpoint_opt|^freeze_all",
        "all trained parameters share --lr; "
        "--freeze-params-name-list freezes, and --megatron-config-path sets the critic's apart",
    ),
    (r"qk_clip|log_max_attention", "it goes with the Muon optimizer, and that is not built"),
    (
        r"batch_size|rampup|_samples$|^train_iters$|^warmup$|^iterations_to_skip$|^exit_(interval|duration|signal)",
        _SCHEDULE,
    ),
    (r"rejected_tracker", "rerunning a step to find faults of the hardware is not built; --deterministic shows them"),
    (r"spiky|large_grads", "train/loss and train/grad_norm tell; one that is infinite or not a number ends the run"),
    (
        r"^log_|^tensorboard_|_logging$|config_logger|dump_param|check_weight_hash",
        "metrics are always written, the same ones: docs/observability.md",
    ),
    (
        r"ckpt|save_retain|persistent|pretrained_checkpoint|checkpoint_args|missing_checkpoint|load_model_opt|"
        r"load_main_params|dist_checkpoint|^init(ialization)?$|perform_initialization",
        _CHECKPOINTS,
    ),
    (
        r"init_method|random_init|cpu_initialization",
        "the weights are those of --hf-checkpoint or --load: none are drawn",
    ),
    (r"^num_workers$|dataloader", _DATA),
    (
        r"nccl|sharp|ring_exchange|high_priority_stream|communicator|comm_backend|gloo_process|batch_p2p|"
        r"overlap_p2p_communication_warmup|create_all_gather|fake_process|tp_pp_dp_mapping|local_rank|lazy_mpu",
        "process groups are made one way: NCCL with CUDA, gloo without, in Megatron's usual order of ranks",
    ),
    (
        r"cp_comm_type|hierarchical_context|hybrid_context|max_seqlen_per_dp_cp",
        "context parallelism is made one way: each sequence is dealt out over --context-parallel-size ranks; on a CPU "
        "keys and values are gathered, with CUDA Transformer Engine passes them round",
    ),
    (
        r"pipeline_model_parallel_layout|account_for_|partial_activation|scatter_gather_tensors|deallocate_pipeline|"
        r"variable_seq",
        "stages are cut by --decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers and "
        "--num-layers-per-virtual-pipeline-stage",
    ),
    (
        r"cpu_offloading|offloading|offload_modules|offloaded_tensor|distribute_saved|checkpoint_activations|"
        r"empty_unused|memory_efficient_layer_norm",
        "activations are saved by recomputing them: --recompute-granularity, --recompute-method; with CUDA "
        "--optimizer-cpu-offload moves the optimizer's states",
    ),
    (
        r"wgrad_(compute|deferral)|defer_embedding|cross_entropy|fused_weighted|fused_single_qkv|bias_swiglu|"
        r"optimizer_cuda|reduce_scatter_with|ddp_|average_in_collective|align_grad|param_layout|grad_reduce_in_bf16|"
        r"optimizer_step|reuse_grad_buf",
        "the loss, its head and the reduction of gradients are colloid's own; what speeds them up is on already, or "
        "has not been run",
    ),
    (r"replication", "checkpoints on local disks that ranks keep for each other are not built; --save is shared"),
    (r"mtp", "multi-token prediction is not trained: see --mtp-num-layers"),
    (r"_dropout$", "dropout would make the trainer's log-probs other than the engine's, and the ratio with them"),
    (r"^test_mode$", "it is for Megatron's own tests"),
    (r"^use_flash_attn$", "that is --attention-backend flash"),
    (r"^model_parallel_size$", "that is --tensor-model-parallel-size"),
    (r"^decoder_num_layers$", "that is --num-layers"),
    (r"^use_legacy_models$", "the models are Megatron-Core's (--use-mcore-models)"),
    (r"^memory_snapshot_path$", "a file has the name of its rank; --memory-snapshot-dir is where"),
    (r"manual_gc|train_sync", "Python's garbage collector is left as it is; a step's time is in perf/"),
    (r".", _LEGACY),
)
"""Pattern of an attribute -> why its option is refused; the first that is found counts."""


def reason(dest: str) -> str:
    """Why the option of this attribute is refused."""
    return next(text for pattern, text in REASONS if re.search(pattern, dest))
