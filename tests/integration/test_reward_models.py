"""Reward models from the command line: a classifier alone and beside a function, a judge that is served, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs import TinyRun, from_step, records
from tests.tiny import tiny_model
from tests.unit.reward.test_reward_model import classifier, plain_scores
from verl.trainer.main_ppo import main
from verl.trajectory import Prompt, Trajectory

ASKS = """
from verl.reward.json_service import post_json

def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, reward_router_address):
    body = {"messages": [{"role": "user", "content": "Grade: " + solution_str}], "max_tokens": 3, "temperature": 0}
    answer = post_json(f"{reward_router_address}/chat/completions", body, timeout=60)
    return {"score": float(len(answer["choices"][0]["message"]["content"])), "asked": len(solution_str)}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return TinyRun(tmp_path_factory.mktemp("rewards"))


def train(tiny: TinyRun, out: Path, model: Path, *words: str) -> dict[int, dict]:
    own = (
        "reward_model.enable=True",
        f"reward_model.model.path={model}",
        f"trainer.rollout_data_dir={out / 'd'}",
    )
    precise = ("reward_model.rollout.dtype=float32", "trainer.total_training_steps=2")
    assert main(tiny.overrides(out, *own, *precise, *words)) == 0
    return records(out)


def dumped(out: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (out / "d" / f"{step}.jsonl").read_text().splitlines()]


def test_a_classifier_scores_every_response_and_a_run_goes_on_exactly(tiny: TinyRun, tmp_path: Path) -> None:
    path, alone = classifier(tmp_path / "rm", vocab_size=300), "custom_reward_function.path=null"
    whole = train(tiny, tmp_path / "whole", path, alone)
    rows = dumped(tmp_path / "whole", 1)
    assert whole[1]["critic/score/mean"] == pytest.approx(sum(r["score"] for r in rows) / 12, abs=1e-5)
    asked = [f"Say {r['gts']} letters" + "!" * (int(r["gts"]) % 7) for r in rows]
    told = [
        Trajectory(Prompt("", None, [{"role": "user", "content": text}]), 0, segments=[], text=r["output"])
        for text, r in zip(asked, rows, strict=True)
    ]
    assert [r["score"] for r in rows] == pytest.approx(plain_scores(path, told), abs=1e-5)
    assert whole[1]["reward/model/mean"] == pytest.approx(whole[1]["critic/score/mean"])
    assert whole[2]["val-core/test/letters/reward/mean@1"] != 0
    assert train(tiny, from_step(tmp_path / "whole", 1, tmp_path / "parts"), path, alone)[2] == whole[2]


def test_beside_a_function_by_weights(tiny: TinyRun, tmp_path: Path) -> None:
    path, weights = (
        classifier(tmp_path / "rm"),
        "reward_model.weights={function: 1, model: 0.25, length: 0.01}",
    )
    found = train(tiny, tmp_path / "out", path, weights, "trainer.test_freq=1")
    for row in dumped(tmp_path / "out", 1):
        assert row["score"] == pytest.approx(row["function"] + 0.25 * row["model"] + 0.01 * row["length"])
    parts = {"function": 1, "model": 0.25, "length": 0.01}
    for record in (found[1], found[2]):
        total = sum(weight * record[f"reward/{name}/mean"] for name, weight in parts.items())
        assert record["critic/score/mean"] == pytest.approx(total) and record["reward/errors"] == 0
        assert {"reward_extra/model/max", "val-aux/test/letters/model/mean@1"} <= set(record)


def test_dynamic_sampling_judges_groups_by_the_whole_score(tiny: TinyRun, tmp_path: Path) -> None:
    words = (
        "algorithm.filter_groups.enable=True",
        "custom_reward_function.path=null",
        "data.train_batch_size=2",
    )
    found = train(tiny, tmp_path / "out", classifier(tmp_path / "rm"), *words)
    assert found[1]["training/filter_groups/gen_prompts"] >= 2 and found[1]["reward/errors"] == 0


def test_a_function_asks_the_judge_that_the_run_serves(tiny: TinyRun, tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    judge = tiny_model(tmp_path / "judge", seed=5)
    words = (f"custom_reward_function.path={tmp_path / 'asks.py'}", "reward_model.rollout.max_num_seqs=8")
    found = train(tiny, tmp_path / "out", judge, *words, "trainer.total_training_steps=1")
    assert found[1]["reward/errors"] == 0 and "reward_extra/asked/min" in found[1]


def test_a_judge_that_answers_nonsense_refuses_the_run(
    tiny: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    judge = tiny_model(tmp_path / "judge")
    words = ("custom_reward_function.path=pkg://verl.reward.judge", "reward_model.enable=True")
    own = (f"reward_model.model.path={judge}", "custom_reward_function.reward_kwargs.max_tokens=4")
    assert main(tiny.overrides(tmp_path / "out", *words, *own, "reward_model.rollout.max_num_seqs=8")) == 2
    assert "the judge's answer holds no verdict, and is cut at max_tokens" in capfd.readouterr().err
