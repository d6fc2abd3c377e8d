"""The optimizer keys that are megatron-core's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ranks
from tests.megatron import cases
from tests.tiny import tiny_model

pytestmark = [cases.NEEDS_MEGATRON, pytest.mark.timeout(240)]

# Steps of warm-up and of decay; the learning rate goes from 0 to 1 and down to 0.1.
_SHARED = {"lr": 1.0, "lr_warmup_steps": 2, "lr_decay_steps": 6, "min_lr": 0.1}
SCHEDULES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "linear": ({"lr_scheduler_type": "linear"}, [0, 0.5, 1, 0.775, 0.55, 0.325, 0.1, 0.1]),
    "warmup from a rate": ({"lr_scheduler_type": "linear", "lr_warmup_init": 0.2}, [0.2, 0.6, 1, 0.775]),
    "stable, then down at a constant rate": (
        {"lr_wsd_decay_style": "linear", "lr_wsd_decay_steps": 2},
        [0, 0.5, 1, 1, 1, 0.55, 0.1, 0.1],
    ),
    "stable, then down ever slower": (
        {"lr_wsd_decay_steps": 2},
        [0, 0.5, 1, 1, 1, 0.1 + 0.9 * (2 * 0.5**0.5 - 1), 0.1, 0.1],
    ),
}


def rates(settings: dict[str, Any], count: int, start: int) -> list[float]:
    """Learning rates of `count` training steps after the first `start`."""
    cases.prepare()
    from verl.engine.training.megatron.optimizer import CoreSchedule, build_schedule
    from verl.engine.training.optimizer import optim_config

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    schedule = build_schedule(optimizer, optim_config(_SHARED | settings), 100)
    assert isinstance(schedule, CoreSchedule)
    if start:
        schedule.restore(start)
    return [schedule.advance() for _ in range(count)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rates_of_its_own_schedules(name: str) -> None:
    settings, expected = SCHEDULES[name]
    for start in (0, 3):
        (found,) = ranks.run(rates, 1, settings, len(expected) - start, start, timeout=120.0)
        assert found == pytest.approx(expected[start:])


def test_the_optimizer_on_the_host_takes_the_same_steps(tmp_path: Path) -> None:
    """`optimizer_cpu_offload`: state and steps of all weights are the host's."""
    path = tiny_model(tmp_path / "m", scale=4.0)
    local = cases.with_fsdp(path)
    (weights,) = ranks.run(cases.on_the_host, 1, path, timeout=120.0)
    for name, expected in local["weights"].items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-5, msg=name)
