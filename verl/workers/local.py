"""Roles in this process: one device, no server, no Ray. The same roles that a Ray controller would place.

The actor's engine owns the weights; the embedded sampler works on the same tensors, vLLM is sent them; the reference
is a frozen engine of its own (with LoRA the actor's, its adapter off), built only when a KL term asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.config.rollout_engines import CAPABILITIES
from verl.engine.training.local_engine import LocalEngine
from verl.profiling.profiler import open_profiler
from verl.weight_sync.sender import InProcessSync, StreamedSync
from verl.workers import build
from verl.workers.actor import Actor
from verl.workers.reference import Reference
from verl.workers.roles import Roles

if TYPE_CHECKING:
    from verl.config import Config
    from verl.weight_sync.base import WeightSync


def build_roles(config: Config, tokenizer: Any, total_steps: int) -> Roles:
    """Load the model and place every role on this process's device. UserError for a model that cannot be used."""
    arr = config.actor_rollout_ref
    in_place = CAPABILITIES[arr.rollout.name].in_place_weights
    engine = build.actor_engine(config, total_steps, shared=in_place)
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
    if in_place:
        sampler = build.native_sampler(config, engine.module, tokenizer, str(engine.compute_dtype))
        sync = InProcessSync(engine, sampler)
    else:
        sampler = build.own_sampler(config, tokenizer, engine.platform)
        sync = StreamedSync(engine, sampler, adapter=build.adapter_moves(config))
    played = ("actor", "ref", "rollout") if reference is not None else ("actor", "rollout")
    profiler = open_profiler(config, roles=played, rank=0, device=engine.platform.name)
    return Roles(actor, reference, sampler, sync, profiler=profiler)
