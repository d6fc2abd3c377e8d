"""Training with megatron-core: tensor, pipeline, context and expert parallelism; torch is imported when it builds."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.matching import nearest
from verl.config.model_facts import QWEN_VISION
from verl.config.schema.base import setting
from verl.engine.registry import EngineCheck, EnginePackageError, Placement, TrainingEngineRecord
from verl.engine.training.megatron import mindspeed

if TYPE_CHECKING:
    from verl.engine.training.base import TrainingEngine

FAMILIES = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "llama", "mixtral", "deepseek_v3", "glm4_moe", "mimo")
"""Types of models that mbridge converts."""

_KEYS = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "sequence": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "chunks": "virtual_pipeline_model_parallel_size",
    "dtype": "dtype",
    "param_offload": "param_offload",
    "grad_offload": "grad_offload",
    "optimizer_offload": "optimizer_offload",
}
_STAGE = "num_layers_in_first_pipeline_stage"
_STAGES = {
    _STAGE,
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
}
"""Settings of `override_transformer_config` that give pipeline stages different numbers of layers."""
SOURCES = {
    "override_transformer_config": ("model_parallel_config.py", "transformer/transformer_config.py"),
    "override_ddp_config": ("distributed/distributed_data_parallel_config.py",),
}
"""Group of overrides → files of megatron-core that define the settings of that name."""
_ELSEWHERE = "use strategy=fsdp2"


class Megatron(TrainingEngineRecord):
    """See `TrainingEngineRecord`."""

    name = "megatron"
    builder = "verl.engine.training.megatron.engine:MegatronEngine"
    packages = ("megatron-core",)
    versions = ">=0.16,<0.17"
    install = "pip install 'verl[megatron]'"
    shares_module = False
    unread = {  # noqa: RUF012
        "*.fsdp_config": "strategy=megatron reads megatron.*",
        "*.{ulysses_sequence_parallel_size, use_prefix_grouper, entropy_checkpointing}": "strategy=megatron has none",
    }

    def placement(self, role: Mapping[str, Any], path: str = "") -> Placement:
        """See `TrainingEngineRecord.placement`; `sequence` are the context-parallel ranks."""
        group, inner = (role["megatron"], "megatron.") if setting(role, "megatron") is not None else (role, "")
        root = f"{path}." if path else ""
        values = {field: setting(group, key) for field, key in _KEYS.items()}
        keys = {field: f"{root}{inner}{key}" for field, key in _KEYS.items()}
        values = {field: value for field, value in values.items() if value is not None}
        uneven = _STAGES & {k for k, v in (setting(group, "override_transformer_config") or {}).items() if v}
        return Placement(keys=keys, cuts_adapters=True, even=not uneven, **values)

    def misfits(self, placement: Placement, model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """See `TrainingEngineRecord.misfits`."""
        heads, layers, experts = (model.get(n) for n in ("num_attention_heads", "num_hidden_layers", "experts"))
        if isinstance(heads, int) and heads % placement.tensor:
            yield placement.at("tensor"), f"does not divide the model's {heads} attention heads"
        if placement.even and isinstance(layers, int) and layers % (placement.pipeline * placement.chunks):
            sizes = ("pipeline", "chunks") if placement.chunks > 1 else ("pipeline",)
            advice = f"set override_transformer_config.{_STAGE}, or another size"
            yield " × ".join(map(placement.at, sizes)), f"does not divide the model's {layers} layers; {advice}"
        if placement.expert > 1 and (not experts or experts % placement.expert):
            yield placement.at("expert"), f"does not divide the model's {experts or 0} experts"

    def build(
        self, model_path: str | None, *, role_cfg: Mapping[str, Any], placement: Placement, **options: Any
    ) -> TrainingEngine:
        """See `TrainingEngineRecord.build`."""
        mindspeed.adapt(setting(role_cfg, "megatron") or role_cfg)
        return super().build(model_path, role_cfg=role_cfg, placement=placement, **options)

    def check(self, check: EngineCheck) -> None:
        """See `EngineRecord.check`."""
        config: Any = check.config
        for package, probe in (("megatron-core", self.installed), ("mbridge", _mbridge)):
            try:
                probe()
            except EnginePackageError as error:
                check.lacks(f"strategy=megatron ({package})", str(error))
        facts, path = check.facts, "actor_rollout_ref.actor" if config.select("actor_rollout_ref.actor") else "engine"
        if facts is not None and facts.name not in (QWEN_VISION if facts.vision else FAMILIES):
            check.refuse("strategy=megatron", f"models of type {facts.name} are not converted here; {_ELSEWHERE}")
        if (config.select("critic.model.lora_rank") or 0) > 0 and config.select("critic.strategy") == self.name:
            check.refuse("critic.model.lora_rank", f"strategy=megatron trains no adapters of critics; {_ELSEWHERE}")
        model: Any = config.select("actor_rollout_ref.model") or config.select("model")
        adapts_all = setting(model, "lora_rank", 0) > 0 and "all-linear" in model.target_modules
        if adapts_all and facts is not None and facts.experts:
            check.refuse("model.target_modules=all-linear", "experts are not adapted; name attention's layers instead")
        self._check_placement(check, path, config.select(path))
        for role_path in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "engine"):
            if config.select(f"{role_path}.strategy") == self.name:
                _check_overrides(check, role_path, config.select(role_path))

    def _check_placement(self, check: EngineCheck, path: str, role: Any) -> None:
        placed, group, facts = self.placement(role, path), setting(role, "megatron") or role, check.facts
        if placed.chunks > 1 and placed.pipeline == 1:
            check.refuse(placed.at("chunks"), f"needs {placed.key('pipeline')} > 1; leave it out")
        if placed.sequence > 1 and facts is not None and facts.vision:
            check.refuse(placed.at("sequence"), "models that see images have no context parallelism here; set 1")
        if placed.sequence > 1 and not has_transformer_engine():
            check.lacks(placed.at("sequence"), "context parallelism needs TransformerEngine, which is not installed")
        if facts is not None and facts.name == "deepseek_v3" and not has_transformer_engine():
            check.lacks(
                "strategy=megatron (deepseek_v3)", "its attention needs TransformerEngine, which is not installed"
            )
        if facts is not None and facts.experts and placed.tensor > 1 and not has_transformer_engine():
            check.lacks(placed.at("tensor"), "experts under tensor parallelism need TransformerEngine, not installed")
        if setting(group, "mindspeed") and not mindspeed.is_installed():
            check.lacks("megatron.mindspeed", "MindSpeed is not installed")
        if setting(group, "use_dist_checkpointing", False) and not setting(group, "dist_checkpointing_path"):
            check.refuse("megatron.use_dist_checkpointing=True", "set megatron.dist_checkpointing_path to a directory")


def _check_overrides(check: EngineCheck, path: str, role: Any) -> None:
    """Refuse names that megatron-core does not have; MindSpeed has settings of its own."""
    group, inner = (role["megatron"], "megatron.") if setting(role, "megatron") is not None else (role, "")
    for key in SOURCES if not mindspeed.is_installed() else ():
        names, overrides = setting_names(key), setting(group, key) or {}
        if path.endswith(".ref") and overrides == check.config.select(f"actor_rollout_ref.actor.megatron.{key}"):
            continue  # the reference inherits them
        if overrides.get("attention_backend") is not None and not has_transformer_engine():
            at = f"{path}.{inner}{key}.attention_backend={overrides['attention_backend']}"
            check.notice(f"no effect: {at}: the backends are TransformerEngine's, which is not installed")
        for name, value in overrides.items() if names else ():
            if name not in names and value is not None:
                check.refuse(f"{path}.{inner}{key}.{name}", f"megatron-core has no such setting{nearest(name, names)}")


def setting_names(key: str) -> list[str]:
    """Names that a group of overrides may hold, read from megatron-core's source without running it; empty where it is
    not installed."""
    spec = importlib.util.find_spec("megatron")
    folders = (spec.submodule_search_locations if spec else None) or ()
    files = [file for folder in folders for name in SOURCES[key] if (file := Path(folder) / "core" / name).is_file()]
    classes = [node for file in files for node in ast.parse(file.read_bytes()).body if isinstance(node, ast.ClassDef)]
    fields = [node.target for part in classes for node in part.body if isinstance(node, ast.AnnAssign)]
    return [field.id for field in fields if isinstance(field, ast.Name)]


def has_transformer_engine() -> bool:
    """TransformerEngine is installed; MindSpeed puts modules of that name without anything in them into memory."""
    try:
        return importlib.util.find_spec("transformer_engine") is not None
    except ValueError:
        return False


def _mbridge() -> None:
    if importlib.util.find_spec("mbridge") is None:
        raise EnginePackageError("mbridge, which converts the weights, is not installed: pip install 'verl[megatron]'")


ENGINE = Megatron()
