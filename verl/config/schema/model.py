"""`*.model.`: which model, how it is loaded, memory savers, LoRA."""

from verl.config.schema.base import FilePath, Group, Map, choice, items, key, open_map, same_as, sub
from verl.config.schema.training import FSDPConfig


class FusedKernelOptions(Group):
    """How log-probs without logits are computed.

    Attributes:
        impl_backend: `torch`, `triton` (CUDA), `liger`.
    """

    impl_backend: str = choice("torch", "torch", "triton", "liger")


class TiledMLPConfig(Group):
    """The MLP in slices of the sequence.

    Attributes:
        enabled: Compute the MLP slice by slice.
        num_shards: Number of slices.
    """

    enabled: bool = False
    num_shards: int = key(4, low=1)


class MTPConfig(Group):
    """The layer that predicts one token further (DeepSeek V3, GLM-4 MoE, Qwen3-Next, Qwen3.5). Saved models keep it in any
    case.

    Attributes:
        enable: Load it with the policy.
        enable_train: Train it: `mtp_loss_scaling_factor` times the mean negative log-prob of the tokens that the loss counts.
        enable_rollout: vLLM drafts with it, and gets it with each transfer of weights.
        mtp_loss_scaling_factor: Factor of its loss.
        detach_encoder: Its loss trains the layer alone, not the model below it, the embedding and the head.
        num_speculative_tokens: Tokens drafted at a time.
    """

    enable: bool = False
    enable_train: bool = False
    enable_rollout: bool = False
    mtp_loss_scaling_factor: float = key(0.1, low=0)
    detach_encoder: bool = key(True, ours=True)
    num_speculative_tokens: int = key(1, low=1, high=16)


class ModelConfig(Group):
    """Which model, how it is loaded, memory savers, LoRA.

    Attributes:
        path: Hugging Face id or directory, `hdfs://`; required.
        tokenizer_path: Where the tokenizer is.
        hf_config_path: Where the model's config.json is.
        trust_remote_code: Run code that is shipped with the model.
        custom_chat_template: Jinja text, or a file that holds it; null = the tokenizer's.
        override_config: Overrides of the model's config (`override_config.x` and `override_config.model_config.x`).
        external_lib: Modules imported in every process before the check (plugins); `VERL_USE_EXTERNAL_MODULES` too.
        use_remove_padding: No effect: sequences are always packed.
        enable_gradient_checkpointing: Recompute activations per layer; null = only when they would not fit.
        enable_activation_offload: Activations to host memory.
        use_fused_kernels: null, True: log-probs and entropy in chunks without the logits; False: from full logits.
        use_liger: No effect: verl's own kernels do the work of Liger's, wherever Triton compiles for the device.
        use_shm: Weights through shared memory at load.
        lora_rank: LoRA when above 0.
        lora_alpha: LoRA scale; with LoRA at least 1.
        lora_adapter_path: Adapter to continue from.
        target_modules: PEFT patterns of the modules that get an adapter.
        exclude_modules: PEFT patterns of modules left out; LoRA only (to freeze the vision tower:
            `actor.freeze_vision_tower`).
    """

    path: FilePath | None = key(None, ours=True, required=True)
    tokenizer_path: FilePath | None = same_as(".path")
    hf_config_path: FilePath | None = same_as(".path")
    trust_remote_code: bool = False
    custom_chat_template: FilePath | None = None
    override_config: Map = open_map()
    external_lib: list[str] | None = None
    use_remove_padding: bool = True
    enable_gradient_checkpointing: bool | None = key(None, ours=True)
    enable_activation_offload: bool = False
    use_fused_kernels: bool | None = key(None, ours=True)
    fused_kernel_options: FusedKernelOptions = sub(FusedKernelOptions)
    use_liger: bool = False
    tiled_mlp: TiledMLPConfig = sub(TiledMLPConfig)
    use_shm: bool = False
    mtp: MTPConfig = sub(MTPConfig)
    lora_rank: int = key(0, low=0)
    lora_alpha: int = key(16, low=0)
    lora_adapter_path: FilePath | None = None
    target_modules: list[str] = items("all-linear")
    exclude_modules: list[str] | None = None


class CriticModelConfig(ModelConfig):
    """As the actor's, plus the placement.

    Attributes:
        path: Hugging Face id or directory; null = the actor's.
    """

    path: FilePath | None = same_as("actor_rollout_ref.model.path")
    fsdp_config: FSDPConfig = sub(FSDPConfig)


class RefModelConfig(Group):
    """The reference model, if it is not the actor's start.

    Attributes:
        path: null = the actor's initial weights; with LoRA the base weights.
    """

    path: FilePath | None = None
