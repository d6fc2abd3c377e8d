"""The probe of the sampler at every push: a run whose sampler follows goes on, one whose sampler does not ends."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.chaos.fork_server import ForkServer
from tests.runs import TinyRun
from verl.trainer.sync_probe import Moves

PROBED = """
from verl.trainer import sync_probe

sync_probe.SHARE = 1e9  # also where a step is over sooner than a probe pays off
"""
FAULTS = {
    "copies that are made once": """
from verl.engine.rollout.native.runner import FastLinears

FastLinears.invalidate = lambda self: None
""",
    "keys and values of earlier weights": """
from verl.engine.rollout.native.scheduler import Scheduler

Scheduler.forget_cache = lambda self: None
""",
}
PARTLY = """
from verl.engine.rollout.native import runner

merged, seen = runner.merged_weight, []


def partly(layer):
    if layer not in seen:
        seen.append(layer)
    return layer.base_layer.weight.detach() if {} else merged(layer)


runner.merged_weight = partly
"""
AWAKE = "actor_rollout_ref.rollout.free_cache_engine=False"  # else sleep drops what is stale
LORA = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=1e-3")


def run(server: ForkServer, tiny: TinyRun, folder: Path, fault: str, *words: str) -> tuple[int, str, list[dict]]:
    """Exit status, stderr, and training/sync_proof/* of each step."""
    (folder / "probe_plugin.py").write_text(PROBED + fault)
    short = ("trainer.total_training_steps=3", "trainer.save_freq=-1", "trainer.test_freq=-1", "data.val_files=null")
    more = ("actor_rollout_ref.model.external_lib=probe_plugin", "actor_rollout_ref.actor.optim.lr=1e-4", *words)
    done = server.run(tiny.overrides(folder / "out", *short, *more), timeout=300, PYTHONPATH=str(folder))
    file = folder / "out/metrics.jsonl"
    lines = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    prefix = "training/sync_proof/"
    steps = [{k.removeprefix(prefix): v for k, v in r.items() if k.startswith(prefix)} for r in lines if "step" in r]
    return done.status, done.stderr, steps


@pytest.mark.parametrize("words", [(), LORA, ("actor_rollout_ref.rollout.temperature=0.6",)], ids=["", "lora", "cool"])
def test_a_sampler_that_follows(words: tuple[str, ...], fork_server: ForkServer, tiny: TinyRun, tmp_path: Path) -> None:
    status, stderr, steps = run(fork_server, tiny, tmp_path, "", *words)
    assert status == 0, stderr[-3000:]
    assert len(steps) == 3 and sum(step["tokens"] > 0 for step in steps) >= 2
    for step in steps:
        assert step["apart"] < 1e-5 and step.get("slope", 1.0) == pytest.approx(1, abs=0.02)
    assert any("slope" in step for step in steps)


@pytest.mark.parametrize("words", [(), LORA], ids=["", "lora"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_sampler_that_does_not(
    fault: str, words: tuple[str, ...], fork_server: ForkServer, tiny: TinyRun, tmp_path: Path
) -> None:
    """It ends within two pushes."""
    status, stderr, steps = run(fork_server, tiny, tmp_path, FAULTS[fault], AWAKE, *words)
    assert status == 1, steps
    assert "the trainer's log-probs of" in stderr, stderr[-3000:]
    if words:
        assert "before the first step: a known adapter" in stderr and not steps
    else:
        assert len(steps) <= 2 and steps[-1]["apart"] > 1e-3
        assert ("keys and values of earlier weights" in stderr) is (fault == "keys and values of earlier weights")


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        ("layer.base_layer.weight.shape == (32, 32)", "k_proj, v_proj of all layers"),
        ("seen.index(layer) == 13", "down_proj of layers 1"),
    ],
)
def test_what_an_adapter_is_not_applied_to_is_named(
    lost: str, named: str, fork_server: ForkServer, tiny: TinyRun, tmp_path: Path
) -> None:
    status, stderr, steps = run(fork_server, tiny, tmp_path, PARTLY.format(lost), AWAKE, *LORA)
    assert status == 1 and not steps
    assert f"the adapter is not applied as it should be in {named}: report it" in stderr, stderr[-3000:]


def test_warn_goes_on(fork_server: ForkServer, tiny: TinyRun, tmp_path: Path) -> None:
    status, stderr, steps = run(
        fork_server, tiny, tmp_path, FAULTS["copies that are made once"], AWAKE, "trainer.sync_proof=warn"
    )
    assert status == 0 and len(steps) == 3 and "the sampler's by " in stderr
    assert "sampler_does_not_follow" in (tmp_path / "out/events.jsonl").read_text()


def test_off_does_not_look(fork_server: ForkServer, tiny: TinyRun, tmp_path: Path) -> None:
    status, _, steps = run(
        fork_server, tiny, tmp_path, FAULTS["copies that are made once"], AWAKE, "trainer.sync_proof=off"
    )
    assert status == 0 and not any("slope" in step or "moved" in step for step in steps)


def test_a_verdict_waits_for_moves_above_the_noise() -> None:
    """Over noise of both sides, and one token that goes its own way: never wrong about a sampler that follows, never
    silent about one that does not."""
    generator = np.random.default_rng(0)
    for scale in (0.01, 0.1, 1.0, 10.0):
        for _ in range(300):
            moved = generator.normal(0, scale * 0.1, 16)
            rounding = generator.normal(0, 0.01, (2, 16))
            rounding[generator.integers(2), generator.integers(16)] += 1
            follows = Moves(moved + rounding[0], moved + rounding[1], 0.01)
            stays = Moves(moved + rounding[0], rounding[1], 0.01)
            assert follows.follows
            assert scale < 10 or not stays.follows
