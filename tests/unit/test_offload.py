"""`param_offload` and `optimizer_offload`: what is where in each phase of a role.

A processor has no second memory, so places are written down by a stand-in for the two moves; tests/gpu measures bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.engine_cases import rows_of, simple_loss
from verl.config import Map, load
from verl.engine.training.local_engine import LocalEngine
from verl.engine.training.offload import Offloading
from verl.trajectory import Batch, Trajectory
from verl.workers import build, codec
from verl.workers.local import build_roles
from verl.workers.train_worker import TrainWorker

ACTOR = "actor_rollout_ref.actor.fsdp_config"
BOTH = [f"{ACTOR}.param_offload=True", f"{ACTOR}.optimizer_offload=True"]
WEIGHTS, ALL, AWAY = {"weights"}, {"weights", "optimizer"}, set[str]()


class Places:
    """What is on the device, by engine (its module); and what was there when an engine computed."""

    def __init__(self) -> None:
        self.here: dict[int, set[str]] = {}
        self.found: list[tuple[str, set[str]]] = []

    def at(self, engine: Any) -> set[str]:
        return self.here.setdefault(id(engine.scorer), set(ALL))


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Places:
    """Watches every `LocalEngine` of a test."""
    seen = Places()

    def moved(move: Callable[..., None], away: bool) -> Callable[..., None]:
        def wrapped(self: Offloading, module: Any, optimizer: Any, *device: Any) -> None:
            named = {"weights"} if self.weights else set()
            named |= {"optimizer"} if self.optimizer and optimizer is not None else set()
            held = seen.here.setdefault(id(module), set(ALL))
            seen.here[id(module)] = held - named if away else held | named
            move(self, module, optimizer, *device)

        return wrapped

    def watched(name: str) -> None:
        method = getattr(LocalEngine, name)

        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.found.append((f"{self.role} {name}", set(seen.at(self))))
            return method(self, *args, **kwargs)

        monkeypatch.setattr(LocalEngine, name, wrapped)

    back = Offloading.back
    monkeypatch.setattr(Offloading, "back", moved(back, away=False))
    monkeypatch.setattr(
        Offloading, "away", moved(lambda s, m, o: back(s, m, o, torch.device("cpu")), away=True)
    )
    for name in (
        "log_probs",
        "step",
        "named_weights",
        "save_weights",
        "save_optimizer",
        "load_weights",
        "load_optimizer",
    ):
        watched(name)
    return seen


def configured(folder: Path, *words: str) -> Any:
    return load(
        [
            "algorithm.adv_estimator=grpo",
            "data.max_prompt_length=16",
            "data.max_response_length=12",
            "data.train_batch_size=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=1",
            "actor_rollout_ref.rollout.n=2",
            f"actor_rollout_ref.model.path={tiny_model(folder / 'model')}",
            "actor_rollout_ref.rollout.name=native",
            "trainer.device=cpu",
            *words,
        ]
    )


def answers() -> list[Trajectory]:
    rows = rows_of([(5, [3, 4]), (7, [2, 6])])
    for row in rows:
        row.loss_mask = row.response_mask
    return rows


def train_step(roles: Any, folder: Path) -> None:
    """What the loop asks of the roles in a step."""
    batch = Batch(answers())
    roles.actor.old_log_probs(batch)
    if roles.reference is not None:
        roles.reference.log_probs(batch)
    assert not roles.actor.update(batch, step=1).refused
    roles.actor.save(folder)
    roles.actor.save_optimizer(folder)
    roles.actor.load(folder)
    roles.actor.load_optimizer(folder)


@pytest.fixture
def separate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A sampler with weights of its own, in place of vLLM."""
    monkeypatch.setitem(build._OWN_SAMPLERS, "vllm", lambda *_: object())
    yield


def with_vllm(config: Any) -> Any:
    config.actor_rollout_ref.rollout.name = "vllm"
    return config


def test_each_phase_of_the_policy_finds_what_it_needs_and_no_more(
    tmp_path: Path, places: Places, separate: None
) -> None:
    reference = [
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    ]
    roles = build_roles(with_vllm(configured(tmp_path, *BOTH, *reference)), tiny_tokenizer(), total_steps=1)
    engines = [roles.actor.engine, roles.reference.engine]  # type: ignore[attr-defined]
    assert places.at(engines[0]) == AWAY and places.at(engines[1]) == {"optimizer"}  # which it does not have
    train_step(roles, tmp_path / "saved")
    assert places.found == [
        ("actor log_probs", WEIGHTS),
        ("ref log_probs", ALL),
        ("actor step", ALL),
        ("actor step", ALL),
        ("actor save_weights", AWAY),
        ("actor save_optimizer", AWAY),
        ("actor load_weights", AWAY),
        ("actor load_optimizer", AWAY),
    ]
    assert places.at(engines[0]) == AWAY
    assert all(p.grad is None for p in engines[0].module.parameters())


def test_a_sampler_on_the_trainers_tensors_keeps_them(tmp_path: Path, places: Places) -> None:
    roles = build_roles(configured(tmp_path, *BOTH), tiny_tokenizer(), total_steps=1)
    assert places.at(roles.actor.engine) == WEIGHTS  # type: ignore[attr-defined]
    train_step(roles, tmp_path / "saved")
    assert places.found[1] == ("actor step", ALL)
    assert places.at(roles.actor.engine) == WEIGHTS  # type: ignore[attr-defined]


def test_a_pass_that_fails_leaves_the_device_free(tmp_path: Path, places: Places, separate: None) -> None:
    roles = build_roles(with_vllm(configured(tmp_path, *BOTH)), tiny_tokenizer(), total_steps=1)
    engine: Any = roles.actor.engine  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError), engine.on_device(optimizer=True):
        assert places.at(engine) == ALL
        raise ZeroDivisionError
    assert places.at(engine) == AWAY


def test_a_training_rank_does_the_same(
    tmp_path: Path, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_vllm(configured(tmp_path, *BOTH))
    host = TrainWorker(config.to_dict(), 0, 1)
    host.join("127.0.0.1", 0)
    host.build(total_steps=1)
    rows = answers()
    host.take_rows(codec.encode(rows, ["loss_mask"]))
    host.old_log_probs(1.0)
    host.log_probs_of([0, 2], 1.0)
    advantages = [{"rows": [0, 1, 2, 3], "denominators": denominators(rows)}]
    result = host.update(codec.collect(rows, ["advantages"]), advantages, 1.0)
    assert not result["results"][0]["refused"]
    host.send_weights(None, [], 1, False)
    for name in ("save_weights", "save_optimizer", "load_weights", "load_optimizer"):
        getattr(host, name)(str(tmp_path / "saved"))
    assert places.found == [
        ("actor log_probs", WEIGHTS),
        ("actor log_probs", WEIGHTS),
        ("actor step", ALL),
        ("actor named_weights", AWAY),
        ("actor save_weights", AWAY),
        ("actor save_optimizer", AWAY),
        ("actor load_weights", AWAY),
        ("actor load_optimizer", AWAY),
    ]
    assert places.at(host.actor) == AWAY


def denominators(rows: list[Trajectory]) -> dict[str, Any]:
    from dataclasses import asdict

    from verl.algorithms.objective import count_denominators

    return asdict(count_denominators(rows, 12.0))


@pytest.mark.parametrize(
    "flags", [{}, {"param_offload": True}, {"param_offload": True, "optimizer_offload": True}]
)
def test_moving_changes_no_weight(tmp_path: Path, flags: dict[str, bool]) -> None:
    path = tiny_model(tmp_path / "m")
    rows, ends = rows_of([(5, [3, 4]), (7, [2, 6])]), []
    for given in ({}, flags):
        role = Map.of({"fsdp_config": {"dtype": "float32", **given}, "optim": {"lr": 1e-2}})
        engine = LocalEngine(path, role_cfg=role, device="cpu")
        for _ in range(3):
            with engine.on_device():
                before = engine.log_probs(rows, temperature=1.0).log_probs
            with engine.on_device(optimizer=True):
                engine.step(rows, simple_loss(15), temperature=1.0)
        ends.append((before, {n: t.clone() for n, t in engine.named_weights()}))
    assert np.array_equal(ends[0][0], ends[1][0])
    assert all(torch.equal(ends[0][1][name], tensor) for name, tensor in ends[1][1].items())
