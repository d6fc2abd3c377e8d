"""LoRA: adapters that can be had, patterns that match, keys that count only with it, what the sampler makes of it."""

from __future__ import annotations

import importlib.util
import re

from verl.config.model_facts import ADAPTER_CONFIG, adapter_directory, read_adapter_config
from verl.config.names import nearest
from verl.config.rollout_engines import CAPABILITIES
from verl.config.rules.context import ACTOR, Check
from verl.errors import UserError

ALL_LINEAR = "all-linear"


def check(c: Check) -> None:
    """Rule 24, and notices."""
    if c.model is None:
        return
    rank, key = int(c.model.lora_rank), c.model_key
    if rank <= 0 and not c.model.lora_adapter_path:
        _without(c)
        return
    if importlib.util.find_spec("peft") is None:
        at = f"{key}.lora_rank" if rank > 0 else f"{key}.lora_adapter_path"
        c.lacks(at, "LoRA needs peft, which is not installed: pip install 'verl[lora]'")
    if c.model.lora_adapter_path:
        rank = _adapter(c) or rank
    else:
        _patterns(c)
    parallel = f"{ACTOR}.fsdp_config" if c.ppo else "engine"
    if (c.cfg.select(f"{parallel}.tensor_parallel_size") or 1) > 1:
        c.refuse(f"{parallel}.tensor_parallel_size", "adapters are not cut so; with LoRA set it to 1")
    if c.rollout is not None:
        _sampler(c, rank)
    if c.ppo:
        _reference(c)


def _without(c: Check) -> None:
    key = c.model_key
    if c.model.exclude_modules:
        other = f"vision tower: {ACTOR}.freeze_vision_tower"
        c.notice(f"{key}.exclude_modules counts with LoRA only ({other})")
    for name in ("lora_alpha", "target_modules"):
        if c.was_set(f"{key}.{name}"):
            c.notice(f"no effect: {key}.{name} counts with LoRA only ({key}.lora_rank=N)")
    only = f"{ACTOR}.checkpoint.save_lora_only" if c.ppo else "checkpoint.save_lora_only"
    if c.cfg.select(only):
        c.notice(f"no effect: {only}=True: this run trains all weights, which are saved")


def _adapter(c: Check) -> int | None:
    """The rank of the adapter to go on with."""
    key, given = f"{c.model_key}.lora_adapter_path", c.model.lora_adapter_path
    try:
        found = read_adapter_config(adapter_directory(given))
    except UserError as error:
        c.refuse(f"{key}={given}", str(error).removeprefix("model.lora_adapter_path=").strip())
        return None
    rank = found.get("r")
    if found.get("peft_type") != "LORA" or not isinstance(rank, int):
        c.refuse(f"{key}={given}", f"{ADAPTER_CONFIG} there is not that of a LoRA adapter")
        return None
    if c.model.lora_rank > 0 and c.model.lora_rank != rank:
        c.refuse(f"{c.model_key}.lora_rank", f"the adapter has rank {rank}; set {rank}, or leave it out")
    own = [f"{c.model_key}.{name}" for name in ("lora_alpha", "target_modules", "exclude_modules")]
    if ignored := [name for name in own if c.was_set(name)]:
        c.notice(f"no effect: {', '.join(ignored)}: the adapter of lora_adapter_path has its own")
    return rank


def _patterns(c: Check) -> None:
    """Refuse names that no weight of the model has; expressions are looked at when the model is there."""
    targets, key = [str(t) for t in c.model.target_modules], f"{c.model_key}.target_modules"
    if not targets:
        c.refuse(f"{key}=[]", f"LoRA needs modules to adapt; {ALL_LINEAR} takes all linear layers")
        return
    modules = [] if c.facts is None else [n.removesuffix(".weight") for n in c.facts.weight_names()]
    if not modules or targets == [ALL_LINEAR] or any(re.fullmatch(r"[\w.\-]+", t) is None for t in targets):
        return
    missing = [t for t in targets if not any(m == t or m.endswith("." + t) for m in modules)]
    if not missing:
        return
    ends = sorted({m.rpartition(".")[2] for m in modules})
    close = "".join(nearest(t.rpartition(".")[2], ends) for t in missing)
    message = f"{', '.join(missing)} matches no module of the model"
    if close or len(missing) == len(targets):
        c.refuse(f"{key}=[{', '.join(targets)}]", f"{message}{close}; its modules are {', '.join(ends)}")
    else:  # lists that are made for several architectures
        c.notice(f"{key}: {message}")


def _sampler(c: Check, rank: int) -> None:
    name, at = c.rollout.name, f"{c.model_key}.lora_rank={rank}"
    engine = CAPABILITIES[name]
    if c.cfg.entry == "generation" and not engine.in_place_weights:
        message = f"an adapter reaches {name} with a weight sync, and nothing is trained here; give it the merged model"
        c.refuse(c.at(f"{c.model_key}.lora_rank", f"{c.model_key}.lora_adapter_path"), message)
    room = next((known for known in engine.lora_ranks if known >= rank), None)
    if not engine.lora_ranks:
        return
    if room is None:
        c.refuse(at, f"{name} takes at most {engine.lora_ranks[-1]}")
    elif engine.takes_arguments and c.rollout.engine_kwargs[name].get("enable_lora") is False:
        return
    elif c.facts is not None and c.facts.experts and not engine.lora_experts:
        c.notice(f"{name} cannot add adapters of experts itself: each weight sync sends the merged weights")
    elif room != rank:
        c.notice(f"{at}: {name} sets room aside for rank {room}, results are the same")


def _reference(c: Check) -> None:
    arr = c.cfg.actor_rollout_ref
    if not (arr.actor.use_kl_loss or c.cfg.algorithm.use_kl_in_reward) or arr.ref.model.path:
        return
    names = ("micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
    keys = [f"actor_rollout_ref.ref.log_prob_{name}" for name in names]
    if given := [key for key in keys if c.was_set(key)]:
        c.notice(
            f"no effect: {', '.join(given)}: with LoRA the reference is the policy's own base, computed as "
            "actor_rollout_ref.rollout.log_prob_* says"
        )
