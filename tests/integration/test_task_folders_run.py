"""A run on task folders, whose rows are the folders themselves, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import TinyRun, records
from tests.unit.rollout.test_task_folders import HARBOR, written
from verl.cli.main import main
from verl.errors import UserError
from verl.rollout import harbor
from verl.tracking import journal
from verl.trainer.main_ppo import main as main_ppo


@pytest.mark.slow
def test_a_run_on_task_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model is random, so its turns hold no call; half of the tasks pay by chance of a coin that the test
    throws."""
    tasks = tmp_path / "tasks"
    for number in range(4):
        test = "echo $((RANDOM % 2)) > /logs/verifier/reward.txt\n"
        written(tasks / f"task{number}", HARBOR | {"tests/test.sh": test, "instruction.md": f"Task {number}."})
    try:
        harbor.check(str(tasks), container="sandbox")
    except UserError as error:
        pytest.skip(str(error))
    rollout = "actor_rollout_ref.rollout"
    words = [
        f"data.train_files=tasks:{tasks}", f"data.val_files=tasks:{tasks}", "data.max_prompt_length=400",
        f"{rollout}.agent.environment.name=harbor", f"{rollout}.agent.environment.path={tasks}",
        f"{rollout}.agent.environment.kwargs.container=sandbox", f"{rollout}.agent.num_workers=0",
        "custom_reward_function.path=null", "trainer.total_training_steps=1", "trainer.save_freq=-1",
        "trainer.val_before_train=False", "trainer.test_freq=-1", f"{rollout}.agent.count_shared=every_segment",
    ]  # fmt: skip
    assert main_ppo([*TinyRun(tmp_path / "tiny").overrides(tmp_path / "out", *words), "--check"]) == 0
    assert main_ppo(TinyRun(tmp_path / "tiny").overrides(tmp_path / "out", *words)) == 0
    record = records(tmp_path / "out")[1]
    assert 0 <= record["critic/score/mean"] <= 1 and record["actor/grad_norm"] >= 0
    batch, _ = journal.read(tmp_path / "out/journal/1.parquet")
    assert {t.fields["messages"][0]["content"] for t in batch} == {f"Task {number}." for number in range(4)}
    assert {t.score for t in batch} == {0.0, 1.0}
    assert main(["export", str(tmp_path / "out"), str(tmp_path / "atif"), "--atif"]) == 0
    assert len(list((tmp_path / "atif").iterdir())) == 12
