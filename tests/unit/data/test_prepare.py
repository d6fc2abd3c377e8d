"""Prepare scripts: exact schema, whole files, no torch, mistakes explained."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from verl.data import prepare
from verl.data.files import RowFiles
from verl.data.prepare import arithmetic, math_dataset
from verl.data.rows import final_number

ROOT = Path(__file__).parents[3]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
needs_gsm8k = pytest.mark.skipif(not GSM8K.is_dir(), reason=f"raw GSM8K is not at {GSM8K}")


def raw(tmp_path: Path, lines: list[dict[str, Any]], name: str = "train.jsonl") -> Path:
    tmp_path.mkdir(exist_ok=True)
    for split in ("train", "test"):
        target = tmp_path / name.replace("train", split)
        target.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return tmp_path


@needs_gsm8k
def test_gsm8k_script_writes_the_specified_files(tmp_path: Path) -> None:
    script = ROOT / "examples/data_preprocess/gsm8k.py"
    code = f"import runpy, sys; sys.argv = ['gsm8k.py', '--local_dataset_path', {str(GSM8K)!r}, '--local_dir', "
    code += f"{str(tmp_path)!r}]\ntry:\n    runpy.run_path({str(script)!r}, run_name='__main__')\n"
    code += "except SystemExit as end:\n    assert end.code == 0, end.code\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "old name" in done.stderr and "7473 rows" in done.stdout and "longest prompt" in done.stdout
    train, test = RowFiles(str(tmp_path / "train.parquet")), RowFiles(str(tmp_path / "test.parquet"))
    assert (len(train), len(test)) == (7473, 1319)
    source = json.loads((GSM8K / "train.jsonl").open().readline())
    question = source["question"] + ' Let\'s think step by step and output the final answer after "####".'
    assert train.row(0) == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"split": "train", "index": 0} | source,
    }
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    for row in train.rows(0, 7473):
        truth = row["reward_model"]["ground_truth"]
        assert re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", truth), truth
        assert row["extra_info"]["answer"].split("#### ")[-1].replace(",", "").strip() == truth


def test_row_without_a_number_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": "a", "answer": "#### 1"}, {"question": "b", "answer": "no idea"}]
    where = ["--local_dataset_path", str(raw(tmp_path / "raw", rows))]
    status = prepare.main(["gsm8k", *where, "--local_save_dir", str(tmp_path / "out")])
    assert status == 2 and not (tmp_path / "out").exists()
    assert "line 2" in capsys.readouterr().err


def test_hub_layout_limit_and_home(tmp_path, monkeypatch, capsys) -> None:
    import pyarrow as pa

    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "raw/main").mkdir(parents=True)
    rows = [{"question": f"q{i}", "answer": f"#### {i},000"} for i in range(5)]
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"raw/main/{split}-00000-of-00001.parquet")
    assert prepare.main(["gsm8k", "--local_dataset_path", "~/raw", "--local_dir=", "--limit", "3"]) == 0
    made = RowFiles(str(tmp_path / "data/gsm8k/train.parquet"))
    assert len(made) == 3 and made.row(2)["reward_model"]["ground_truth"] == "2000"
    assert "3 rows" in capsys.readouterr().out


def test_multiturn_sft(tmp_path: Path) -> None:
    where = raw(tmp_path / "raw", [{"question": "a", "answer": "b\n#### 1"}])
    where = ["--local_dataset_path", str(where), "--local_save_dir", str(tmp_path / "o")]
    assert prepare.main(["gsm8k_multiturn_sft", *where, "--hdfs_dir", f"file://{tmp_path}/copy"]) == 0
    row = RowFiles(str(tmp_path / "o/train.parquet")).row(0)
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
    question, answer = (message["content"] for message in row["messages"])
    assert question.startswith("a Let's think") and answer == "b\n#### 1"
    assert (tmp_path / "copy/test.parquet").read_bytes() == (tmp_path / "o/test.parquet").read_bytes()


def test_math_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"problem": "p", "solution": r"so \boxed{1} or $\boxed{\frac{1}{2}}$."}]
    where = raw(tmp_path / "raw", lines)
    argv = ["math_dataset", "--local_dataset_path", str(where), "--local_save_dir", str(tmp_path / "o")]
    assert prepare.main(argv) == 0
    row = RowFiles(str(tmp_path / "o/test.parquet")).row(0)
    assert row["reward_model"]["ground_truth"] == r"\frac{1}{2}"
    assert "\\boxed{}" in row["prompt"][0]["content"]
    assert row["data_source"] == "DigitalLearningGmbH/MATH-lighteval" and row["extra_info"]["split"] == "test"
    raw(tmp_path / "raw", [{"problem": "p", "solution": "none"}])
    assert prepare.main(argv) == 2 and "line 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "boxed"),
    [(r"\boxed{a{b}c}d", "a{b}c"), (r"\boxed{1} $\boxed 5$", "5"), (r"so \fbox{6}", "6"), ("x", None)],
)
def test_the_boxed_answer_of_a_solution(text: str, boxed: str | None) -> None:
    assert math_dataset.boxed_answer(text) == boxed


@pytest.mark.parametrize(
    ("text", "number"),
    [("#### 1\n#### -2,000", "-2000"), ("#### $5.50.", "5.50"), ("####5", None), ("#### .", None)],
)
def test_final_number(text: str, number: str | None) -> None:
    assert final_number(text) == number


# -------------------------------------------------------------------------------------------------- arithmetic


def solve(text: str) -> int:
    """An independent reading of a question: words to signs, then left to right (× by precedence)."""
    text = re.sub(r"(get[s]?|Then) (\d+) (more|are added)", r"+ \2", text)
    text = re.sub(r"(Then|loses) (\d+)( are taken away)?", r"- \2", text)
    tokens = re.findall(r"\d+|(?<=\s)[-+*](?=\s)", text)
    total = int(tokens[0])
    for sign, number in zip(tokens[1::2], tokens[2::2], strict=True):
        n = int(number)
        total = total * n if sign == "*" else total + n if sign == "+" else total - n
    return total


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_arithmetic_is_right_seeded_and_disjoint(level: int) -> None:
    sizes = {"train": 150, "test": 50, "level": level}
    made = arithmetic.make(**sizes, seed=3)
    assert made == arithmetic.make(**sizes, seed=3) != arithmetic.make(**sizes, seed=4)
    assert (len(made["train"]), len(made["test"])) == (150, 50)
    keys = []
    for row in made["train"] + made["test"]:
        info, truth = row["extra_info"], row["reward_model"]["ground_truth"]
        assert str(solve(info["question"])) == truth, info["question"]
        assert info["answer"].endswith(f"#### {truth}") and final_number(info["answer"]) == truth
        for step in info["answer"].splitlines()[:-1]:
            a, sign, b, _, c = step.split()
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(c)
        assert row["prompt"] == [{"role": "user", "content": info["question"]}]
        keys.append((info["answer"], row["extra_info"]["question"]))
    assert len(set(keys)) == 200
    train, test = ({row["extra_info"]["answer"] for row in made[split]} for split in ("train", "test"))
    assert not train & test


def original_geo3k(root: Path) -> None:
    for number, (split, letter) in {
        2: ("train", "B"),
        10: ("train", "D"),
        3: ("val", "A"),
        4: ("test", "C"),
    }.items():
        facts = {
            "annotat_text": f"Find ${number}$.",
            "choices": ["1", "20", "3", "x"],
            "answer": letter,
            "data_type": split,
        }
        (root / str(number)).mkdir(parents=True)
        (root / str(number) / "data.json").write_text(json.dumps(facts))
        (root / str(number) / "img_diagram.png").write_bytes(b"%d" % number)


def test_geo3k_is_the_same_from_any_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original_geo3k(tmp_path / "original")
    (tmp_path / "hub").mkdir()
    for split, names in {"train": ("2", "10"), "test": ("4",)}.items():
        answers = {"2": "20", "10": "x", "4": "3"}
        lines = [
            {
                "problem": f"<image>Find ${n}$.",
                "answer": answers[n],
                "images": [f"../original/{n}/img_diagram.png"],
            }
            for n in names
        ]
        (tmp_path / "hub" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    made = []
    for layout in ("original", "hub"):
        argv = [
            "--local_dataset_path",
            str(tmp_path / layout),
            "--local_save_dir",
            str(tmp_path / f"{layout}_out"),
        ]
        assert prepare.main(["geo3k", *argv]) == 0
        files = [RowFiles(str(tmp_path / f"{layout}_out" / f"{split}.parquet")) for split in ("train", "test")]
        made.append([file.rows(0, len(file)) for file in files])
    for rows in made[1]:
        for row in rows:
            row["images"][0]["path"] = row["images"][0]["path"].removeprefix("../original/")
    assert made[0] == made[1] and [len(rows) for rows in made[0]] == [2, 1]
    first = made[0][0][0]
    assert first["images"] == [{"bytes": b"2", "path": "2/img_diagram.png"}] and "1 bytes" in capsys.readouterr().out
    assert first["prompt"][0]["content"].startswith("<image>Find $2$. You FIRST think")
    assert first["reward_model"] == {"style": "rule", "ground_truth": "20"}
    assert first["extra_info"] == {
        "split": "train",
        "index": 0,
        "answer": "20",
        "question": "<image>Find $2$.",
    }


def test_level_too_small_for_the_rows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["arithmetic", "--local_save_dir", str(tmp_path), "--train", "90000", "--level", "2"]
    assert prepare.main(argv) == 2
    assert "raise --level" in capsys.readouterr().err


def test_command_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert prepare.main(["hellaswag"]) == 2 and "not in this release" in capsys.readouterr().err
    assert prepare.main(["gsm8"]) == 2 and "gsm8k" in capsys.readouterr().err
    assert prepare.main([]) == 2 and prepare.main(["--help"]) == 0
    assert prepare.main(["gsm8k", "--local_dataset_path", str(tmp_path / "none")]) == 2
    (tmp_path / "other.jsonl").write_text("{}\n")
    assert prepare.main(["gsm8k", "--local_dataset_path", str(tmp_path)]) == 2
    assert "other.jsonl" in capsys.readouterr().err
