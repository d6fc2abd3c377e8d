"""Batches, lengths, devices and parallel sizes; and the plan of batches."""

from __future__ import annotations

import math
from typing import Any

from verl.config.layout import MODEL_KEYS, Sizes, divisors, model_problems, rank_problems
from verl.config.rollout_engines import CAPABILITIES
from verl.config.rules.context import Check

_ACTOR = "actor_rollout_ref.actor"


def check(c: Check) -> None:
    """All rules on sizes (config.md §16, 7 to 12, 18, and their notices)."""
    if c.rollout is not None:
        _lengths(c)
        _engine_layout(c)
    if c.ppo:
        _batches(c)
        _overlong(c)
        _pools(c)
    _training_layout(c)


def _lengths(c: Check) -> None:
    rollout, facts = c.rollout, c.facts
    longest = rollout.prompt_length + rollout.response_length
    named = (
        ("data.max_prompt_length", "data.max_response_length")
        if c.ppo
        else ("prompt_length", "response_length")
    )
    text = f"{named[0]}={rollout.prompt_length} + {named[1]}={rollout.response_length}"
    if facts is not None and facts.context is not None and longest > facts.context:
        c.refuse(text, f"= {longest} tokens, the model's context is {facts.context}; lower one of them")
    if longest > rollout.max_model_len:
        key = f"{c.rollout_key}.max_model_len"
        c.refuse(text, f"= {longest} tokens, {key}={rollout.max_model_len}; raise it or leave it null")
    if c.ppo and rollout.prompt_length < c.cfg.data.max_prompt_length:
        c.refuse(
            f"{c.rollout_key}.prompt_length={rollout.prompt_length}",
            f"prompts may have data.max_prompt_length={c.cfg.data.max_prompt_length} tokens; leave it unset",
        )
    batched = rollout.max_num_batched_tokens
    if not rollout.enable_chunked_prefill and batched < rollout.max_model_len:
        c.refuse(
            f"{c.rollout_key}.max_num_batched_tokens={batched}",
            f"without enable_chunked_prefill a prompt is not cut; raise it to {rollout.max_model_len}, or leave it unset",
        )


def _engine_layout(c: Check) -> None:
    """Rules 9 and 10: how an engine's devices fit the pool, the node and the model."""
    rollout, facts, key = c.rollout, c.facts, c.rollout_key
    engine = CAPABILITIES[rollout.name]
    tensor = rollout.tensor_model_parallel_size or 1
    size = tensor * rollout.pipeline_model_parallel_size * rollout.data_parallel_size
    separate = c.ppo and rollout.nnodes > 0
    per_node = rollout.n_gpus_per_node if separate else c.trainer.n_gpus_per_node
    nodes = rollout.nnodes if separate else c.trainer.nnodes
    pool = nodes * per_node
    if facts is not None and facts.heads and facts.heads % tensor:
        message = (
            f"does not divide the model's {facts.heads} attention heads; use one of {divisors(facts.heads)}"
        )
        c.refuse(f"{key}.tensor_model_parallel_size={tensor}", message)
    if tensor > per_node:
        message = f"more than the {per_node} devices of the node (trainer.n_gpus_per_node); lower it"
        message += "" if nodes == 1 else ": an engine stays on one node"
        c.refuse(f"{key}.tensor_model_parallel_size={tensor}", message)
    elif not engine.tensor_parallel and tensor > 1 and c.ppo:
        c.notice(
            f"{key}.tensor_model_parallel_size={tensor}: a {rollout.name} engine runs on one device; there are more engines"
        )
    elif pool % size or per_node % size:
        message = (
            f"an engine of {size} devices does not divide the pool of {pool}; use one of {divisors(per_node)}"
        )
        c.refuse(f"{key}: tensor × pipeline × data parallel = {size}", message)
    expert = rollout.expert_parallel_size
    if expert > 1:
        if facts is not None and not facts.experts:
            c.refuse(f"{key}.expert_parallel_size={expert}", "the model has no experts; set 1")
        elif expert != tensor * rollout.data_parallel_size:
            message = f"must be tensor × data parallel = {tensor * rollout.data_parallel_size}, or 1"
            c.refuse(f"{key}.expert_parallel_size={expert}", message)
    if rollout.pipeline_model_parallel_size > 1 and engine.tensor_parallel:
        message = f"{rollout.name} is not run in pipeline; set 1 and raise tensor_model_parallel_size"
        c.refuse(f"{key}.pipeline_model_parallel_size={rollout.pipeline_model_parallel_size}", message)


def _batches(c: Check) -> None:
    data, actor = c.cfg.data, c.cfg.actor_rollout_ref.actor
    size, mini = data.train_batch_size, actor.ppo_mini_batch_size
    if mini > size:
        if c.was_set(f"{_ACTOR}.ppo_mini_batch_size"):
            c.notice(
                f"{_ACTOR}.ppo_mini_batch_size={mini} > data.train_batch_size={size}: one update on the batch"
            )
    elif size % mini:
        parts = math.ceil(size / mini)
        c.notice(
            f"data.train_batch_size={size} is no multiple of {_ACTOR}.ppo_mini_batch_size={mini}: "
            f"{parts} mini-batches of {size // parts} to {math.ceil(size / parts)} prompts"
        )
    longest = data.max_prompt_length + data.max_response_length
    budget = actor.ppo_max_token_len_per_gpu * actor.ulysses_sequence_parallel_size
    if actor.use_dynamic_bsz and longest > budget:
        c.notice(
            f"the longest sequence ({longest} tokens) is above the token budget ({budget}); it goes alone"
        )
    if c.trainer.val_only and not data.val_files:
        c.refuse("trainer.val_only=True, data.val_files", "there is nothing to validate on; name the files")
    validates = c.trainer.test_freq > 0
    if validates and not data.val_files:
        c.notice(
            f"trainer.test_freq={c.trainer.test_freq} without data.val_files: there is nothing to validate on"
        )


def _overlong(c: Check) -> None:
    kwargs = c.cfg.reward_model.reward_kwargs
    buffer = kwargs.overlong_buffer_cfg
    key = "reward_model.reward_kwargs"
    if buffer.enable and not 0 < buffer.len <= kwargs.max_resp_len:
        message = f"must be above 0 and at most {key}.max_resp_len={kwargs.max_resp_len}"
        c.refuse(f"{key}.overlong_buffer_cfg.len={buffer.len}", message)
    limit = c.cfg.data.max_response_length
    if buffer.enable and kwargs.max_resp_len != limit:
        c.notice(f"{key}.max_resp_len={kwargs.max_resp_len} is not data.max_response_length={limit}")


def _pools(c: Check) -> None:
    reward, rollout = c.cfg.reward_model, c.rollout
    if reward.enable_resource_pool and (reward.nnodes < 1 or reward.n_gpus_per_node < 1):
        message = "needs its size: reward_model.nnodes=1 and reward_model.n_gpus_per_node"
        c.refuse("reward_model.enable_resource_pool=True", message)
    if not c.cfg.actor_rollout_ref.hybrid_engine and rollout.nnodes == 0:
        message = "needs a pool for sampling: actor_rollout_ref.rollout.nnodes and n_gpus_per_node"
        c.refuse("actor_rollout_ref.hybrid_engine=False", message)


def _training_layout(c: Check) -> None:
    """Rules 11 and 12: sequence parallel, shard groups, Megatron's sizes."""
    if c.ppo:
        actor = c.cfg.actor_rollout_ref.actor
        _ranks(c, _sizes(actor, f"{_ACTOR}."), own_model=True)
        _reference_layout(c, actor, c.cfg.actor_rollout_ref.ref)
        if actor.strategy == "megatron":
            _megatron(c, f"{_ACTOR}.megatron", actor.megatron)
    elif c.cfg.entry == "sft":
        engine = c.cfg.engine
        split, cut = engine.ulysses_sequence_parallel_size, engine.tensor_parallel_size
        _ranks(c, Sizes(split, cut, engine.fsdp_size, "engine.", ""), own_model=True)
        if engine.strategy == "megatron":
            _megatron(c, "engine", engine)


def _sizes(role: Any, keys: str) -> Sizes:
    parallel = role.fsdp_config
    return Sizes(role.ulysses_sequence_parallel_size, parallel.tensor_parallel_size, parallel.fsdp_size, keys)


def _reference_layout(c: Check, actor: Any, ref: Any) -> None:
    """The reference gets the rows of the actor's layout: who shares its work must have the same ones."""
    ours, theirs = (
        role.ulysses_sequence_parallel_size * role.fsdp_config.tensor_parallel_size for role in (actor, ref)
    )
    if ours % theirs:
        c.refuse(
            "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
            f"{theirs} devices share a sequence of the reference and {ours} one of the actor, which gets the same rows: "
            f"{theirs} must divide {ours}; leave it as the actor's",
        )
    wanted = actor.use_kl_loss or c.cfg.algorithm.use_kl_in_reward
    adapted = c.model.lora_rank > 0 or c.model.lora_adapter_path
    if not wanted or (adapted and not ref.model.path):  # then it is the actor's base
        return
    keys = "actor_rollout_ref.ref."
    if _sizes(ref, "") != _sizes(actor, "") or ref.model.path:
        _ranks(c, _sizes(ref, keys), own_model=not ref.model.path)


def _ranks(c: Check, sizes: Sizes, *, own_model: bool) -> None:
    """Do they fit the ranks, and the run's model if it is the role's own?"""
    for key, message in rank_problems(sizes, c.world):
        c.refuse(key, message)
    if own_model and c.facts is not None:
        model = {key: c.facts.text.get(key) for key in MODEL_KEYS}
        model |= {"num_attention_heads": c.facts.heads, "experts": c.facts.experts}
        for key, message in model_problems(sizes, model):
            c.refuse(key, message)


def _megatron(c: Check, key: str, m: Any) -> None:
    model = m.tensor_model_parallel_size * m.pipeline_model_parallel_size * m.context_parallel_size
    virtual = m.virtual_pipeline_model_parallel_size
    if c.world % model:
        equation = f"tensor × pipeline × context = {model}"
        c.refuse(f"{key}: {equation}", f"does not divide the {c.world} ranks")
    if virtual and m.pipeline_model_parallel_size == 1:
        c.refuse(
            f"{key}.virtual_pipeline_model_parallel_size={virtual}", "needs pipeline_model_parallel_size > 1"
        )
    layers = c.facts.layers if c.facts is not None else None
    chunks = m.pipeline_model_parallel_size * (virtual or 1)
    uneven = any(name.startswith(("num_layers_in", "account_for")) for name in m.override_transformer_config)
    if layers and layers % chunks and not uneven:
        message = f"{layers} layers over {chunks} chunks; set num_layers_in_first_pipeline_stage or …_last_…"
        c.refuse(f"{key}.pipeline_model_parallel_size={m.pipeline_model_parallel_size}", message)
    experts = m.expert_model_parallel_size
    count = c.facts.experts if c.facts is not None else 0
    if experts > 1 and c.facts is not None and (not count or count % experts):
        message = (
            f"does not divide the model's {count} experts" if count else "the model has no experts; set 1"
        )
        c.refuse(f"{key}.expert_model_parallel_size={experts}", message)
    if m.sequence_parallel and m.tensor_model_parallel_size == 1:
        c.notice(f"{key}.sequence_parallel is off with tensor_model_parallel_size=1")


def plan(c: Check) -> list[str]:
    """The batches of a run in words: prompts → trajectories → updates → micro-batches."""
    if not c.ppo:
        return _other_plan(c)
    data, actor, n = c.cfg.data, c.cfg.actor_rollout_ref.actor, c.rollout.n
    size = data.train_batch_size
    parts = math.ceil(size / min(actor.ppo_mini_batch_size, size))
    updates = parts * actor.ppo_epochs
    small, large = size // parts * n, math.ceil(size / parts) * n
    each = f"{large}" if small == large else f"{small} to {large}"
    ranks = max(1, c.world // (actor.ulysses_sequence_parallel_size * actor.fsdp_config.tensor_parallel_size))
    lines = [
        _steps(c),
        f"each step: {size} prompts × {n} answers = {size * n} trajectories "
        f"(≤ {data.max_prompt_length} + {data.max_response_length} tokens)",
        f"→ {updates} update{'s' if updates > 1 else ''} ({parts} mini-batches of {each} answers × "
        f"{actor.ppo_epochs} epoch{'s' if actor.ppo_epochs > 1 else ''})",
        f"→ micro-batches on each of {ranks} rank{'s' if ranks > 1 else ''}: {_micro(actor, large, ranks)}",
    ]
    if c.trainer.test_freq > 0 or c.trainer.val_before_train:
        rows = c.rows.get("data.val_files")
        if rows and data.val_max_samples >= 0:
            rows = min(rows, data.val_max_samples)
        prompts = f"{rows} prompts" if rows else "validation prompts"
        if data.val_files:
            lines.append(f"validation: {prompts} × {c.rollout.val_kwargs.n}")
    return lines


def _train_rows(c: Check) -> int | None:
    """Rows of the training files that a run uses, as far as they are known."""
    rows, most = c.rows.get("data.train_files"), c.cfg.data.train_max_samples
    return min(rows, most) if rows and most >= 0 else rows


def _steps(c: Check) -> str:
    rows, size = _train_rows(c), c.cfg.data.train_batch_size
    total, epochs = c.trainer.total_training_steps, c.trainer.total_epochs
    if total is not None:
        return f"{total} steps" + (f" over {rows} rows" if rows else "")
    if not rows:
        return f"{epochs} epochs"
    each, total = rows // size, rows // size * epochs
    return (
        f"{rows} rows, {each} step{'' if each == 1 else 's'} an epoch × {epochs} epoch{'' if epochs == 1 else 's'} = "
        f"{total} step{'' if total == 1 else 's'}"
    )


def _micro(actor: Any, answers: int, ranks: int) -> str:
    rows = actor.ppo_micro_batch_size_per_gpu
    if actor.use_dynamic_bsz or rows is None:
        budget = actor.ppo_max_token_len_per_gpu * actor.ulysses_sequence_parallel_size
        return f"up to {budget} tokens each, packed"
    share = math.ceil(answers / ranks)
    return f"{math.ceil(share / rows)} of {min(rows, share)} answers per mini-batch"


def _other_plan(c: Check) -> list[str]:
    data = c.cfg.data
    if c.cfg.entry == "sft":
        rows, size = _train_rows(c), data.train_batch_size
        steps = f"{rows} rows, {rows // size} steps an epoch" if rows else f"{size} rows a step"
        return [f"{steps} × {c.trainer.total_epochs} epochs, sequences of at most {data.max_length} tokens"]
    if c.cfg.entry == "generation":
        return [
            f"{c.rows.get('data.path', 'all')} prompts × {data.n_samples} answers, {data.batch_size} at a time"
        ]
    return []
