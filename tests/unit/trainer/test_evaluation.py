"""Reading files of responses, scoring them by main_eval, and what becomes of rows and responses that cannot be used."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.data.test_media import picture
from verl.config import load
from verl.preflight.check import check
from verl.reward.rules import final_answer, has_answers, predicted
from verl.trainer import main_eval
from verl.trainer.evaluation import Responses, evaluation_metrics

GSM8K, DAPO = "openai/gsm8k", "math_dapo"
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg={enable:True,len:4}"


def row(responses: Any, truth: Any = "1", source: str = GSM8K, **more: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": "How many?"}]
    model = {"style": "rule", "ground_truth": truth}
    return {"data_source": source, "prompt": prompt, "reward_model": model, "responses": responses, **more}


def write(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "responses.parquet"
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


def config_of(path: str, *words: str) -> Any:
    return load([f"data.path={path}", "reward_model.num_workers=1", *words], entry="eval")


def run(path: str, capfd: Any, *words: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command."""
    status = main_eval.main([f"data.path={path}", "reward_model.num_workers=1", *words])
    said = capfd.readouterr()
    return status, said.out, said.err


def record_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "responses_evaluation/metrics.jsonl").read_text().splitlines()[-1])


# ------------------------------------------------------------------------------------------------------ a run


def test_scores_metrics_and_page(tmp_path, capfd) -> None:
    path = write(
        tmp_path,
        row(["#### 1", "#### 2", "#### 1", "none"]),
        row(["#### 2"] * 4),
        row(["Answer: 3", "Answer: 4", "Answer: 4", "?"], "3", DAPO),
    )
    status, out, err = run(path, capfd)
    assert status == 0, err
    assert "{'test_score/openai/gsm8k': 0.25, 'test_score/math_dapo': -0.5}" in out
    assert "openai/gsm8k: 2 prompts, 8 responses: accuracy 0.2500 (" in out
    found = record_of(tmp_path)
    assert found["eval/openai/gsm8k/accuracy"] == found["val-core/openai/gsm8k/acc/mean@4"] == 0.25
    assert found["eval/openai/gsm8k/pass@2"] == pytest.approx((1 - 1 / 6) / 2)
    assert found["eval/openai/gsm8k/pass@4"] == 0.5 and found["eval/openai/gsm8k/maj@4"] == 0.5
    assert found["eval/math_dapo/maj@4"] == 0.0 and found["eval/math_dapo/pass@4"] == 1.0
    assert found["eval/all/prompts"] == 3 and found["eval/all/accuracy"] == pytest.approx(0.25)
    folder = tmp_path / "responses_evaluation"
    assert "eval/openai/gsm8k/accuracy" in (folder / "report.html").read_text()
    scores = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    assert [s["score"] for s in scores[:4]] == [1.0, 0.0, 1.0, 0.0] and scores[0]["output"] == "#### 1"


def test_a_function_that_fails_on_a_row_is_counted(tmp_path, capfd) -> None:
    function = tmp_path / "mine.py"
    function.write_text(
        "def compute_score(solution_str, ground_truth, **row):\n"
        "    if solution_str == 'bad': raise ValueError('no such answer')\n"
        "    return {'score': 0.5, 'acc': solution_str == ground_truth, 'pred': solution_str}\n"
    )
    path = write(tmp_path, row(["1", "bad", "2", "1"], source="mine"), row([], source="mine"))
    status, out, err = run(path, capfd, f"custom_reward_function.path={function}")
    assert status == 0, err
    assert "left out 1 × no responses" in err and "no such answer" in err
    assert "1 prompt, 4 responses, 1 not scored" in out
    found = record_of(tmp_path)
    assert found["eval/mine/errors"] == 1 and found["eval/mine/accuracy"] == 0.5
    assert found["eval/mine/maj@4"] == 1.0 and found["test_score/mine"] == 0.5
    events = (tmp_path / "responses_evaluation/events.jsonl").read_text()
    assert events.count('"reward_failed"') == 1


@pytest.mark.parametrize("more", ["", ", weight=1.0", ", **kwargs"])
def test_a_function_with_other_names_is_called_by_position(more: str, tmp_path, capfd) -> None:
    (tmp_path / "mine.py").write_text(
        f"def compute_score(source, response, truth{more}):\n"
        "    return locals().get('weight', 1.0) * (source == 'mine' and response == truth)\n"
    )
    path = write(tmp_path, row(["1", "2"], source="mine"))
    status, out, err = run(path, capfd, f"custom_reward_function.path={tmp_path}/mine.py")
    assert status == 0 and "{'test_score/mine': 0.5}" in out, err


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        ([row([1, 2])], [], "responses must be a list of strings"),
        ([row(["#### 1"], "")], [], "no usable row is left: 1 × no ground truth"),
        ([row(["x"], source="nobody")], [], "data_source 'nobody' has no built-in reward"),
        ([row(["x"])], ["data.response_key=response"], "nearest: responses"),
        ([row(["x"])], ["metrics.reference=answer"], "no such column"),
        ([row(["x"])], ["metrics.text=[blue]"], "nearest: bleu"),
        ([row(["x"])], ["metrics.k=[0]"], "out of range"),
        ([row(["x"])], ["reward_model.enable=True"], "closest: main_ppo with trainer.val_only=True"),
        ([row(["x"])], ["reward_model.weights={function:2}"], "closest: main_ppo with trainer.val_only=True"),
        ([row(["x"])], [OVERLONG], "the penalty needs it"),
        (
            [row(["x"])],
            [OVERLONG, "reward_model.reward_kwargs.max_resp_len=9"],
            "no column 'response_lengths'",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_with_one_message(rows, words, message, tmp_path, capfd) -> None:
    status, _, err = run(write(tmp_path, *rows), capfd, *words)
    assert status == 2 and message in err, err
    assert "Traceback" not in err


def test_a_function_that_always_fails_is_an_error(tmp_path, capfd) -> None:
    function = tmp_path / "mine.py"
    function.write_text("def compute_score(**row): return None\n")
    path = write(tmp_path, row(["a", "b"]))
    status, _, err = run(path, capfd, f"custom_reward_function.path={function}")
    assert status == 2 and "not one of 2 responses could be scored" in err


def test_missing_packages_are_named_before_anything_is_scored(tmp_path, capfd, monkeypatch) -> None:
    monkeypatch.setattr("verl.data.check.importlib.util.find_spec", lambda name: None)
    status, _, err = run(write(tmp_path, row(["a"])), capfd, "metrics.text=[bleu,rouge]")
    assert status == 3 and "pip install sacrebleu" in err and "pip install rouge-score" in err


# ------------------------------------------------------------------------------------------------------ reading


def test_a_lost_response_is_not_right_and_a_single_text_is_one_response(tmp_path) -> None:
    table = Responses(config_of(write(tmp_path, row(["#### 1", None]))))
    assert [t.finish_reason for t in table.all] == ["", "lost"]
    table.all[0].score = 1.0
    found, *_ = evaluation_metrics(table, config_of(table.names))
    assert found["eval/openai/gsm8k/accuracy"] == 0.5 and found["eval/openai/gsm8k/errors"] == 1
    (only,) = Responses(config_of(write(tmp_path, row("#### 1")))).all
    assert (only.text, only.uid, only.index) == ("#### 1", "0:0@0", 0)


def test_other_columns_and_the_plain_format(tmp_path) -> None:
    path = write(tmp_path, {"kind": GSM8K, "truth": "7", "answers": ["#### 7"]})
    keys = ["data.data_source_key=kind", "data.reward_model_key=truth", "data.response_key=answers"]
    (only,) = Responses(config_of(path, *keys)).all
    assert only.prompt.ground_truth == "7" and only.prompt.data_source == GSM8K
    path = write(tmp_path, {"prompt": "How many?", "response": "so #### 7", "responses": ["7", "#### 8"]})
    assert check(config_of(path)).problems == []
    (first, _) = Responses(config_of(path)).all
    assert first.prompt.ground_truth == "7"
    assert first.prompt.columns["reward_kwargs"] == {"method": "flexible"}


def test_references_of_texts(tmp_path) -> None:
    rows = [row(["x"], extra_info={"answer": "long text"}), row(["x"], extra_info={"answer": None})]
    table = Responses(config_of(write(tmp_path, *rows), "metrics.reference=extra_info.answer"))
    assert table.references == {"0:0@0": ["long text"], "0:1@0": []}
    targets = row(["x"], {"target": ["a", "b"]}, "searchR1_nq")
    assert Responses(config_of(write(tmp_path, targets))).references == {"0:0@0": ["a", "b"]}


def test_right_is_what_reaches_the_pass_score(tmp_path) -> None:
    table = Responses(config_of(write(tmp_path, row(["a", "b", "c"]))))

    for t, score in zip(table.all, (0.4, 0.6, 1.0), strict=True):
        t.score, t.score_parts = score, {}
    accuracy = "eval/openai/gsm8k/accuracy"
    assert evaluation_metrics(table, config_of(table.names))[0][accuracy] == pytest.approx(1 / 3)
    half = config_of(table.names, "metrics.pass_score=0.5")
    assert evaluation_metrics(table, half)[0][accuracy] == pytest.approx(2 / 3)
    table.all[2].score_parts = {"acc": False}
    assert evaluation_metrics(table, half)[0][accuracy] == pytest.approx(1 / 3)


def test_answers_that_rules_read() -> None:
    assert final_answer(GSM8K, "#### 1,000", {}) == "1000" and final_answer(GSM8K, "so 7", {}) is None
    assert final_answer(GSM8K, "so 7", {"method": "flexible"}) == "7"
    assert final_answer("lighteval/MATH", r"\boxed{ \dfrac12 }", {}) == r"\frac{1}{2}"
    assert final_answer("searchR1_nq", "<answer>The Cat.</answer>", {}) == "cat"
    assert final_answer("numina_olympiads", "The answer is 4.", {}) == "4"
    assert final_answer("lighteval/MATH", "nothing", {}) is None
    assert not has_answers(DAPO)  # it returns `pred`
    assert [predicted(parts) for parts in ({"pred": "[INVALID]"}, {"pred": 3}, {})] == [None, "3", None]


def test_a_function_sees_the_images_where_it_is_asked_for(tmp_path, capfd) -> None:
    (tmp_path / "own.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(len(extra_info.get('images', [])))\n"
    )
    (tmp_path / "a.png").write_bytes(picture())
    rows = [row(["x"], images=[{"path": name}] * 2) for name in ("a.png", "a.png", "gone.png")]
    words = (f"custom_reward_function.path={tmp_path}/own.py", "reward_model.images=True")
    status, out, err = run(write(tmp_path, *rows), capfd, *words)
    assert status == 0 and "'test_score/openai/gsm8k': 2.0" in out and "1 × image missing" in err
    assert record_of(tmp_path)["val/multimodal_score"] == 2.0
    assert "data:image/jpeg;base64," in (tmp_path / "responses_evaluation/report.html").read_text()


@pytest.mark.parametrize("shows", [True, False])
def test_images_in_parts_of_the_messages_are_shown_too(tmp_path, capfd, shows: bool) -> None:
    (tmp_path / "own.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(len(extra_info.get('images', [])))\n"
    )
    uri = f"data:image/png;base64,{base64.b64encode(picture()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": uri}, "text": None}, {"type": "text", "text": "How many?"}]
    rows = [row(["x"], prompt=[{"role": "user", "content": parts}])]
    words = (f"custom_reward_function.path={tmp_path}/own.py", f"reward_model.images={shows}")
    status, out, _ = run(write(tmp_path, *rows), capfd, *words)
    assert status == 0 and f"'test_score/openai/gsm8k': {float(shows)}" in out
    assert uri not in (tmp_path / "responses_evaluation/report.html").read_text()
