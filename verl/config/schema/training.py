"""A role's weights and steps: `*.fsdp_config.`, `*.megatron.`, `*.optim.`, `*.checkpoint.`."""

from verl.config.schema.base import SEEDS, FilePath, Group, Map, choice, items, key, open_map, same_as, sub


class MixedPrecisionConfig(Group):
    """Precisions that override `dtype`.

    Attributes:
        param_dtype: Precision of weights in the forward and backward pass; null = `dtype`.
        reduce_dtype: Precision in which gradients are added over ranks; null = float32.
        buffer_dtype: Precision of buffers; null = as the model has them.
    """

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    buffer_dtype: str | None = None


class WrapPolicyConfig(Group):
    """Which modules are sharded together.

    Attributes:
        min_num_params: 0 = one unit per decoder layer; else layers are merged up to this many parameters.
    """

    min_num_params: int = key(0, low=0)


class PlacementConfig(Group):
    """Where a role's state is while the role is idle, and its randomness.

    Attributes:
        param_offload: Weights to host memory while the role is idle.
        optimizer_offload: Optimizer state to host memory while the role is idle.
        seed: Seed of the role's own randomness.
    """

    param_offload: bool = False
    optimizer_offload: bool = False
    seed: int = same_as("trainer.seed", low=0, high=SEEDS)


class FSDPConfig(PlacementConfig):
    """Placement, precision and sharding.

    Attributes:
        offload_policy: FSDP2 CPU offload during the step.
        fsdp_size: Ranks per shard group; -1 = all; smaller = hybrid sharding.
        tensor_parallel_size: Devices that share the products inside layers, where transformers has a plan for the
            model.
        expert_parallel_size: Devices that the experts of a layer are spread over; tokens travel to them. Its layers are
            computed again in the backward pass unless `enable_gradient_checkpointing=False`.
        reshard_after_forward: Free gathered weights after the forward pass.
        forward_prefetch: Gather the next layer's weights during the forward pass of this one.
        model_dtype: Precision of the master weights; anything but float32 is announced and has no effect.
        dtype: Precision of computation; null = bfloat16, on cpu bfloat16 products with float32 master weights where the
            processor has them (AVX512-BF16, AMX), else float32.
        full_determinism: Deterministic kernels only.
    """

    offload_policy: bool = False
    fsdp_size: int = key(-1, low=1, also=-1)
    tensor_parallel_size: int = key(1, low=1, ours=True)
    expert_parallel_size: int = key(1, low=1, ours=True)
    reshard_after_forward: bool = True
    forward_prefetch: bool = False
    model_dtype: str = "fp32"
    dtype: str | None = key(None, ours=True)
    mixed_precision: MixedPrecisionConfig = sub(MixedPrecisionConfig)
    wrap_policy: WrapPolicyConfig = sub(WrapPolicyConfig)
    full_determinism: bool = False


class RefFSDPConfig(FSDPConfig):
    """As the actor's.

    Attributes:
        dtype: Precision of computation; null = the actor's.
    """

    dtype: str | None = same_as("actor_rollout_ref.actor.fsdp_config.dtype", ours=True)


class MegatronConfig(PlacementConfig):
    """Parallel layout, offload and overrides of megatron-core.

    Attributes:
        tensor_model_parallel_size: Devices a layer's matrices are split over.
        pipeline_model_parallel_size: Devices the layers are split over.
        virtual_pipeline_model_parallel_size: Chunks of layers per pipeline stage.
        context_parallel_size: Devices a sequence is split over.
        expert_model_parallel_size: Devices the experts are split over.
        expert_tensor_parallel_size: Devices an expert's matrices are split over.
        sequence_parallel: Split activations between tensor-parallel regions along the sequence; off with one
            tensor-parallel rank.
        use_distributed_optimizer: Shard the optimizer state over the data-parallel ranks.
        grad_offload: Gradients to host memory while the role is idle.
        use_dist_checkpointing: Load from megatron-core's distributed checkpoint.
        dist_checkpointing_path: Directory of that checkpoint.
        use_mbridge: Convert weights with mbridge.
        vanilla_mbridge: Use mbridge's own model definition unchanged.
        dtype: Precision of computation.
        override_ddp_config: Overrides of megatron-core's data-parallel config.
        override_transformer_config: Overrides of megatron-core's transformer config (`recompute_granularity`,
            `attention_backend`, …).
        mindspeed: Options of MindSpeed, which adapts megatron-core to Ascend NPUs (`swap_optimizer`, …).
    """

    tensor_model_parallel_size: int = key(1, low=1)
    pipeline_model_parallel_size: int = key(1, low=1)
    virtual_pipeline_model_parallel_size: int | None = key(None, low=1)
    context_parallel_size: int = key(1, low=1)
    expert_model_parallel_size: int = key(1, low=1)
    expert_tensor_parallel_size: int | None = same_as(".tensor_model_parallel_size", low=1)
    sequence_parallel: bool = True
    use_distributed_optimizer: bool = True
    grad_offload: bool = False
    use_dist_checkpointing: bool = False
    dist_checkpointing_path: FilePath | None = None
    use_mbridge: bool = True
    vanilla_mbridge: bool = False
    dtype: str | None = "bfloat16"
    override_ddp_config: Map = open_map()
    override_transformer_config: Map = open_map()
    mindspeed: Map = open_map()


_MEGATRON = "actor_rollout_ref.actor.megatron."


class RefMegatronConfig(MegatronConfig):
    """As the actor's; parallel sizes and `override_transformer_config` are inherited from it."""

    tensor_model_parallel_size: int = same_as(_MEGATRON + "tensor_model_parallel_size", low=1)
    pipeline_model_parallel_size: int = same_as(_MEGATRON + "pipeline_model_parallel_size", low=1)
    virtual_pipeline_model_parallel_size: int | None = same_as(
        _MEGATRON + "virtual_pipeline_model_parallel_size", low=1
    )
    context_parallel_size: int = same_as(_MEGATRON + "context_parallel_size", low=1)
    expert_model_parallel_size: int = same_as(_MEGATRON + "expert_model_parallel_size", low=1)
    expert_tensor_parallel_size: int | None = same_as(_MEGATRON + "expert_tensor_parallel_size", low=1)
    override_transformer_config: Map = open_map({"same_as": _MEGATRON + "override_transformer_config"})


class OptimConfig(Group):
    """Optimizer and schedule.

    Attributes:
        lr: Peak learning rate.
        weight_decay: Decoupled weight decay.
        betas: Decay rates of the two moments.
        lr_warmup_steps: Training steps of linear warm-up from 0; a value ≥ 0 wins over the ratio, null is -1.
        lr_warmup_steps_ratio: Warm-up as a share of all training steps.
        lr_scheduler_type: Shape after the warm-up; one scheduler step per training step that updates the role (the
            actor's schedule stands still during `trainer.critic_warmup`).
        min_lr_ratio: Floor of the schedule as a share of `lr`.
        num_cycles: Cosine waves; 0.5 is one fall to the floor.
        zero_indexed_step: False: the first warm-up step has lr/warmup, not 0.
        optimizer: Class name of the optimizer.
        optimizer_impl: Module the class is taken from.
        override_optimizer_config: Extra arguments of the optimizer's constructor (Megatron: `optimizer_cpu_offload`,
            …).
        total_training_steps: Length of the schedule in steps; filled from the trainer.
        lr_decay_steps: Megatron only: steps until the floor is reached.
        min_lr: Megatron only: floor as a learning rate.
        lr_warmup_init: Megatron only: learning rate the warm-up starts from.
        lr_wsd_decay_style: Megatron only: decay of the warm-up-stable-decay schedule.
        lr_wsd_decay_steps: Megatron only: steps of that decay.
        weight_decay_incr_style: Megatron only: how the weight decay grows.
        use_checkpoint_opt_param_scheduler: Megatron only: take the schedule from the checkpoint.
    """

    lr: float = key(1e-6, low=0, high=10**4)
    weight_decay: float = key(0.01, low=0)
    betas: list[float] = items(0.9, 0.999, low=0, high=1)
    lr_warmup_steps: int | None = -1
    lr_warmup_steps_ratio: float = key(0.0, low=0, high=1)
    lr_scheduler_type: str = choice("constant", "constant", "cosine", "linear")
    min_lr_ratio: float = key(0.0, low=0, high=1)
    num_cycles: float = key(0.5, low=0)
    zero_indexed_step: bool = True
    optimizer: str = "AdamW"
    optimizer_impl: str = "torch.optim"
    override_optimizer_config: Map = open_map()
    total_training_steps: int = -1
    lr_decay_steps: int | None = None
    min_lr: float | None = key(None, low=0)
    lr_warmup_init: float | None = key(None, low=0)
    lr_wsd_decay_style: str | None = None
    lr_wsd_decay_steps: int | None = None
    weight_decay_incr_style: str | None = None
    use_checkpoint_opt_param_scheduler: bool | None = None


class CriticOptimConfig(OptimConfig):
    """As the actor's, with a larger learning rate."""

    lr: float = key(1e-5, low=0, high=10**4)


class SFTOptimConfig(OptimConfig):
    """As the actor's, with a larger learning rate.

    Attributes:
        grad_clip: Largest global gradient norm.
    """

    lr: float = key(1e-5, low=0, high=10**4)
    grad_clip: float = key(1.0, above=0, inf=True)


class LogProbConfig(Group):
    """Batches of a pass that only computes log-probs.

    Attributes:
        log_prob_micro_batch_size_per_gpu: Responses per forward on one device; null = by token budget.
        log_prob_use_dynamic_bsz: True: token budget even if a micro-batch size is given; null: budget only if none is.
        log_prob_max_token_len_per_gpu: Token budget of a forward.
    """

    log_prob_micro_batch_size_per_gpu: int | None = key(None, low=1)
    log_prob_use_dynamic_bsz: bool | None = same_as("actor_rollout_ref.actor.use_dynamic_bsz")
    log_prob_max_token_len_per_gpu: int = same_as("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", low=1)


CONTENTS = ("model", "optimizer", "extra", "hf_model")


class CheckpointConfig(Group):
    """What a checkpoint of this role holds and how it is written.

    Attributes:
        save_contents: Parts written: `model`, `optimizer`, `extra`; `hf_model` has no effect (weights are Hugging Face
            already).
        load_contents: Parts read on resume. Named by the user and less than everything: the run goes on without the
            rest.
        async_save: Sync, hash, seal and copy a written checkpoint beside the training; until then the one before is the
            newest.
        save_lora_only: Write the adapter only.
        strict: Refuse missing or extra tensors.
    """

    save_contents: list[str] = items("model", "optimizer", "extra", options=CONTENTS)
    load_contents: list[str] = same_as(".save_contents", options=CONTENTS)
    async_save: bool = False
    save_lora_only: bool = False
    strict: bool = True
