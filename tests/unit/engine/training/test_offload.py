"""`param_offload` and `optimizer_offload`: what is where in each phase of a role.

A processor has no second memory, so places are written down by a stand-in for the two moves; tests/gpu measures bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.engine.training.engine_cases import rows_of, simple_loss
from verl.config import load
from verl.engine.rollout.vllm import VLLM
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.trainer.colocation import Colocation
from verl.trajectory import Batch, Trajectory
from verl.workers.launch import start_here
from verl.workers.roles import WorkerSet

ACTOR = "actor_rollout_ref.actor.fsdp_config"
BOTH = [f"{ACTOR}.param_offload=True", f"{ACTOR}.optimizer_offload=True"]
WEIGHTS, ALL, AWAY = {"weights"}, {"weights", "optimizer"}, set[str]()


class Places:
    """What is on the device, by engine (its module); and what was there when an engine computed."""

    def __init__(self) -> None:
        self.here: dict[int, set[str]] = {}
        self.found: list[tuple[str, set[str]]] = []

    def at(self, engine: Any) -> set[str]:
        return self.here.setdefault(id(engine), set(ALL))


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Places:
    """Watches every `FSDPEngine` of a test."""
    seen = Places()

    def moved(name: str, away: bool) -> None:
        method = getattr(FSDPEngine, name)

        def wrapped(self: Any, *, optimizer: bool = away) -> None:
            named = {"weights"} if self._weights_leave else set()
            named |= {"optimizer"} if self._state_leaves and optimizer and self._optimizer is not None else set()
            seen.here[id(self)] = seen.at(self) - named if away else seen.at(self) | named
            method(self) if away else method(self, optimizer=optimizer)

        monkeypatch.setattr(FSDPEngine, name, wrapped)

    def watched(name: str) -> None:
        method = getattr(FSDPEngine, name)

        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.found.append((f"{self.role} {name}", set(seen.at(self))))
            return method(self, *args, **kwargs)

        monkeypatch.setattr(FSDPEngine, name, wrapped)

    moved("offload", away=True)
    moved("onload", away=False)
    for name in (
        "forward",
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


PARTS = [(step, part) for step in ("save", "load") for part in ("weights", "optimizer")]


def responses() -> list[Trajectory]:
    rows = rows_of([(5, [3, 4]), (7, [2, 6])])
    for row in rows:
        row.loss_mask = row.response_mask
    return rows


def train_step(config: Any, workers: WorkerSet, folder: Path) -> None:
    """What the loop asks of the roles in a step."""
    batch, memory = Batch(responses()), Colocation(config, workers.sampler)
    with memory.computing(workers.policy):
        workers.policy.forward(batch, "old_log_prob", {"log_probs": "old_log_probs"})
    if "ref" in workers.roles:
        with memory.computing(workers.roles["ref"]):
            workers.roles["ref"].forward(batch, "ref", {"log_probs": "ref_log_probs"})
    with memory.computing(workers.policy, optimizer=True):
        assert not workers.policy.update(batch, step=1).refused
    for step, part in PARTS:
        getattr(workers.policy, step)(part, folder)


def engine_of(workers: WorkerSet, role: str = "actor") -> Any:
    return workers.policy.group.calls.workers[0].engine(role)


@pytest.fixture
def separate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A sampler with weights of its own, in place of vLLM."""
    monkeypatch.setattr(VLLM, "build", lambda *_: object())
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
    config = with_vllm(configured(tmp_path, *BOTH, *reference))
    workers = start_here(config, tiny_tokenizer(), total_steps=1)
    engines = [engine_of(workers), engine_of(workers, "ref")]
    assert places.at(engines[0]) == AWAY and places.at(engines[1]) == {"optimizer"}  # which it does not have
    train_step(config, workers, tmp_path / "saved")
    workers.policy.group.calls.workers[0].send_weights(None, [], 1, False)
    assert places.found == [
        ("actor forward", WEIGHTS),
        ("ref forward", ALL),
        ("actor step", ALL),
        ("actor step", ALL),
        ("actor save_weights", AWAY),
        ("actor save_optimizer", AWAY),
        ("actor load_weights", AWAY),
        ("actor load_optimizer", AWAY),
        ("actor named_weights", AWAY),
    ]
    assert places.at(engines[0]) == AWAY
    assert all(p.grad is None for p in engines[0].module.parameters())


def test_a_sampler_on_the_trainers_tensors_keeps_them(tmp_path: Path, places: Places) -> None:
    config = configured(tmp_path, *BOTH)
    workers = start_here(config, tiny_tokenizer(), total_steps=1)
    assert places.at(engine_of(workers)) == WEIGHTS
    train_step(config, workers, tmp_path / "saved")
    assert places.found[1] == ("actor step", ALL)
    assert places.at(engine_of(workers)) == WEIGHTS


def test_a_pass_that_fails_leaves_the_device_free(tmp_path: Path, places: Places, separate: None) -> None:
    config = with_vllm(configured(tmp_path, *BOTH))
    workers = start_here(config, tiny_tokenizer(), total_steps=1)
    engine, memory = engine_of(workers), Colocation(config, workers.sampler)
    with pytest.raises(ZeroDivisionError), memory.computing(workers.policy, optimizer=True):
        assert places.at(engine) == ALL
        raise ZeroDivisionError
    assert places.at(engine) == AWAY


def test_the_base_of_an_adapter_is_there_for_the_references_pass(
    tmp_path: Path, places: Places, separate: None
) -> None:
    config = with_vllm(
        configured(tmp_path, *BOTH, "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.model.lora_rank=2")
    )
    workers = start_here(config, tiny_tokenizer(), total_steps=1)
    train_step(config, workers, tmp_path / "saved")
    assert places.found[:2] == [("actor forward", WEIGHTS)] * 2, "the adapter's base is the reference"
    assert places.at(engine_of(workers)) == AWAY


@pytest.mark.parametrize("leaves", ["param_offload", "optimizer_offload"])
def test_a_loaded_optimizer_state_is_where_the_next_update_looks(tmp_path: Path, leaves: str) -> None:
    """The device "meta" stands for an accelerator."""
    model = str(tiny_model(tmp_path / "model"))

    def engine() -> FSDPEngine:
        return FSDPEngine(
            model,
            role_cfg={"fsdp_config": {"dtype": "float32", leaves: True}, "optim": {"lr": 1e-3}},
            device="cpu",
        )

    one, other = engine(), engine()
    one.step(rows_of([(5, [4, 3])]), simple_loss(7, 0.1), ("log_probs", "entropy"), temperature=1.0)
    one.save_optimizer(tmp_path / "state")
    other.offload()
    other.device = torch.device("meta")
    other.load_optimizer(tmp_path / "state")
    found = {state["exp_avg"].device.type for state in other._optimizer.state.values()}
    assert found == ({"meta"} if leaves == "param_offload" else {"cpu"})
