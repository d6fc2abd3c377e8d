"""The sampler under proof: its log-probs are the trainer's, turn by turn, and images and new weights reach both."""

from __future__ import annotations

from typing import Any

import numpy as np

from verl.algorithms.agreement import first_step_bound
from verl.config.layout import policy_placement
from verl.proving.finding import FAILED, LOOK, OK, SKIPPED, Finding
from verl.proving.life import Life
from verl.trainer.image_checks import changes_of, probes_of
from verl.trainer.sync_probe import SamplerDoesNotFollow
from verl.trajectory import Batch
from verl.weight_sync.verify import WeightSyncError

NOT_ARRIVED = "not all weights arrived"


def log_probs(life: Life, batch: Batch, name: str = "log-probs") -> Finding:
    """Log-probs of sampler and trainer, by turn of the model."""
    if first_step_bound(life.config, life.parts.workers.policy.compute_dtype) is None:
        why = "they differ by design: a truncated distribution, bypass mode or logprob_diff_limit"
        return Finding(name, why, verdict=SKIPPED)
    ours, rows = life.log_probs(batch), [t for t in batch if t.rollout_log_probs is not None]
    turns: dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    for t, values in zip(batch, ours, strict=True):
        mask = t.response_mask
        numbers = np.cumsum(np.diff(mask.astype(np.int8), prepend=0) == 1) * mask
        for turn in range(1, int(numbers.max(initial=0)) + 1):
            turns.setdefault(turn, []).append((values, t.rollout_log_probs, numbers == turn))
    by_turn = {turn: life.apart(*map(list, zip(*triples, strict=True))) for turn, triples in turns.items()}
    if not rows or not by_turn:
        return Finding(name, "the sampler wrote nothing", verdict=FAILED, advice="look at the events of the run folder")
    worst = max(by_turn, key=lambda turn: by_turn[turn][0])
    advice = (
        "sampler and trainer compute different models: try rollout.name=native, "
        f"{policy_placement(life.config).key('dtype')}=float32 to tell rounding from an error, and report it"
    )
    about = f"turn {worst} of {len(by_turn)}" if len(by_turn) > 1 else ""
    return Finding.within(name, *by_turn[worst], "nats", advice, about)


def images(life: Life, batch: Batch) -> Finding:
    """What blanked images change of a response's log-probs."""
    row = next((s for s in batch.segments if s.media is not None and s.length), None)
    if row is None or row.media is None:
        return Finding("images", "no images", verdict=SKIPPED)
    difference, rounding = changes_of(life.log_probs(Batch(probes_of(row, row.media))))
    right = difference > 3 * rounding
    advice = "the model does not see its images: look at its vision tower and its processor"
    measured = f"blanked, they change log-probs by {difference:.3g} nats"
    return Finding(
        "images", measured, f"above {3 * rounding:.2g} nats", OK if right else FAILED, "" if right else advice
    )


def known_adapter(life: Life) -> Finding:
    """The adapter with B other than 0, before the first update; the trainer's log-probs of the probe are taken."""
    if not life.config.actor_rollout_ref.model.lora_rank:
        life.trainer.probe.before_update(0)
        return Finding("adapter", "no adapter", verdict=SKIPPED)
    try:
        life.trainer.probe.before_update(0)
    except SamplerDoesNotFollow as error:
        return Finding("adapter", "a known adapter is not seen", "seen", FAILED, str(error))
    return Finding("adapter", "a known adapter goes in, is seen, goes out", "seen")


def weights(life: Life, metrics: dict[str, Any]) -> Finding:
    """Push what an update made, and what the probe says of it. metrics: of that update, gets the push's."""
    name = "weights"
    try:
        life.trainer.push(1, metrics)
    except WeightSyncError as error:
        return Finding(name, NOT_ARRIVED, "all", FAILED, str(error))
    moved, slope = metrics.get("training/sync_proof/moved"), metrics.get("training/sync_proof/slope")
    if moved is None:
        return Finding(name, "no probe with this configuration: see log-probs, step 2", verdict=SKIPPED)
    measured = f"trainer moved {moved:.3g} nats, sampler {slope or 0:.0%} of it"
    try:
        life.trainer.probe.check()
    except SamplerDoesNotFollow as error:
        return Finding(name, measured, "100 %", FAILED, str(error))
    if not metrics["training/sync_proof/tokens"]:
        why = "the update changed every token that is compared: a smaller rate (verl prove --rate)"
        return Finding(name, "no token is drawn again", "100 %", LOOK, why)
    if moved == 0:
        return Finding(
            name, measured, "above 0", FAILED, "an update changes nothing: look at optim.lr and frozen weights"
        )
    if slope is None:
        why = "too small a move for a verdict: more rows, or a larger rate (verl prove --rate)"
        return Finding(name, measured, "100 %", LOOK, why)
    return Finding(name, measured, "100 %")


def routes(metrics: dict[str, float]) -> Finding:
    """Where replayed experts differ from those that the trainer would choose."""
    changed = metrics.get("actor/router_replay/changed_frac")
    if changed is None:
        return Finding("routes", "no routes are replayed", verdict=SKIPPED)
    advice = "most replayed experts are not the trainer's choice: routes are those of other tokens or layers; report it"
    return Finding.within("routes", changed, 0.2, "of them changed", advice)
