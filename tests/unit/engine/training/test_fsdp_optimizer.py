"""The optimizer's step over ranks: clipping by the norm of all gradients, and optimizers other than AdamW.

Clipping is seen in plain gradient descent, whose steps have the gradient's scale. Adam's do not: it divides a factor
that all gradients have in common out again.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ranks
from tests.tiny import tiny_model
from tests.unit.engine.training.fsdp_cases import locally, on_ranks, role
from tests.unit.engine.training.test_fsdp_checkpoint import go, state
from tests.unit.engine.training.test_fsdp_engine import complaint

LIMIT = 0.05
RATE = 2.0
STEPS = 2


def descending(limit: float = LIMIT, **changes: Any) -> dict[str, Any]:
    return role(
        optim={"optimizer": "SGD", "lr": RATE, "weight_decay": 0.0},
        grad_clip=limit,
        **changes,
    )


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "uneven": (descending(), {}, "uneven"),
    "one rank has none": (descending(), {}, "none for the last"),
    "sequence": (descending(ulysses_sequence_parallel_size=2), {}, "even"),
    "replicas": (descending(fsdp={"fsdp_size": 1}), {}, "uneven"),
    "products": (descending(fsdp={"tensor_parallel_size": 2}), {}, "even"),
    "offloaded": (descending(fsdp={"offload_policy": True}), {}, "uneven"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("m") / "m", scale=4.0, tied=True)


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, Any]:
    return locally(str(model), descending(), steps=STEPS)


def moved(model: Path, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """How far each weight went from where it was."""
    before = locally(str(model), role(), steps=0)["weights"]
    return {name: weights[name] - before[name] for name in weights if name != "lm_head.weight"}  # tied


def length(tensors: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))


def check(size: int, cases: Any, model: Path, alone: dict[str, Any]) -> None:
    path, expected = moved(model, alone["weights"]), length(moved(model, alone["weights"]))
    found = ranks.run(on_ranks, size, str(model), cases, STEPS)
    for name in cases:
        for one in (each[name] for each in found):
            assert one["norm"] == pytest.approx(alone["norm"], rel=1e-5), name
            theirs = moved(model, one["weights"])
            apart = length({key: theirs[key] - path[key] for key in path})
            assert apart <= 2e-4 * expected, name


def test_one_device_goes_as_far_as_the_limit_says(model: Path, alone: dict[str, Any]) -> None:
    assert min(alone["norm"]) > 4 * LIMIT
    once = locally(str(model), descending(), steps=1)
    assert length(moved(model, once["weights"])) == pytest.approx(RATE * LIMIT, rel=1e-3)
    free = locally(str(model), descending(limit=0.0), steps=1)
    assert length(moved(model, free["weights"])) == pytest.approx(RATE * once["norm"][0], rel=1e-3)


def test_two_ranks_go_where_one_device_goes(model: Path, alone: dict[str, Any]) -> None:
    check(2, CASES, model, alone)


@pytest.mark.slow
@pytest.mark.long
def test_four_ranks_go_where_one_device_goes(model: Path, alone: dict[str, Any]) -> None:
    cases = {
        "replicas of shards": (descending(fsdp={"fsdp_size": 2}), {}, "uneven"),
        "replicas, sequence": (
            descending(fsdp={"fsdp_size": 2}, ulysses_sequence_parallel_size=2),
            {},
            "even",
        ),
        "products, sequence": (
            descending(fsdp={"tensor_parallel_size": 2}, ulysses_sequence_parallel_size=2),
            {},
            "even",
        ),
    }
    check(4, cases, model, alone)


# -- other optimizers ----------------------------------------------------------------------------------------


KINDS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "Adagrad": {},
    "RMSprop": {"eps": 1e-3},
    "NAdam": {},
}


def stepping(kind: str, rate: float = 1e-3) -> dict[str, Any]:
    return role(optim={"optimizer": kind, "lr": rate, "override_optimizer_config": KINDS.get(kind, {})})


@pytest.mark.long
def test_other_optimizers_step_as_on_one_device(model: Path) -> None:
    found = ranks.run(on_ranks, 2, str(model), {k: (stepping(k), {}, "uneven") for k in KINDS}, STEPS)
    for kind in KINDS:
        expected = locally(str(model), stepping(kind), steps=STEPS)["weights"]
        gone = length(moved(model, expected))
        for one in found:
            weights = one[kind]["weights"]
            apart = length({n: weights[n] - expected[n] for n in expected})
            assert gone > 0 and apart <= 1e-3 * gone, kind


def test_muon_steps_the_matrices_of_layers(model: Path, tmp_path: Path) -> None:
    from verl.config.schema.training import OptimConfig
    from verl.engine.training.optimizer import build_optimizer

    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((4, 6), (5, 3), (7,))]
    twins = [[torch.nn.Parameter(value.clone()) for value in start] for _ in range(2)]
    extra = {"momentum": 0.9, "nesterov": True, "extra_scale_factor": 0.3}
    optim = OptimConfig(optimizer="Muon", lr=0.1, weight_decay=0.2, override_optimizer_config=extra)
    both = build_optimizer(twins[0], optim, {id(twins[0][0])})
    muon = torch.optim.Muon(twins[1][:1], lr=0.1, weight_decay=0, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    alone = [muon, torch.optim.AdamW(twins[1][1:], lr=0.1, weight_decay=0.2, betas=tuple(optim.betas), fused=True)]
    for _ in range(3):
        before = twins[1][0].detach().clone()
        for mine, other in zip(*twins, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        both.step()
        for optimizer in alone:
            optimizer.step()
        with torch.no_grad():  # the update alone is scaled by 0.3 / 0.2
            twins[1][0].copy_(before * (1 - 0.1 * 0.2) + (twins[1][0] - before) * 1.5)
        for mine, other in zip(*twins, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    found = ranks.run(on_ranks, 2, str(model), {"Muon": (stepping("Muon"), {}, "uneven")}, STEPS)
    expected = locally(str(model), stepping("Muon"), steps=STEPS)["weights"]
    for one in found:  # products of bfloat16
        apart = length({n: one["Muon"]["weights"][n] - expected[n] for n in expected})
        assert apart <= 3e-2 * length(moved(model, expected))
    assert ranks.run(resumed, 2, str(model), str(tmp_path), "Muon") == [True, True]


@pytest.mark.parametrize("kind", ["Adafactor", "Rprop"])
def test_those_that_cannot_are_refused_before_the_first_step(model: Path, kind: str) -> None:
    for message in ranks.run(complaint, 2, str(model), stepping(kind)):
        assert f"torch.optim.{kind} cannot step weights that are cut over ranks" in message


def resumed(path: str, folder: str, kind: str) -> bool:
    """State as it was saved, whether the optimizer has any or not."""
    from verl.engine.training.fsdp.engine import FSDPEngine

    one = FSDPEngine(path, role_cfg=stepping(kind), device="cpu")
    go(one, 1)
    one.save_optimizer(Path(folder))
    before = state(one)
    go(one, 1)
    one.load_optimizer(Path(folder))
    after = state(one)
    kept = [name for name in before if "/" in name or name == "schedule"]
    return all(torch.equal(before[name], after[name]) for name in kept)


@pytest.mark.long
def test_state_of_other_optimizers_is_saved_and_read(model: Path, tmp_path: Path) -> None:
    for kind in ("SGD", "ASGD"):
        assert ranks.run(resumed, 2, str(model), str(tmp_path / kind), kind) == [True, True]
