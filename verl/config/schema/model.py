"""`*.model.`: which model, how it is loaded, memory savers, LoRA."""

from verl.config.schema.base import FilePath, Group, Map, choice, items, key, open_map, same_as, sub
from verl.config.schema.training import FSDPConfig


class FusedKernelOptions(Group):
    """How log-probs without logits are computed."""

    impl_backend: str = choice("torch", "torch", "triton", "liger")
    """`torch`, `triton` (CUDA), `liger`."""


class TiledMLPConfig(Group):
    """The MLP in slices of the sequence."""

    enabled: bool = False
    """Compute the MLP slice by slice."""
    num_shards: int = key(4, low=1)
    """Number of slices."""


class ModelConfig(Group):
    """Which model, how it is loaded, memory savers, LoRA."""

    path: FilePath | None = key(None, ours=True, required=True)
    """Hugging Face id or directory, `hdfs://`; required."""
    tokenizer_path: FilePath | None = same_as(".path")
    """Where the tokenizer is."""
    hf_config_path: FilePath | None = same_as(".path")
    """Where the model's config.json is."""
    trust_remote_code: bool = False
    """Run code that is shipped with the model."""
    custom_chat_template: FilePath | None = None
    """Jinja text, or a file that holds it; null = the tokenizer's."""
    override_config: Map = open_map()
    """Overrides of the model's config (`override_config.x` and `override_config.model_config.x`)."""
    external_lib: list[str] | None = None
    """Modules imported in every process before the check (plugins); `VERL_USE_EXTERNAL_MODULES` too."""
    use_remove_padding: bool = True
    """No effect: sequences are always packed."""
    enable_gradient_checkpointing: bool | None = key(None, ours=True)
    """Recompute activations per layer; null = only when they would not fit."""
    enable_activation_offload: bool = False
    """Activations to host memory."""
    use_fused_kernels: bool | None = key(None, ours=True)
    """null, True: log-probs and entropy in chunks without the logits; False: from full logits."""
    fused_kernel_options: FusedKernelOptions = sub(FusedKernelOptions)
    use_liger: bool = False
    """Liger kernels where they are installed."""
    tiled_mlp: TiledMLPConfig = sub(TiledMLPConfig)
    use_shm: bool = False
    """Weights through shared memory at load."""
    lora_rank: int = key(0, low=0)
    """LoRA when above 0."""
    lora_alpha: int = 16
    """LoRA scale."""
    lora_adapter_path: FilePath | None = None
    """Adapter to continue from."""
    target_modules: list[str] = items("all-linear")
    """PEFT patterns of the modules that get an adapter."""
    exclude_modules: list[str] | None = None
    """PEFT patterns of modules left out; LoRA only (to freeze the vision tower: `actor.freeze_vision_tower`)."""


class CriticModelConfig(ModelConfig):
    """As the actor's, plus the placement."""

    path: FilePath | None = same_as("actor_rollout_ref.model.path")
    """Hugging Face id or directory; null = the actor's."""
    fsdp_config: FSDPConfig = sub(FSDPConfig)


class RefModelConfig(Group):
    """The reference model, if it is not the actor's start."""

    path: FilePath | None = None
    """null = the actor's initial weights; with LoRA the base weights."""
