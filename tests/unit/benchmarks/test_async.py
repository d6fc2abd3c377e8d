"""The simulation against cases that can be computed by hand, and the picture of a timeline."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import async_simulation as sim
import async_timeline as pictures

EVEN = sim.Assumptions(
    pass_s=0.01, response_s=0.001, prefill_per_s=1e12, train_per_s=1000.0, sync_s=2.0, median=100.0, sigma=0.0
)


def test_even_lengths_by_hand() -> None:
    """4 devices, 4 prompts of 8 responses of 100 tokens: 8 responses a device, 100 passes of 0.018 s, then 3200/4000
    s."""
    gen, train = 100 * (0.01 + 0.001 * 8), 4 * 8 * 100 / (4 * 1000)
    sync = sim.Simulation(EVEN, sim.Way("", 0, shared=True), 4, 4, prompts=4).run(6, warm_up=2)
    assert sync["step_s"] == pytest.approx(gen + train + 2.0)
    assert sync["sampler_idle"] == pytest.approx(1 - gen / sync["step_s"])
    ahead = sim.Simulation(EVEN, sim.Way("", 1, partial=False), 4, 4, prompts=4).run(6, warm_up=3)
    assert ahead["step_s"] == pytest.approx(max(gen, train) + 2.0)
    assert ahead["staleness"] == {"mean": 1.0, "max": 1, "shares": {"1": 1.0}}
    assert ahead["versions_per_response"]["max"] == 1, "nobody is interrupted"


def test_slots_make_responses_wait() -> None:
    """Half the slots: two waves, each quicker a pass."""
    narrow = replace(EVEN, slots=4)
    gen, train = 2 * 100 * (0.01 + 0.001 * 4), 0.8
    sync = sim.Simulation(narrow, sim.Way("", 0, shared=True), 4, 4, prompts=4).run(6, warm_up=2)
    assert sync["step_s"] == pytest.approx(gen + train + 2.0)


def test_what_goes_on_is_prefilled_again() -> None:
    """A trainer that is done at once interrupts every response: each sync costs prompt + tokens so far once more."""
    slow = replace(EVEN, prefill_per_s=1e4, prompt=1000, train_per_s=1e9, median=1000.0)
    free = replace(slow, prefill_per_s=1e12)
    costs = [sim.Simulation(how, sim.Way("", 2), 4, 4, prompts=4).run(8, 4)["step_s"] for how in (slow, free)]
    assert costs[0] > costs[1]


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


def test_the_picture_has_every_span(tmp_path: Path) -> None:
    steps = [
        {"step": s, "begin": 10.0 * s, "end": 10.0 * s + 9, "sampler": [[10.0 * s, 10.0 * s + 5]],
         "trainer": [["gen", 10.0 * s, 10.0 * s + 4], ["update_actor", 10.0 * s + 4, 10.0 * s + 8]]}
        for s in (1, 2, 3, 4)
    ]  # fmt: skip
    lines = [json.dumps(record) for record in [*steps[:2], {**steps[1], "end": 29.5}, *steps[2:]]]
    (tmp_path / "timeline.jsonl").write_text("\n".join(lines) + "\n")
    loaded = pictures.load(tmp_path)
    assert [s["step"] for s in loaded] == [1, 2, 3, 4] and loaded[1]["end"] == 29.5, "the last record counts"
    tree = ET.fromstring(pictures.svg({"a <run>": loaded}))
    titles = [t.text for t in tree.iter("{http://www.w3.org/2000/svg}title")]
    assert titles.count("step 3, update_actor: 4.00 s") == 1 and titles.count("step 3: 5.00 s") == 1
    assert len(titles) == 12
    record = {
        "timing_s/step": 9.0, "timing_s/gen": 4.0, "timing_s/update_actor": 4.0, "timing_s/update_weights": 0.1,
        "perf/sampler_idle_ratio": 0.4, "perf/trainer_idle_ratio": 0.5, "perf/total_num_tokens": 100,
        "training/off_policy/trajectory_staleness_worst/mean": 1.0, "training/off_policy/trajectory_spans/mean": 1.2,
    }  # fmt: skip
    found = pictures.figures(loaded, dict.fromkeys((1, 2, 3, 4), record))
    assert found["steps"] == 2 and found["seconds_per_step"] == pytest.approx((49 - 29.5) / 2)
