"""`verl replay`, `verl diff` and `verl audit` on a run of a tiny model."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.integration.test_vision_runs import VisionRun
from tests.runs import TinyRun
from verl.cli.main import main
from verl.data import atif
from verl.tracking import journal
from verl.trainer.main_ppo import main as main_ppo

WORDS = [
    "trainer.save_freq=2",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
    "trainer.total_training_steps=3",
]
WORDS += ["actor_rollout_ref.rollout.top_p=0.9", "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("run")
    assert main_ppo(TinyRun(root / "tiny").overrides(root / "out", *WORDS)) == 0
    return root / "out"


def said(capsys, *words: object) -> str:
    capsys.readouterr()
    status = main([str(word) for word in words])
    streams = capsys.readouterr()
    return streams.out if status == 0 else f"{status}: {streams.err}"


@pytest.mark.parametrize(("step", "start"), [(2, "the start"), (3, "global_step_2")])
def test_a_step_is_rebuilt_bit_for_bit(run, capsys, step: int, start: str) -> None:
    text = said(capsys, "replay", run, "--step", step)
    assert f"step {step} of {run}, from {start}" in text
    assert "actor/grad_norm" in text and "recorded " not in re.sub("recorded metrics", "", text)
    same, count = re.search(r"(\d+) of (\d+) recorded metrics are the same", text).groups()
    assert same == count and int(count) >= 8


def test_a_step_with_images_is_rebuilt_bit_for_bit(tmp_path, capsys) -> None:
    tiny, out = VisionRun(tmp_path / "tiny"), tmp_path / "out"
    assert main_ppo(tiny.overrides(out, *WORDS, "trainer.total_training_steps=2", "trainer.save_freq=-1")) == 0
    text = said(capsys, "replay", out, "--step", 2)
    same, count = re.search(r"(\d+) of (\d+) recorded metrics are the same", text).groups()
    assert same == count and int(count) >= 8
    batch, _ = journal.read(out / "journal/2.parquet")
    media = {segment.media for segment in batch.segments}
    values = sum(m.inputs["pixel_values"].size for m in media)
    assert len(media) == 4 and (out / "journal/2.parquet").stat().st_size < 1.5 * values, (
        "4 bytes of a value are not kept"
    )
    text = said(capsys, "audit", out, "--step", 2)
    apart = [float(value) for value in re.findall(r"largest difference (\S+) nats", text)]
    assert len(apart) == 2 and max(apart) <= 1e-5
    whole = ("actor_rollout_ref.rollout.top_p=1", "trainer.total_training_steps=1", "trainer.save_freq=-1")
    assert main_ppo(tiny.overrides(tmp_path / "whole", *WORDS, *whole)) == 0
    apart = re.findall(r"largest difference (\S+) nats", said(capsys, "audit", tmp_path / "whole"))
    assert len(apart) == 2 and max(map(float, apart)) <= 1e-5, "tokens that stand for images have no probability"


def test_what_would_have_changed(run, capsys, tmp_path) -> None:
    """The same setting changes nothing; another sign of the reward turns the gradient around."""
    same = said(capsys, "replay", run, "--step", 2, "--set", "algorithm.adv_estimator=grpo")
    assert "0.0% of the tokens differ" in same and "cosine 1.000000" in same
    reward = tmp_path / "other.py"
    source = (run.parent / "tiny/reward.py").read_text()
    reward.write_text(source.replace("/ (1 + len(text))", "/ -(1.0 + len(text))"))
    words = ["--reward", reward, "--set", "algorithm.use_kl_in_reward=False"]
    turned = said(capsys, "replay", run, "--step", 1, *words)
    assert "cosine -1.0" in turned or "cosine -0.99" in turned


def test_two_runs_part_at_a_step_phase_and_tensor(run, capsys, tmp_path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    assert "the same in steps 1 to 3" in said(capsys, "diff", run, other)
    lines = (other / "metrics.jsonl").read_text().splitlines()
    (other / "metrics.jsonl").write_text(
        "\n".join(re.sub(r'"actor/pg_loss": \S+,', '"actor/pg_loss": 7,', x) for x in lines)
    )
    assert re.search(r"step 1, update, actor/pg_loss: \S+ and 7", said(capsys, "diff", run, other))
    path = other / "journal/1.parquet"
    for name, phase in (("ref_log_probs", "ref"), ("rollout_log_probs", "gen")):
        batch, about = journal.read(path, computed=True)
        batch[4].column(name)[3] += 0.25
        journal.write(path, batch, about)
        where = f"1 of 12 rows differ, first response 1 of {batch[4].uid}, token 3"
        assert f"step 1, {phase}, {name}: {where}" in said(capsys, "diff", run, other)


def test_log_probs_are_those_of_transformers(run, capsys) -> None:
    text = said(capsys, "audit", run, "--step", 2)
    assert "12 of them sampled with the weights of this step" in text
    apart = [float(value) for value in re.findall(r"largest difference (\S+) nats", text)]
    assert len(apart) == 2 and max(apart) <= 1e-5
    assert f"step 3 of {run}: 12 rows" in said(capsys, "audit", run)


def test_trajectories_in_the_interchange_format(run, capsys, tmp_path) -> None:
    assert "12 documents" in said(capsys, "export", run, tmp_path / "out", "--atif", "--step", 3)
    made = {d["trajectory_id"]: d for d in map(atif.read, (tmp_path / "out").iterdir())}
    batch, _ = journal.read(run / "journal/3.parquet")
    for t in batch:
        metrics = made[f"{run.name}/3/{t.uid}/{t.index}/0"]["steps"][-1]["metrics"]
        assert metrics["prompt_token_ids"] == t.context_ids.tolist()
        assert metrics["completion_token_ids"] == t.response_ids.tolist()
        assert np.array_equal(np.float32(metrics["logprobs"]), t.rollout_log_probs)
    assert "36 documents" in said(capsys, "export", run, tmp_path / "all", "--atif")
    assert "its journal has steps 1 to 3" in said(capsys, "export", run, tmp_path / "none", "--atif", "--step", 9)


def test_mistakes_are_said_before_the_step_is_computed(run, capsys) -> None:
    assert said(capsys, "replay", run, "--step", 2, "--set", "algorithm.gama=1").startswith("2: verl replay: the conf")
    assert "--reward no.py: no such file" in said(capsys, "replay", run, "--step", 2, "--reward", "no.py")


def test_a_run_that_was_killed_within_a_line(run, capsys, tmp_path) -> None:
    shutil.copytree(run, tmp_path / "killed")
    with open(tmp_path / "killed/metrics.jsonl", "a") as file:
        file.write('{"step": 4, "actor/lo')
    assert "are the same" in said(capsys, "replay", tmp_path / "killed", "--step", 2, "trainer.device=cpu")
    assert "the same in steps 1 to 3" in said(capsys, "diff", run, tmp_path / "killed")


def test_steps_that_the_journal_lacks_are_named(run, capsys) -> None:
    assert "does not have step 9, only 1 to 3" in said(capsys, "replay", run, "--step", 9)


@pytest.mark.parametrize("command", [("diff",), ("replay", "--step", 1), ("audit",)])
def test_a_folder_without_settings_is_named(run, capsys, tmp_path, command) -> None:
    """So is a file of settings that cannot be read."""
    (tmp_path / "part").mkdir()
    (tmp_path / "part/journal").symlink_to(run / "journal")
    (tmp_path / "part/metrics.jsonl").symlink_to(run / "metrics.jsonl")
    words = (command[0], *([run] if command[0] == "diff" else ()), tmp_path / "part", *command[1:])
    assert f"{tmp_path / 'part'} has no config.yaml" in said(capsys, *words)
    (tmp_path / "part/config.yaml").write_text("data: [1")
    assert "config.yaml: cannot be read as YAML" in said(capsys, *words)
