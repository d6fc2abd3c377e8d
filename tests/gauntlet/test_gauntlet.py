"""Each silent error of `FAULTS`, injected into a run of two steps: the run names it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.gauntlet import page
from tests.gauntlet.faults import FAULTS, KL, LORA, Fault
from tests.integration.test_vision_runs import VisionRun
from tests.kinds import ToolRun, critic, tools
from tests.runs import TinyRun
from tests.tiny import tiny_model
from verl.proving.run import main as prove
from verl.trainer.main_ppo import main

SHORT = ("trainer.save_freq=-1", "trainer.test_freq=-1", "data.val_files=null", "trainer.val_before_train=False")
SHORT += ("actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.rollout.n=3")
REPLAY = [
    "actor_rollout_ref.actor.router_replay.mode=R3",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
]


def text(root: Path) -> TinyRun:
    """A model whose distribution is not flat."""
    run = TinyRun(root)
    tiny_model(run.model, scale=4.0)
    return run


def experts(root: Path) -> TinyRun:
    run = TinyRun(root)
    tiny_model(run.model, "qwen3_moe", scale=4.0)
    return run


def failing(root: Path) -> TinyRun:
    """A reward function that fails for some responses."""
    run = text(root)
    run.reward.write_text(
        run.reward.read_text().replace("    return", "    assert len(text) % 3 or len(text) < 6\n    return")
    )
    return run


KINDS: dict[str, tuple[Any, Any]] = {
    "text": (text, lambda run: []),
    "experts": (experts, lambda run: REPLAY),
    "images": (VisionRun, lambda run: []),
    "tools": (ToolRun, lambda run: [*tools(run), "actor_rollout_ref.actor.ppo_mini_batch_size=4"]),
    "critic": (text, critic),
    "failing": (failing, lambda run: ["reward_model.max_error_ratio=1"]),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyRun]:
    """Models and data by kind, made when they are first asked for."""

    class Made(dict[str, TinyRun]):
        def __missing__(self, kind: str) -> TinyRun:
            self[kind] = KINDS[kind][0](tmp_path_factory.mktemp("gauntlet"))
            return self[kind]

    return Made()


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what a run does that no fault is about: the page, and collecting the test's garbage."""
    from verl.tracking.run_folder import LiveReport

    monkeypatch.setattr(LiveReport, "write", lambda self, *args, **kwargs: None)
    monkeypatch.setattr("gc.collect", lambda *args: 0)


def run(made: dict[str, TinyRun], out: Path, fault: Fault) -> tuple[str, int]:
    """What the runs of a fault said (events and the error), and after how many steps the first matching thing."""
    kind, steps = made[fault.kind], 0
    for life in range(1, fault.runs + 1):
        words = [*KINDS[fault.kind][1](kind), *SHORT, *fault.words, f"trainer.total_training_steps={2 * life}"]
        words += ["trainer.save_freq=2"] if fault.runs > 1 else []
        main(kind.overrides(out, *words))
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    said = "\n".join(str(event) for event in events)
    for event in events:
        if fault.caught and re.search(fault.caught, str(event)):
            told = re.search(r"step (\d+):", str(event))
            steps = int(told[1]) if told else sum(e["time"] <= event["time"] for e in records(out))
            break
    return said, steps - 2 * (fault.runs - 1)


OTHERS = {
    "gspo": ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo",),
    "weighted cispo": (
        "actor_rollout_ref.actor.policy_loss.loss_mode=cispo",
        "algorithm.rollout_correction.rollout_is=token",
    ),
    "adapter": (LORA, "actor_rollout_ref.actor.optim.lr=1e-2"),
    "adapter, kl": (LORA, KL, "actor_rollout_ref.actor.kl_loss_type=kl"),
}
"""Whose loss and gradient are checked by other ways than the vanilla loss of all weights."""
LOSS_FAULTS = {f.patch.__name__: f for f in FAULTS if f.patch.__name__ in ("per_micro_batch", "divided_again")}


@pytest.mark.parametrize("name", ["divided_again", pytest.param("per_micro_batch", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "words", [pytest.param(w, id=k, marks=[pytest.mark.long] * (k != "gspo")) for k, w in OTHERS.items()]
)
def test_other_losses_and_adapters(
    words: tuple[str, ...], name: str, made: dict[str, TinyRun], quiet: None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fault = replace(LOSS_FAULTS[name], words=(*LOSS_FAULTS[name].words, *words))
    right, _ = run(made, tmp_path / "right", fault)
    assert '"check_' not in right
    fault.patch(monkeypatch)
    said, steps = run(made, tmp_path / "out", fault)
    assert re.search(fault.caught, said) and steps == 1, said[-3000:]


def records(out: Path) -> list[dict[str, Any]]:
    """The steps that were logged."""
    file = out / "metrics.jsonl"
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return [line for line in lines if "step" in line and "event" not in line]


PARAMETERS = [
    pytest.param(f, id=f.patch.__name__, marks=() if f.quick else pytest.mark.long) for f in FAULTS if f.caught
]


@pytest.mark.parametrize("fault", PARAMETERS)
def test_a_run_names_the_fault(
    fault: Fault, made: dict[str, TinyRun], quiet: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.trainer import sync_probe

    monkeypatch.setattr(sync_probe, "SHARE", 1e9)  # also where a step is over sooner than a probe pays off
    fault.patch(monkeypatch)
    said, steps = run(made, tmp_path / "out", fault)
    assert re.search(fault.caught, said), said[-3000:]
    assert steps == fault.steps


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.long) for kind in KINDS])
def test_a_right_run_says_nothing(kind: str, made: dict[str, TinyRun], quiet: None, tmp_path: Path) -> None:
    words = ["actor_rollout_ref.actor.use_kl_loss=True", "trainer.total_training_steps=3"]
    assert main(made[kind].overrides(tmp_path / "out", *KINDS[kind][1](made[kind]), *SHORT, *words)) == 0
    assert '"check_' not in (tmp_path / "out/events.jsonl").read_text()


PROVABLE = [pytest.param(f, id=f.patch.__name__, marks=pytest.mark.long) for f in FAULTS if f.prove]


@pytest.mark.parametrize("fault", PROVABLE)
def test_prove_finds_the_fault(
    fault: Fault,
    made: dict[str, TinyRun],
    quiet: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fault.patch(monkeypatch)
    kind = made[fault.kind]
    words = kind.overrides(tmp_path / "out", *KINDS[fault.kind][1](kind), *fault.words)
    status = prove(["--out", str(tmp_path / "proof"), *words])
    said = capsys.readouterr()
    verdict = re.search(rf"verl prove: {fault.prove}(?: 2)?: (FAILED|look)", said.err)
    assert verdict, said.out
    assert status == (verdict[1] == "FAILED")


def test_the_page_is_the_list() -> None:
    assert page.PAGE.read_text() == page.text(), "run python -m tests.gauntlet.page"
