"""The workers of a run: in this process for one device, on a Ray cluster for more.

In one process the policy's engine owns the weights. The embedded sampler works on the same tensors; an engine with
weights of its own receives them. The reference is a frozen engine of its own (with LoRA the policy's, its adapter off),
built only when a pass of it is needed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from verl.config import Config
from verl.config.devices import ray_address
from verl.config.layout import own_pools
from verl.engine.registry import ROLLOUT_ENGINES, TRAINING_ENGINES
from verl.engine.rollout.settings import moving_adapter
from verl.errors import UserError
from verl.platform import detect
from verl.platform.network import check_reachable
from verl.tracking.hooks import RunHooks
from verl.tracking.profiler import open_profiler
from verl.weight_sync.sender import InProcessSync, StreamedSync, WeightSync
from verl.workers import build
from verl.workers.cluster_needs import no_cluster
from verl.workers.group import DirectCalls, WorkerGroup
from verl.workers.roles import Role, WorkerSet, roles_of, update_plan
from verl.workers.training_worker import Worker


def wants_ray(config: Config) -> bool:
    """True for more than one device, and where a cluster's address is given."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    many = trainer.nnodes * trainer.n_gpus_per_node > 1 or rollout.nnodes > 0
    return many or bool(ray_address(config) or own_pools(config))


def check_cluster(config: Config) -> None:
    """UserError if a cluster's address was given and nothing listens there; Ray itself would try for five minutes."""
    address = ray_address(config)
    try:
        check_reachable(address)
    except ConnectionError as error:
        raise no_cluster(address, error) from error


def start_workers(config: Config, tokenizer: Any, total_steps: int, hooks: RunHooks) -> WorkerSet:
    """The workers of a run, wherever they belong. UserError for what cannot be had."""
    if not wants_ray(config):
        return start_here(config, tokenizer, total_steps)
    workers = _on_cluster(config, hooks, total_steps)
    detect("cpu").seed(config.trainer.seed)  # in one process the engine does it; starting Ray draws numbers
    return workers


def start_samplers(config: Config, tokenizer: Any, hooks: RunHooks) -> WorkerSet:
    """Sampling engines alone, on the devices of `trainer.*`, with the weights of the model's files. UserError as
    above."""
    if wants_ray(config):
        return _on_cluster(config, hooks)
    platform = detect(config.trainer.device)
    return WorkerSet({}, build.own_sampler(config, tokenizer, platform), None, platform.describe())


def _on_cluster(config: Config, hooks: RunHooks, total_steps: int | None = None) -> WorkerSet:
    if importlib.util.find_spec("ray") is None:
        raise UserError(
            "more than one device, or a cluster's address, needs Ray, which is not installed here: "
            "pip install 'verl[ray]', or set trainer.nnodes=1 trainer.n_gpus_per_node=1 and unset RAY_ADDRESS"
        )
    from verl.workers.ray.build import start_on_cluster

    return start_on_cluster(config, hooks, total_steps)


def build_here(
    config: Config, total_steps: int, shared: bool = False
) -> tuple[Worker, Mapping[str, Any], dict[str, Role]]:
    """Every role on this process's device: the worker, what its `build` returned, the roles."""
    worker = Worker(config)
    facts = worker.build(total_steps, shared)
    group = WorkerGroup(DirectCalls(worker), [facts], plan=update_plan(config))
    return worker, facts, roles_of(group, config)


def start_here(config: Config, tokenizer: Any, total_steps: int) -> WorkerSet:
    """Load the model and place every role on this process's device. UserError for a model that cannot be used."""
    record = ROLLOUT_ENGINES.named(config.actor_rollout_ref.rollout.name)
    training = TRAINING_ENGINES.named(config.actor_rollout_ref.actor.strategy)
    shared = record.capabilities.in_place_weights and training.shares_module
    worker, facts, roles = build_here(config, total_steps, shared)
    engine: Any = worker.engine()
    sampler: Any
    sync: WeightSync
    if shared:
        sampler = record.attach(config, tokenizer, engine)
        sync = InProcessSync(engine, sampler)
    else:
        sampler = record.build(config, tokenizer, worker.platform)
        sync = StreamedSync(engine, sampler, adapter=moving_adapter(config) is not None)
    profiler = open_profiler(config, roles=(*roles, "rollout"), rank=0, platform=worker.platform)
    return WorkerSet(roles, sampler, sync, facts["device"], profiler=profiler)
