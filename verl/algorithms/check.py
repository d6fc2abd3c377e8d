"""Estimators, losses, KL, corrections, distillation: what does not go together, and what is worth a notice."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from verl.algorithms.correction import parse_rules, parse_weighting
from verl.config.defaults import reader_of_values
from verl.config.layout import own_pools, policy_placement
from verl.config.matching import nearest
from verl.config.model_facts import ModelFacts
from verl.config.report import ACTOR, ROLLOUT, Report
from verl.config.schema.actor import CLIP_BOUNDS, OF_POLICY_LOSS
from verl.config.schema.algorithm import ESTIMATORS, GROUP_ESTIMATORS, TEACHER_KEYS, TOPK_MODES
from verl.config.schema.base import Group, Map, Root
from verl.config.schema.fields import limits_of
from verl.plugins import REGISTRIES

_CORRECTION = "algorithm.rollout_correction"
_LOSS, _TEACHERS = "distillation.distillation_loss", "distillation.teacher_models"


def check(config: Root, report: Report) -> None:
    """Check `algorithm.*`, the losses of the actor, and `distillation.*` of a reinforcement-learning run."""
    if report.ppo:
        for rules in (_kl, _estimator, _entropy, _by_source, _loss, _correction):
            rules(report)
        if report.config.distillation.enabled:
            _distillation(report)


def _kl(report: Report) -> None:
    algorithm, actor = report.config.algorithm, report.config.actor_rollout_ref.actor
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        both = f"algorithm.use_kl_in_reward=True, {ACTOR}.use_kl_loss=True"
        report.refuse(both, "KL would be charged twice, in the reward and in the loss; keep one (GRPO: the loss)")
    if algorithm.use_kl_in_reward or actor.use_kl_loss:
        _same_tokens(report, "actor_rollout_ref.ref.model.path")
    if report.was_set("algorithm.kl_ctrl") and not algorithm.use_kl_in_reward:
        report.notice("algorithm.kl_ctrl.* is set, and without algorithm.use_kl_in_reward=True nothing uses it")
    if actor.use_kl_loss and actor.kl_loss_type in ("kl", "k1"):
        report.notice(f"{report.at(f'{ACTOR}.kl_loss_type')}: its expected gradient is 0; low_var_kl is usual")


def _estimator(report: Report) -> None:
    algorithm, n = report.config.algorithm, report.rollout.n
    name = algorithm.adv_estimator
    if not report.config.critic.enable and (reader := reader_of_values(report.config)):
        report.refuse("critic.enable", f"{reader} needs values; enable the critic or use grpo")
    if report.config.critic.enable:
        _same_tokens(report, "critic.model.path")
        if report.facts is not None and report.facts.vision:
            report.refuse("critic.enable", "no critic sees images in this release; take grpo, which has none")
    if algorithm.use_pf_ppo and name != "gae":
        keys = report.at("algorithm.use_pf_ppo", "algorithm.adv_estimator")
        report.refuse(keys, "PF-PPO goes with gae; switch use_pf_ppo off")
    groups = algorithm.filter_groups
    if n < 2 and (name == "grpo_passk" or groups.enable):
        feature = "grpo_passk" if name == "grpo_passk" else "filter_groups"
        report.refuse(f"{ROLLOUT}.n", f"{feature} compares responses to one prompt; set {ROLLOUT}.n=2 or more")
    elif n == 1 and name in GROUP_ESTIMATORS:
        report.notice(f"{ROLLOUT}.n=1 with {name}: a group of one has no baseline, the score is the advantage")
    if groups.enable and algorithm.use_kl_in_reward and groups.metric == "seq_final_reward":
        message = "the KL penalty is not known while groups are sampled; use metric=reward"
        report.refuse("algorithm.filter_groups.metric=seq_final_reward", message)
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if name in ("gdpo", "mo_grpo") and not keys:
        report.refuse("algorithm.gdpo_reward_keys", f"{name} needs the keys the reward function returns, [a,b]")
    if keys and weights and len(keys) != len(weights):
        report.refuse("algorithm.gdpo_reward_weights", f"{len(weights)} weights for {len(keys)} keys")
    if name in ("gdpo", "mo_grpo") and algorithm.use_kl_in_reward:
        report.notice(f"algorithm.use_kl_in_reward=True with {name}: advantages are made of gdpo_reward_keys alone")


def _entropy(report: Report) -> None:
    control, actor = report.config.algorithm.entropy_ctrl, report.config.actor_rollout_ref.actor
    if control.target is None:
        if report.was_set("algorithm.entropy_ctrl"):
            report.notice("no effect: algorithm.entropy_ctrl: entropy_ctrl.target is not set")
        return
    if actor.entropy_coeff:
        both = f"algorithm.entropy_ctrl.target={control.target}, {ACTOR}.entropy_coeff={actor.entropy_coeff}"
        report.refuse(
            both, "the bonus would count twice; keep one (entropy_ctrl.coeff is where the coefficient begins)"
        )
    distillation = report.config.distillation
    if distillation.enabled and not distillation.distillation_loss.use_task_rewards:
        report.notice("no effect: algorithm.entropy_ctrl: use_task_rewards=False minimises distillation alone")


def _by_source(report: Report) -> None:
    """Settings of data sources are settings of the group, and their estimators need what the run has."""
    algorithm = report.config.algorithm
    keys = {"weight", *(name for name, value in vars(algorithm).items() if not isinstance(value, Group | Map))}
    keys -= {"use_kl_in_reward", "kl_penalty", "use_pf_ppo", "by_source", "_extra"}
    keys |= {"policy_loss"}
    for source, settings in algorithm.by_source.items():
        at = f"algorithm.by_source.{source}"
        if not isinstance(settings, dict):
            report.refuse(at, "is a mapping, {adv_estimator: …, weight: …}")
            continue
        for unknown in sorted(settings.keys() - keys):
            report.refuse(f"{at}.{unknown}", f"no such setting of a data source{nearest(unknown, sorted(keys))}")
        weight = settings.get("weight", 1.0)
        if not isinstance(weight, int | float) or weight < 0:
            report.refuse(f"{at}.weight={weight}", "is a number, at least 0")
        name = settings.get("adv_estimator", algorithm.adv_estimator)
        if name != algorithm.adv_estimator and name in ("gae", "remax"):
            producer = "values of a critic" if name == "gae" else "greedy responses"
            report.refuse(f"{at}.adv_estimator={name}", f"needs {producer}, which a run has for all rows or none")
        elif name not in ESTIMATORS and name not in _registered("ESTIMATORS"):
            report.refuse(f"{at}.adv_estimator={name}", f"no such estimator{nearest(name, ESTIMATORS)}")
        if "policy_loss" in settings:
            _loss_of_source(report, f"{at}.policy_loss", settings["policy_loss"])


def _registered(kind: str) -> Container[str]:
    """Estimators or losses of plug-ins, where the check has imported them."""
    registry = REGISTRIES.get(kind)
    return registry.functions if registry is not None else ()


def _loss_of_source(report: Report, at: str, settings: Any) -> None:
    """A policy loss of a data source: keys of the actor's, each in its range, and what it does not go with."""
    if not isinstance(settings, dict):
        return report.refuse(at, "is a mapping, {loss_mode: …, clip_ratio_high: …}")
    keys = {path.rpartition(".")[2]: field for path, field in report.keys.items() if _of_policy_loss(path)}
    for name, value in settings.items():
        if name not in keys:
            report.refuse(f"{at}.{name}", f"no such setting of a policy loss{nearest(name, sorted(keys))}")
        elif name in ("loss_mode", "loss_agg_mode"):
            here = [option for option in keys[name].about["options"] if option != "bypass_mode"]
            own = name == "loss_mode" and value != "bypass_mode" and value in _registered("LOSSES")
            if value not in here and not own:
                report.refuse(f"{at}.{name}={value}", f"none of {', '.join(here)}{nearest(str(value), here)}")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            report.refuse(f"{at}.{name}={value}", "expected a number")
        elif not limits_of(keys[name], type(value)).hold(value):
            report.refuse(f"{at}.{name}={value}", f"out of the range of {ACTOR}.{name}, in docs/config.md")
    actor, correction = report.config.actor_rollout_ref.actor, report.config.algorithm.rollout_correction
    mode = str(settings.get("loss_mode", actor.policy_loss.loss_mode))
    if mode == "dro" and not (settings.get("dro_beta") or actor.policy_loss.dro_beta):
        report.refuse(f"{at}.dro_beta", "dro needs a value above 0")
    _far_from_paper(report, f"{at}: {mode}", mode, _bounds(settings, actor))
    if correction.bypass_mode and correction.loss_type == "reinforce":
        report.refuse(at, f"{_CORRECTION}.loss_type=reinforce is the loss of all rows; take loss_type=ppo_clip")
    distillation = report.config.distillation
    if distillation.enabled and not distillation.distillation_loss.use_task_rewards:
        report.notice(f"no effect: {at}: {_LOSS}.use_task_rewards=False leaves only the teacher's term")


def _of_policy_loss(path: str) -> bool:
    """True for a key that a data source's policy loss may set."""
    group, _, name = path.rpartition(".")
    return group == f"{ACTOR}.policy_loss" or (group == ACTOR and name in OF_POLICY_LOSS)


def _bounds(settings: dict[str, Any], actor: Any) -> tuple[float, float]:
    """(ε_lo, ε_hi) of a data source; the actor's where it says nothing that is a number."""
    low, high = (settings.get(name, settings.get("clip_ratio", actor[name])) for name in CLIP_BOUNDS)
    return tuple(value if isinstance(value, int | float) else 0.0 for value in (low, high))  # type: ignore[return-value]


def _same_tokens(report: Report, key: str) -> None:
    """A model of its own has the policy's tokens."""
    path = report.config.select(key)
    facts = report.look(key, path) if path and path != report.model.path else None
    if facts is None or report.facts is None:
        return
    vocabulary, policy_vocabulary = (model.text.get("vocab_size") for model in (facts, report.facts))
    if vocabulary and policy_vocabulary and vocabulary != policy_vocabulary:
        sizes = f"its vocabulary has {vocabulary} tokens, the policy's {policy_vocabulary}"
        report.refuse(key, f"{sizes}; use one of the same family")


def _loss(report: Report) -> None:
    actor = report.config.actor_rollout_ref.actor
    mode, beta = actor.policy_loss.loss_mode, actor.policy_loss.dro_beta
    if mode == "dro" and not (beta and beta > 0):
        report.refuse(f"{ACTOR}.policy_loss.dro_beta={beta}", "dro needs a value above 0")
    _far_from_paper(report, mode, mode, (actor.clip_ratio_low, actor.clip_ratio_high))
    unset = not (report.was_set(f"{ACTOR}.clip_ratio_low") and report.was_set(f"{ACTOR}.clip_ratio_high"))
    if mode.startswith("dppo_") and unset:
        report.notice(f"{mode}: clip_ratio_low and clip_ratio_high bound a divergence; set both (paper: 0.05)")
    _weights(report)
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and report.config.algorithm.norm_adv_by_std_in_grpo:
        report.notice("seq-mean-token-sum-norm with norm_adv_by_std_in_grpo=True: Dr. GRPO sets it to False")


def _far_from_paper(report: Report, at: str, mode: str, bounds: tuple[float, float]) -> None:
    """A ratio of whole responses wants bounds of its own."""
    if mode in ("gspo", "luspo") and max(bounds) > 0.01:
        report.notice(f"{at}: its paper has clip_ratio_low=3e-4, clip_ratio_high=4e-4, far below these")


def _weights(report: Report) -> None:
    """Weights of turns, roles and demonstrations are numbers that something reads."""
    actor = report.config.actor_rollout_ref.actor
    roles, coef = actor.observation_loss_roles, actor.observation_loss_coef
    if any(weight < 0 for weight in actor.turn_weights or ()):
        report.refuse(f"{ACTOR}.turn_weights={actor.turn_weights}", "are numbers, at least 0")
    if wrong := [role for role, w in roles.items() if isinstance(w, bool) or not isinstance(w, int | float) or w < 0]:
        report.refuse(f"{ACTOR}.observation_loss_roles.{wrong[0]}={roles[wrong[0]]}", "is a number, at least 0")
    if roles and not coef:
        report.notice(f"no effect: {ACTOR}.observation_loss_roles: {ACTOR}.observation_loss_coef is 0")
    shown = report.was_set(f"{ACTOR}.demonstrations")
    if shown and not actor.demonstrations.column:
        report.notice(f"no effect: {ACTOR}.demonstrations: demonstrations.column is not set")


def _correction(report: Report) -> None:
    """What importance weights, rejection and bypass mode need, and what excludes them."""
    correction, key = report.config.algorithm.rollout_correction, _CORRECTION
    weights, reinforce = correction.rollout_is, correction.loss_type == "reinforce"
    if (weights or correction.bypass_mode) and not report.rollout.calculate_log_probs:
        report.refuse(f"{ROLLOUT}.calculate_log_probs=False", f"{key} needs the sampler's log-probs; set True")
    if reinforce and not correction.bypass_mode:
        report.refuse(f"{key}.loss_type=reinforce", f"goes with {key}.bypass_mode=True")
    if weights or correction.rollout_rs:
        _thresholds(report, correction)
    if not correction.rollout_rs_in_baseline and correction.bypass_mode:
        why = "with bypass_mode responses are rejected before each update, after the statistics are computed"
        report.refuse(f"{key}.rollout_rs_in_baseline=False", f"{why}; leave it True")
    elif not correction.rollout_rs_in_baseline and not correction.rollout_rs:
        report.notice(f"no effect: {key}.rollout_rs_in_baseline=False: without rollout_rs nothing is rejected")
    if reinforce and correction.bypass_mode and not weights:
        report.notice(f"{key}.loss_type=reinforce without rollout_is: older responses are trained on uncorrected")
    if correction.bypass_mode and not reinforce and weights:
        why = "bypass_mode with loss_type=ppo_clip, whose ratio is to the sampler already"
        report.notice(f"no effect: {key}.rollout_is={weights}: {why}")


def _thresholds(report: Report, correction: Any) -> None:
    """Weights and rejection rules have thresholds that parse."""

    if correction.rollout_is in ("token", "sequence"):
        _attempt(report, parse_weighting, correction.rollout_is, correction.rollout_is_threshold)
    if correction.rollout_rs:
        _attempt(report, parse_rules, correction.rollout_rs, correction.rollout_rs_threshold)


def _attempt(report: Report, parse: Callable[..., Any], *arguments: Any) -> None:
    try:
        parse(*arguments)
    except ValueError as error:
        name, _, message = str(error).partition(": ")
        report.refuse(f"{_CORRECTION}.{name}".replace("'", ""), message)


def _distillation(report: Report) -> None:
    """Teachers that are complete and apart, terms that see the teacher, what has no effect."""
    if not report.config.distillation.nnodes and report.was_set("distillation.n_gpus_per_node"):
        report.notice("no effect: distillation.n_gpus_per_node: teachers run on the policy's devices")
    _teachers(report)
    _distillation_loss(report)


def _teachers(report: Report) -> None:
    keys, teachers = dict[str, str](), []
    for name, teacher in report.config.distillation.teacher_models.items():
        at = f"{_TEACHERS}.{name}"
        if not isinstance(teacher, dict) or not isinstance(teacher.get("inference") or {}, dict):
            report.refuse(at, f"a teacher is a mapping of {', '.join(TEACHER_KEYS)} (a mapping itself)")
            continue
        for unknown in teacher.keys() - {*TEACHER_KEYS}:
            report.refuse(f"{at}.{unknown}", f"no such key of a teacher{nearest(unknown, TEACHER_KEYS)}")
        key = str(teacher.get("key") or name)
        if (other := keys.setdefault(key, name)) != name:
            report.refuse(f"{at}.key={key}", f"picks {_TEACHERS}.{other}, too; one key for each teacher")
        teachers.append(teacher)
        _teacher_model(report, at, teacher)
    parallel = {str((t.get("inference") or {}).get("tensor_model_parallel_size") or 1) for t in teachers}
    if len(parallel) > 1 and own_pools(report.config):
        sizes = f"tensor_model_parallel_size of the teachers: {', '.join(sorted(parallel))}"
        report.refuse(_TEACHERS, f"{sizes}; they share devices, so make them equal")
    if not report.config.distillation.teacher_models:
        report.refuse(_TEACHERS, f"there is no teacher; set {_TEACHERS}.teacher_model.model_path")


def _teacher_model(report: Report, at: str, teacher: Any) -> None:
    """Its model exists; its parallel size fits the ranks: the policy's, whose rows it gets, or the teachers'."""
    inference, arr = teacher.get("inference") or {}, report.config.actor_rollout_ref
    size = inference.get("tensor_model_parallel_size") or 1
    devices, split = policy_placement(report.config).ranks_per_row, arr.ref.ulysses_sequence_parallel_size
    message = f"a teacher's rows are the policy's, which {devices} of its devices share; set 1"
    if pool := own_pools(report.config).get("teacher"):
        devices, split = pool.devices, 1
        message = f"does not divide the teachers' {devices} devices ({pool})"
    if not isinstance(size, int) or devices % (split * size):
        report.refuse(f"{at}.inference.tensor_model_parallel_size={size}", message)
    unread = [f"inference.{key}" for key in inference if key != "tensor_model_parallel_size"]
    unread += ["num_replicas"] if teacher.get("num_replicas") else []
    if unread:
        report.notice(f"no effect: {at}: {', '.join(unread)}: the training engine serves every teacher")
    _moving_and_contrasting(report, at, teacher)
    if not isinstance(teacher.get("solution_score") or 1.0, int | float):
        report.refuse(f"{at}.solution_score={teacher['solution_score']}", "is not a number")
    mode = report.config.distillation.distillation_loss.loss_mode
    loss = report.config.distillation.distillation_loss
    learns = not loss.use_task_rewards or loss.distillation_loss_coef
    if "{solution}" in str(teacher.get("prompt")) and learns and mode in ("forward_kl_topk", "reverse_kl_topk"):
        why = f"loss_mode={mode} would train responses without a solution too; take jsd_topk, k1, k2 or k3"
        report.refuse(f"{at}.prompt with {{solution}}", why)
    if not teacher.get("model_path") and (teacher.get("prompt") or teacher.get("update_rate") is not None):
        if own_pools(report.config).get("teacher"):
            report.refuse(
                f"{at}.model_path", "is required on devices of the teachers' own; or set distillation.nnodes=0"
            )
        return
    if not teacher.get("model_path"):
        report.refuse(f"{at}.model_path", "is required: a Hugging Face id or a directory")
        return
    where = f"{at}.model_path={teacher['model_path']}"
    facts = report.look(where, teacher["model_path"])
    if facts is None or report.facts is None:
        return
    if facts.vision and not report.facts.vision:
        report.refuse(where, "it sees images and the policy does not; choose a text model")
    elif not facts.vision and report.facts.vision:
        report.notice(f"{where} is a text model: it reads the policy's prompts without their images")
        if teacher.get("prompt"):
            report.refuse(f"{at}.prompt", "is not in this release for a text teacher of a policy that sees images")
    elif _patches(facts) != _patches(report.facts):
        report.refuse(where, "its images have other patches than the policy's; choose a teacher of the family")


def _moving_and_contrasting(report: Report, at: str, teacher: Any) -> None:
    """`own_tokenizer`, `update_rate` and `contrast` go with the rest."""
    mode = report.config.distillation.distillation_loss.loss_mode
    if teacher.get("own_tokenizer") and mode in TOPK_MODES:
        report.refuse(f"{at}.own_tokenizer=True", f"loss_mode={mode} compares tokens; take k1, k2 or k3")
    if teacher.get("own_tokenizer") and not teacher.get("model_path"):
        report.refuse(f"{at}.own_tokenizer=True", "the teacher's model_path is missing")
    rate, contrast = teacher.get("update_rate"), teacher.get("contrast")
    if rate is not None and (not isinstance(rate, int | float) or not 0 < rate <= 1):
        report.refuse(f"{at}.update_rate={rate}", "is the share of the policy that goes into the teacher, above 0 to 1")
    elif rate is not None and own_pools(report.config).get("teacher"):
        report.refuse(f"{at}.update_rate={rate}", "a teacher that follows the policy is on its devices; set nnodes=0")
    elif rate is not None and report.model.lora_rank:
        report.refuse(f"{at}.update_rate={rate}", "a teacher cannot follow an adapter; set model.lora_rank=0")
    if not contrast:
        return
    if not isinstance(contrast, int) or contrast < 0:
        report.refuse(f"{at}.contrast={contrast}", "is the number of wrong responses that it reads, 0 for none")
    elif "{solution}" not in str(teacher.get("prompt")):
        report.refuse(f"{at}.contrast={contrast}", "wrong responses are read as {solution} of its prompt; add it there")


def _patches(facts: ModelFacts) -> list[Any]:
    """How images are cut for a model; what the policy's processor makes of them goes to its teachers too."""
    vision = facts.config.get("vision_config") or {}
    return [vision.get(key) for key in ("patch_size", "temporal_patch_size", "spatial_merge_size")]


def _distillation_loss(report: Report) -> None:
    loss, actor = report.config.distillation.distillation_loss, report.config.actor_rollout_ref.actor
    mode, gradient = report.at(f"{_LOSS}.loss_mode"), loss.use_policy_gradient
    if loss.loss_mode in ("kl", "k1") and not gradient:
        report.refuse(mode, "its gradient does not see the teacher; use k2, k3, or use_policy_gradient=True")
    if loss.loss_mode in TOPK_MODES:
        vocabulary = report.facts.text.get("vocab_size") if report.facts is not None else None
        if gradient:
            report.notice(f"{mode} with use_policy_gradient=True: it says nothing of the token that was sampled")
        if vocabulary and loss.topk > vocabulary:
            report.refuse(report.at(f"{_LOSS}.topk"), f"the vocabulary has {vocabulary} tokens; lower it")
    if report.was_set(f"{_LOSS}.token_set") and loss.loss_mode != "reverse_kl_topk":
        report.notice(f"no effect: {_LOSS}.token_set={loss.token_set}: it is of loss_mode=reverse_kl_topk")
    if gradient and loss.policy_loss_mode == "dro" and not (actor.policy_loss.dro_beta or 0) > 0:
        report.refuse(f"{ACTOR}.policy_loss.dro_beta", "policy_loss_mode=dro needs a value above 0")
    if loss.use_task_rewards:
        return
    alone = {
        f"{ACTOR}.use_kl_loss": actor.use_kl_loss,
        f"{ACTOR}.entropy_coeff": actor.entropy_coeff,
        f"{_LOSS}.distillation_loss_coef": loss.distillation_loss_coef != 1,
    }
    if unused := [key for key, on in alone.items() if on]:
        report.notice(f"no effect: {', '.join(unused)}: use_task_rewards=False minimises distillation alone")
