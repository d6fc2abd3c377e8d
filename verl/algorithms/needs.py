"""From what algorithms declare to the passes that a step runs: a need is the name of a column, a pass produces columns.

estimator ┐                                          old_log_prob   the policy at the start of the step
loss      ├─▶ needed columns ─▶ passes of the step    ref            the reference
KL terms  ┘
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from verl.algorithms import advantage, step_credit  # noqa: F401  (they fill the registry of estimators)
from verl.algorithms.correction import parse_correction
from verl.algorithms.distillation import compares_both_sets, compares_teachers_tokens
from verl.algorithms.entropy import controls_entropy
from verl.algorithms.registry import ESTIMATORS
from verl.algorithms.source_losses import chosen_losses
from verl.config.layout import sampling_mask_from
from verl.config.schema.algorithm import TOPK_MODES
from verl.config.schema.base import setting
from verl.config.schema.entries import Config
from verl.errors import UserError
from verl.trajectory import COLUMNS

GREEDY_BASELINE = "reward_baselines"
"""The need of an estimator that compares with a greedy response: one is sampled for each group
(`Trajectory.baseline`)."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass of a step. name: its phase, timing_s/{name}; outputs: the engine's output → the column it
    fills."""

    name: str
    role: str
    outputs: Mapping[str, str]

    def only(self, needed: frozenset[str]) -> Pass:
        """The pass without outputs that cost extra and that nothing needs."""
        extra = _COSTLY - needed
        return replace(self, outputs={o: c for o, c in self.outputs.items() if c not in extra})


OLD_LOG_PROB = Pass(
    "old_log_prob",
    "actor",
    {
        "log_probs": "old_log_probs",
        "entropy": "entropy",
        "sum_pi_squared": "sum_pi_squared",
        "routed_experts": "routed_experts",
        "sampling_mask": "sampling_mask",
    },
)
_TAUGHT = {name: f"teacher_{name}" for name in ("log_probs", "topk_ids", "topk_log_probs")}
# Run once for each teacher, whose role has a name of its own (`teacher_roles`).
TEACHER = Pass("teacher", "teacher", _TAUGHT)
PASSES = (
    OLD_LOG_PROB,
    Pass("ref", "ref", {"log_probs": "ref_log_probs"}),
    TEACHER,
    Pass("values", "critic", {"values": "values"}),
)
_TOPK = frozenset(_TAUGHT.values()) - {"teacher_log_probs"}
_COSTLY = frozenset({"sum_pi_squared", "routed_experts", "sampling_mask"}) | _TOPK
# Sources of columns that no estimator or loss finds without more ado.
_NOT_THERE = ("reward", "update", "teacher")


def needed_columns(config: Config) -> frozenset[str]:
    """Columns that the estimator, the loss, the KL terms and the correction of a configuration need.

    UserError for one that nothing in this release produces.
    """
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    correction = parse_correction(algorithm.rollout_correction)
    loss_mode = setting(actor.policy_loss, "loss_mode", "vanilla")
    losses = chosen_losses(actor, setting(algorithm, "by_source"), correction)
    needs = set[str]().union(*(loss.needs for loss in losses), *map(ESTIMATORS.needs, estimators_of(algorithm)))
    if algorithm.use_kl_in_reward:
        needs |= {"ref_log_probs", "old_log_probs"}
    if actor.use_kl_loss:
        needs.add("ref_log_probs")
    if controls_entropy(algorithm):
        needs.add("entropy")
    if setting(config, "critic.enable", False):  # trained beside an estimator that does not read it
        needs.add("values")
    if correction.active:
        needs |= {"old_log_probs", "rollout_log_probs"}
    if correction.bypass:  # the old policy is the sampler
        needs = {"rollout_log_probs" if name == "old_log_probs" else name for name in needs}
    needs |= teacher_columns(config)
    available = {
        GREEDY_BASELINE,
        *(name for name, column in COLUMNS.items() if column.source not in _NOT_THERE),
    }
    if teacher_roles(config):
        available |= {"teacher_log_probs"} | teacher_columns(config)
        contrasts = [bool(teacher.get("contrast")) for teacher in teacher_roles(config).values()]
        available |= {"teacher_contrast_log_probs"} if all(contrasts) else set()
    for name in sorted(needs - available):
        where = f"algorithm.adv_estimator={algorithm.adv_estimator} or policy_loss.loss_mode={loss_mode}"
        why = "no pass produces a column of that name"
        if name == "teacher_contrast_log_probs":
            why = (
                "it comes from teachers with `contrast`; set distillation.enabled=True, and both `prompt` with "
                "{solution} and `contrast` of each"
            )
        elif name in _TAUGHT.values():
            why = (
                "it comes from a teacher; set distillation.enabled=True, "
                "and loss_mode=forward_kl_topk for the most likely tokens"
            )
        raise UserError(f"{where} needs {name}: {why}")
    return frozenset(needs)


def estimators_of(algorithm: Any) -> list[str]:
    """The names of the run's estimators: its own, and those of data sources (`algorithm.by_source`)."""
    of_sources = (setting(algorithm, "by_source") or {}).values()
    return [algorithm.adv_estimator, *(source["adv_estimator"] for source in of_sources if source.get("adv_estimator"))]


def passes(config: Config, updates_per_step: int) -> list[Pass]:
    """The forward passes of a step, in order.

    With one update in a step its own first pass is the old policy, so that none is run for it.
    """
    needed = needed_columns(config)
    if updates_per_step > 1 and not parse_correction(config.algorithm.rollout_correction).bypass:
        needed |= {"old_log_probs"}
    loss = config.distillation.distillation_loss
    reverse = teacher_roles(config) and loss.loss_mode == "reverse_kl_topk" and not compares_teachers_tokens(loss)
    by_text = any(teacher.get("own_tokenizer") for teacher in teacher_roles(config).values())
    if reverse or by_text:  # what a teacher says of a span of text is shared among the policy's tokens
        needed |= {"old_log_probs"}
    if config.algorithm.use_pf_ppo:  # the update is of responses drawn again, what is logged of all
        needed |= {"old_log_probs"}
    replay = setting(config.actor_rollout_ref.actor, "router_replay.mode", "disabled")
    if replay == "R2" and "old_log_probs" in needed:
        needed |= {"routed_experts"}
    if sampling_mask_from(config) == "trainer":
        needed |= {"old_log_probs", "sampling_mask"}
    if setting(config.actor_rollout_ref.actor, "calculate_sum_pi_squared", False):
        needed |= {"sum_pi_squared"}
    chosen = [forward for forward in PASSES if needed & set(forward.outputs.values())]
    if TEACHER in chosen:
        at = chosen.index(TEACHER)
        chosen[at : at + 1] = [replace(TEACHER, role=role) for role in teacher_roles(config)]
    chosen = [forward.only(needed) for forward in chosen]
    if reverse:
        # The policy says which tokens are compared, the teachers their log-probs.
        ids, log_probs = {"topk_ids": "teacher_topk_ids"}, {"candidate_log_probs": "teacher_topk_log_probs"}
        if compares_both_sets(loss):
            log_probs |= {"topk_ids": "teacher_other_ids", "topk_log_probs": "teacher_other_log_probs"}
        chosen = [
            replace(forward, outputs={**forward.outputs, **ids})
            if forward.name == OLD_LOG_PROB.name
            else replace(
                forward,
                outputs=log_probs | ({"log_probs": "teacher_log_probs"} if "teacher_log_probs" in needed else {}),
            )
            if forward.name == TEACHER.name
            else forward
            for forward in chosen
        ]
    return chosen


def with_old_log_probs(chosen: list[Pass]) -> list[Pass]:
    """The passes of a step without an update of the policy, whose own first pass would give its log-probs."""
    present = any(forward.name == OLD_LOG_PROB.name for forward in chosen)
    return chosen if present else [OLD_LOG_PROB.only(frozenset()), *chosen]


def teacher_roles(config: Config) -> dict[str, Any]:
    """The teachers' roles with what `distillation.teacher_models` says of each; none where distillation is off."""
    on = setting(config, "distillation.enabled", False)
    return {f"teacher_{name}": model for name, model in config.distillation.teacher_models.items()} if on else {}


def teacher_path(teacher: Mapping[str, Any], config: Config) -> str | None:
    """The model that a teacher is; None for the policy itself. One that follows the policy is a model of its own."""
    path = config.actor_rollout_ref.model.path if teacher.get("update_rate") is not None else None
    return teacher.get("model_path") or path


def teacher_columns(config: Config) -> frozenset[str]:
    """Columns of the teachers that the loss reads; none where distillation is off."""
    if not teacher_roles(config):
        return frozenset()
    topk = config.distillation.distillation_loss.loss_mode in TOPK_MODES
    return _TOPK if topk else frozenset({"teacher_log_probs"})
