"""The probe of the sampler at every push: a run whose sampler follows goes on, one whose sampler does not ends."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.chaos.fork_server import ForkServer
from tests.runs import TinyRun
from tests.tiny import tiny_model
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.trainer.sync_probe import Moves, rows_of
from verl.trajectory import Batch, Prompt, Segment, Trajectory

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
QUANTIZED = """
import torch
from verl.algorithms import agreement
from verl.engine.rollout.native.runner import FastLinears

agreement.quantized_sampling = lambda rollout: "quantization=fp8_per_channel"
whole = FastLinears._weight


def in_8_bits(self, module):
    weight = whole(self, module)
    step = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
    return (weight / step).to(torch.float8_e4m3fn).float() * step


FastLinears._weight = in_8_bits
"""
"""A sampler with weights of 8 bits: the embedded one has none of its own."""
FASTER = "actor_rollout_ref.actor.optim.lr=3e-4"
AWAKE = "actor_rollout_ref.rollout.free_cache_engine=False"  # else sleep drops what is stale
REPLAY = (
    "actor_rollout_ref.actor.router_replay.mode=R3",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
)
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


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A model whose distribution is not flat: its likeliest tokens stay so."""
    run = TinyRun(tmp_path_factory.mktemp("sharp"))
    tiny_model(run.model, scale=4.0)
    return run


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        *((fault, ()) for fault in FAULTS),
        ("copies that are made once", LORA),
        pytest.param("keys and values of earlier weights", LORA, marks=pytest.mark.long),
    ],
)
def test_a_sampler_that_does_not(
    fault: str, words: tuple[str, ...], fork_server: ForkServer, sharp: TinyRun, tmp_path: Path
) -> None:
    """It ends within two pushes."""
    status, stderr, steps = run(fork_server, sharp, tmp_path, FAULTS[fault], AWAKE, FASTER, *words)
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
        pytest.param("seen.index(layer) == 13", "down_proj of layers 1", marks=pytest.mark.long),
    ],
)
def test_what_an_adapter_is_not_applied_to_is_named(
    lost: str, named: str, fork_server: ForkServer, tiny: TinyRun, tmp_path: Path
) -> None:
    status, stderr, steps = run(fork_server, tiny, tmp_path, PARTLY.format(lost), AWAKE, *LORA)
    assert status == 1 and not steps
    assert f"the adapter is not applied as it should be in {named}: report it" in stderr, stderr[-3000:]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A model with experts whose distribution is not flat."""
    run = TinyRun(tmp_path_factory.mktemp("experts"))
    tiny_model(run.model, "qwen3_moe", scale=4.0)
    return run


@pytest.mark.parametrize("mode", [pytest.param("R2", marks=pytest.mark.long), "R3"])
def test_with_replayed_routes(mode: str, fork_server: ForkServer, moe: TinyRun, tmp_path: Path) -> None:
    """The probe is scored with the trainer's own routes; a sampler that does not follow is named."""
    words = REPLAY if mode == "R3" else ("actor_rollout_ref.actor.router_replay.mode=R2",)
    status, stderr, steps = run(fork_server, moe, tmp_path, "", *words)
    assert status == 0, stderr[-3000:]
    assert [step["slope"] for step in steps] == pytest.approx([1, 1, 1], abs=0.02)
    (folder := tmp_path / "stale").mkdir()
    status, stderr, steps = run(fork_server, moe, folder, FAULTS["copies that are made once"], AWAKE, *words)
    assert status == 1 and "the trainer's log-probs of" in stderr, stderr[-3000:]
    assert len(steps) == 1


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_a_quantized_sampler(seed: int, fork_server: ForkServer, tmp_path: Path) -> None:
    """One whose weights have 8 bits follows; one that keeps those of before is named, once moves are large enough."""
    tiny = TinyRun(tmp_path / "tiny")
    tiny_model(tiny.model, seed=seed, scale=4.0)
    words = ("actor_rollout_ref.actor.optim.lr=1e-3", "trainer.total_training_steps=6", AWAKE)
    status, stderr, steps = run(fork_server, tiny, tmp_path, QUANTIZED, *words)
    assert status == 0, stderr[-3000:]
    assert len(steps) == 6 and max(step["apart"] for step in steps) > 2e-3
    assert all(0.7 < step["slope"] < 1.3 for step in steps if "slope" in step)
    (folder := tmp_path / "stale").mkdir()
    fault = QUANTIZED + FAULTS["copies that are made once"]
    status, stderr, steps = run(fork_server, tiny, folder, fault, *words)
    assert status == 1 and "the trainer's log-probs of" in stderr, stderr[-3000:]
    assert steps[-1]["slope"] < 0.3, "embeddings are no copies"


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


def test_rows_are_different_starts_of_few_prompts(tmp_path: Path) -> None:
    """Equal starts count once; a prompt's rows are neighbours, which the trainer computes once."""

    def segment(uid: str, length: int, response: list[int]) -> Segment:
        prompt = Prompt(uid, np.arange(length), None)
        log_probs = np.array([-3, -0.7, -3, -3], np.float32)
        one = Segment(prompt.ids, np.array(response), np.ones(4, bool), rollout_log_probs=log_probs)
        return Trajectory(prompt, 0, segments=[one]).segments[0]

    many = [segment(uid, size, [k, 1, 2, 3]) for uid, size in (("b", 25), ("c", 50), ("a", 20)) for k in range(6)]
    rows = rows_of(many)
    assert [row.prompt for row in rows] == ["a"] * 4 + ["b"] * 4
    assert [row.ids[-1] for row in rows] == [0, 1, 2, 3] * 2 and {row.count for row in rows} == {2}
    same = [segment(uid, size, [7, 1, 2, 3]) for uid, size in (("b", 25), ("c", 50), ("a", 20)) for _ in range(6)]
    assert [row.prompt for row in rows_of(same)] == ["a", "b", "c"]
    assert len(rows_of(many[:6])) == 6, "all responses to a single prompt"
    role = {"fsdp_config": {"dtype": "float32"}}
    engine = FSDPEngine(str(tiny_model(tmp_path)), role_cfg=role, device="cpu", trainable=False)
    asked = [Segment(row.ids, np.array([1, 2]), np.ones(2, bool)) for row in rows]
    batch = Batch(Trajectory(Prompt(r.prompt, r.ids, None), 0, segments=[s]) for r, s in zip(rows, asked, strict=True))
    computed = sum(pack.size for pack, _ in engine._packs(batch.segments, engine.forward_batching))
    assert computed == 20 + 25 + 2 * 4 * 2, "each prompt once"


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
