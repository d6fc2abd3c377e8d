"""Estimators, losses, KL, sampling for training: what does not go together, and what is worth a word."""

from __future__ import annotations

import re
from typing import Any

from verl.config.devices import ray_address
from verl.config.rollout_engines import CAPABILITIES
from verl.config.rules.context import Check
from verl.config.schema.algorithm import GROUP_ESTIMATORS

_RS = re.compile(r"(token_k[123]|seq_(sum|mean)_k[123]|seq_max_k[23])")
_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"


def check(c: Check) -> None:
    """All rules on algorithms (config.md §16, 1, 3 to 6, 14, 15, and their notices)."""
    if not c.ppo:
        return
    _kl(c)
    _estimator(c)
    _sampling(c)
    _loss(c)
    _correction(c)
    _staleness(c)
    _notices(c)


def _kl(c: Check) -> None:
    algorithm, actor = c.cfg.algorithm, c.cfg.actor_rollout_ref.actor
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        c.refuse(
            f"algorithm.use_kl_in_reward=True, {_ACTOR}.use_kl_loss=True",
            "KL would be charged twice, in the reward and in the loss; keep one (GRPO: the loss)",
        )
    control = algorithm.kl_ctrl
    if control.type == "adaptive" and (control.horizon <= 0 or control.target_kl <= 0):
        c.refuse(
            f"algorithm.kl_ctrl.horizon={control.horizon}, target_kl={control.target_kl}",
            "adaptive KL needs both above 0",
        )
    if c.was_set("algorithm.kl_ctrl") and not algorithm.use_kl_in_reward:
        c.notice("algorithm.kl_ctrl.* is set, and without algorithm.use_kl_in_reward=True nothing uses it")
    if actor.use_kl_loss and actor.kl_loss_type in ("kl", "k1"):
        c.notice(
            f"{_ACTOR}.kl_loss_type={actor.kl_loss_type}: its expected gradient is 0; low_var_kl is usual"
        )


def _estimator(c: Check) -> None:
    algorithm, n = c.cfg.algorithm, c.cfg.actor_rollout_ref.rollout.n
    name = algorithm.adv_estimator
    if name == "gae" and c.cfg.critic.enable is False:
        c.refuse(
            "critic.enable=False", "algorithm.adv_estimator=gae needs values; enable the critic or use grpo"
        )
    if algorithm.use_pf_ppo and name != "gae":
        c.refuse(
            f"algorithm.use_pf_ppo=True, adv_estimator={name}", "PF-PPO goes with gae; switch use_pf_ppo off"
        )
    if n < 2 and (name == "grpo_passk" or algorithm.filter_groups.enable):
        why = "grpo_passk compares answers" if name == "grpo_passk" else "filter_groups compares answers"
        c.refuse(f"{_ROLLOUT}.n={n}", f"{why} to one prompt; set {_ROLLOUT}.n=2 or more")
    elif n == 1 and name in GROUP_ESTIMATORS:
        c.notice(f"{_ROLLOUT}.n=1 with {name}: a group of one has no baseline, the score is the advantage")
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if name == "gdpo" and not keys:
        c.refuse(
            "algorithm.gdpo_reward_keys", "gdpo needs the keys the reward function returns, [accuracy,format]"
        )
    if keys and weights and len(keys) != len(weights):
        message = f"{len(weights)} weights for {len(keys)} keys; give one each"
        c.refuse("algorithm.gdpo_reward_weights", message)


def _sampling(c: Check) -> None:
    rollout = c.cfg.actor_rollout_ref.rollout
    val = rollout.val_kwargs
    if rollout.temperature <= 0:
        message = "training samples; set 1.0 (validation has its own: val_kwargs.temperature)"
        c.refuse(f"{_ROLLOUT}.temperature={rollout.temperature}", message)
    if not rollout.do_sample:
        message = "training samples; set True (validation has its own: val_kwargs.do_sample)"
        c.refuse(f"{_ROLLOUT}.do_sample=False", message)
    if val.do_sample is True and val.temperature == 0:
        c.refuse(
            f"{_ROLLOUT}.val_kwargs.do_sample=True, val_kwargs.temperature=0",
            "temperature 0 is greedy; set val_kwargs.temperature=1.0, or do_sample=False",
        )
    greedy = val.do_sample is False or val.temperature == 0
    if val.n > 1 and greedy and val.do_sample is not True:
        c.notice(f"{_ROLLOUT}.val_kwargs.n={val.n} and greedy: all answers to a prompt will be the same")
    if rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0:
        c.notice(
            f"{_ROLLOUT}: top_p={rollout.top_p}, top_k={rollout.top_k}, min_p={rollout.min_p} truncate what is sampled; "
            "the trainer's distribution is not truncated"
        )


def _loss(c: Check) -> None:
    actor = c.cfg.actor_rollout_ref.actor
    mode = actor.policy_loss.loss_mode
    beta = actor.policy_loss.dro_beta
    if mode == "dro" and not (beta and beta > 0):
        c.refuse(f"{_ACTOR}.policy_loss.dro_beta={beta}", "dro needs a value above 0")
    if mode == "gspo" and max(actor.clip_ratio_low, actor.clip_ratio_high) > 0.01:
        c.notice(
            f"gspo with clip_ratio={actor.clip_ratio}: its paper has clip_ratio_low=3e-4, clip_ratio_high=4e-4"
        )
    unset = not (c.was_set(f"{_ACTOR}.clip_ratio_low") and c.was_set(f"{_ACTOR}.clip_ratio_high"))
    if mode.startswith("dppo_") and unset:
        c.notice(
            f"{mode}: clip_ratio_low and clip_ratio_high bound a divergence here; set both (dppo_kl's paper: 0.05)"
        )
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and c.cfg.algorithm.norm_adv_by_std_in_grpo:
        c.notice("seq-mean-token-sum-norm with norm_adv_by_std_in_grpo=True: Dr. GRPO sets it to False")


def _correction(c: Check) -> None:
    correction = c.cfg.algorithm.rollout_correction
    key = "algorithm.rollout_correction"
    calculates = c.cfg.actor_rollout_ref.rollout.calculate_log_probs
    if (correction.rollout_is or correction.bypass_mode) and not calculates:
        c.refuse(f"{_ROLLOUT}.calculate_log_probs=False", f"{key} needs the sampler's log-probs; set True")
    if correction.loss_type == "reinforce" and not correction.bypass_mode:
        c.refuse(f"{key}.loss_type=reinforce", f"goes with {key}.bypass_mode=True")
    if correction.rollout_is and not _parses(correction.rollout_is_threshold):
        message = 'write a number, "2.0" (truncates), or bounds, "0.5_5.0" (zeroes outside)'
        c.refuse(f"{key}.rollout_is_threshold={correction.rollout_is_threshold}", message)
    if correction.rollout_rs:
        _rejection(c, key, correction.rollout_rs, correction.rollout_rs_threshold)
    if correction.loss_type == "reinforce" and correction.bypass_mode and not correction.rollout_is:
        c.notice(
            f"{key}.loss_type=reinforce without rollout_is: answers of an older policy are trained on uncorrected "
            f"({key}.rollout_is=token weighs them)"
        )
    if correction.bypass_mode and correction.loss_type == "ppo_clip" and correction.rollout_is:
        c.notice(
            f"no effect: {key}.rollout_is={correction.rollout_is} with bypass_mode and loss_type=ppo_clip, whose ratio "
            "is to the sampler already"
        )


def _staleness(c: Check) -> None:
    """Answers that may lag: who corrects for it, and whether the sampler has weights of its own to lag with."""
    lag, correction = c.cfg.trainer.max_staleness, c.cfg.algorithm.rollout_correction
    if lag <= 0:
        return
    key = f"trainer.max_staleness={lag}"
    if not correction.rollout_is and not correction.bypass_mode:
        c.notice(
            "trainer.max_staleness > 0 without algorithm.rollout_correction.rollout_is: stale answers are trained on "
            "uncorrected (rollout_is=token corrects)"
        )
    address = ray_address(c.cfg)
    if c.rollout.nnodes > 0:
        return
    if c.world == 1 and not address and CAPABILITIES[c.rollout.name].in_place_weights:
        c.refuse(
            key,
            f"sampler and trainer share one model here, so nothing can be sampled while it is trained. Give sampling "
            f"devices of its own ({_ROLLOUT}.nnodes=1 {_ROLLOUT}.n_gpus_per_node=1), or set trainer.max_staleness=0",
        )
    else:
        c.notice(
            f"{key} on shared devices: sampler and trainer compete for them; {_ROLLOUT}.nnodes gives sampling its own"
        )


def _rejection(c: Check, key: str, listed: str, given: Any) -> None:
    """Rule 15: names, and one threshold each or one for all."""
    names = [n.strip() for n in listed.split(",") if n.strip()]
    for name in names:
        if not _RS.fullmatch(name):
            message = (
                "a list of token_k1..3, seq_sum_k1..3, seq_mean_k1..3, seq_max_k2..3, separated by commas"
            )
            c.refuse(f"{key}.rollout_rs={name}", message)
    if given is None:
        c.refuse(f"{key}.rollout_rs_threshold", 'rollout_rs needs one: a number, or bounds "0.5_2.0" for k1')
        return
    thresholds = [t.strip() for t in str(given).split(",")]
    if len(thresholds) not in (1, len(names)):
        message = f"{len(thresholds)} thresholds for {len(names)} rules; give one each, or one for all"
        c.refuse(f"{key}.rollout_rs_threshold={given}", message)
    for threshold in thresholds:
        if not _parses(threshold):
            message = 'write a number, or bounds "0.5_2.0" for k1'
            c.refuse(f"{key}.rollout_rs_threshold={threshold}", message)
    for name, threshold in zip(
        names, thresholds * len(names) if len(thresholds) == 1 else thresholds, strict=False
    ):
        pair, known = "_" in threshold, _RS.fullmatch(name) and _parses(threshold)
        if known and not name.endswith("k1") and pair:
            message = f"{name} has an upper bound only; write one number"
            c.refuse(f"{key}.rollout_rs_threshold={threshold}", message)
        elif known and name.endswith("k1") and not pair and float(threshold) <= 1:
            message = f"{name} is bounded on both sides by 1/{threshold} and {threshold}; write a number above 1, or bounds"
            c.refuse(f"{key}.rollout_rs_threshold={threshold}", message)


def _parses(threshold: Any) -> bool:
    try:
        parts = [float(part) for part in str(threshold).split("_")]
    except ValueError:
        return False
    return all(p > 0 for p in parts) and (len(parts) == 1 or (len(parts) == 2 and parts[0] < parts[1]))


def _notices(c: Check) -> None:
    trainer, actor = c.cfg.trainer, c.cfg.actor_rollout_ref.actor
    if trainer.critic_warmup > 0 and not c.cfg.critic.enable:
        c.notice(
            f"trainer.critic_warmup={trainer.critic_warmup}: there is no critic to warm up; "
            "the actor is trained from the first step"
        )
    if not c.model.use_remove_padding:
        text = "sequences are packed without padding; results are the same"
        c.notice(f"no effect: {c.model_key}.use_remove_padding=False: {text}")
    if actor.freeze_vision_tower and c.facts is not None and not c.facts.vision:
        c.notice(f"{_ACTOR}.freeze_vision_tower=True: this model has no vision tower")
    if "hf_model" in actor.checkpoint.save_contents:
        c.notice(
            "checkpoint.save_contents: hf_model has no effect, weights are written as Hugging Face files always"
        )
