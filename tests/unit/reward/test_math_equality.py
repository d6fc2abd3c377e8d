"""math-verify behind our limit: right on what it should know, never a silent 0, never a hang, from any thread."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl.reward import default_compute_score, scoring_process
from verl.reward.outcome import VerifyFailed
from verl.reward.pool import FunctionSpec, ScoringPool
from verl.reward.rules import math_equality

MATH = "lighteval/MATH"


def score(answer: str, truth: str, source: str = MATH) -> object:
    return default_compute_score(source, answer, truth)


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("0.5", r"\frac12", 1.0),
        ("2x+1", "1+2x", 1.0),
        ("(x+1)^2", "x^2+2x+1", 1.0),
        (r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt{2}}", 1.0),
        (r"\{2,1\}", r"\{1,2\}", 1.0),
        ("10^3", "1000", 1.0),
        (r"\frac{3\pi}{6}", r"\frac{\pi}{2}", 1.0),
        ("0.51", r"\frac12", 0.0),
        ("2x", "2y", 0.0),
        ("x^2+1", "x^2+2", 0.0),
        ("", "0", 0.0),
        ("5", r"\text{Evelyn}", 0.0),
        ("(1,2)", "(2,1)", 0.0),
    ],
)
def test_equal_and_different_in_meaning(answer: str, truth: str, expected: float) -> None:
    assert score(f"so \\boxed{{{answer}}}.", truth) == expected
    assert score(answer, truth) == 0.0, "the answer must be boxed"


def test_numina_reads_pi_as_3_14_and_words() -> None:
    assert score("The answer is 6.28.", r"2\pi", "numina_cn_k12") == 1.0
    assert score("The answer is $6.28$, roughly", r"2\pi", "numina_olympiads") == 1.0
    assert score("The answer is 6.3.", r"2\pi", "numina_cn_k12") == 0.0
    truths = {
        r"\pi": "3.14",
        "π": "3.14",
        r"\frac{\pi}{2}": "1.57",
        r"\pi^2": "9.8596",
        r"1+\pi": "4.14",
        "3π": "9.42",
    }
    for truth, answer in truths.items():
        assert score(f"\\boxed{{{answer}}}", truth, "numina_cn_k12") == 1.0, truth
    assert score("Answer: 7\nThe answer is 8", "7", "numina_cn_k12") == 0.0
    assert score("nothing", "7", "numina_cn_k12") == 0.0


def test_many_threads_get_the_same_answers() -> None:
    pairs = [(f"{i}/{i + 1} + 0x", rf"\frac{{{i + (i % 2)}}}{{{i + 1}}}") for i in range(1, 25)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda p: score(f"\\boxed{{{p[0]}}}", p[1]), pairs))
    assert found == [1.0 if i % 2 == 0 else 0.0 for i in range(1, 25)]


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^9}}",
        "10^{10000000}",
        r"\frac{1}{2^{-999999999}}",
        r"\left(9^{(9^9)}\right)",
        "999999!",
        "((200!)!)!",
        "9!!",
    ],
)
def test_what_is_too_large_to_compute_is_wrong_at_once_and_counted(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring_process, "_undecided", 0)
    monkeypatch.setattr(math_equality, "_ask", lambda *call: pytest.fail("it was computed"))
    assert score(f"\\boxed{{{answer}}}", "7") == 0.0 and scoring_process._undecided == 1


@pytest.mark.parametrize(
    "answer", ["2^{2^{10}}", "(2^{10})^{10}3^{5}", "9!", "x^{10^9}", "5!!", "7^{2019}-1", "12^ 5, 7^{9}"]
)
def test_what_can_be_computed_is(answer: str) -> None:
    assert not math_equality.is_huge(answer)


def test_over_the_limit_is_wrong_and_the_next_one_works(capfd, monkeypatch) -> None:
    monkeypatch.setattr(scoring_process, "_undecided", 0)
    monkeypatch.setattr(math_equality, "is_huge", lambda text: False)
    started = time.monotonic()
    # A tower of powers: computed in C, deaf to signals and to exceptions set from outside.
    tower = "9^{9^{9^{9}}}"
    assert math_equality.decide(tower, "7", limit=0.5) is None and scoring_process._undecided == 1
    with pytest.raises(VerifyFailed, match=r"ground truth '9\^.* took more than 0\.5 s"):
        math_equality.decide("7", tower, limit=0.5)
    assert time.monotonic() - started < 30 and scoring_process._undecided == 1
    assert math_equality.equal("0.5", r"\frac12")
    assert "Timeout is disabled" not in capfd.readouterr().err


def test_a_broken_parser_is_an_error_and_not_a_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.reward.rules import math_verify_process

    monkeypatch.setattr(math_verify_process, "parse", lambda *a, **k: [])
    with pytest.raises(VerifyFailed, match="does not work in this environment"):
        math_verify_process.self_test()
    broken = ScoringPool(FunctionSpec(path="pkg://no_such_verifier"), workers=1)
    monkeypatch.setattr(math_equality, "_helper", (os.getpid(), broken))
    with pytest.raises(VerifyFailed, match="no module 'no_such_verifier'"):
        math_equality.equal("0.5", r"\frac12")


def test_an_error_because_of_the_answer_is_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring_process, "_undecided", 0)

    def ask(answer: str, truth: str, limit: float, whole: bool) -> bool:
        if "bad" in answer + truth:
            raise VerifyFailed("cannot compare")
        return False

    monkeypatch.setattr(math_equality, "_ask", ask)
    assert score(r"\boxed{bad}", "5") == 0.0 and scoring_process._undecided == 1
    with pytest.raises(VerifyFailed, match="cannot compare"):
        score(r"\boxed{5}", "bad")


@pytest.mark.parametrize(
    "answer",
    ["1+" * 5000 + "1", "(" * 999 + ")" * 999, r"\frac{" * 99 + "1" + "}{2}" * 99, "1" * 10**5, "[{(" * 999],
)
def test_long_and_deep_answers_are_wrong_at_once(answer: str) -> None:
    started = time.process_time()
    assert score(f"\\boxed{{{answer}}}", "5") == 0.0
    assert time.process_time() - started < 3.0


WORDS = r"\frac \sqrt \boxed \text \left \right \pi \infty \int \sum \cdot \le \circ \{ \} \% \$ \begin{pmatrix}"
SIGNS = r"\end{pmatrix} { } ( ) [ ] | ^ _ = < > , ; + - * / ! 0 1 12 0.5 . x y abc e i $ % \ & # ٧"
_PIECES = st.sampled_from([*WORDS.split(), *SIGNS.split(), " ", "\n", "\x00", "\u202e", "\\text{ and }"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.one_of(st.lists(_PIECES, max_size=14).map("".join), st.text(max_size=30)),
    st.sampled_from(["5", r"\frac{1}{2}", "x^2+1", r"\{1,2\}", r"(-\infty, 3]", r"\text{Evelyn}", "x=3"]),
)
def test_hostile_answers_give_a_score(text: str, truth: str) -> None:
    assert score(f"\\boxed{{{text}}}", truth) in (0.0, 1.0)
