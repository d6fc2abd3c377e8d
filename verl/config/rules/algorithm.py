"""Estimators, losses, KL, sampling for training: what does not go together, and what is worth a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.config.devices import ray_address
from verl.config.fill import reader_of_values
from verl.config.rules.context import ACTOR, ROLLOUT, Check
from verl.config.schema.algorithm import GROUP_ESTIMATORS
from verl.engine.registry import capabilities

_CORRECTION = "algorithm.rollout_correction"


def check(c: Check) -> None:
    """All rules on algorithms, and their notices."""
    if c.ppo:
        for rules in (_kl, _estimator, _sampling, _loss, _correction, _routes, _staleness, _images, _notices):
            rules(c)
    elif c.cfg.entry == "generation":
        _generation(c)


def _generation(c: Check) -> None:
    rollout = c.rollout
    if rollout.n > 1 and (rollout.temperature == 0 or not rollout.do_sample):
        c.notice(f"{c.at('rollout.n')} and greedy: all responses to a prompt will be the same")
    if rollout.nnodes:
        message = "no pool of its own: trainer.nnodes and trainer.n_gpus_per_node are the sampling devices"
        c.refuse(c.at("rollout.nnodes"), message)


def _kl(c: Check) -> None:
    algorithm, actor = c.cfg.algorithm, c.cfg.actor_rollout_ref.actor
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        both = f"algorithm.use_kl_in_reward=True, {ACTOR}.use_kl_loss=True"
        c.refuse(both, "KL would be charged twice, in the reward and in the loss; keep one (GRPO: the loss)")
    if algorithm.use_kl_in_reward or actor.use_kl_loss:
        _same_tokens(c, "actor_rollout_ref.ref.model.path")
    if c.was_set("algorithm.kl_ctrl") and not algorithm.use_kl_in_reward:
        c.notice("algorithm.kl_ctrl.* is set, and without algorithm.use_kl_in_reward=True nothing uses it")
    if actor.use_kl_loss and actor.kl_loss_type in ("kl", "k1"):
        c.notice(f"{c.at(f'{ACTOR}.kl_loss_type')}: its expected gradient is 0; low_var_kl is usual")


def _estimator(c: Check) -> None:
    algorithm, n = c.cfg.algorithm, c.rollout.n
    name = algorithm.adv_estimator
    if not c.cfg.critic.enable and (reader := reader_of_values(c.cfg)):
        c.refuse("critic.enable", f"{reader} needs values; enable the critic or use grpo")
    if c.cfg.critic.enable:
        _same_tokens(c, "critic.model.path")
        if c.facts is not None and c.facts.vision:
            c.refuse("critic.enable", "no critic sees images in this release; take grpo, which has none")
    if algorithm.use_pf_ppo and name != "gae":
        keys = c.at("algorithm.use_pf_ppo", "algorithm.adv_estimator")
        c.refuse(keys, "PF-PPO goes with gae; switch use_pf_ppo off")
    groups = algorithm.filter_groups
    if n < 2 and (name == "grpo_passk" or groups.enable):
        feature = "grpo_passk" if name == "grpo_passk" else "filter_groups"
        c.refuse(f"{ROLLOUT}.n", f"{feature} compares responses to one prompt; set {ROLLOUT}.n=2 or more")
    elif n == 1 and name in GROUP_ESTIMATORS:
        c.notice(f"{ROLLOUT}.n=1 with {name}: a group of one has no baseline, the score is the advantage")
    if groups.enable and algorithm.use_kl_in_reward and groups.metric == "seq_final_reward":
        message = "the KL penalty is not known while groups are sampled; use metric=reward"
        c.refuse("algorithm.filter_groups.metric=seq_final_reward", message)
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if name == "gdpo" and not keys:
        c.refuse("algorithm.gdpo_reward_keys", "gdpo needs the keys the reward function returns, [a,b]")
    if keys and weights and len(keys) != len(weights):
        c.refuse("algorithm.gdpo_reward_weights", f"{len(weights)} weights for {len(keys)} keys")
    if name == "gdpo" and algorithm.use_kl_in_reward:
        c.notice("algorithm.use_kl_in_reward=True with gdpo: advantages are made of gdpo_reward_keys alone")


def _same_tokens(c: Check, key: str) -> None:
    """A model of its own has the policy's tokens."""
    path = c.cfg.select(key)
    facts = c.look(key, path) if path and path != c.model.path else None
    if facts is None or c.facts is None:
        return
    vocabulary, policy_vocabulary = (model.text.get("vocab_size") for model in (facts, c.facts))
    if vocabulary and policy_vocabulary and vocabulary != policy_vocabulary:
        sizes = f"its vocabulary has {vocabulary} tokens, the policy's {policy_vocabulary}"
        c.refuse(key, f"{sizes}; use one of the same family")


def _sampling(c: Check) -> None:
    rollout = c.rollout
    val = rollout.val_kwargs
    if rollout.temperature <= 0:
        c.refuse(f"{ROLLOUT}.temperature", "training samples; set 1.0 (validation: val_kwargs.temperature)")
    if not rollout.do_sample:
        c.refuse(f"{ROLLOUT}.do_sample", "training samples; set True (validation: val_kwargs.do_sample)")
    if val.do_sample is True and val.temperature == 0:
        both = f"{ROLLOUT}.val_kwargs.do_sample=True, val_kwargs.temperature=0"
        c.refuse(both, "temperature 0 is greedy; set val_kwargs.temperature=1.0, or do_sample=False")
    elif val.n > 1 and (val.do_sample is False or val.temperature == 0):
        c.notice(f"{c.at(f'{ROLLOUT}.val_kwargs.n')} and greedy: all responses to a prompt will be the same")
    if rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0:
        c.notice(
            f"{ROLLOUT}: top_p={rollout.top_p}, top_k={rollout.top_k}, min_p={rollout.min_p} truncate what is sampled; "
            "the trainer's distribution is not truncated"
        )


def _loss(c: Check) -> None:
    actor = c.cfg.actor_rollout_ref.actor
    mode, beta = actor.policy_loss.loss_mode, actor.policy_loss.dro_beta
    if mode == "dro" and not (beta and beta > 0):
        c.refuse(f"{ACTOR}.policy_loss.dro_beta={beta}", "dro needs a value above 0")
    if mode == "gspo" and max(actor.clip_ratio_low, actor.clip_ratio_high) > 0.01:
        c.notice("gspo: its paper has clip_ratio_low=3e-4, clip_ratio_high=4e-4, far below these")
    unset = not (c.was_set(f"{ACTOR}.clip_ratio_low") and c.was_set(f"{ACTOR}.clip_ratio_high"))
    if mode.startswith("dppo_") and unset:
        c.notice(f"{mode}: clip_ratio_low and clip_ratio_high bound a divergence; set both (paper: 0.05)")
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and c.cfg.algorithm.norm_adv_by_std_in_grpo:
        c.notice("seq-mean-token-sum-norm with norm_adv_by_std_in_grpo=True: Dr. GRPO sets it to False")


def _correction(c: Check) -> None:
    """What importance weights, rejection and bypass mode need, and what excludes them."""
    correction, key = c.cfg.algorithm.rollout_correction, _CORRECTION
    weights, reinforce = correction.rollout_is, correction.loss_type == "reinforce"
    if (weights or correction.bypass_mode) and not c.rollout.calculate_log_probs:
        c.refuse(f"{ROLLOUT}.calculate_log_probs=False", f"{key} needs the sampler's log-probs; set True")
    if reinforce and not correction.bypass_mode:
        c.refuse(f"{key}.loss_type=reinforce", f"goes with {key}.bypass_mode=True")
    if weights or correction.rollout_rs:
        _thresholds(c, correction)
    if not correction.rollout_rs_in_baseline and correction.bypass_mode:
        why = "with bypass_mode responses are rejected before each update, after the statistics are computed"
        c.refuse(f"{key}.rollout_rs_in_baseline=False", f"{why}; leave it True")
    elif not correction.rollout_rs_in_baseline and not correction.rollout_rs:
        c.notice(f"no effect: {key}.rollout_rs_in_baseline=False: without rollout_rs nothing is rejected")
    if reinforce and correction.bypass_mode and not weights:
        c.notice(f"{key}.loss_type=reinforce without rollout_is: older responses are trained on uncorrected")
    if correction.bypass_mode and not reinforce and weights:
        why = "bypass_mode with loss_type=ppo_clip, whose ratio is to the sampler already"
        c.notice(f"no effect: {key}.rollout_is={weights}: {why}")


def _thresholds(c: Check, correction: Any) -> None:
    """Weights and rejection rules have thresholds that parse."""
    from verl.algorithms.correction import parse_rules, parse_weighting

    if correction.rollout_is in ("token", "sequence"):
        _attempt(c, parse_weighting, correction.rollout_is, correction.rollout_is_threshold)
    if correction.rollout_rs:
        _attempt(c, parse_rules, correction.rollout_rs, correction.rollout_rs_threshold)


def _attempt(c: Check, parse: Callable[..., Any], *arguments: Any) -> None:
    try:
        parse(*arguments)
    except ValueError as error:
        name, _, message = str(error).partition(": ")
        c.refuse(f"{_CORRECTION}.{name}".replace("'", ""), message)


def _routes(c: Check) -> None:
    """Replay of expert routes: a model with experts, and a pass that records them."""
    mode, key = c.cfg.actor_rollout_ref.actor.router_replay.mode, f"{ACTOR}.router_replay.mode"
    recorded, switch = c.rollout.enable_rollout_routing_replay, f"{ROLLOUT}.enable_rollout_routing_replay"
    if mode != "disabled" and c.facts is not None and not c.facts.experts:
        c.refuse(key, f"{c.facts.name} is a dense model, which has no experts to choose; set it to disabled")
    if mode == "R3" and not recorded:
        c.refuse(key, f"it replays the sampler's routes; set {switch}=True")
    elif mode == "R3" and not capabilities(c.rollout.name).routes:
        c.refuse(key, f"{ROLLOUT}.name={c.rollout.name} does not return routes; use native, or R2")
    elif recorded and mode != "R3":
        c.notice(f"no effect: {switch}=True: only {key}=R3 replays the sampler's routes")
    if mode == "R2" and c.cfg.algorithm.rollout_correction.bypass_mode:
        c.refuse(key, "with rollout_correction.bypass_mode no pass gives old log-probs and routes; use R3")


def _staleness(c: Check) -> None:
    """Responses that may lag: who corrects for it, and whether the sampler has weights of its own to lag with."""
    lag, correction = c.cfg.trainer.max_staleness, c.cfg.algorithm.rollout_correction
    every, steps = c.trainer.weight_sync_every, c.trainer.max_steps_per_version
    if every > 1 and not c.rollout.nnodes:
        advice = f"the sampler keeps older weights: give it devices of its own ({ROLLOUT}.nnodes=1), or set 1"
        c.refuse("trainer.weight_sync_every", advice)
    if steps and not every <= steps <= every * (1 + lag):
        bounds = f"between weight_sync_every={every} and {every * (1 + lag)}, 1 + max_staleness times as many"
        c.refuse("trainer.max_steps_per_version", bounds)
    if lag <= 0:
        return
    if not correction.rollout_is and not correction.bypass_mode:
        c.notice(
            "trainer.max_staleness > 0 without algorithm.rollout_correction.rollout_is: stale responses are trained on "
            "uncorrected (rollout_is=token corrects)"
        )
    key, nodes_key = f"trainer.max_staleness={lag}", f"{ROLLOUT}.nnodes"
    if c.rollout.nnodes > 0:
        return
    if c.world == 1 and not ray_address(c.cfg) and capabilities(c.rollout.name).in_place_weights:
        c.refuse(
            key,
            "sampler and trainer share one model here, so nothing can be sampled while it is trained. Give sampling "
            f"devices of its own ({nodes_key}=1 {ROLLOUT}.n_gpus_per_node=1), or set trainer.max_staleness=0",
        )
    else:
        c.notice(f"{key} on shared devices: sampler and trainer compete; {nodes_key} gives sampling its own")


def _images(c: Check) -> None:
    """What has no effect on a text model."""
    if c.facts is None or c.facts.vision:
        return
    names = [f"data.augmentation.{name}" for name in ("rotate", "crop", "color_jitter", "path")]
    names += [f"{ACTOR}.freeze_vision_tower", "data.mm_processor_kwargs", "reward_model.images"]
    for key in [name for name in names if c.was_set(name) and c.cfg.select(name)]:
        c.notice(f"no effect: {c.at(key)}: this model sees no images")


def _notices(c: Check) -> None:
    actor = c.cfg.actor_rollout_ref.actor
    if c.trainer.critic_warmup > 0 and not c.cfg.critic.enable:
        c.notice(f"no effect: {c.at('trainer.critic_warmup')}: there is no critic to warm up")
    if c.cfg.critic.nnodes and not c.cfg.critic.enable:
        c.notice(f"no effect: {c.at('critic.nnodes')}: there is no critic (critic.enable)")
    if not c.model.use_remove_padding:
        c.notice(f"no effect: {c.model_key}.use_remove_padding=False: sequences are packed without padding")
    if "hf_model" in actor.checkpoint.save_contents:
        c.notice("checkpoint.save_contents: hf_model has no effect, weights are Hugging Face files always")
