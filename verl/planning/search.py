"""Layouts for a number of devices, ranked by the predicted seconds of a step among those that fit."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

from verl.config.schema.base import put
from verl.engine.registry import capabilities, placement
from verl.planning.devices import Device
from verl.planning.model import ModelSize, model_size
from verl.planning.plan import ACTOR, ROLLOUT, Plan, plan

if TYPE_CHECKING:
    from verl.config import Config


SIZES = (1, 2, 4, 8)
ENOUGH_TOKENS = 32768
"""Of a micro-batch on one device: larger ones gain little."""
SAFE = 0.95
"""How full a proposal may be: predictions are off by some per cent."""
_MODEL, _REF = "actor_rollout_ref.model", "actor_rollout_ref.ref"
_GRANULARITY = f"{ACTOR}.megatron.override_transformer_config.recompute_granularity"

Keys = dict[str, Any]


def search(
    config: Config, model_config: Mapping[str, Any], device: Device, *, best: int = 5, **lengths: Any
) -> list[tuple[Keys, Plan]]:
    """The fastest layouts that fit, each with the keys that differ from the configuration, the best first."""
    model, ranks = model_size(model_config), config.trainer.nnodes * config.trainer.n_gpus_per_node
    changed = copy.deepcopy(config)
    fitting: list[tuple[Keys, Plan]] = []
    for training, sampling in product(list(_training(config, model, ranks)), list(_sampling(config, model))):
        keys = training | sampling
        for key, value in keys.items():
            put(changed, key, value)
        sequence = int(keys.get(f"{ACTOR}.ulysses_sequence_parallel_size", 1))
        first = plan(changed, model_config, device, **lengths)
        tokens = min(first.largest, max(ENOUGH_TOKENS, first.work.longest))
        if tokens * sequence < first.work.longest:
            continue
        budget = {f"{ACTOR}.ppo_max_token_len_per_gpu": tokens, f"{ACTOR}.ppo_micro_batch_size_per_gpu": None}
        keys = keys | budget
        for key, value in (budget | {f"{ROLLOUT}.log_prob_max_token_len_per_gpu": tokens}).items():
            put(changed, key, value)
        second = plan(changed, model_config, device, **lengths)
        if second.worst < SAFE:
            fitting.append(({k: v for k, v in keys.items() if config.select(k) != v}, second))
    fitting.sort(key=lambda pair: (round(pair[1].step, 1), round(pair[1].worst, 2), len(pair[0])))
    # Layouts that differ in the size of the cache alone are one proposal.
    different: dict[str, tuple[Keys, Plan]] = {}
    for keys, found in fitting:
        name = str({key: value for key, value in keys.items() if key != f"{ROLLOUT}.gpu_memory_utilization"})
        different.setdefault(name, (keys, found))
    return list(different.values())[:best]


def _training(config: Config, model: ModelSize, ranks: int) -> Iterator[Keys]:
    """Keys of the trainer's layouts whose sizes divide the ranks, the heads, the layers and the experts."""
    keys = {role: placement(config.select(role), role).keys for role in (ACTOR, _REF)}
    offloads = [
        {
            keys[role][f"{part}_offload"]: on
            for role, part, on in ((ACTOR, "optimizer", o), (_REF, "param", o), (ACTOR, "param", p))
            if f"{part}_offload" in keys[role]  # an engine of a user's may have no such keys
        }
        for o, p in ((False, False), (True, False), (True, True))
    ]
    if config.actor_rollout_ref.actor.strategy == "megatron":
        names = ("tensor", "pipeline", "expert")
        for sizes, recompute, offload in product(product(SIZES, SIZES, SIZES), (False, True), offloads):
            if _divides(model, ranks, *sizes):
                placed = {keys[role][n]: s for role in (ACTOR, _REF) for n, s in zip(names, sizes, strict=True)}
                yield placed | {f"{_MODEL}.enable_gradient_checkpointing": recompute, _GRANULARITY: None} | offload
        return
    for sequence, recompute, offload in product(SIZES, (False, True), offloads):
        if ranks % sequence == 0 and model.heads % sequence == 0:
            placed = {keys[role]["sequence"]: sequence for role in (ACTOR, _REF) if "sequence" in keys[role]}
            yield placed | {f"{_MODEL}.enable_gradient_checkpointing": recompute} | offload


def _divides(model: ModelSize, ranks: int, tensor: int, pipeline: int, expert: int) -> bool:
    """Whether Megatron's sizes divide the ranks, the heads, the layers and the experts."""
    if model.heads % tensor or model.layers % pipeline or ranks % (tensor * pipeline * expert):
        return False
    return expert == 1 or (model.expert_count > 0 and model.expert_count % expert == 0)


def _sampling(config: Config, model: ModelSize) -> Iterator[Keys]:
    """Keys of the sampler's layouts."""
    rollout = config.actor_rollout_ref.rollout
    per_node = rollout.n_gpus_per_node if rollout.nnodes else config.trainer.n_gpus_per_node
    shares = (0.8, 0.9) if rollout.nnodes else (0.3, 0.4, 0.5, 0.6, 0.7)
    for tensor, share in product(SIZES, shares):
        if model.heads % tensor or per_node % tensor or (tensor > 1 and not capabilities(rollout.name).tensor_parallel):
            continue
        yield {f"{ROLLOUT}.tensor_model_parallel_size": tensor, f"{ROLLOUT}.gpu_memory_utilization": share}
