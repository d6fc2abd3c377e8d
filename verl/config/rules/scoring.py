"""Models beside the policy that judge responses: the reward model, the sum of rewards, the teachers of distillation."""

from __future__ import annotations

from typing import Any

from verl.config.layout import own_pools, policy_placement
from verl.config.model_facts import ModelFacts
from verl.config.names import nearest
from verl.config.rules.context import ACTOR, Check
from verl.config.rules.values import beyond
from verl.config.schema.distillation import TEACHER_KEYS
from verl.config.weights import scores_by_model

_KEY = "reward_model"
_JUDGE = "custom_reward_function.path=pkg://verl.reward.judge"
_LOSS, _TEACHERS = "distillation.distillation_loss", "distillation.teacher_models"


def check(c: Check) -> None:
    """The reward model, and distillation where it is on."""
    if c.ppo:
        _reward_model(c)
        if c.cfg.distillation.enabled:
            _distillation(c)


def _reward_model(c: Check) -> None:
    """The reward model, the weights of several rewards, and where a judge can be served."""
    reward_model, weights, path = c.cfg.reward_model, c.cfg.reward_model.weights, f"{_KEY}.model.path"
    if wrong := [n for n, w in weights.items() if isinstance(w, bool) or not isinstance(w, (int, float))]:
        c.refuse(f"{_KEY}.weights", f"{', '.join(wrong)}: a weight is a number, {{function: 1, model: 0.5}}")
        return
    for at, number in beyond(weights, 10**9, f"{_KEY}.weights"):
        c.refuse(f"{at}={number}", "out of range; a weight is within ±10^9")
    if "model" in weights and not reward_model.enable:
        c.refuse(f"{_KEY}.weights", f"model needs {_KEY}.enable=True and {path}")
    if not reward_model.enable:
        return
    if not reward_model.model.path:
        c.refuse(path, f"{_KEY}.enable=True needs it")
        return
    classifier, scores, problem = _classifier(c), scores_by_model(c.cfg), ""
    if scores and classifier is False:
        problem = f"is no sequence classifier with one label; to ask it as a judge set {_JUDGE}"
    elif not scores and classifier:
        problem = f"a sequence classifier beside a function: set {_KEY}.weights={{function: 1, model: 1}}"
    elif not (scores or c.cfg.custom_reward_function.path):
        problem = f"nothing asks this model; to ask it as a judge set {_JUDGE}"
    elif not scores and "judge" not in own_pools(c.cfg) and c.several:
        problem = (
            f"beside several devices a judge has a pool of its own: set {_KEY}.enable_resource_pool=True, "
            f"{_KEY}.nnodes and {_KEY}.n_gpus_per_node; or start a server and set reward_kwargs.reward_router_address"
        )
    if problem:
        c.refuse(path, problem)


def _classifier(c: Check) -> bool | None:
    """Whether the reward model is a sequence classifier; None where that cannot be seen here."""
    key, path = f"{_KEY}.model.path", c.cfg.reward_model.model.path
    facts = c.look(key, path)
    if facts is None:
        return None
    config = facts.config
    is_classifier = any(
        "ForSequenceClassification" in str(name) for name in config.get("architectures") or ()
    )
    return is_classifier and len(config.get("id2label") or (0, 1)) == 1


def _distillation(c: Check) -> None:
    """Teachers that are complete and apart, terms that see the teacher, what has no effect."""
    if not c.cfg.distillation.nnodes and c.was_set("distillation.n_gpus_per_node"):
        c.notice("no effect: distillation.n_gpus_per_node: teachers run on the policy's devices")
    _teachers(c)
    _loss(c)


def _teachers(c: Check) -> None:
    keys, teachers = dict[str, str](), []
    for name, teacher in c.cfg.distillation.teacher_models.items():
        at = f"{_TEACHERS}.{name}"
        if not isinstance(teacher, dict) or not isinstance(teacher.get("inference") or {}, dict):
            c.refuse(at, f"a teacher is a mapping of {', '.join(TEACHER_KEYS)} (a mapping itself)")
            continue
        for unknown in teacher.keys() - {*TEACHER_KEYS}:
            c.refuse(f"{at}.{unknown}", f"no such key of a teacher{nearest(unknown, TEACHER_KEYS)}")
        key = str(teacher.get("key") or name)
        if (other := keys.setdefault(key, name)) != name:
            c.refuse(f"{at}.key={key}", f"picks {_TEACHERS}.{other}, too; one key for each teacher")
        teachers.append(teacher)
        _model(c, at, teacher)
    parallel = {str((t.get("inference") or {}).get("tensor_model_parallel_size") or 1) for t in teachers}
    if len(parallel) > 1 and own_pools(c.cfg):
        sizes = f"tensor_model_parallel_size of the teachers: {', '.join(sorted(parallel))}"
        c.refuse(_TEACHERS, f"{sizes}; they share devices, so make them equal")
    if not c.cfg.distillation.teacher_models:
        c.refuse(_TEACHERS, f"there is no teacher; set {_TEACHERS}.teacher_model.model_path")


def _model(c: Check, at: str, teacher: Any) -> None:
    """Its model exists; its parallel size fits the ranks: the policy's, whose rows it gets, or the teachers'."""
    inference, arr = teacher.get("inference") or {}, c.cfg.actor_rollout_ref
    size = inference.get("tensor_model_parallel_size") or 1
    devices, split = policy_placement(c.cfg).ranks_per_row, arr.ref.ulysses_sequence_parallel_size
    message = f"a teacher's rows are the policy's, which {devices} of its devices share; set 1"
    if pool := own_pools(c.cfg).get("teacher"):
        devices, split = pool.devices, 1
        message = f"does not divide the teachers' {devices} devices ({pool})"
    if not isinstance(size, int) or devices % (split * size):
        c.refuse(f"{at}.inference.tensor_model_parallel_size={size}", message)
    unread = [f"inference.{key}" for key in inference if key != "tensor_model_parallel_size"]
    unread += ["num_replicas"] if teacher.get("num_replicas") else []
    if unread:
        c.notice(f"no effect: {at}: {', '.join(unread)}: the training engine serves every teacher")
    if not teacher.get("model_path"):
        c.refuse(f"{at}.model_path", "is required: a Hugging Face id or a directory")
        return
    where = f"{at}.model_path={teacher['model_path']}"
    facts = c.look(where, teacher["model_path"])
    if facts is None or c.facts is None:
        return
    if facts.vision != c.facts.vision:
        c.refuse(where, "a teacher sees images if the policy does, and only then; choose another teacher")
    elif _patches(facts) != _patches(c.facts):
        c.refuse(where, "its images have other patches than the policy's; choose a teacher of the family")


def _patches(facts: ModelFacts) -> list[Any]:
    """How images are cut for a model; what the policy's processor makes of them goes to its teachers too."""
    vision = facts.config.get("vision_config") or {}
    return [vision.get(key) for key in ("patch_size", "temporal_patch_size", "spatial_merge_size")]


def _loss(c: Check) -> None:
    loss, actor = c.cfg.distillation.distillation_loss, c.cfg.actor_rollout_ref.actor
    mode, gradient = c.at(f"{_LOSS}.loss_mode"), loss.use_policy_gradient
    if loss.loss_mode in ("kl", "k1") and not gradient:
        c.refuse(mode, "its gradient does not see the teacher; use k2, k3, or use_policy_gradient=True")
    if loss.loss_mode == "forward_kl_topk":
        vocabulary = c.facts.text.get("vocab_size") if c.facts is not None else None
        if gradient:
            c.notice(f"{mode} with use_policy_gradient=True: it says nothing of the token that was sampled")
        if vocabulary and loss.topk > vocabulary:
            c.refuse(c.at(f"{_LOSS}.topk"), f"the vocabulary has {vocabulary} tokens; lower it")
    if gradient and loss.policy_loss_mode == "dro" and not (actor.policy_loss.dro_beta or 0) > 0:
        c.refuse(f"{ACTOR}.policy_loss.dro_beta", "policy_loss_mode=dro needs a value above 0")
    if loss.use_task_rewards:
        return
    alone = {
        f"{ACTOR}.use_kl_loss": actor.use_kl_loss,
        f"{ACTOR}.entropy_coeff": actor.entropy_coeff,
        f"{_LOSS}.distillation_loss_coef": loss.distillation_loss_coef != 1,
    }
    if unused := [key for key, on in alone.items() if on]:
        c.notice(f"no effect: {', '.join(unused)}: use_task_rewards=False minimises distillation alone")
