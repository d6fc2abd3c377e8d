"""`*.fsdp_config.`: placement, precision and sharding of a role's weights."""

from verl.config.schema.base import Group, group, key, same_as, sub


@group
class MixedPrecisionConfig(Group):
    """Precisions that override `dtype`."""

    param_dtype: str | None = None
    """Precision of weights in the forward and backward pass; null = `dtype`."""
    reduce_dtype: str | None = None
    """Precision in which gradients are added over ranks; null = float32."""
    buffer_dtype: str | None = None
    """Precision of buffers; null = as the model has them."""


@group
class WrapPolicyConfig(Group):
    """Which modules are sharded together."""

    min_num_params: int = key(0, low=0)
    """0 = one unit per decoder layer; else layers are merged up to this many parameters."""


@group
class FSDPConfig(Group):
    """Placement, precision and sharding."""

    param_offload: bool = False
    """Weights to host memory while the role is idle."""
    optimizer_offload: bool = False
    """Optimizer state to host memory while the role is idle."""
    offload_policy: bool = False
    """FSDP2 CPU offload during the step."""
    fsdp_size: int = -1
    """Ranks per shard group; -1 = all; smaller = hybrid sharding."""
    tensor_parallel_size: int = key(1, low=1, ours=True)
    """Devices that share the products inside layers, where transformers has a plan for the model."""
    reshard_after_forward: bool = True
    """Free gathered weights after the forward pass."""
    forward_prefetch: bool = False
    """Gather the next layer's weights during the forward pass of this one."""
    model_dtype: str = "fp32"
    """Precision of the master weights; anything but float32 is announced and has no effect."""
    dtype: str | None = key(None, ours=True)
    """Precision of computation; null = bfloat16, on cpu bfloat16 products with float32 master weights where the
    processor has them (AVX512-BF16, AMX), else float32."""
    mixed_precision: MixedPrecisionConfig = sub(MixedPrecisionConfig)
    wrap_policy: WrapPolicyConfig = sub(WrapPolicyConfig)
    full_determinism: bool = False
    """Deterministic kernels only."""
    seed: int = same_as("trainer.seed")
    """Seed of the role's own randomness."""
