"""LoRA: adapters that can be had, patterns that match, keys that count only with it, what the sampler makes of it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from verl.config import model_facts
from verl.config.layout import policy_placement
from verl.config.matching import nearest
from verl.config.model_facts import VALUE_LAYERS, ModelFacts
from verl.config.report import ACTOR, Report
from verl.config.schema.base import Root
from verl.engine.registry import Placement, capabilities, placement
from verl.errors import UserError

ALL_LINEAR = "all-linear"


def check(config: Root, report: Report) -> None:
    """What adapters need of the model and of other settings, and notices."""
    if report.model is None:
        return
    if report.ppo and report.config.critic.enable:
        path = report.config.critic.model.path
        facts = report.facts if path == report.model.path else report.look("critic.model.path", path)
        _rank(report, "critic.model", facts, placement(report.config.critic, "critic"))
    rank = _rank(report, report.model_key, report.facts, policy_placement(report.config))
    if rank is None:
        _without(report)
        return
    if report.rollout is not None:
        _sampler(report, rank)
    if report.ppo:
        _reference(report)


def _rank(report: Report, key: str, facts: ModelFacts | None, role: Placement) -> int | None:
    """The rank of the adapter that a role's model, at `key`, has; None without one."""
    model: Any = report.config.select(key)
    rank = int(model.lora_rank)
    if rank <= 0 and not model.lora_adapter_path:
        return None
    if importlib.util.find_spec("peft") is None:
        at = f"{key}.lora_rank" if rank > 0 else f"{key}.lora_adapter_path"
        report.lacks(at, "LoRA needs peft, which is not installed: pip install 'verl[lora]'")
    if model.lora_adapter_path:
        rank = _adapter(report, key, model, facts) or rank
    else:
        _patterns(report, key, model, facts)
        if model.lora_alpha < 1:
            report.refuse(f"{key}.lora_alpha", "is the adapter's scale, which has no effect at 0; set at least 1")
    if role.tensor > 1 and not role.cuts_adapters:
        report.refuse(role.at("tensor"), "adapters are not cut so; with LoRA set it to 1")
    return rank


def _without(report: Report) -> None:
    key = report.model_key
    if report.model.exclude_modules:
        other = f"vision tower: {ACTOR}.freeze_vision_tower"
        report.notice(f"{key}.exclude_modules counts with LoRA only ({other})")
    for name in ("lora_alpha", "target_modules"):
        if report.was_set(f"{key}.{name}"):
            report.notice(f"no effect: {key}.{name} counts with LoRA only ({key}.lora_rank=N)")
    only = f"{ACTOR}.checkpoint.save_lora_only" if report.ppo else "checkpoint.save_lora_only"
    if report.config.select(only):
        report.notice(f"no effect: {only}=True: this run trains all weights, which are saved")


def _adapter(report: Report, model_key: str, model: Any, facts: ModelFacts | None) -> int | None:
    """The rank of the adapter to go on with."""
    key, path = f"{model_key}.lora_adapter_path", model.lora_adapter_path
    try:
        adapter = model_facts.read_adapter_config(model_facts.adapter_directory(path))
    except UserError as error:
        report.refuse(f"{key}={path}", str(error).removeprefix("model.lora_adapter_path=").strip())
        return None
    rank = adapter.get("r")
    if adapter.get("peft_type") != "LORA" or not isinstance(rank, int):
        report.refuse(f"{key}={path}", f"{model_facts.ADAPTER_CONFIG} there is not that of a LoRA adapter")
        return None
    if model.lora_rank > 0 and model.lora_rank != rank:
        report.refuse(f"{model_key}.lora_rank", f"the adapter has rank {rank}; set {rank}, or leave it out")
    keys = [f"{model_key}.{name}" for name in ("lora_alpha", "target_modules", "exclude_modules")]
    if ignored := [name for name in keys if report.was_set(name)]:
        report.notice(f"no effect: {', '.join(ignored)}: the adapter of lora_adapter_path has its own")
    if model_key == "critic.model" and facts is not None and not _reaches_values(adapter, facts):
        message = "the adapter has no part in the layer of values, which is new and would stay 0"
        advice = f"nothing would be learned; use {model_key}.lora_rank for a new adapter"
        report.refuse(f"{key}={path}", f"{message}: {advice}")
    return rank


def _reaches_values(adapter: dict[str, Any], facts: ModelFacts) -> bool:
    """Whether a critic has values to start from, or the adapter trains those of a new layer."""
    targets, names = adapter.get("target_modules") or [], facts.weight_names()
    if isinstance(targets, str):
        targets = [name for name in VALUE_LAYERS if targets == ALL_LINEAR or re.fullmatch(targets, name)]
    value_weights = [name for name in names if _named(name.removesuffix(".weight"), VALUE_LAYERS)]
    return bool(not names or value_weights or set(VALUE_LAYERS) & set(targets))


def _patterns(report: Report, model_key: str, model: Any, facts: ModelFacts | None) -> None:
    """Refuse names that no weight of the model has; expressions are looked at when the model is there."""
    targets, key = [str(t) for t in model.target_modules], f"{model_key}.target_modules"
    if not targets:
        report.refuse(f"{key}=[]", f"LoRA needs modules to adapt; {ALL_LINEAR} takes all linear layers")
        return
    modules = [] if facts is None else [n.removesuffix(".weight") for n in facts.weight_names()]
    if not modules or targets == [ALL_LINEAR] or any(re.fullmatch(r"[\w.\-]+", t) is None for t in targets):
        return
    missing = [t for t in targets if not any(_named(m, [t]) for m in modules)]
    adapted = [m for m in modules if _named(m, targets)]
    if adapted and all(_named(m, model.exclude_modules or []) for m in adapted):
        report.refuse(report.at(f"{model_key}.exclude_modules"), f"leaves nothing of {report.at(key)} to adapt")
    if not missing:
        return
    ends = sorted({m.rpartition(".")[2] for m in modules})
    close = "".join(nearest(t.rpartition(".")[2], ends) for t in missing)
    message = f"{', '.join(missing)} matches no module of the model"
    if close or len(missing) == len(targets):
        report.refuse(f"{key}=[{', '.join(targets)}]", f"{message}{close}; its modules are {', '.join(ends)}")
    else:  # lists that are made for several architectures
        report.notice(f"{key}: {message}")


def _named(module: str, names: Sequence[str]) -> bool:
    """True for a module that one of the names, or the end of its path, stands for."""
    return any(f".{module}".endswith(f".{name}") for name in names)


def _sampler(report: Report, rank: int) -> None:
    name, at = report.rollout.name, f"{report.model_key}.lora_rank={rank}"
    engine = capabilities(name)
    if report.config.entry == "generation" and not engine.in_place_weights:
        message = f"an adapter reaches {name} with a weight sync, and nothing is trained here; give it the merged model"
        report.refuse(report.at(f"{report.model_key}.lora_rank", f"{report.model_key}.lora_adapter_path"), message)
    room = next((supported for supported in engine.lora_ranks if supported >= rank), None)
    if not engine.lora_ranks:
        return
    if room is None:
        report.refuse(at, f"{name} takes at most {engine.lora_ranks[-1]}")
    elif (report.rollout.engine_kwargs.get(name) or {}).get("enable_lora") is False:
        return
    elif report.facts is not None and report.facts.experts and not engine.lora_experts:
        report.notice(f"{name} cannot add adapters of experts itself: each weight sync sends the merged weights")
    elif room != rank:
        report.notice(f"{at}: {name} sets room aside for rank {room}, results are the same")


def _reference(report: Report) -> None:
    arr = report.config.actor_rollout_ref
    if not (arr.actor.use_kl_loss or report.config.algorithm.use_kl_in_reward) or arr.ref.model.path:
        return
    names = ("micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
    keys = [f"actor_rollout_ref.ref.log_prob_{name}" for name in names]
    if ignored := [key for key in keys if report.was_set(key)]:
        report.notice(
            f"no effect: {', '.join(ignored)}: with LoRA the reference is the policy's own base, computed as "
            "actor_rollout_ref.rollout.log_prob_* says"
        )
