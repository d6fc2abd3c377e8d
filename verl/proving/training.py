"""The gradient under proof: the same however rows are cut, shared and ordered, and none from masked tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from verl.algorithms.agreement import BOUNDS
from verl.algorithms.batch_advantages import copied
from verl.config import Config
from verl.proving.finding import FAILED, OK, SKIPPED, Finding
from verl.proving.life import Life, relative
from verl.trajectory import Batch, Trajectory


def cut_otherwise(config: Config) -> Config:
    """The configuration with one response per micro-batch and prompts repeated; with all together where it has that."""
    config = copy.deepcopy(config)
    actor, rollout, critic = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.critic
    alone = actor.ppo_micro_batch_size_per_gpu == 1 and not actor.use_dynamic_bsz
    size = None if alone else 1
    actor.use_prefix_grouper = actor.use_prefix_grouper is False
    for group, prefix in ((actor, "ppo"), (rollout, "log_prob"), (critic, "ppo"), (critic, "forward")):
        setattr(group, f"{prefix}_micro_batch_size_per_gpu", size)
    actor.use_dynamic_bsz = critic.use_dynamic_bsz = rollout.log_prob_use_dynamic_bsz = alone
    return config


def identities(life: Life, step: int, batch: Batch, metrics: dict[str, Any]) -> Finding:
    """What the checks of each step say (`verl.trainer.step_checks`)."""
    record = life.trainer.record
    causes = record.checks.causes(step, batch, record.updates, metrics)
    verdict = FAILED if causes else OK
    return Finding("step" if step == 1 else f"step {step}", f"{len(causes)} wrong", "0", verdict, "; ".join(causes))


def micro_batches(life: Life, batch: Batch, expected: dict[str, float]) -> Finding:
    """The first update again, rows cut otherwise and in another order. expected: metrics of that update."""
    groups = [copied(t) for group in reversed(batch.groups()) for t in group]
    difference, metric = relative(life.update(Batch(groups), 1), expected)
    ranks = life.parts.workers.policy.group.dp_size
    cut = "one response per micro-batch, groups in reverse" + (f" over {ranks} ranks" if ranks > 1 else "")
    advice = "the gradient depends on how rows are cut into micro-batches and spread over ranks: report it"
    return Finding.within(
        "micro-batches", difference, BOUNDS[life.precision].update, "relative", advice, f"{metric}; {cut}"
    )


def shared_prompts(life: Life, batch: Batch, expected: list[np.ndarray]) -> Finding:
    """Log-probs with the prompt repeated for each response. expected: those of the other life."""
    advice = (
        "a prompt that is shared by its group is not computed as a repeated one: set actor.use_prefix_grouper=False"
    )
    difference, bound = life.apart(life.log_probs(batch), expected, [t.response_mask for t in batch])
    return Finding.within("shared prompt", difference, bound, "nats", advice)


def masked_tokens(life: Life, batch: Batch, reload: Callable[[], None]) -> list[Finding]:
    """The same update twice, then with other numbers on the tokens that have no gradient. reload(): puts the weights
    back."""
    hides = not any((~t.loss_mask).any() for t in batch if t.loss_mask is not None and t.loss_mask.any())
    rows, other = ([_masked(t, hides, disturb) for t in batch] for disturb in (False, True))
    results = []
    for some in (rows, rows, other):
        reload()
        results.append(life.update(Batch(some), 1))
    # The same rows in the same cut: only atomic additions of a device differ.
    bound = BOUNDS[life.precision].update / 10
    again, metric = relative(results[1], results[0])
    masked, of = relative(results[2], results[0])
    return [
        Finding.within(
            "gradient", again, bound, "relative", "the same update twice gives two gradients: what is left of the one "
            "before, or random numbers, is in it; report it", metric,
        ),
        _old_log_probs(results[0].get("actor/ppo_kl")),
        Finding.within(
            "masked tokens", masked, bound, "relative", "tokens of tools, or other tokens without a mask, change the "
            "gradient: report it", f"{of}; " + ("every second token masked" if hides else "tokens of tools"),
        ),
    ]  # fmt: skip


def _old_log_probs(moved: float | None) -> Finding:
    """moved: actor/ppo_kl of an update of weights that are not those of the old log-probs any more."""
    name, advice = (
        "old log-probs",
        "old log-probs are computed anew for each update, and nothing is ever clipped: report it",
    )
    if moved is None:
        return Finding(name, "the loss has no ratio", verdict=SKIPPED)
    verdict = OK if moved else FAILED
    return Finding(
        name, f"after an update the KL of the ratio is {moved:.3g}", "not 0", verdict, "" if moved else advice
    )


def _masked(t: Trajectory, hides: bool, disturb: bool) -> Trajectory:
    fresh = copied(t)
    mask = np.array(fresh.loss_mask)
    if hides:
        mask[1::2] = False
        fresh.loss_mask = mask
    for name in ("advantages", "returns", "old_log_probs", "ref_log_probs") if disturb else ():
        values = fresh.column(name)
        if values is not None:
            fresh.put(name, np.where(mask, values, values - 1.5).astype(np.float32))
    return fresh
