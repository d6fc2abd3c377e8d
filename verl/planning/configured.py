"""From a configuration and a model's config.json to the work of its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from verl.config.devices import ranks
from verl.config.layout import own_pools, policy_placement, reference_is_base, sampler_devices
from verl.config.model_facts import look
from verl.config.schema.base import setting
from verl.engine.registry import TRAINING_ENGINES, Placement, capabilities, float_name, placement
from verl.errors import UserError
from verl.planning.devices import Device
from verl.planning.memory import layer_bytes
from verl.planning.model import ModelSize, model_size
from verl.planning.workload import Role, Sampler, Step

if TYPE_CHECKING:
    from verl.config import Config


HOST_TOKENS = (1024, 4096)
HOST_ACTIVATIONS = 2.0**29
"""Bounds of a micro-batch on a processor, and the activations aimed at (`verl.platform.cpu`)."""


@dataclass(frozen=True, slots=True)
class Workload:
    """All of a run's step.

    roles    "actor", "ref", "critic", those that are loaded; ref is the actor's own role where it is its base
    offload  role → parts of its state that go to the host while it is idle
    nodes    of the training devices; longest: most tokens of a sequence
    """

    device: Device
    step: Step
    roles: dict[str, Role]
    sampler: Sampler
    offload: dict[str, frozenset[str]]
    nodes: int
    longest: int


def workload(
    config: Config,
    model_config: Mapping[str, Any],
    device: Device,
    *,
    prompt: float | None = None,
    response: float | None = None,
) -> Workload:
    """The work of a step of reinforcement learning. prompt, response: mean tokens; None: the limits.

    UnknownModel where the model's config.json lacks a size.
    """
    arr, data, trainer = config.actor_rollout_ref, config.data, config.trainer
    model, longest = model_size(model_config), data.max_prompt_length + data.max_response_length
    actor = _role(config, "actor_rollout_ref.actor", arr.model, model, device, longest)
    roles, offload = {"actor": actor}, {"actor": _offloaded(policy_placement(config))}
    minis = math.ceil(data.train_batch_size / min(arr.actor.ppo_mini_batch_size, data.train_batch_size))
    passes = []
    bypass, reward_kl = config.algorithm.rollout_correction.bypass_mode, config.algorithm.use_kl_in_reward
    if (minis * arr.actor.ppo_epochs > 1 and not bypass) or reward_kl:
        passes.append(("old_log_prob", "actor"))
    if arr.actor.use_kl_loss or reward_kl:
        passes.append(("ref", "ref"))
        if not reference_is_base(config):
            roles["ref"] = _reference(config, model, actor)
            offload["ref"] = _offloaded(placement(arr.ref))
    if config.critic.enable and "critic" not in own_pools(config):
        passes.append(("values", "critic"))
        roles["critic"] = _critic(config, model, device, longest)
        offload["critic"] = _offloaded(placement(config.critic))
    step = Step(
        prompts=data.train_batch_size,
        responses=arr.rollout.n,
        prompt=float(prompt or data.max_prompt_length),
        response=float(response or data.max_response_length),
        minis=minis,
        epochs=arr.actor.ppo_epochs,
        passes=tuple(passes),
        shared=arr.rollout.enable_prefix_caching,
        grouped=arr.actor.use_prefix_grouper is not False,
    )
    return Workload(
        device, step, roles, _sampler(config, model, actor, device, longest), offload, trainer.nnodes, longest
    )


def _width(dtype: str | None, device: Device) -> int:
    """Bytes of a compute type; of None those of the device's choice."""
    if dtype is None:
        return 2 if not device.on_host or device.flops > 1.2 * device.full else 4
    return 4 if float_name(dtype) == "float32" else 2


def _offloaded(placed: Placement) -> frozenset[str]:
    parts = {"weights": placed.param_offload, "optimizer": placed.optimizer_offload}
    parts["gradients"] = placed.grad_offload or placed.param_offload or placed.optimizer_offload
    return frozenset(name for name, leaves in parts.items() if leaves)


def _role(config: Config, path: str, model_group: Any, model: ModelSize, device: Device, longest: int) -> Role:
    """A trained role. `path` of its group, `model_group` with its model's settings."""
    group = config.select(path)
    placed = placement(group, path)
    many = ranks(config)
    role = Role(
        model=model,
        ranks=many,
        placement=placed,
        gathers=group.strategy != "megatron" and many > 1,
        megatron=group.strategy == "megatron",
        adapter=model_group.lora_rank,
        recompute=model_group.enable_gradient_checkpointing,
        offload_activations=model_group.enable_activation_offload,
        full_logits=model_group.use_fused_kernels is False,
        width=_width(placed.dtype, device),
        on_host=device.on_host,
        streams=placed.streams,
    )
    if group.strategy == "megatron":
        granularity = setting(group, "megatron.override_transformer_config.recompute_granularity")
        whole = role.recompute is not False if granularity is None else granularity == "full"
        role = replace(role, recompute=whole)
    update = _tokens(group, "ppo", role, device, longest, config.was_set(f"{path}.ppo_max_token_len_per_gpu"))
    infer = update
    if path.endswith("actor"):
        infer = _tokens(config.actor_rollout_ref.rollout, "log_prob", role, device, longest, False)
    return replace(role, micro_tokens=update, infer_tokens=infer)


def _tokens(group: Any, prefix: str, role: Role, device: Device, longest: int, named: bool) -> int:
    """Most tokens of a micro-batch on the ranks that share it."""
    switch = "use_dynamic_bsz" if prefix == "ppo" else f"{prefix}_use_dynamic_bsz"
    rows = None if setting(group, switch) else setting(group, f"{prefix}_micro_batch_size_per_gpu")
    if rows is not None:
        return int(rows) * longest
    limit = int(setting(group, f"{prefix}_max_token_len_per_gpu", 16384)) * role.placement.sequence
    if device.on_host and not named:
        least, most = HOST_TOKENS
        per_token = layer_bytes(role) * role.model.layers
        limit = min(limit, int(max(least, min(most, HOST_ACTIVATIONS // max(1.0, per_token)))))
    return max(limit, longest)


def _reference(config: Config, model: ModelSize, actor: Role) -> Role:
    arr = config.actor_rollout_ref
    if arr.ref.model.path:
        model = _other_model(arr.ref.model.path, model)
    placed = placement(arr.ref, "actor_rollout_ref.ref")
    megatron = arr.ref.strategy == "megatron"
    return replace(actor, model=model, placement=placed, trained=False, adapter=0, megatron=megatron)


def _critic(config: Config, model: ModelSize, device: Device, longest: int) -> Role:
    group = config.critic.model
    if group.path != config.actor_rollout_ref.model.path:
        model = _other_model(group.path, model)
    return replace(_role(config, "critic", group, model, device, longest), value=True)


def _other_model(path: str | None, fallback: ModelSize) -> ModelSize:
    """Sizes of another model; those of the policy where it is not on this disk."""
    try:
        return fallback if path is None else model_size(look(path).config)
    except UserError:
        return fallback


def _sampler(config: Config, model: ModelSize, actor: Role, device: Device, longest: int) -> Sampler:
    rollout, many = config.actor_rollout_ref.rollout, ranks(config)
    engine = capabilities(rollout.name)
    pool = rollout.nnodes * rollout.n_gpus_per_node if rollout.nnodes else many
    width = _width(rollout.dtype, device) if rollout.dtype else actor.width
    tensor = sampler_devices(rollout)
    if rollout.tensor_model_parallel_size is None and engine.tensor_parallel:
        room = rollout.gpu_memory_utilization * device.memory * 0.8
        tensor = next((t for t in (1, 2, 4, 8) if model.total * width / t <= room), 8)
    strategy = config.actor_rollout_ref.actor.strategy
    shares = engine.in_place_weights and many == 1 and not rollout.nnodes
    shares = shares and strategy in TRAINING_ENGINES and TRAINING_ENGINES[strategy].shares_module
    engines = max(1, pool // (tensor * rollout.data_parallel_size))
    return Sampler(
        model=model,
        engines=engines,
        tensor=tensor,
        expert=rollout.expert_parallel_size,
        shares=shares,
        colocated=not rollout.nnodes,
        width=width,
        # A processor's cache takes memory as it is written.
        sequences=min(rollout.max_num_seqs, math.ceil(config.data.train_batch_size * rollout.n / engines))
        if device.on_host
        else rollout.max_num_seqs,
        longest=rollout.max_model_len or longest,
        share=rollout.gpu_memory_utilization * (0.5 if device.on_host else 1.0),
        sleeps=rollout.free_cache_engine,
        preallocates=not engine.in_place_weights,
        tables=2 if engine.in_place_weights and not device.on_host else 1,
        cache_width=4 if device.on_host and engine.in_place_weights else None,
        bucket=rollout.checkpoint_engine.update_weights_bucket_megabytes * 2.0**20,
    )
