"""`verl reward check`: quiet on sound rewards, loud on each way a reward can be wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_model
from verl.preflight.reward import main, reward_check
from verl.reward.outcome import RewardLoadError
from verl.reward.precheck import reference_responses
from verl.trainer.main_ppo import main as main_ppo


def rows(count: int = 12, source: str = "openai/gsm8k") -> list[dict[str, Any]]:
    found = []
    for i in range(count):
        value = str(137 + 3 * i)
        extra = {"index": i, "answer": f"so\n#### {value}", "question": "q"}
        prompt = [{"role": "user", "content": "q"}]
        reward = {"style": "rule", "ground_truth": value}
        found.append({"data_source": source, "prompt": prompt, "reward_model": reward, "extra_info": extra})
    return found


@pytest.fixture()
def data(tmp_path: Path) -> Any:
    def write(records: list[dict[str, Any]], name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.write_text("\n".join(json.dumps(r) for r in records) + "\n")
        return str(path)

    return write


@pytest.fixture()
def reward(tmp_path: Path) -> Any:
    def write(body: str) -> str:
        path = tmp_path / "reward.py"
        signature = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):"
        path.write_text(f"import os, time\n{signature}\n    {body}\n")
        return str(path)

    return write


@pytest.mark.parametrize("source", ["openai/gsm8k", "math_dapo", "searchR1_nq", "lighteval/MATH", "hiyouga/geometry3k"])
def test_built_in_rules_pass_on_sound_rows(data: Any, source: str) -> None:
    records = rows(6, source)
    if source == "searchR1_nq":
        for i, record in enumerate(records):
            record["reward_model"]["ground_truth"] = {"target": [f"name{i}"]}
    report = reward_check(data(records), samples=4)
    assert report.ok, report.problems
    assert report.rows == 4 and report.total_rows == 6
    kinds = {t.kind for t in report.trials}
    assert kinds == {"reference", "empty", "other", "garbage", "hostile"}


def test_parquet_and_the_plain_format(tmp_path: Path, data: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    seen = [row | {"images": [{"path": "a.png"}]} for row in rows()]
    pq.write_table(pa.Table.from_pylist(seen), tmp_path / "chat.parquet")
    assert reward_check(str(tmp_path / "chat.parquet"), samples=5).ok
    plain = [{"prompt": "q", "response": f"so #### {137 + i}", "reward": 1.0} for i in range(5)]
    report = reward_check(data(plain, "plain.jsonl"))
    assert report.ok and {t.label for t in report.trials} >= {"ground truth", "extra_info.response"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return float(f'#### {ground_truth}' in solution_str)", "^ok$"),
        ("return float(solution_str == ground_truth)", "^ok$"),
        ("return 0.0", "the reference scores low on 6 of 6 rows"),
        ("return 1.0", "a wrong response scores high on 6 rows: 'empty'"),
        ("return float(not solution_str or ground_truth in solution_str)", "a wrong response scores high on 6 rows: 'empty'"),
        ("return float(solution_str.strip() != '' and len(solution_str) < 30)", "wrong response scores high.*another row"),
        ("return float(solution_str == ground_truth) if solution_str else None", "6 of 6 calls on 'empty' failed.*None"),
        ("return {'banana': 1/0}.get(solution_str, 0) if solution_str == 'banana' else float(solution_str == ground_truth)",
         "calls on 'one word' failed; row 0: it raised ZeroDivisionError.*reward.py.*line 3"),
        ("return os._exit(4) if '\\0' in solution_str else float(solution_str == ground_truth)", "'null bytes' failed.*exit code 4"),
        ("return time.sleep(9) if len(solution_str) > 99999 else float(solution_str == ground_truth)", "'very long' failed.*more than 1 s"),
    ],
)  # fmt: skip
def test_each_way_to_be_wrong_is_said(data: Any, reward: Any, body: str, words: str) -> None:
    import re

    report = reward_check(data(rows(6)), reward(body), timeout=1.0)
    text = "\n".join(report.problems) or "ok"
    assert re.search(words, text), text


def test_a_name_that_verl_lacks_is_said(data: Any, reward: Any) -> None:
    body = "try: import verl.utils.reward_score.rlla\n    except Exception: return float(solution_str == ground_truth)"
    with pytest.raises(RewardLoadError, match=r"verl\.utils\.reward_score\.rlla is not offered"):
        reward_check(data(rows(2)), reward(body))


def test_slow_functions_are_said(data: Any, reward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.preflight.reward.SLOW", 0.05)
    body = "time.sleep(0.1 * (solution_str == 'banana')); return float(solution_str == ground_truth)"
    report = reward_check(data(rows(3)), reward(body))
    assert any("slow: 3 of 3 calls on 'one word'" in p for p in report.problems)


def test_a_source_without_a_rule_and_bad_rows_are_said(data: Any) -> None:
    records = [*rows(3, "unknown/source"), *rows(3)]
    records[5]["reward_model"] = {"style": "rule", "ground_truth": ""}
    report = reward_check(data(records))
    text = "\n".join(report.problems)
    assert "'unknown/source' has no built-in reward" in text and "row 5 cannot be used: " in text
    assert all(t.prompt.data_source == "openai/gsm8k" for t in report.trials)


def test_references_are_in_the_form_the_rule_wants() -> None:
    assert reference_responses("openai/gsm8k", 72, {"answer": "x #### 72"}) == [
        ("ground truth", "#### 72"),
        ("extra_info.answer", "x #### 72"),
    ]
    custom = reference_responses("openai/gsm8k", 72, None, built_in=False)
    assert custom == [("ground truth", "72"), ("ground truth, as '#### …'", "#### 72")]
    assert reference_responses("mine", "{x}", None) == [("ground truth", "{x}")]
    assert reference_responses("lighteval/MATH", "{x}", {}) == [("ground truth", r"\boxed{{x}}")]
    assert reference_responses("searchR1_nq", {"target": ["a", "b"]}, {})[0][1] == "<answer>a</answer>"


def test_command_line(data: Any, reward: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = data(rows(4))
    good, bad = "return float(solution_str == ground_truth)", "return 1.0"
    assert main(["check", "--data", path]) == 0
    assert "nothing looks wrong" in capsys.readouterr().out
    assert main([reward(good), path]) == 0
    assert main(["check", path, reward(bad)]) == 1
    assert "wrong response scores high" in capsys.readouterr().out
    assert main(["check", path, reward(good), "--name", "nobody"]) == 2
    assert "defines no 'nobody'" in capsys.readouterr().err
    assert main(["--data", path, "--kwargs", '{"method": "flexible"}']) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "no.parquet"], "no.parquet"),
        (["--data", "DATA", "--kwargs", "[1]"], "must be a JSON object"),
        (["--data", "DATA", "--kwargs", "{"], "is not JSON"),
    ],
)
def test_command_line_mistakes(data, arguments, message, capsys) -> None:
    path = data(rows(2))
    assert main([path if a == "DATA" else a for a in arguments]) == 2
    assert message in capsys.readouterr().err
    for wrong in ([], [path, path], [path, "--samples", "0"]):
        with pytest.raises(SystemExit) as stop:
            main(wrong)
        assert stop.value.code == 2


def test_the_check_imports_no_torch() -> None:
    code = "import sys, verl.preflight.reward; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=True)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("return float(solution_str == ground_truth)", 0, "scores 1, an empty response 0"),
        ("return None", 2, "what it returned is None; return a number, or a dict with 'score'"),
        ("return 'good'", 2, "what it returned is the text 'good', not a number"),
        ("return {'acc': 1.0}", 2, "the dict it returned has no 'score' (keys: 'acc')"),
    ],
)
def test_check_calls_a_runs_function_on_the_first_rows(
    data: Any, reward: Any, body: str, status: int, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tiny_model(tmp_path / "model")
    path = data(rows(4))
    arguments = [f"data.train_files={path}", f"data.val_files={path}", f"custom_reward_function.path={reward(body)}"]
    arguments += [f"actor_rollout_ref.model.path={tmp_path / 'model'}", "data.train_batch_size=2", "trainer.device=cpu"]
    arguments += ["actor_rollout_ref.actor.ppo_mini_batch_size=2", "--check"]
    assert main_ppo(arguments) == status
    text = "".join(capsys.readouterr())
    assert words in text and ("check: ok" in text) == (status == 0)
