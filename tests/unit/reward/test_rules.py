"""The built-in rules, each on responses that it accepts and rejects."""

from __future__ import annotations

import importlib
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from verl.data.boxed import last_boxed
from verl.data.rows import BadRow
from verl.reward import default_compute_score, known_sources
from verl.reward.outcome import RewardLoadError, UnknownSource
from verl.reward.rules import boxed, check_kwargs, check_truth, gsm8k, rule_for, unsupported

MATHVERSE = Path(__file__).parents[3].parent / "shared/data/mathverse_text_lite/problems.jsonl"
GSM8K = Path(__file__).parents[3].parent / "shared/data/gsm8k/test.jsonl"


@pytest.mark.parametrize(
    ("answer", "truth", "strict", "flexible"),
    [
        ("so\n#### 72", "72", 1, 1),
        ("#### 72.", "72", 1, 1),
        ("#### 1,234", "1234", 1, 1),
        ("#### 1234", "1,234", 1, 1),
        ("#### -5", "-5", 1, 1),
        ("#### 72.0", "72", 1, 1),
        ("#### 0.50", ".5", 1, 1),
        ("-1,234,567.25 is it\n#### -1,234,567.25.", "-1234567.25", 1, 1),
        ("#### 71", "72", 0, 0),
        ("#### 5\n#### 72", "72", 1, 1),
        ("#### 72\n#### 5", "72", 0, 0),
        ("####72", "72", 0, 1),
        ("#### $72", "72", 0, 1),
        ("the answer is 72", "72", 0, 1),
        ("the answer is $72.", "72", 0, 1),
        ("72 apples, or so ...", "72", 0, 1),
        ("#### .", "72", 0, 0),
        ("", "72", 0, 0),
        ("no number at all", "72", 0, 0),
        ("#### 72" + " " * 400, "72", 0, 0),
        ("#### ٧٢", "72", 0, 0),
        ("#### 1.2.3", "72", 0, 0),
        ("#### 72", 72, 1, 1),
        ("#### 72", 72.0, 1, 1),
    ],
)
def test_gsm8k_table(answer: str, truth: object, strict: float, flexible: float) -> None:
    assert default_compute_score("openai/gsm8k", answer, truth) == strict
    assert default_compute_score("openai/gsm8k", answer, truth, method="flexible") == flexible
    assert flexible == 0 or gsm8k.extract_solution(answer, method="flexible") is not None


def test_gsm8k_format_score_and_score_are_told_apart() -> None:
    def score(text: str) -> object:
        return default_compute_score("openai/gsm8k", text, "72", format_score=0.1, score=2.0)

    assert [score("#### 72"), score("#### 1"), score("72")] == [2.0, 0.1, 0.0]


@pytest.mark.parametrize("truth", [None, "", "  "])
def test_a_missing_ground_truth_is_an_error_and_not_a_zero(truth: object) -> None:
    for source in ("openai/gsm8k", "lighteval/MATH", "math_dapo", "numina_cn_k12"):
        with pytest.raises(ValueError, match="ground truth"):
            default_compute_score(source, "#### 72", truth)


def test_an_unknown_method_is_an_error() -> None:
    with pytest.raises(ValueError, match="'strict' or 'flexible'"):
        default_compute_score("openai/gsm8k", "#### 72", "72", method="lenient")


@pytest.mark.skipif(not GSM8K.is_file(), reason=f"{GSM8K} is not there")
def test_every_gsm8k_reference_scores_one_and_a_changed_one_zero() -> None:
    lines = GSM8K.read_text().splitlines()
    assert len(lines) == 1319
    for line in lines:
        answer = json.loads(line)["answer"]
        truth = answer.split("#### ")[1].replace(",", "").strip()
        other = str(Decimal(truth) + 1)
        for method in ("strict", "flexible"):
            assert gsm8k.compute_score(answer, truth, method) == 1.0, line
            assert gsm8k.compute_score(answer, other, method) == 0.0, line


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{5} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{7}", "7"),
        (r"\boxed {7}", "7"),
        (r"\boxed{5} then \boxed{6", "5"),
        (r"{ { \boxed{5}", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed{a\\}", "a\\\\"),
        (r"}}}\boxed{5}}}}", "5"),
        ("boxed{5}", None),
        (r"\boxed 5", None),
        ("", None),
    ],
)
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize("text", ["\\boxed{" * 200_000, "\\boxed{1" + "}" * 200_000, "{" * 300_000 + "\\boxed{1}"])
def test_last_boxed_is_linear(text: str) -> None:
    assert last_boxed(text) in (None, "1")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (r"\frac12", r"\frac{1}{2}"),
        (r"\dfrac{1}{2}", r"\tfrac{1}{2}"),
        ("1/2", r"\frac{1}{2}"),
        (r"\sqrt3", r"\sqrt{3}"),
        ("x=5", "5"),
        ("f(x)=x+1", "x+1"),
        (r"5\text{ cm}", "5"),
        (r"5\text{ cm}^2", "5"),
        (r"\$5", "5"),
        (r"50\%", "50"),
        (r"90^\circ", "90"),
        (r"90^{\circ}", "90"),
        (".5", "0.5"),
        (r"\left(1, 2\right)", "(1,2)"),
        (r"1\,000", "1000"),
        (r"10,000\!", "10000"),
        ("12,345", "12345"),
        (r" $\frac{1}{2}$ ", r"\frac{1}{2}"),
        (r"(1,\!\;2)", "(1,2)"),
        (r"5\text{ metres}.", "5"),
    ],
)
def test_math_normalisation_makes_equal(a: str, b: str) -> None:
    assert boxed.normalise(a) == boxed.normalise(b) == boxed.normalise(boxed.normalise(a))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (r"\text{Evelyn}", r"\text{Alice}"),
        ("(1,2)", "(12)"),
        ("(1,234)", "(1234)"),
        (r"10\text{ a.m.}", r"10\text{ p.m.}"),
        (r"1\text{ and }2", "1"),
        (r"\begin{pmatrix}1\\ 2\end{pmatrix}", r"\begin{pmatrix}12\end{pmatrix}"),
        ("1.5", "15"),
        ("x=5", "x=6"),
        (r"\frac{1}{2}", r"\frac{2}{1}"),
    ],
)
def test_math_normalisation_keeps_apart(a: str, b: str) -> None:
    assert boxed.normalise(a) != boxed.normalise(b)


@pytest.mark.parametrize(
    ("answer", "truth", "score", "pred"),
    [
        ("Answer: 72", "72", 1.0, "72"),
        ("answer : $72$", "72", 1.0, "72"),
        ("Answer: x = 72", "72", 1.0, "72"),
        ("Answer: 1,234 dollars", "1234", 1.0, "1234"),
        ("Answer: \\text{72}", "72", 1.0, "72"),
        ("Answer: \\boxed{72}", "72", 1.0, "72"),
        ("Answer: 72\nAnswer: 5", "72", -1.0, "5"),
        ("so \\boxed{72}", "72", 1.0, "72"),
        ("\\boxed{72}" + " " * 100, "72", -1.0, "[INVALID]"),
        ("Answer: 72" + " " * 300, "72", -1.0, "[INVALID]"),
        ("", "72", -1.0, "[INVALID]"),
        ("Answer: \\frac12", "\\frac{1}{2}", 1.0, "\\frac{1}{2}"),
    ],
)
def test_math_dapo(answer: str, truth: str, score: float, pred: str) -> None:
    found = default_compute_score("math_dapo", answer, truth)
    assert found == {"score": score, "acc": score > 0, "pred": pred}


@pytest.mark.parametrize(
    ("answer", "target", "score"),
    [
        ("<answer>The Beatles!</answer>", ["beatles"], 1.0),
        ("<answer>x</answer><answer>Paris</answer>", "paris", 1.0),
        ("<answer>Paris</answer><answer>x</answer>", "paris", 0.0),
        ("<answer>a</answer>" * 11, ["b", "a"], 0.25),
        ("<answer>Paris", ["paris"], 0.0),
        ("Paris", ["paris"], 0.0),
        ("<answer></answer>", ["The"], 0.0),
        ("</answer><answer>", ["x"], 0.0),
    ],
)
def test_search_qa(answer: str, target: object, score: float) -> None:
    assert default_compute_score("searchR1_nq", answer, {"target": target}) == score


@pytest.mark.parametrize(
    ("answer", "score", "acc", "form"),
    [
        ("<think>a</think> \\boxed{48}", 1.0, 1.0, 1.0),
        ("<think>a\nb</think>\n \\boxed{47} end", 0.1, 0.0, 1.0),
        ("\\boxed{48}", 0.9, 1.0, 0.0),
        (" <think>a</think> \\boxed{48}", 0.9, 1.0, 0.0),
        ("<think>\\boxed{48}</think>", 0.9, 1.0, 0.0),
        ("<think>a", 0.0, 0.0, 0.0),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_geometry3k(answer: str, score: float, acc: float, form: float) -> None:
    found = default_compute_score("hiyouga/geometry3k", answer, "48")
    assert found == {"score": pytest.approx(score), "acc": acc, "format": form}


def test_sources() -> None:
    assert rule_for("aime2024") == rule_for("aime_anything") == "math_dapo"
    assert {"openai/gsm8k", "HuggingFaceH4/MATH-500", "aime*", "searchR1_bamboogle"} <= set(known_sources())
    with pytest.raises(UnknownSource, match=r"'openai/gsm8'.*openai/gsm8k.*aime\*") as caught:
        default_compute_score("openai/gsm8", "", "1")
    assert "custom_reward_function.path" in str(caught.value)
    assert list(unsupported(["openai/gsm8k", "nope", "apps"])) == ["nope"]


def test_a_misspelt_keyword_of_a_built_in_rule_is_refused() -> None:
    check_kwargs(["method", "format_score"])
    with pytest.raises(RewardLoadError, match=r"reward_kwargs\.metod.*method"):
        check_kwargs(["metod"])


# ------------------------------------------------------------------------------------------------ visual questions

PEOPLE = ["two", "2", "2.", "3", "three dogs"]


@pytest.mark.parametrize(
    ("response", "answers", "score"),
    [
        ("<think>a 3?</think>The answer is 2.", [*PEOPLE, *["4"] * 5], (3 * 2 / 3 + 7) / 10),
        ("2", ["2", *["4"] * 9], 0.3),
        ("2", [{"answer": "2"}] * 4 + [{"answer": "x"}] * 6, 1),
        (r"\boxed{The Dog's}", "dogs", 1),
        ("cat", ["dog", "Cat!"], 1),
        ("10:30", {"answers": ["10:30"]}, 1),
        ("1,000", "1000", 1),
        ("3.5", "35", 0),
        ("<answer>A</answer>", "a", 1),
        ("", ["a"], 0),
    ],
)
def test_vqa_accuracy(response: str, answers: object, score: float) -> None:
    found = default_compute_score("lmms-lab/VQAv2", response, answers)
    assert found["score"] == found["acc"] == pytest.approx(score)


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        ("It is red. The answer is Red.", "red", 1),
        ("<answer> B </answer>", {"answer": "B", "choices": ["A: odd", "B: even"]}, 1),
        ("<answer>even</answer>", {"answer": "B", "choices": ["A: odd", "B: even"]}, 1),
        ("<answer>odd</answer>", {"answer": "B", "choices": ["odd", "even"]}, 0),
        ("(b)", "B", 1),
        ("A dog", "A", 0),
        (r"\boxed{1/2}", "0.5", 1),
        ("-1", "1", 0),
        ("eat", "tea", 0),
        ("3", ["4", "3"], 1),
        ("", "3", 0),
    ],
)
def test_exact_match_of_a_visual_question(response: str, truth: object, right: int) -> None:
    assert default_compute_score("visual_qa_drawn", response, truth)["score"] == right


def test_a_visual_question_without_an_answer_cannot_be_scored() -> None:
    for source in ("vqa", "visual_qa"):
        with pytest.raises(ValueError, match="must hold a"):
            default_compute_score(source, "x", [])


@pytest.mark.skipif(not MATHVERSE.exists(), reason=f"{MATHVERSE} is absent")
def test_the_answers_of_mathverse_are_right_and_those_of_another_question_are_not() -> None:
    rows = [json.loads(line) for line in MATHVERSE.read_text().splitlines()]
    truths = [{"answer": row["answer"], "choices": row["choices"]} for row in rows]
    source = "AI4Math/MathVerse"
    for row, truth in zip(rows, truths, strict=True):
        said = row["answer"]
        assert default_compute_score(source, f"<answer>{said}</answer>", truth)["score"] == 1, row
    wrong = [default_compute_score(source, f"<answer>{rows[i - 1]['answer']}</answer>", truths[i]) for i in range(20)]
    assert sum(one["score"] for one in wrong) <= 2


# ------------------------------------------------------------------------------------------------- ground truths

NUMBER, MATH, DAPO = "openai/gsm8k", "lighteval/MATH", "math_dapo"
CHOICES = {"answer": "B", "choices": ["A. 1", "B. 2"]}


@pytest.mark.parametrize(
    ("source", "truth"),
    [
        *((NUMBER, truth) for truth in ("72", "-1,000.50", "$5", 72, 72.0, "1e3", "+5", "72.", "0.00")),
        *((MATH, truth) for truth in (r"\frac{1}{2}", r"\boxed{5}", "x", 3, r"\text{Evelyn}", "1 < x")),
        *((DAPO, truth) for truth in ("34", "x = 5", "3\n4", r"\frac12", "the cat", 7)),
        *(("hiyouga/geometry3k", "90"), ("numina_cn_k12", "2\\pi"), ("searchR1_nq", {"target": ["a", ""]})),
        *(("vqa_x", ["no", "yes"]), ("visual_qa_x", CHOICES), ("apps", {"inputs": ["1"], "outputs": ["2"]})),
        ("apps", '{"assert_case": ["assert True"]}'),
    ],
)
def test_ground_truths_that_a_response_can_match(source: str, truth: Any) -> None:
    check_truth(source, truth)


@pytest.mark.parametrize(
    ("source", "truth"),
    [
        *((NUMBER, truth) for truth in ("abc", "nan", float("nan"), [72], {"a": 1}, True, "5%", "1/2", "#### 72", ",", "inf")),
        *((NUMBER, truth) for truth in ("1e999", "7 apples", "7" * 400)),
        *((MATH, truth) for truth in ("%", "$", {"answer": "1"}, " ")),
        *((DAPO, truth) for truth in (["34"], "[INVALID]", r"\boxed{5}", "9" * 400)),
        *(("searchR1_nq", truth) for truth in ({}, {"target": []}, {"target": ""}, {"target": 5}, 5)),
        *(("vqa_x", []), ("visual_qa_x", {"answer": None}), ("visual_qa_x", "")),
        *(("apps", truth) for truth in ("no json", "[1]", {"inputs": ["1"], "outputs": []}, {}, 3)),
        ("unheard/of", "72"),
    ],
)  # fmt: skip
def test_ground_truths_that_no_response_can_match(source: str, truth: Any) -> None:
    with pytest.raises(BadRow) as caught:
        check_truth(source, truth)
    assert repr(truth)[:40] in caught.value.detail or source in caught.value.detail


def test_a_list_of_one_answer_is_matched_by_that_answer() -> None:
    check_truth("hiyouga/geometry3k", ["90"])
    assert default_compute_score("hiyouga/geometry3k", r"<think>t</think>\boxed{90}", ["90"])["score"] == 1.0


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda s: s.math_reward.last_boxed_only_string(r"\boxed{1} so \boxed{\frac{1}{2}}."), r"\boxed{\frac{1}{2}}"),
        (lambda s: s.math.last_boxed_only_string(r"it is $\boxed 5$."), r"\boxed 5"),
        (lambda s: s.math_dapo.last_boxed_only_string("none"), None),
        (lambda s: s.math.remove_boxed(r"\boxed{\frac{1}{2}}"), r"\frac{1}{2}"),
        (lambda s: s.math.remove_boxed(r"\boxed 5"), "5"),
        (lambda s: s.math.strip_string("x = .5"), r"\frac{1}{2}"),
        (lambda s: s.math.strip_string(r"\left(3, \dfrac12\right)"), r"(3,\frac{1}{2})"),
        (lambda s: s.math.strip_string(r"10\%"), "10"),
        (lambda s: s.math.strip_string(r"90^\circ\text{ degrees}"), "90"),
        (lambda s: s.math.fix_fracs(r"\frac12+\frac{3}4+\frac1{72}"), r"\frac{1}{2}+\frac{3}4+\frac{1}{72}"),
        (lambda s: s.math.fix_fracs(r"\frac1"), r"\frac1"),
        (lambda s: s.math.fix_a_slash_b("-3/4"), r"\frac{-3}{4}"),
        (lambda s: s.math.fix_a_slash_b("a/b"), "a/b"),
        (lambda s: s.math.fix_sqrt(r"\sqrt3+\sqrt{2}"), r"\sqrt{3}+\sqrt{2}"),
        (lambda s: s.math.remove_right_units(r"5\text{ cm}"), "5"),
        (lambda s: s.math_reward.is_equiv(str1="1/2", str2=r"\frac12"), True),
        (lambda s: (s.math.is_equiv(None, None), s.math.is_equiv(None, "1"), s.math.is_equiv("1", "2")), (True, False, False)),
        (lambda s: s.math_reward.compute_score(r"\boxed{72}", "72"), 1.0),
        (lambda s: s.math_batch.compute_score_batched(["", ""], [r"\boxed{1}", "1"], ["1", "1"], [{}, {}]), [1.0, 0.0]),
        (lambda s: s.math_dapo.normalize_final_answer("x = 1,234 dollars"), "1234"),
        (lambda s: s.math_dapo.normalize_final_answer(r"$1{,}234{,}567$"), "1234567"),
        (lambda s: s.math_dapo.is_correct_minerva("Answer: 7\nAnswer: 8", r"\boxed{8}", gt_need_extract=True), (True, "8")),
        (lambda s: s.math_dapo.is_correct_minerva("8", "8"), (False, "[INVALID]")),
        (lambda s: s.math_dapo.is_correct_strict_box(r"\boxed{8}", "8"), (1, "8")),
        (lambda s: s.math_dapo.is_correct_strict_box(r"\boxed{8}" + "x" * 100, "8"), (-1, "[INVALID]")),
        (lambda s: s.math_dapo.verify(r"\boxed{8}", "8", strict_box_verify=True), (True, "8")),
        (lambda s: s.math_dapo.compute_score("Answer: 8", "8", True), {"score": -1.0, "acc": False, "pred": "[INVALID]"}),
        (lambda s: s.gsm8k.extract_solution(solution_str="#### 1,000", method="strict"), "1000"),
        (lambda s: s.gsm8k.compute_score("#### 7", "8", format_score=0.1), 0.1),
        (lambda s: s.geo3k.compute_score(predict_str="<think>.</think> \\boxed{5}", ground_truth="5", use_boxed=True), 1.0),
        (lambda s: (s.geo3k.format_reward("5"), s.geo3k.acc_reward("5", "5", use_boxed=False)), (0.0, 1.0)),
        (lambda s: s.math_verify.compute_score("The answer is $0.5$.", r"\frac12", timeout_score=0), 1.0),
        (lambda s: s.math_verify.compute_score("long text, 7 apples: 8", "7"), 0.0),
        (lambda s: s.prime_math.compute_score("Thus the answer is 5.", "5."), (True, True, "5.")),
        (lambda s: s.prime_math.compute_score(r"Step 2: \boxed{4}", "5"), (False, True, "4")),
        (lambda s: s.prime_math.match_answer("nothing"), (False, "nothing")),
        (lambda s: s.prime_math.grade_answer("0.5", r"\frac12"), True),
        (lambda s: (s.prime_math.grader.math_equal("50", "0.5"), s.prime_math.grader.math_equal("50", "0.5", False)), (True, False)),
        (lambda s: s.prime_math.grader.math_equal("6.28", r"2\pi", pi=3.14), True),
        (lambda s: s.search_r1_like_qa_em.normalize_answer("The  Cat."), "cat"),
        (lambda s: s.search_r1_like_qa_em.em_check("the cat", ["dog", "Cat!"]), 1),
        (lambda s: (s.search_r1_like_qa_em.subem_check("a black cat", "cat"), s.search_r1_like_qa_em.em_check("a", "b")), (1, 0)),
        (lambda s: s.search_r1_like_qa_em.extract_solution(solution_str="<answer>a</answer><answer> b </answer>"), "b"),
        (lambda s: s.search_r1_like_qa_em.compute_score("<answer>x b</answer>", {"target": ["b"]}, format_score=0.1), 0.1),
        (lambda s: s.search_r1_like_qa_em.compute_score_subem("<answer>x b</answer>", {"target": ["b"]}), 1.0),
    ],
)  # fmt: skip
def test_helpers_of_the_public_reward_modules(call: Any, expected: object) -> None:
    assert call(importlib.import_module("verl.utils.reward_score")) == expected


def test_code_by_the_public_names() -> None:
    from verl.utils.reward_score import prime_code, sandbox_fusion

    tests = {"inputs": ["1", "2"], "outputs": ["1", "3"]}
    echo = "print(input())"
    assert prime_code.compute_score(echo, tests, continuous=True) == (
        0.5,
        [{"passed": True}, {"passed": False}],
    )
    assert prime_code.compute_score(f"```python\n{echo}\n```", tests)[0] is False
    assert sandbox_fusion.compute_score(None, None, 256, echo, tests, timeout=5)[0] == 0.5
