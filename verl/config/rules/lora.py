"""LoRA: adapters that can be had, patterns that match, keys that count only with it, what the sampler makes of it."""

from __future__ import annotations

import difflib
import importlib.util
import re
from typing import Any

from verl.config.adapter_files import ADAPTER_CONFIG, adapter_directory, read_adapter_config
from verl.config.rollout_engines import CAPABILITIES
from verl.config.rules.context import Check
from verl.errors import UserError

ALL_LINEAR = "all-linear"
_OWN = ("lora_alpha", "target_modules", "exclude_modules")


def check(c: Check) -> None:
    """Rule 24, and notices."""
    if c.model is None:
        return
    if c.model.lora_rank <= 0 and not c.model.lora_adapter_path:
        _without(c)
        return
    if importlib.util.find_spec("peft") is None:
        key = "lora_rank" if c.model.lora_rank > 0 else "lora_adapter_path"
        c.lacks(
            f"{c.model_key}.{key}={c.model[key]}",
            "LoRA needs peft, which is not installed: pip install 'verl[lora]'",
        )
    rank = int(c.model.lora_rank)
    if c.model.lora_adapter_path:
        rank = _adapter(c) or rank
    else:
        _patterns(c)
    key = "actor_rollout_ref.actor.fsdp_config" if c.ppo else "engine"
    parallel: Any = c.cfg.select(key)
    if parallel is not None and (cut := parallel.get("tensor_parallel_size") or 1) > 1:
        c.refuse(f"{key}.tensor_parallel_size={cut}", "adapters are not cut so; with LoRA set it to 1")
    if c.rollout is not None:
        _sampler(c, rank)
    if c.ppo:
        _reference(c)


def _without(c: Check) -> None:
    if c.model.exclude_modules:
        c.notice(
            f"{c.model_key}.exclude_modules counts with LoRA only (vision tower: "
            "actor_rollout_ref.actor.freeze_vision_tower)"
        )
    for name in ("lora_alpha", "target_modules"):
        if c.was_set(f"{c.model_key}.{name}"):
            c.notice(f"no effect: {c.model_key}.{name} counts with LoRA only ({c.model_key}.lora_rank=N)")
    key = "actor_rollout_ref.actor.checkpoint" if c.ppo else "checkpoint"
    contents: Any = c.cfg.select(key)
    if contents is not None and contents.get("save_lora_only"):
        c.notice(f"no effect: {key}.save_lora_only=True: this run trains all weights, which are saved")


def _adapter(c: Check) -> int | None:
    """The rank of the adapter to go on with."""
    key = f"{c.model_key}.lora_adapter_path"
    try:
        folder = adapter_directory(c.model.lora_adapter_path)
        found = read_adapter_config(folder)
    except UserError as error:
        c.refuse(
            f"{key}={c.model.lora_adapter_path}", str(error).removeprefix("model.lora_adapter_path=").strip()
        )
        return None
    rank = found.get("r")
    if found.get("peft_type") != "LORA" or not isinstance(rank, int):
        c.refuse(
            f"{key}={c.model.lora_adapter_path}", f"{ADAPTER_CONFIG} there is not that of a LoRA adapter"
        )
        return None
    if c.model.lora_rank > 0 and c.model.lora_rank != rank:
        c.refuse(
            f"{c.model_key}.lora_rank={c.model.lora_rank}",
            f"the adapter of {key} has rank {rank}; set {rank}, or leave it out",
        )
    ignored = [f"{c.model_key}.{name}" for name in _OWN if c.was_set(f"{c.model_key}.{name}")]
    if ignored:
        c.notice(f"no effect: {', '.join(ignored)}: the adapter of lora_adapter_path has its own")
    return rank


def _patterns(c: Check) -> None:
    """Refuse names that no weight of the model has; expressions are looked at when the model is there."""
    targets = [str(t) for t in c.model.target_modules]
    if not targets:
        c.refuse(
            f"{c.model_key}.target_modules=[]",
            f"LoRA needs modules to adapt; {ALL_LINEAR} takes all linear layers",
        )
        return
    modules = [] if c.facts is None else [n.removesuffix(".weight") for n in c.facts.weight_names()]
    if not modules or targets == [ALL_LINEAR] or any(re.fullmatch(r"[\w.\-]+", t) is None for t in targets):
        return
    missing = [t for t in targets if not any(m == t or m.endswith("." + t) for m in modules)]
    if not missing:
        return
    ends = sorted({m.rpartition(".")[2] for m in modules})
    close = [n for t in missing for n in difflib.get_close_matches(t.rpartition(".")[2], ends, 1, 0.5)]
    nearest = f"; nearest: {', '.join(dict.fromkeys(close))}" if close else ""
    if close or len(missing) == len(targets):
        c.refuse(
            f"{c.model_key}.target_modules=[{', '.join(targets)}]",
            f"{', '.join(missing)} matches no module of the model{nearest}; its modules are {', '.join(ends)}",
        )
    else:  # lists that are made for several architectures
        c.notice(f"{c.model_key}.target_modules: {', '.join(missing)} matches no module of the model")


def _sampler(c: Check, rank: int) -> None:
    name = c.rollout.name
    engine = CAPABILITIES[name]
    if engine.lora_ranks and rank > engine.lora_ranks[-1]:
        c.refuse(f"{c.model_key}.lora_rank={rank}", f"{name} takes at most {engine.lora_ranks[-1]}")
        return
    if engine.takes_arguments and c.rollout.engine_kwargs[name].get("enable_lora") is False:
        return
    if c.facts is not None and c.facts.experts and not engine.lora_experts:
        c.notice(f"{name} cannot add adapters of experts itself: each weight sync sends the merged weights")
        return
    room = next((known for known in engine.lora_ranks if known >= rank), rank)
    if room != rank:
        c.notice(
            f"{c.model_key}.lora_rank={rank}: {name} sets room aside for rank {room}, results are the same"
        )


def _reference(c: Check) -> None:
    arr = c.cfg.actor_rollout_ref
    if not (arr.actor.use_kl_loss or c.cfg.algorithm.use_kl_in_reward) or arr.ref.model.path:
        return
    names = (
        "log_prob_micro_batch_size_per_gpu",
        "log_prob_use_dynamic_bsz",
        "log_prob_max_token_len_per_gpu",
    )
    given = [f"actor_rollout_ref.ref.{n}" for n in names if c.was_set(f"actor_rollout_ref.ref.{n}")]
    if given:
        c.notice(
            f"no effect: {', '.join(given)}: with LoRA the reference is the policy's own base, computed as "
            "actor_rollout_ref.rollout.log_prob_* says"
        )
