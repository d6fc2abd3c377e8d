"""State under proof: what a checkpoint holds is what a resumed run computes with and goes on from."""

from __future__ import annotations

import numpy as np

from verl.proving.finding import FAILED, LOOK, OK, Finding
from verl.proving.life import Life
from verl.trajectory import Batch


def saved(life: Life, batch: Batch, expected: list[np.ndarray]) -> Finding:
    """Log-probs under the weights that were loaded. expected: before they were saved."""
    advice = "the weights that a checkpoint gives back are not those that were saved: report it"
    difference, bound = life.apart(life.log_probs(batch), expected, [t.response_mask for t in batch])
    return Finding.within(
        "save and load", difference, bound / 10 if life.precision == "float32" else bound, "nats", advice
    )


def next_batch(batch: Batch, expected: Batch) -> Finding:
    """The batch that a resumed run samples next. expected: the batch of the run that went on."""
    prompts = [(t.uid, t.prompt.ids.tolist()) for t in batch]
    same = prompts == [(t.uid, t.prompt.ids.tolist()) for t in expected]
    responses = [t.response_ids.tolist() for t in expected]
    equal = sum(t.response_ids.tolist() in responses for t in batch)
    measured = f"{'the same' if same else 'other'} prompts, {equal} of {len(batch)} responses the same"
    if not same:
        return Finding("resume", measured, "the same prompts", FAILED, "a resumed run draws other data: report it")
    advice = "only the sampler's numbers differ: exact with rollout.name=native, not with others"
    return Finding(
        "resume",
        measured,
        "the same prompts",
        OK if equal == len(batch) else LOOK,
        "" if equal == len(batch) else advice,
    )


def next_update(life: Life, moved: list[np.ndarray], expected: list[np.ndarray]) -> Finding:
    """What the next update moves log-probs by, after a resume and without."""
    ours, theirs = np.concatenate(moved), np.concatenate(expected)
    difference = float(np.linalg.norm(ours - theirs) / max(1e-12, float(np.linalg.norm(theirs))))
    advice = (
        "after a resume the next update is another one: the optimizer's state was not saved or not loaded; report it"
    )
    return Finding.within("next update", difference, 0.01 if life.precision == "float32" else 0.2, "relative", advice)
