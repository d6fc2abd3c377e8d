"""What this release has of the schema's keys and values, and what it lacks.

Keys may be globs (`verl.config.matching.compiled`).
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

OFF = ("false", "none", "null", "disabled", "", "0", "0.0")
"""Values of a switch that leave it off, in lower case."""


class Absent(NamedTuple):
    """A feature that this release lacks: its name, what to do instead, values (lower case) that leave it off."""

    what: str
    instead: str
    off: tuple[str, ...] = OFF


_ROLLOUT = "{actor_rollout_ref.rollout, rollout}."
_ALONE = "on one device nothing is sharded or kept in host memory during a step"
_SHARED = "in one process the native engine uses the trainer's own weights, which are not sent and stay where they are"
UNREAD: dict[str, dict[str, str]] = {
    "": {
        _ROLLOUT + "checkpoint_engine.engine_kwargs": "the ways that weights travel here take no arguments",
        _ROLLOUT + "checkpoint_engine.backend": (
            "weights travel through shared memory; only nodes of a cluster that sample and do not train get a "
            "broadcast (RAY_ADDRESS, rollout.nnodes)"
        ),
        "data.gen_batch_size": "groups are begun one by one, as many as are needed and there is room for",
        "{*.fsdp_config, engine}.model_dtype": (
            "master weights and the optimizer's state are float32; the precision of computation is dtype beside it"
        ),
        "*.optim.total_training_steps": "a schedule has the run's length, trainer.total_training_steps",
        "{*.fsdp_config, engine}.seed": "every role has trainer.seed",
        "critic.checkpoint.{save_contents, load_contents, async_save}": (
            "the critic is saved as the policy is: actor_rollout_ref.actor.checkpoint"
        ),
        "critic.model.mtp.enable": "a critic predicts no tokens",
        "*.model.use_liger": (
            "norms, gated MLPs, rotations and the head have kernels of verl's own, used wherever Triton compiles for "
            "the device; Liger's are not"
        ),
        "{*.model.use_shm, *.optim.use_checkpoint_opt_param_scheduler, "
        "*.rollout.quantization_config_file, reward_model.rollout.multi_stage_wake_up, "
        "*.model.enable_activation_offload, *.model.fused_kernel_options.impl_backend, "
        "data.dataloader_num_workers, data.num_workers, data.image_patch_size, "
        "trainer.esi_redundant_time}": "not in this release, the run is as without",
        "engine.optimizer_offload": "the model is never idle; engine.param_offload keeps it in host memory",
    },
    "one device": {
        "{*.fsdp_config, engine}.{offload_policy, reshard_after_forward, forward_prefetch, "
        "mixed_precision.reduce_dtype, mixed_precision.buffer_dtype, wrap_policy}": _ALONE,
        "engine.param_offload": _ALONE,
    },
    "one process": {
        _ROLLOUT + "checkpoint_engine.update_weights_bucket_megabytes": _SHARED,
        "actor_rollout_ref.actor.fsdp_config.param_offload": _SHARED,
    },
}
"""Keys of the schema that nothing reads, and why; by when ("": always; see `verl.preflight.values`). Those that an
engine does not read are in its record."""

_FULL = {"full": Absent("the KL of whole distributions, which needs all logits,", "low_var_kl")}
REFUSED_VALUES: dict[str, dict[str, Absent]] = {
    "name": {"trtllm": Absent("TensorRT-LLM as sampling engine", "rollout.name=vllm or native")},
    "strategy": {"mindspeed": Absent("the MindSpeed trainer", "strategy=fsdp2")},
    "kl_loss_type": _FULL,
    "kl_penalty": _FULL,
    "backend": {"nixl": Absent("NIXL for the weight transfer", "rollout.checkpoint_engine.backend=nccl")},
}
"""By the last part of the key: values of other systems."""
FEATURES: dict[str, Absent] = {
    "*.model.tiled_mlp.enabled": Absent("the MLP in slices", "set it to False"),
    "*.rollout.prometheus.enable": Absent("engine metrics over HTTP", "set it to False"),
    "*.rollout.trace.backend": Absent("traces", "leave it null"),
    "data.datagen.path": Absent("a generator of rows", "write the rows to a file of data.train_files"),
}
"""Keys of the schema, or globs, whose values need a missing feature unless they are false, null or empty."""
NO_STEP = {"torch.optim": {"LBFGS", "Optimizer", "SparseAdam", "lr_scheduler", "swa_utils"}}
"""Names in a module of what wants a closure, a subclass, sparse gradients, or is no optimizer."""
LOGGERS = ("console", "file", "tensorboard", "wandb", "swanlab", "mlflow", "clearml", "trackio")


@functools.cache
def built_in(registry: str) -> tuple[str, ...]:
    """Names that verl.algorithms registers itself, read from its source: importing it needs torch."""
    folder = Path(__file__).parents[1] / "algorithms"
    pattern = re.compile(rf"^@{registry}\.register\(\s*(?:AdvantageEstimator\.|\")(\w+)", re.M)
    registered = [name for file in sorted(folder.glob("*.py")) for name in pattern.findall(file.read_text())]
    # algorithm.rollout_correction chooses bypass_mode
    return tuple(name.lower() for name in registered if name != "bypass_mode")
