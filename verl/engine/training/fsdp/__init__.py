"""Training in one process, or with torch's FSDP2 on many ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verl.config.layout import divisors, model_problems
from verl.config.schema.base import setting
from verl.engine.registry import Placement, TrainingEngineRecord

_KEYS = {
    "tensor": "tensor_parallel_size",
    "expert": "expert_parallel_size",
    "shard": "fsdp_size",
    "param_offload": "param_offload",
    "optimizer_offload": "optimizer_offload",
    "streams": "offload_policy",
}


def fsdp_settings(role: Any) -> tuple[Any, str]:
    """The `fsdp_config` of a role's group, and its path from there: of a critic in its `model`, in supervised training
    the group itself."""
    for path in ("fsdp_config", "model.fsdp_config"):
        if (group := setting(role, path)) is not None:
            return group, f"{path}."
    return role, ""


class FSDP(TrainingEngineRecord):
    """See `TrainingEngineRecord`."""

    name = "fsdp"
    finds_sampling_mask = True
    unread = {  # noqa: RUF012
        "{*.megatron, *.optim.lr_decay_steps, *.optim.min_lr, *.optim.lr_warmup_init, *.optim.lr_wsd_*, "
        "*.optim.weight_decay_incr_style}": "strategy=megatron alone reads it"
    }
    builder = "verl.engine.training.fsdp.engine:FSDPEngine"

    def placement(self, role: Mapping[str, Any], path: str = "") -> Placement:
        """See `TrainingEngineRecord.placement`."""
        group, inner = fsdp_settings(role)
        precision = "mixed_precision.param_dtype"
        dtype_key = "dtype" if setting(group, precision) is None else precision
        values = {field: setting(group, key) for field, key in {**_KEYS, "dtype": dtype_key}.items()}
        values["sequence"] = setting(role, "ulysses_sequence_parallel_size")
        root = f"{path}." if path else ""
        keys = {field: f"{root}{inner}{key}" for field, key in {**_KEYS, "dtype": dtype_key}.items()}
        keys["sequence"] = f"{root}ulysses_sequence_parallel_size"
        return Placement(keys=keys, **{field: value for field, value in values.items() if value is not None})

    def misfits(self, placement: Placement, model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """See `TrainingEngineRecord.misfits`."""
        yield from model_problems(placement, model)
        if model.get("vision") and placement.tensor > 1:
            yield placement.at("tensor"), "models that see images are not split so in this release; set 1"
        experts = model.get("experts") or 0
        if max(1, experts) % placement.expert:
            sizes = divisors(max(1, experts))
            yield placement.at("expert"), f"does not divide the model's {experts} experts; use one of {sizes}"


ENGINE = FSDP()
