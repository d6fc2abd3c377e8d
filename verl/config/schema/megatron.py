"""`*.megatron.`: parallel layout of a role with `strategy=megatron`."""

from verl.config.schema.base import FilePath, Group, Map, group, key, open_map, same_as


@group
class MegatronConfig(Group):
    """Parallel layout, offload and overrides of megatron-core."""

    tensor_model_parallel_size: int = key(1, low=1)
    """Devices a layer's matrices are split over."""
    pipeline_model_parallel_size: int = key(1, low=1)
    """Devices the layers are split over."""
    virtual_pipeline_model_parallel_size: int | None = key(None, low=1)
    """Chunks of layers per pipeline stage."""
    context_parallel_size: int = key(1, low=1)
    """Devices a sequence is split over."""
    expert_model_parallel_size: int = key(1, low=1)
    """Devices the experts are split over."""
    expert_tensor_parallel_size: int | None = same_as(".tensor_model_parallel_size", low=1)
    """Devices an expert's matrices are split over."""
    sequence_parallel: bool = True
    """Split activations between tensor-parallel regions along the sequence; off with one tensor-parallel rank."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state over the data-parallel ranks."""
    param_offload: bool = False
    """Weights to host memory while the role is idle."""
    optimizer_offload: bool = False
    """Optimizer state to host memory while the role is idle."""
    grad_offload: bool = False
    """Gradients to host memory while the role is idle."""
    use_dist_checkpointing: bool = False
    """Load from megatron-core's distributed checkpoint."""
    dist_checkpointing_path: FilePath | None = None
    """Directory of that checkpoint."""
    use_mbridge: bool = True
    """Convert weights with mbridge."""
    vanilla_mbridge: bool = False
    """Use mbridge's own model definition unchanged."""
    dtype: str | None = "bfloat16"
    """Precision of computation."""
    seed: int = same_as("trainer.seed")
    """Seed of the role's own randomness."""
    override_ddp_config: Map = open_map()
    """Overrides of megatron-core's data-parallel config."""
    override_transformer_config: Map = open_map()
    """Overrides of megatron-core's transformer config (`recompute_granularity`, `attention_backend`, …)."""


_ACTOR = "actor_rollout_ref.actor.megatron."


@group
class RefMegatronConfig(MegatronConfig):
    """As the actor's; parallel sizes are inherited from it."""

    tensor_model_parallel_size: int = same_as(_ACTOR + "tensor_model_parallel_size", low=1)
    """Devices a layer's matrices are split over."""
    pipeline_model_parallel_size: int = same_as(_ACTOR + "pipeline_model_parallel_size", low=1)
    """Devices the layers are split over."""
    virtual_pipeline_model_parallel_size: int | None = same_as(
        _ACTOR + "virtual_pipeline_model_parallel_size", low=1
    )
    """Chunks of layers per pipeline stage."""
    context_parallel_size: int = same_as(_ACTOR + "context_parallel_size", low=1)
    """Devices a sequence is split over."""
    expert_model_parallel_size: int = same_as(_ACTOR + "expert_model_parallel_size", low=1)
    """Devices the experts are split over."""
    expert_tensor_parallel_size: int | None = same_as(_ACTOR + "expert_tensor_parallel_size", low=1)
    """Devices an expert's matrices are split over."""
