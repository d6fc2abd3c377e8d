"""A plug-in (model.external_lib) with a sampler and a training engine of its own, which no file of verl names."""

from __future__ import annotations

from typing import Any

from verl.engine.registry import (
    Capabilities,
    EngineCheck,
    RolloutEngineRecord,
    register_rollout_engine,
    register_training_engine,
)
from verl.engine.training.fsdp import FSDP

BUILT: list[str] = []


class Sampler(RolloutEngineRecord):
    name = "users_sampler"
    builder = f"{__name__}:build_sampler"
    capabilities = Capabilities(dtypes=("float32",), tensor_parallel=False)

    def check(self, check: EngineCheck) -> None:
        if check.rollout.engine_kwargs.get(self.name, {}).get("speed", 1) < 1:
            check.refuse(f"{check.rollout_key}.engine_kwargs.{self.name}.speed", "must be at least 1")


class Trainer(FSDP):
    name = "users_trainer"
    builder = f"{__name__}:build_trainer"

    def check(self, check: EngineCheck) -> None:
        if check.config.select("actor_rollout_ref.actor.users_trainer.depth", 1) > 3:
            check.refuse("actor_rollout_ref.actor.users_trainer.depth", "must be at most 3")


def build_sampler(config: Any, tokenizer: Any, platform: Any) -> Any:
    from verl.engine.rollout.native.build import build

    BUILT.append(f"sampler {config.actor_rollout_ref.rollout.engine_kwargs.get(Sampler.name)}")
    return build(config, tokenizer, platform)


def build_trainer(model_path: str | None, *, role_cfg: Any, **options: Any) -> Any:
    from verl.engine.training.fsdp.engine import FSDPEngine

    if "users_trainer" in role_cfg:
        BUILT.append(f"trainer {role_cfg['users_trainer']['depth']}")
    return FSDPEngine(model_path, role_cfg=role_cfg, **options)


register_rollout_engine(Sampler())
register_training_engine(Trainer())
