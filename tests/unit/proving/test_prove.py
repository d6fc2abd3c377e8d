"""`verl prove` on commands that are right: every check holds, for each kind of run; the page, statuses and bounds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gauntlet.faults import LORA
from tests.gauntlet.test_gauntlet import KINDS, SHORT
from verl.cli.main import main
from verl.proving import sampling
from verl.proving.finding import FAILED, LOOK, OK, Finding, table

HALF = "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16"
ONE = ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "actor_rollout_ref.actor.use_dynamic_bsz=False")
CASES = {
    "text": ("text", ()),
    "one by one, with a reference": ("text", (*ONE, "actor_rollout_ref.actor.use_kl_loss=True")),
    "bfloat16": ("text", (HALF,)),
    "LoRA": ("text", (LORA,)),
    **{kind: (kind, ()) for kind in ("critic", "experts", "images", "tools")},
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c == "text" else pytest.mark.long) for c in CASES])
def test_a_right_command(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind, words = CASES[case]
    make, own = KINDS[kind]
    run = make(tmp_path / "run")
    command = run.overrides(tmp_path / "out", *own(run), *SHORT, *words)
    assert main(["prove", *command]) == 0
    said = capsys.readouterr()
    assert FAILED not in said.out and "resume " in said.out, said.out
    page = (tmp_path / "out/prove/prove.html").read_text()
    assert "<th>verdict</th>" in page and "<td>next update</td>" in page and "<script" not in page
    assert not list((tmp_path / "out/prove").glob("global_step_*"))
    assert not list((tmp_path / "out").glob("global_step_*")), "the run's own folder has no checkpoint of the proof"


def test_a_wrong_command_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove"]) == 2
    assert main(["prove", f"actor_rollout_ref.model.path={tmp_path}", "actor_rollout_ref.rollout.m=3"]) == 2
    assert "rollout.m" in capsys.readouterr().err


def test_a_runs_checkpoints_are_not_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "global_step_2/actor").mkdir(parents=True)
    assert main(["prove", f"--out={tmp_path}", f"actor_rollout_ref.model.path={tmp_path}"]) == 2
    assert "holds checkpoints (global_step_2)" in capsys.readouterr().err
    assert (tmp_path / "global_step_2/actor").is_dir()


def test_what_is_not_a_number_is_not_within_bounds() -> None:
    assert Finding.within("a", float("nan"), 1.0, "nats", "do").verdict == FAILED
    assert Finding.within("a", 1.0, 1.0, "nats", "do") == Finding("a", "1 nats", "1 nats", OK, "")
    assert "what to do" in table([])


def test_no_token_to_compare_after_an_update_is_no_verdict() -> None:
    """Each row's first greedy token is another one: that says nothing of the learning rate."""
    probe = {"training/sync_proof/tokens": 0, "training/sync_proof/moved": 0.0, "training/sync_proof/apart": 0.0}
    trainer = SimpleNamespace(
        push=lambda step, metrics: metrics.update(probe), probe=SimpleNamespace(check=lambda: None)
    )
    life: Any = SimpleNamespace(trainer=trainer)
    assert (sampling.weights(life, {}).verdict, sampling.weights(life, {}).measured) == (
        LOOK,
        "no token is drawn again",
    )
    probe["training/sync_proof/tokens"] = 4
    assert sampling.weights(life, {}).verdict == FAILED
