"""A run on Ray workers writes the profiles it was asked for: the named rank's and the sampler's, one for both steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.runs import TinyRun, main_ppo

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_workers_write_profiles_of_the_chosen_steps(tmp_path: Path) -> None:
    tiny = TinyRun(tmp_path / "run")
    done = main_ppo(
        tiny.overrides(
            tmp_path / "out", "trainer.n_gpus_per_node=2", "trainer.total_training_steps=3",
            "trainer.save_freq=-1", "data.val_files=null", "global_profiler.tool=torch", "global_profiler.steps=[2,3]",
            "global_profiler.profile_continuous_steps=True", f"global_profiler.save_path={tmp_path / 'profiles'}",
            "actor_rollout_ref.actor.profiler.enable=True", "actor_rollout_ref.actor.profiler.ranks=[1]",
            "actor_rollout_ref.rollout.profiler.enable=True",
        ),
        timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = sorted(p.name for p in (tmp_path / "profiles").glob("*.json.gz"))
    assert found == ["actor.rank1.step2-3.torch.json.gz", "rollout.rank0.step2-3.torch.json.gz"]
    for name in found:
        with gzip.open(tmp_path / "profiles" / name, "rt") as file:
            names = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert {"aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise"} & names
        phases = (
            {"old_log_prob", "update_actor", "update_weights"}
            if name.startswith("actor")
            else {"update_weights"}
        )
        assert phases <= names, "the phases of this worker are ranges"
    events = [json.loads(line) for line in (tmp_path / "out/events.jsonl").read_text().splitlines()]
    files = next(event["files"] for event in events if event["event"] == "profile")
    assert len(files) == 4
