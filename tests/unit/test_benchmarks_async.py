"""The simulation of asynchronous training against cases that can be computed by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import async_simulation as sim

EVEN = sim.Assumptions(
    pass_s=0.01, response_s=0.001, prefill_per_s=1e12, train_per_s=1000.0, sync_s=2.0, median=100.0, sigma=0.0
)


def test_even_lengths_by_hand() -> None:
    """4 devices, 4 prompts of 8 responses of 100 tokens: 8 responses a device, 100 passes of 0.018 s, then 3200/4000 s."""
    gen, train = 100 * (0.01 + 0.001 * 8), 4 * 8 * 100 / (4 * 1000)
    sync = sim.Simulation(EVEN, sim.Way("", 0, shared=True), 4, 4, prompts=4).run(6, warm_up=2)
    assert sync["step_s"] == pytest.approx(gen + train + 2.0)
    assert sync["sampler_idle"] == pytest.approx(1 - gen / sync["step_s"])
    ahead = sim.Simulation(EVEN, sim.Way("", 1, partial=False), 4, 4, prompts=4).run(6, warm_up=3)
    assert ahead["step_s"] == pytest.approx(max(gen, train) + 2.0)
    assert ahead["staleness"] == {"mean": 1.0, "max": 1, "shares": {"1": 1.0}}
    assert ahead["versions_per_response"]["max"] == 1, "nobody is interrupted"


@pytest.mark.parametrize("way", sim.WAYS)
def test_the_bound_holds_and_runs_repeat(way: sim.Way) -> None:
    how = replace(sim.Assumptions(), longest=4000)
    first, again = (
        sim.Simulation(how, way, 8, 8, prompts=16).run(8 + way.staleness, way.staleness + 2) for _ in range(2)
    )
    assert first == again
    assert first["staleness"]["max"] <= way.staleness and first["staleness"]["mean"] <= way.staleness
    if not way.partial or way.staleness == 0:
        assert first["versions_per_response"]["max"] == 1
    assert sum(first["staleness"]["shares"].values()) == pytest.approx(1, abs=1e-3)
