"""Batches, lengths, devices and parallel sizes; and the plan of batches."""

from __future__ import annotations

import math
from typing import Any

from verl.config.layout import (
    divisors,
    model_problems,
    own_pools,
    policy_placement,
    rank_problems,
    reference_is_base,
)
from verl.config.problems import counted
from verl.config.rules.context import ACTOR, Check
from verl.config.schema.trainer import EACH_EPOCH
from verl.engine.registry import Placement, capabilities, placement

_REF = "actor_rollout_ref.ref"


def check(c: Check) -> None:
    """All rules on sizes, and their notices."""
    if c.rollout is not None:
        _lengths(c)
        _engine_layout(c)
    if c.ppo:
        _batches(c)
        _overlong(c)
        _pools(c)
        _policy_layout(c)
    elif c.cfg.entry == "eval":
        _overlong(c)
    elif c.cfg.entry == "sft":
        _ranks(c, policy_placement(c.cfg), own_model=True)
        if c.cfg.data.use_dynamic_bsz and c.cfg.data.micro_batch_size_per_gpu:
            size = c.at("data.micro_batch_size_per_gpu")
            c.notice(f"no effect: {size}: data.use_dynamic_bsz=True packs by token budget")
        for key in ("trainer.save_freq", "trainer.test_freq"):
            if isinstance(c.cfg.select(key), str) and c.cfg.select(key) != EACH_EPOCH:
                c.refuse(key, f"a number of steps, or {EACH_EPOCH}")


def _lengths(c: Check) -> None:
    rollout, facts, key = c.rollout, c.facts, c.rollout_key
    prompt, response = f"{key}.prompt_length", f"{key}.response_length"
    if c.ppo and rollout.prompt_length == c.cfg.data.max_prompt_length:
        prompt = "data.max_prompt_length"
    if c.ppo and rollout.response_length >= c.cfg.data.max_response_length:
        response = "data.max_response_length"
    longest = c.cfg.select(prompt) + c.cfg.select(response)
    text = f"{c.at(prompt)} + {c.at(response)}"
    if facts is not None and facts.context is not None and longest > facts.context:
        c.refuse(text, f"= {longest} tokens, the model's context is {facts.context}; lower one of them")
    if longest > rollout.max_model_len:
        c.refuse(text, f"= {longest} tokens, {c.at(f'{key}.max_model_len')}; raise it or leave it null")
    if c.ppo and rollout.prompt_length < c.cfg.data.max_prompt_length:
        c.refuse(f"{key}.prompt_length", f"prompts may have {c.at('data.max_prompt_length')}; leave it unset")
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < rollout.max_model_len:
        message = f"without enable_chunked_prefill a prompt is not cut; raise it to {rollout.max_model_len}"
        c.refuse(f"{key}.max_num_batched_tokens", f"{message}, or leave it unset")


def _engine_layout(c: Check) -> None:
    """How an engine's devices fit the pool, the node and the model."""
    rollout, facts, key = c.rollout, c.facts, c.rollout_key
    engine = capabilities(rollout.name)
    tensor = rollout.tensor_model_parallel_size or 1
    size = tensor * rollout.pipeline_model_parallel_size * rollout.data_parallel_size
    place = rollout if c.ppo and rollout.nnodes > 0 else c.trainer
    per_node, pool = place.n_gpus_per_node, place.nnodes * place.n_gpus_per_node
    at = f"{key}.tensor_model_parallel_size={tensor}"
    if facts is not None and facts.heads and facts.heads % tensor:
        heads = f"the model's {facts.heads} attention heads; use one of {divisors(facts.heads)}"
        c.refuse(at, f"does not divide {heads}")
    if tensor > per_node:
        pool_key = "trainer" if place is c.trainer else key
        message = f"more than the {per_node} devices of the node ({pool_key}.n_gpus_per_node); lower it"
        c.refuse(at, message + ("" if place.nnodes == 1 else ": an engine stays on one node"))
    elif not engine.tensor_parallel and tensor > 1 and c.ppo:
        c.notice(f"{at}: a {rollout.name} engine runs on one device; there are more engines")
    elif pool % size or per_node % size:
        message = f"an engine of {size} devices does not divide the pool of {pool}"
        product = f"{key}: tensor × pipeline × data parallel = {size}"
        c.refuse(product, f"{message}; use one of {divisors(per_node)}")
    expert, spread = rollout.expert_parallel_size, tensor * rollout.data_parallel_size
    if expert > 1 and facts is not None and not facts.experts:
        c.refuse(f"{key}.expert_parallel_size", "the model has no experts; set 1")
    elif expert > 1 and expert != spread:
        c.refuse(f"{key}.expert_parallel_size", f"must be tensor × data parallel = {spread}, or 1")
    if rollout.pipeline_model_parallel_size > 1 and engine.tensor_parallel:
        message = f"{rollout.name} is not run in pipeline; set 1 and raise tensor_model_parallel_size"
        c.refuse(f"{key}.pipeline_model_parallel_size", message)


def _batches(c: Check) -> None:
    data, actor = c.cfg.data, c.cfg.actor_rollout_ref.actor
    size, mini = data.train_batch_size, actor.ppo_mini_batch_size
    at, batch = f"{ACTOR}.ppo_mini_batch_size={mini}", f"data.train_batch_size={size}"
    if mini > size:
        if c.was_set(f"{ACTOR}.ppo_mini_batch_size"):
            c.notice(f"{at} > {batch}: one update on the batch")
    elif size % mini:
        parts = math.ceil(size / mini)
        c.notice(f"{batch} is no multiple of {at}: {parts} mini-batches of {_each(size, parts)} prompts")
    longest = data.max_prompt_length + data.max_response_length
    budget = actor.ppo_max_token_len_per_gpu * actor.ulysses_sequence_parallel_size
    if actor.use_dynamic_bsz and longest > budget:
        above = f"the longest sequence ({longest} tokens) is above the token budget ({budget})"
        c.notice(f"{above}; it goes alone")
    if not data.val_files and c.trainer.val_only:
        c.refuse("trainer.val_only=True, data.val_files", "there is nothing to validate on; name the files")
    if not data.val_files and c.trainer.test_freq > 0:
        c.notice(f"{c.at('trainer.test_freq')} without data.val_files: there is nothing to validate on")


def _overlong(c: Check) -> None:
    kwargs = c.cfg.reward_model.reward_kwargs
    limit = c.cfg.data.max_response_length if c.ppo else kwargs.max_resp_len
    buffer, key = kwargs.overlong_buffer_cfg, "reward_model.reward_kwargs"
    if not buffer.enable:
        return
    if kwargs.max_resp_len is None:
        c.refuse(f"{key}.max_resp_len", "the penalty needs it: data.max_response_length of the run")
        return
    most = c.at(f"{key}.max_resp_len")
    if not 0 < buffer.len <= kwargs.max_resp_len:
        c.refuse(f"{key}.overlong_buffer_cfg.len", f"must be above 0 and at most {most}")
    if kwargs.max_resp_len != limit:
        c.notice(f"{most} is not data.max_response_length={limit}")


def _pools(c: Check) -> None:
    if not c.cfg.actor_rollout_ref.hybrid_engine and c.rollout.nnodes == 0:
        needed = "needs a pool for sampling: actor_rollout_ref.rollout.nnodes and n_gpus_per_node"
        c.refuse("actor_rollout_ref.hybrid_engine", needed)
    if c.cfg.reward_model.enable_resource_pool and not c.cfg.reward_model.nnodes:
        c.refuse("reward_model.enable_resource_pool=True, reward_model.nnodes=0", "set its size in nodes")


def _policy_layout(c: Check) -> None:
    """Sequence parallel, shard groups, Megatron's sizes, of the actor and its reference.

    The reference gets the rows of the actor's layout: ranks that share its work must have the same ones.
    """
    actor, ref = c.cfg.actor_rollout_ref.actor, c.cfg.actor_rollout_ref.ref
    of_actor, of_ref = policy_placement(c.cfg), placement(ref, _REF)
    _ranks(c, of_actor, own_model=True)
    rows, ref_rows = of_actor.ranks_per_row, of_ref.ranks_per_row
    if rows % ref_rows:
        c.refuse(
            f"{_REF}.ulysses_sequence_parallel_size",
            f"{ref_rows} devices share a sequence of the reference and {rows} one of the actor, which gets the same "
            f"rows: {ref_rows} must divide {rows}; leave it as the actor's",
        )
    needs_reference = (actor.use_kl_loss or c.cfg.algorithm.use_kl_in_reward) and not reference_is_base(c.cfg)
    if needs_reference and (ref.model.path or of_ref.sizes != of_actor.sizes):
        _ranks(c, of_ref, own_model=not ref.model.path)
    if c.cfg.critic.enable:
        _critic_layout(c, rows)


def _critic_layout(c: Check, together: int) -> None:
    """A critic on the policy's ranks has their rows, which as many of them share as share the actor's."""
    critic, pool = placement(c.cfg.critic, "critic"), own_pools(c.cfg).get("critic")
    if pool is None and critic.ranks_per_row != together:
        message = (
            f"= {critic.ranks_per_row} devices share a row of the critic and {together} one of the actor on the same "
            "devices; make them equal, or give the critic devices of its own (critic.nnodes)"
        )
        c.refuse(f"{critic.at('sequence')} × {critic.at('tensor')}", message)
    for key, message in rank_problems(critic, pool.devices) if pool is not None else ():
        c.refuse(key, f"{message} (its ranks: {pool})")


def _ranks(c: Check, role: Placement, *, own_model: bool) -> None:
    """Do they fit the ranks, and the run's model if it is the role's own?"""
    for key, message in rank_problems(role, c.world):
        c.refuse(key, message)
    if own_model and c.facts is not None:
        model = c.facts.text | {"num_attention_heads": c.facts.heads, "experts": c.facts.experts}
        for key, message in model_problems(role, model):
            c.refuse(key, message)


# ---- the plan ----


def plan(c: Check) -> list[str]:
    """The batches of a run in words: prompts → trajectories → updates → micro-batches."""
    if not c.ppo:
        return _other_plan(c)
    data, actor, n = c.cfg.data, c.cfg.actor_rollout_ref.actor, c.rollout.n
    size = data.train_batch_size
    parts = math.ceil(size / min(actor.ppo_mini_batch_size, size))
    large = math.ceil(size / parts) * n
    ranks = max(1, c.world // policy_placement(c.cfg).ranks_per_row)
    epochs = actor.ppo_epochs
    lines = [
        _steps(c),
        f"each step: {size} prompts × {n} responses = {size * n} trajectories "
        f"(≤ {data.max_prompt_length} + {data.max_response_length} tokens)",
        f"→ {counted(parts * epochs, 'update')} ({parts} mini-batches of {_each(size, parts, n)} responses "
        f"× {counted(epochs, 'epoch')})",
        f"→ micro-batches on each of {counted(ranks, 'rank')}: {_micro(actor, large, ranks)}",
    ]
    only = c.trainer.val_only
    if data.val_files and (c.trainer.test_freq > 0 or c.trainer.val_before_train or only):
        rows = c.rows_used("val")
        prompts = f"{rows} prompts" if rows else "validation prompts"
        lines.append(f"validation: {prompts} × {c.rollout.val_kwargs.n}")
    return lines[-1:] if only else lines


def _each(size: int, parts: int, n: int = 1) -> str:
    """How large the parts of a batch of `size` times `n` are."""
    small, large = size // parts * n, math.ceil(size / parts) * n
    return f"{large}" if small == large else f"{small} to {large}"


def _steps(c: Check) -> str:
    rows, size = c.rows_used("train"), c.cfg.data.train_batch_size
    total, epochs = c.trainer.total_training_steps, c.trainer.total_epochs
    if total is not None:
        return f"{total} steps" + (f" over {rows} rows" if rows else "")
    if not rows:
        return f"{epochs} epochs"
    epoch = f"{rows} rows, {counted(rows // size, 'step')} an epoch × {counted(epochs, 'epoch')}"
    return f"{epoch} = {counted(rows // size * epochs, 'step')}"


def _micro(actor: Any, responses: int, ranks: int) -> str:
    rows = actor.ppo_micro_batch_size_per_gpu
    if actor.use_dynamic_bsz or rows is None:
        budget = actor.ppo_max_token_len_per_gpu * actor.ulysses_sequence_parallel_size
        return f"up to {budget} tokens each, packed"
    share = math.ceil(responses / ranks)
    return f"{math.ceil(share / rows)} of {min(rows, share)} responses per mini-batch"


def _other_plan(c: Check) -> list[str]:
    data = c.cfg.data
    if c.cfg.entry == "sft":
        if c.trainer.val_only:
            return [f"validation: {c.rows_used('val') or 'all'} rows"]
        batch = f"{data.train_batch_size} sequences of at most {data.max_length} tokens"
        return [_steps(c), f"each step: {batch}"]
    if c.cfg.entry == "generation":
        prompts = f"{c.rows.get('data.path', 'all')} prompts"
        return [f"{prompts} × {c.rollout.n} responses, {data.batch_size} at a time"]
    return []
