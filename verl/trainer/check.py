"""Batches, lengths, devices, parallel sizes, staleness, folders, resuming; and the plan of batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from verl.config.devices import ray_address
from verl.config.layout import (
    divisors,
    own_pools,
    policy_placement,
    rank_problems,
    reference_is_base,
    sampler_devices,
)
from verl.config.model_facts import ModelFacts
from verl.config.problems import counted
from verl.config.report import ACTOR, ROLLOUT, Report
from verl.config.schema.base import Root
from verl.config.schema.trainer import EACH_EPOCH
from verl.engine.registry import TRAINING_ENGINES, Placement, capabilities, placement

_REF = "actor_rollout_ref.ref"
# Keys of `trainer.` that belong to sampling, which supervised training does not do.
_OF_SAMPLING = (
    "critic_warmup", "max_critic_ckpt_to_keep", "rollout_data_dir", "validation_data_dir", "log_val_generations",
    "max_staleness", "weight_sync_every", "max_steps_per_version", "partial_rollout", "logprob_diff_limit",
    "verify_weight_sync", "sync_proof", "journal",
)  # fmt: skip


def check(config: Root, report: Report) -> None:
    """Check sizes against each other, the devices and the model, and where the run writes; sets `report.plan`."""
    if report.trainer is not None:
        _folders(report)
    if report.rollout is not None:
        _lengths(report)
        _engine_layout(report)
    if report.ppo:
        for rules in (_batches, _pools, _policy_layout, _staleness, _recorded, _without_effect):
            rules(report)
    elif config.entry == "sft":
        _ranks(report, policy_placement(report.config), report.config.engine.strategy, own_model=True)
        if report.config.data.use_dynamic_bsz and report.config.data.micro_batch_size_per_gpu:
            size = report.at("data.micro_batch_size_per_gpu")
            report.notice(f"no effect: {size}: data.use_dynamic_bsz=True packs by token budget")
        if unread := [report.at(k) for k in (f"trainer.{name}" for name in _OF_SAMPLING) if report.was_set(k)]:
            report.notice(f"no effect: {', '.join(unread)}: supervised training samples nothing")
        if config.select("preference.loss"):
            _preference(report)
        for key in ("trainer.save_freq", "trainer.test_freq"):
            if isinstance(config.select(key), str) and config.select(key) != EACH_EPOCH:
                report.refuse(key, f"a number of steps, or {EACH_EPOCH}")
    if config.entry in ("ppo", "sft"):
        _multi_token(report)
        _resume(report)


def _preference(report: Report) -> None:
    """What pairs do not go with, and keys that their loss does not read."""
    config, loss = report.config, report.config.preference.loss
    if config.engine.strategy == "megatron":
        report.refuse("preference.loss with engine.strategy=megatron", "is not in this release; use fsdp")
    unread = {"beta": ("reward",), "label_smoothing": ("ipo", "simpo", "reward")}
    unread["gamma"] = ("dpo", "dpo_norm", "ipo", "reward")
    for name, losses in unread.items():
        if loss in losses and report.was_set(key := f"preference.{name}"):
            report.notice(f"no effect: {report.at(key)}: preference.loss={loss}")


def _multi_token(report: Report) -> None:
    """What the layer that predicts a token further (`model.mtp`) does not go with."""
    config, key = report.config, "actor_rollout_ref.model.mtp" if report.ppo else "model.mtp"
    model, actor = config.select(key.removesuffix(".mtp")), config.select(ACTOR) if report.ppo else config.engine
    drafts, mtp = report.ppo and model.mtp.enable_rollout, model.mtp
    if not mtp.enable:
        for name in ("enable_train", "enable_rollout"):
            if mtp[name]:
                report.notice(f"no effect: {report.at(f'{key}.{name}')}: {key}.enable=False")
        return
    if actor.strategy == "megatron":
        report.refuse(f"{key}.enable=True", "strategy=megatron leaves such layers out; use fsdp2")
    if model.lora_rank or model.lora_adapter_path:
        report.refuse(f"{key}.enable=True", "with LoRA such a layer is not trained and not sent; set it to False")
    if report.ppo and actor.router_replay.mode != "disabled":
        report.refuse(f"{key}.enable=True", "routes of such a layer are not recorded; set router_replay.mode=disabled")
    if drafts and report.rollout.name != "vllm":
        report.refuse(
            f"{key}.enable_rollout=True", f"the {report.rollout.name} engine does not draft with it; vllm does"
        )
    elif drafts and config.select("trainer.device") == "cpu":
        report.lacks(f"{key}.enable_rollout=True", "on a CPU vLLM draws wrongly beside drafts; set it to False")
    elif drafts and report.facts is not None and report.facts.vision:
        report.refuse(f"{key}.enable_rollout=True", "beside drafts vLLM cannot forbid the tokens that stand for images")
    elif drafts and (report.rollout.min_p or report.rollout.val_kwargs.min_p):
        report.refuse(f"{report.rollout_key}.min_p", f"vLLM has no min_p beside drafts ({key}.enable_rollout); set 0")


def _recorded(report: Report) -> None:
    """What recorded steps cannot stand for."""
    trainer, algorithm = report.config.trainer, report.config.algorithm
    ahead = trainer.max_staleness or trainer.weight_sync_every > 1
    if report.config.skip.rollout.enable and (
        ahead or algorithm.filter_groups.enable or algorithm.adv_estimator == "remax"
    ):
        why = "steps are recorded where each one is sampled by itself: without max_staleness, filter_groups and remax"
        report.refuse("skip.rollout.enable=True", why)


def _lengths(report: Report) -> None:
    rollout, facts, key = report.rollout, report.facts, report.rollout_key
    prompt, response = f"{key}.prompt_length", f"{key}.response_length"
    if report.ppo and rollout.prompt_length == report.config.data.max_prompt_length:
        prompt = "data.max_prompt_length"
    if report.ppo and rollout.response_length >= report.config.data.max_response_length:
        response = "data.max_response_length"
    longest = report.config.select(prompt) + report.config.select(response)
    text = f"{report.at(prompt)} + {report.at(response)}"
    if facts is not None and facts.context is not None and longest > facts.context:
        report.refuse(text, f"= {longest} tokens, the model's context is {facts.context}; lower one of them")
    if longest > rollout.max_model_len:
        report.refuse(text, f"= {longest} tokens, {report.at(f'{key}.max_model_len')}; raise it or leave it null")
    if report.ppo and rollout.prompt_length < report.config.data.max_prompt_length:
        report.refuse(f"{key}.prompt_length", f"prompts may have {report.at('data.max_prompt_length')}; leave it unset")
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < rollout.max_model_len:
        message = f"without enable_chunked_prefill a prompt is not cut; raise it to {rollout.max_model_len}"
        report.refuse(f"{key}.max_num_batched_tokens", f"{message}, or leave it unset")


def _engine_layout(report: Report) -> None:
    """How an engine's devices fit the pool, the node and the model."""
    rollout, facts, key = report.rollout, report.facts, report.rollout_key
    engine = capabilities(rollout.name)
    tensor = rollout.tensor_model_parallel_size or 1
    copies, one = rollout.data_parallel_size, sampler_devices(rollout)
    size = tensor * rollout.pipeline_model_parallel_size * copies
    place = rollout if report.ppo and rollout.nnodes > 0 else report.trainer
    per_node, pool = place.n_gpus_per_node, place.nnodes * place.n_gpus_per_node
    at = f"{key}.tensor_model_parallel_size={tensor}"
    if facts is not None and facts.heads and facts.heads % tensor:
        heads = f"the model's {facts.heads} attention heads; use one of {divisors(facts.heads)}"
        report.refuse(at, f"does not divide {heads}")
    spans = tensor > per_node and tensor == one and not tensor % per_node and engine.several_nodes
    if tensor > per_node and not (spans and place.nnodes > 1):
        pool_key = "trainer" if place is report.trainer else key
        message = f"more than the {per_node} devices of the node ({pool_key}.n_gpus_per_node); lower it"
        whole = f" or make it a multiple of {per_node}" if engine.several_nodes else ": an engine stays on one node"
        report.refuse(at, message + (whole if place.nnodes > 1 else ""))
    elif spans and report.model is not None and (report.model.lora_rank or report.model.lora_adapter_path):
        report.refuse(at, f"with LoRA an engine stays on one node, which has the adapter's files; at most {per_node}")
    elif not engine.tensor_parallel:
        if tensor > 1 and report.ppo:
            report.notice(f"{at}: a {rollout.name} engine runs on one device; there are more engines")
    elif pool % size:
        message = f"an engine of {size} devices does not divide the pool of {pool}"
        product = f"{key}: tensor × pipeline × data parallel = {size}"
        report.refuse(product, f"{message}; use one of {divisors(per_node)}")
    elif per_node % one and not spans:
        message = f"an engine of {one} devices does not divide the {per_node} of a node"
        report.refuse(f"{key}: tensor × data parallel = {one}", f"{message}; use one of {divisors(per_node)}")
    elif copies > 1 and one == tensor:
        engines = f"each copy is an engine of its own, of which there are {pool // one}"
        report.notice(f"{report.at(f'{key}.data_parallel_size')}: {engines}")
    expert, spread = rollout.expert_parallel_size, tensor * rollout.data_parallel_size
    if expert > 1 and facts is not None and not facts.experts:
        report.refuse(f"{key}.expert_parallel_size", "the model has no experts; set 1")
    elif expert > 1 and expert != spread:
        report.refuse(f"{key}.expert_parallel_size", f"must be tensor × data parallel = {spread}, or 1")
    if rollout.pipeline_model_parallel_size > 1 and engine.tensor_parallel:
        message = f"{rollout.name} is not run in pipeline; set 1 and raise tensor_model_parallel_size"
        report.refuse(f"{key}.pipeline_model_parallel_size", message)


def _batches(report: Report) -> None:
    data, actor = report.config.data, report.config.actor_rollout_ref.actor
    size, mini = data.train_batch_size, actor.ppo_mini_batch_size
    at, batch = f"{ACTOR}.ppo_mini_batch_size={mini}", f"data.train_batch_size={size}"
    if mini > size:
        if report.was_set(f"{ACTOR}.ppo_mini_batch_size"):
            report.notice(f"{at} > {batch}: one update on the batch")
    elif size % mini:
        parts = math.ceil(size / mini)
        report.notice(f"{batch} is no multiple of {at}: {parts} mini-batches of {_each(size, parts)} prompts")
    longest = data.max_prompt_length + data.max_response_length
    budget = actor.ppo_max_token_len_per_gpu * actor.ulysses_sequence_parallel_size
    if actor.use_dynamic_bsz and longest > budget:
        above = f"the longest sequence ({longest} tokens) is above the token budget ({budget})"
        report.notice(f"{above}; it goes alone")
    if not data.val_files and report.trainer.val_only:
        report.refuse("trainer.val_only=True, data.val_files", "there is nothing to validate on; name the files")
    if not data.val_files and report.trainer.test_freq > 0:
        report.notice(f"{report.at('trainer.test_freq')} without data.val_files: there is nothing to validate on")


def _trainers_that_sample(report: Report) -> None:
    rollout, trainer, key = report.rollout, report.trainer, f"{ROLLOUT}.trainer_memory_utilization"
    if not rollout.trainer_memory_utilization:
        return
    size, per_node = sampler_devices(rollout), trainer.n_gpus_per_node
    if not rollout.nnodes:
        report.refuse(key, f"the samplers are on the trainers' devices already; set 0, or {ROLLOUT}.nnodes for a pool")
    elif per_node % size:
        report.refuse(key, f"a sampler of {size} devices does not divide the trainers' {per_node} of a node; set 0")


def _pools(report: Report) -> None:
    if not report.config.actor_rollout_ref.hybrid_engine and report.rollout.nnodes == 0:
        needed = "needs a pool for sampling: actor_rollout_ref.rollout.nnodes and n_gpus_per_node"
        report.refuse("actor_rollout_ref.hybrid_engine", needed)
    _trainers_that_sample(report)
    if report.config.reward_model.enable_resource_pool and not report.config.reward_model.nnodes:
        report.refuse("reward_model.enable_resource_pool=True, reward_model.nnodes=0", "set its size in nodes")


def _policy_layout(report: Report) -> None:
    """Sequence parallel, shard groups, Megatron's sizes, of the actor and its reference.

    The reference gets the rows of the actor's layout: ranks that share its work must have the same ones.
    """
    actor, ref = report.config.actor_rollout_ref.actor, report.config.actor_rollout_ref.ref
    of_actor, of_ref = policy_placement(report.config), placement(ref, _REF)
    _ranks(report, of_actor, actor.strategy, own_model=True)
    rows, ref_rows = of_actor.ranks_per_row, of_ref.ranks_per_row
    if rows % ref_rows:
        report.refuse(
            f"{_REF}.ulysses_sequence_parallel_size",
            f"{ref_rows} devices share a sequence of the reference and {rows} one of the actor, which gets the same "
            f"rows: {ref_rows} must divide {rows}; leave it as the actor's",
        )
    needs_reference = (actor.use_kl_loss or report.config.algorithm.use_kl_in_reward) and not reference_is_base(
        report.config
    )
    if needs_reference and (ref.model.path or of_ref.sizes != of_actor.sizes):
        _ranks(report, of_ref, ref.strategy, own_model=not ref.model.path)
    if report.config.critic.enable:
        _critic_layout(report, rows)


def _critic_layout(report: Report, together: int) -> None:
    """A critic on the policy's ranks has their rows, which as many of them share as share the actor's."""
    critic, pool = placement(report.config.critic, "critic"), own_pools(report.config).get("critic")
    problems = list(rank_problems(critic, pool.devices if pool is not None else report.world))
    if pool is None and critic.ranks_per_row != together:
        message = (
            f"= {critic.ranks_per_row} devices share a row of the critic and {together} one of the actor on the same "
            "devices; make them equal, or give the critic devices of its own (critic.nnodes)"
        )
        report.refuse(f"{critic.at('sequence')} × {critic.at('tensor')}", message)
        kept_sizes = critic.at("expert"), critic.at("shard")
        problems = [(key, message) for key, message in problems if key in kept_sizes]
    _refuse_sizes(report, problems, f" (its ranks: {pool})" if pool is not None else "")
    _refuse_sizes(report, _misfits(critic, report.config.critic.strategy, _critic_facts(report)))


def _critic_facts(report: Report) -> ModelFacts | None:
    """Of the critic's model, which has overrides of its own also where its weights are the policy's."""
    model = report.config.critic.model
    if not model.path or (model.path == report.model.path and report.facts is None):
        return None
    return report.look("critic.model.path", model.path, model.override_config, model.hf_config_path)


def _ranks(report: Report, role: Placement, strategy: str, *, own_model: bool) -> None:
    """Do they fit the ranks, and the run's model if it is the role's own?"""
    _refuse_sizes(report, rank_problems(role, report.world))
    if own_model:
        _refuse_sizes(report, _misfits(role, strategy, report.facts))


def _misfits(role: Placement, strategy: str, facts: ModelFacts | None) -> Iterator[tuple[str, str]]:
    """(key=value, what is wrong) for sizes of a role that do not suit its model."""
    if facts is not None and strategy in TRAINING_ENGINES:
        model = facts.text | {"num_attention_heads": facts.heads, "experts": facts.experts, "vision": facts.vision}
        yield from TRAINING_ENGINES[strategy].misfits(role, model)


def _refuse_sizes(report: Report, problems: Iterable[tuple[str, str]], where: str = "") -> None:
    """Refuse sizes (key=value, or several with × between them, and what is wrong). A size that nobody gave the role
    follows another role's: the message names that one, and what was said of that one is not said again."""
    for text, message in problems:
        keys = {word.partition("=")[0] for word in text.split(" × ")} & report.keys.keys()
        leaders = {key: report.keys[key].about.get("same_as") for key in sorted(keys) if not report.was_set(key)}
        followed = {key: leader for key, leader in leaders.items() if leader}
        leaders_text = text
        for key, leader in followed.items():
            leaders_text = leaders_text.replace(f"{key}=", f"{leader}=")
        if followed and any((p.key, p.message.startswith(message)) == (leaders_text, True) for p in report.problems):
            continue
        advice = f". Inherited from {', '.join(followed.values())}: set {', '.join(followed)} itself"
        report.refuse(text, message + where + (advice if followed else ""))


def _staleness(report: Report) -> None:
    """Responses that may lag: who corrects for it, and whether the sampler has weights of its own to lag with."""
    lag, correction = report.config.trainer.max_staleness, report.config.algorithm.rollout_correction
    every, steps = report.trainer.weight_sync_every, report.trainer.max_steps_per_version
    if every > 1 and not report.rollout.nnodes:
        advice = f"the sampler keeps older weights: give it devices of its own ({ROLLOUT}.nnodes=1), or set 1"
        report.refuse("trainer.weight_sync_every", advice)
    if steps and not every <= steps <= every * (1 + lag):
        bounds = f"between weight_sync_every={every} and {every * (1 + lag)}, 1 + max_staleness times as many"
        report.refuse("trainer.max_steps_per_version", bounds)
    if lag <= 0:
        return
    if not correction.rollout_is and not correction.bypass_mode:
        report.notice(
            "trainer.max_staleness > 0 without algorithm.rollout_correction.rollout_is: stale responses are trained on "
            "uncorrected (rollout_is=token corrects)"
        )
    key, nodes_key = f"trainer.max_staleness={lag}", f"{ROLLOUT}.nnodes"
    if report.rollout.nnodes > 0:
        return
    if report.world == 1 and not ray_address(report.config) and capabilities(report.rollout.name).in_place_weights:
        report.refuse(
            key,
            "sampler and trainer share one model here, so nothing can be sampled while it is trained. Give sampling "
            f"devices of its own ({nodes_key}=1 {ROLLOUT}.n_gpus_per_node=1), or set trainer.max_staleness=0",
        )
    else:
        report.notice(f"{key} on shared devices: sampler and trainer compete; {nodes_key} gives sampling its own")


def _without_effect(report: Report) -> None:
    actor = report.config.actor_rollout_ref.actor
    if report.trainer.critic_warmup > 0 and not report.config.critic.enable:
        report.notice(f"no effect: {report.at('trainer.critic_warmup')}: there is no critic to warm up")
    if report.config.critic.nnodes and not report.config.critic.enable:
        report.notice(f"no effect: {report.at('critic.nnodes')}: there is no critic (critic.enable)")
    if not report.model.use_remove_padding:
        report.notice(f"no effect: {report.model_key}.use_remove_padding=False: sequences are packed without padding")
    if "hf_model" in actor.checkpoint.save_contents:
        report.notice("checkpoint.save_contents: hf_model has no effect, weights are Hugging Face files always")


def _folders(report: Report) -> None:
    """Where a run writes, and that its checkpoints hold something."""
    key = "trainer.default_local_dir"
    if report.was_set(key) and str(report.trainer.get("default_local_dir")).lower() in ("", "false", "true"):
        report.refuse(key, "name a folder")
    report.refuse_file(key, report.trainer.get("default_local_dir"))
    for name in ("project_name", "experiment_name"):
        folder_name = report.trainer.get(name)
        if folder_name == "":
            report.refuse(f"trainer.{name}", "is part of the run's folder; name something")
        elif ".." in Path(str(folder_name or "")).parts:
            report.refuse(f"trainer.{name}", "is part of the run's folder and may not lead out of it; remove '..'")
    for role in ("actor_rollout_ref.actor.checkpoint", "checkpoint"):
        contents: Any = report.config.select(f"{role}.save_contents")
        if contents == [] and report.trainer.get("save_freq") not in (-1, 0):
            report.refuse(f"{role}.save_contents", "a checkpoint would hold nothing; name model, optimizer, extra")


def _resume(report: Report) -> None:
    """The checkpoint of resume_path is there."""
    if report.trainer.resume_mode != "resume_path":
        if report.trainer.resume_from_path:
            report.notice(f"no effect: {report.at('trainer.resume_from_path')} without trainer.resume_mode=resume_path")
        return
    at, folder = report.at("trainer.resume_from_path"), Path(report.trainer.resume_from_path or "")
    complete = ("manifest.json", "latest_checkpointed_iteration.txt", "data.pt", "global_step_*")
    if not report.trainer.resume_from_path:
        report.refuse("trainer.resume_mode=resume_path", "needs trainer.resume_from_path=…/global_step_N")
    elif not folder.is_dir():
        report.refuse(at, "no such directory; name another one, or start afresh with trainer.resume_mode=disable")
    elif not any(any(folder.glob(name)) for name in complete):
        report.refuse(at, "holds no checkpoint (no manifest.json, no global_step_N)")


# ---- the plan ----


def plan(report: Report) -> list[str]:
    """The batches of a run in words: prompts → trajectories → updates → micro-batches."""
    if not report.ppo:
        return _other_plan(report)
    data, actor, n = report.config.data, report.config.actor_rollout_ref.actor, report.rollout.n
    size = data.train_batch_size
    parts = math.ceil(size / min(actor.ppo_mini_batch_size, size))
    large = math.ceil(size / parts) * n
    ranks = max(1, report.world // policy_placement(report.config).ranks_per_row)
    epochs = actor.ppo_epochs
    lines = [
        _steps(report),
        f"each step: {size} prompts × {n} responses = {size * n} trajectories "
        f"(≤ {data.max_prompt_length} + {data.max_response_length} tokens)",
        f"→ {counted(parts * epochs, 'update')} ({parts} mini-batches of {_each(size, parts, n)} responses "
        f"× {counted(epochs, 'epoch')})",
        f"→ micro-batches on each of {counted(ranks, 'rank')}: {_micro(actor, large, ranks)}",
    ]
    only = report.trainer.val_only
    if data.val_files and (report.trainer.test_freq > 0 or report.trainer.val_before_train or only):
        rows = report.rows_used("val")
        prompts = f"{rows} prompts" if rows else "validation prompts"
        lines.append(f"validation: {prompts} × {report.rollout.val_kwargs.n}")
    return lines[-1:] if only else lines


def _each(size: int, parts: int, n: int = 1) -> str:
    """How large the parts of a batch of `size` times `n` are."""
    small, large = size // parts * n, math.ceil(size / parts) * n
    return f"{large}" if small == large else f"{small} to {large}"


def _steps(report: Report) -> str:
    rows, size = report.rows_used("train"), report.config.data.train_batch_size
    total, epochs = report.trainer.total_training_steps, report.trainer.total_epochs
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


def _other_plan(report: Report) -> list[str]:
    data = report.config.data
    if report.config.entry == "sft":
        if report.trainer.val_only:
            return [f"validation: {report.rows_used('val') or 'all'} rows"]
        rows = "pairs" if report.config.preference.loss else "sequences"
        batch = f"{data.train_batch_size} {rows} of at most {data.max_length} tokens"
        return [_steps(report), f"each step: {batch}"]
    if report.config.entry == "generation":
        prompts = f"{report.rows.get('data.path', 'all')} prompts"
        return [f"{prompts} × {report.rollout.n} responses, {data.batch_size} at a time"]
    return []
