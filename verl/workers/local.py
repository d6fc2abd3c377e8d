"""Roles in this process: one device, no server, no Ray. The same roles that a Ray controller would place.

The actor's engine owns the weights; the embedded sampler works on the same tensors, vLLM is sent them; the reference
is a frozen engine of its own (with LoRA the actor's, its adapter off), built only when a KL term asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.engine.training.local_engine import LocalEngine
from verl.profiling.profiler import open_profiler
from verl.weight_sync.in_process import InProcessSync
from verl.weight_sync.streamed import StreamedSync
from verl.workers import build
from verl.workers.actor import Actor
from verl.workers.build import end_token_ids
from verl.workers.reference import Reference
from verl.workers.roles import Roles

if TYPE_CHECKING:
    from verl.config import Config
    from verl.weight_sync.base import WeightSync

__all__ = ["Roles", "build_roles", "end_token_ids"]


def build_roles(config: Config, tokenizer: Any, total_steps: int) -> Roles:
    """Load the model and place every role on this process's device. UserError for a model that cannot be used."""
    arr = config.actor_rollout_ref
    engine = build.actor_engine(config, total_steps, shared=arr.rollout.name != "vllm")
    assert isinstance(engine, LocalEngine)
    actor = Actor(
        engine,
        arr.actor,
        temperature=arr.rollout.temperature,
        max_response_length=build.max_response_length(config),
        batch_prompts=config.data.train_batch_size,
        rollout_correction=config.algorithm.rollout_correction,
    )
    reference = None
    if build.wants_reference(config):
        reference = Reference(build.reference_engine(config, engine), temperature=arr.rollout.temperature)
    sampler: Any
    sync: WeightSync
    if arr.rollout.name == "vllm":
        sampler = build.vllm_sampler(config, tokenizer, engine.platform)
        sync = StreamedSync(engine, sampler)
    else:
        sampler = build.native_sampler(config, engine.module, tokenizer, str(engine.compute_dtype))
        sync = InProcessSync(engine, sampler)
    played = ("actor", "ref", "rollout") if reference is not None else ("actor", "rollout")
    profiler = open_profiler(config, roles=played, rank=0, device=engine.platform.name)
    return Roles(actor, reference, sampler, sync, profiler=profiler)
