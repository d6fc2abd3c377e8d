"""What samplers of images with weights of their own are tested with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.invariant.test_vision import make_prompts, marks_of, rows_of, sample, sampled, segments, trained
from tests.unit.engine.training.engine_cases import simple_loss
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.trajectory import Prompt
from verl.weight_sync.sender import StreamedSync


def assert_agreement(path: Path, engine: Callable[[Path], Any]) -> None:
    """Sampler and trainer agree from a checkpoint and after syncs: one image, none, several, and one of 64 tokens; first
    as the engine loads what the trainer saved. Prompts whose image tokens are not those of their images are refused."""
    saved, prompts = path.with_name("saved"), make_prompts(path)
    actor = FSDPEngine(path, role_cfg=trained(), device="cpu")
    actor.save_weights(saved)
    for file in path.glob("*.json*"):
        if not (saved / file.name).exists():
            (saved / file.name).write_bytes(file.read_bytes())
    sampler = engine(saved)
    try:
        for version in range(3):
            if version:
                assert StreamedSync(actor, sampler).push(version, verify=True).verified
            found = sample(sampler, prompts)
            rows = rows_of(prompts, found)
            ours = actor.forward(segments(rows), temperature=1.0)["log_probs"]
            assert np.abs(ours - sampled(found)).max() <= 1e-4
            assert not set(marks_of(path)) & {int(t) for row in rows for t in row.response_ids}
            loss = simple_loss(sum(row.length for row in rows))
            assert not actor.step(segments(rows), loss, temperature=1.0).refused
        swapped = Prompt("0:0@0", prompts[0].ids, None, media=prompts[2].media)
        for wrong, why in (
            (swapped, "image tokens for images"),
            (Prompt("0:0@0", prompts[0].ids, None), "holds"),
        ):
            with pytest.raises(ValueError, match=why):
                sample(sampler, [wrong], 1)
    finally:
        sampler.close()
