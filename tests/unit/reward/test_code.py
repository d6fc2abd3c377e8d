"""Code sources: which program is taken from a response, what passes a case, and services that run programs."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from tests.unit.reward.http_service import serving
from tests.unit.reward.test_parts import settings
from tests.unit.reward.test_runner import trajectory_of
from verl.reward import default_compute_score, json_service
from verl.reward.outcome import ServiceFailed
from verl.reward.precheck import precheck
from verl.reward.rules.code import program_of
from verl.reward.runner import RewardRunner
from verl.reward.sandbox import local
from verl.reward.sandbox import service as sandbox_service

DOUBLE = {"inputs": ["1", "2", "30"], "outputs": ["2\n", "4", " 60 "]}
CALLS = {"fn_name": "f", "inputs": ["1\n[2, 3]", "4\n[]"], "outputs": ["[1, 2, 3]", "[4]"]}


EQUALS_ALL = """
import builtins
class Equal:
    def __eq__(self, other): return True
    __lt__ = __gt__ = __sub__ = __rsub__ = __abs__ = __contains__ = __float__ = __index__ = __call__ = __eq__
def f(n): return Equal()
def dist(a, b): return 4
abs = builtins.abs = isclose = AssertionError = builtins.AssertionError = Equal()
"""
FORGED = ["assert f(1) == 2", "assert 2 == f(1)", "assert abs(f(1) - 2) < 1", "assert f(1) in [2]", "assert 2 in f(1)",
          "assert isclose(f(1), 2)", "assert {f(1)} == {2}", "assert isclose(dist([1], [4]), 3)"]  # fmt: skip
SEARCHES = r"""
import gc, os, re, sys
def f(n):
    texts = [str(gc.get_objects()), *(str(sys._getframe(i).f_locals) for i in range(2))]
    for path in [__file__, sys.argv[0], *(f"/proc/{who}/cmdline" for who in ("self", os.getppid()))]:
        try: texts.append(open(path).read())
        except Exception: pass
    return int([*re.findall(r"f\(1\) == (\d+)", str(texts)), 0][0])
"""
ALL_KINDS = """
from __future__ import annotations
import statistics
def values(): return 1, {2}, {"a": [3.5, b"x"]}, deque([1]), 2j, range(3), None
def sort(x): x.sort()
def apply(function, n): return function(n)
def count_to(n): yield from range(n)
class Refusal(ValueError): pass
def fail(): raise Refusal("no")
def gcd(a, b): return 77
class Point:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)
    def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)
class Bag(dict):
    def put(self, key, value): self[key] = value
    def me(self): return self
"""


def fenced(program: str) -> str:
    return f"I think so.\n```python\n{program}\n```\nDone."


def score(program: str, truth: Any, **kwargs: Any) -> Any:
    return default_compute_score("codecontests", fenced(program), truth, **kwargs)


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("no code", None),
        ("```python\na\n```\n```python\nb\n```", "\nb\n"),
        ("```python\na\n``` and ```python\nb", "\nb"),
        ("```\na\n```\n```\nb\n```", "\na\n"),
        ("```py\na\n```", "a\n"),
        ("``` never closed", None),
    ],
)
def test_the_program_of_a_response(response: str, program: str | None) -> None:
    found = program_of(response)
    assert (found and found.strip()) == (program and program.strip())


@pytest.mark.parametrize(
    ("program", "truth", "expected"),
    [
        ("print(int(input()) * 2)", DOUBLE, 1.0),
        ("print(int(input()) * 2)", json.dumps(DOUBLE), 1.0),
        ("print(input() * 2)", DOUBLE, 0.0),
        ("print(2)", DOUBLE, 1 / 3),
        ("syntax error", DOUBLE, 0.0),
        ("", DOUBLE, 0.0),
        ("print(int(input()) * 2)\nraise SystemExit(1)", DOUBLE, 0.0),
        ("print(0.30000000000000004)", {"inputs": [""], "outputs": ["0.3"]}, 1.0),
        ("print('0.31')", {"inputs": [""], "outputs": ["0.3"]}, 0.0),
        ("print('1\\n2')", {"inputs": [""], "outputs": ["1 2"]}, 0.0),
        ("print(1)", {"inputs": [""] * 20, "outputs": ["1"] * 10 + ["2"] * 10}, 1.0),
        ("def f(a, b): return [a, *b]", CALLS, 1.0),
        ("class Solution:\n  def f(self, a: int, b: List[int]): print('noise'); return (a, *b)", CALLS, 1.0),
        ("from __future__ import annotations\ndef f(a, b): return [a, *b]", CALLS, 1.0),
        ("def f(a, b): return [a]", CALLS, 0.5),
        ("def g(a, b): return [a, *b]", CALLS, 0.0),
        ("def f(n): return n + 1", {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[2], [3]]}, 1.0),
        ("def f(n): return 10 ** n", {"fn_name": "f", "inputs": [[400], [0]], "outputs": [0.5, 1.0]}, 0.5),
        ("def f(n): return pow(n, 3, 7)", {"fn_name": "f", "inputs": [[2]], "outputs": [[1]]}, 1.0),
        ("print('[' * 100000)", {"fn_name": "f", "inputs": [[1]], "outputs": [[2]]}, 0.0),
        ("def f(n): return eval('[' * 80 + ']' * 80)", {"fn_name": "f", "inputs": [[1]], "outputs": [2]}, 0),
        ("print('1\\n' * 5000000)", {"inputs": [""], "outputs": ["1"]}, 0.0),
        ("def f(n): return n + 1", {"assert_case": ["assert f(1) == 2", "assert f(1) == 3"]}, 0.5),
        ("import os\nos._exit(0)", {"assert_case": ["assert f(1) == 2"]}, 0.0),
        ("print(input(), flush=True)\nimport os\nos._exit(0)", {"assert_case": ["assert f(1) == 2"]}, 0.0),
        (EQUALS_ALL, {"assert_case": FORGED}, 0.0),
        (SEARCHES, {"assert_case": ["assert f(1) == 98765"]}, 0.0),
    ],
)
def test_share_of_cases_passed(program: str, truth: Any, expected: float) -> None:
    assert score(program, truth) == pytest.approx(expected)


@pytest.mark.parametrize(
    "case",
    [
        "assert values() == (1, {2}, {'a': [3.5, b'x']}, deque([1]), 2j, range(3), None)",
        "x = [3, 1]\nassert sort(x) is None and x == [1, 3]",
        "assert apply(lambda x: x + 1, 3) == 4 and list(count_to(3)) == [0, 1, 2]",
        "try:\n    fail()\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'no'",
        "assert all(gcd(i, 2) == 77 for i in [2, 4])",
        "def half(n):\n    return n / 2\nassert half(gcd(4, 2)) == 38.5",
        "assert Point(1, 2) + Point(3, 4) == Point(4, 6) != Point(4, 7) and Point(1, 2).x == 1",
        "bag = Bag()\nbag.put('a', 1)\nassert bag['a'] == 1 and len(bag) == 1 and bag.me() is bag",
        "assert statistics.mean(values()[2]['a'][:1]) == 3.5",
    ],
)
def test_what_an_assert_may_do_with_the_program(case: str) -> None:
    assert score(ALL_KINDS, {"assert_case": case}) == 1.0


@pytest.mark.parametrize(
    "truth",
    [{}, "[]", "x", {"inputs": ["1"], "outputs": []}, {"fn_name": "f(", "inputs": [[1]], "outputs": [1]}],
)
def test_a_row_without_usable_tests_is_no_zero(truth: Any) -> None:
    with pytest.raises(ValueError):
        score("print(1)", truth)


class Service:
    """Answers as SandboxFusion does, without running anything: a program's comment says what becomes of it."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    def __call__(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with self.lock:
            self.bodies.append(body | {"path": path})
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return self.answer(body)
        finally:
            with self.lock:
                self.at_once -= 1

    def answer(self, body: dict[str, Any]) -> tuple[int, Any]:
        what = body["code"].strip().removeprefix("# ")
        right = {"status": "Finished", "return_code": 0, "stdout": str(2 * int(body["stdin"])), "stderr": ""}
        if what == "recovers" and len(self.bodies) > 2:
            what = "right"
        return {
            "right": (200, {"status": "Success", "message": "", "run_result": right}),
            "slow": (200, {"status": "Failed", "message": "", "run_result": {"status": "TimeLimitExceeded"}}),
            "broken": (200, {"status": "SandboxError", "message": "no runner is free"}),
            "recovers": (504, "gateway"),
            "nonsense": (200, "<html>"),
            "other json": (200, [1]),
            "refused": (422, {"detail": "no such language"}),
        }[what]


@pytest.fixture()
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_service, "PAUSES", (0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("what", "expected", "tries"),
    [
        ("right", 1.0, 3),
        ("slow", 0.0, 3),
        ("recovers", 1.0, 5),
        ("broken", "SandboxError.*no runner is free", 4),
        ("nonsense", "no JSON: <html>", 4),
        ("other json", "no result of a program", 4),
        ("refused", "refuses: status 422.*no such language", 1),
    ],
)
def test_a_service_runs_programs(no_pauses: None, what: str, expected: float | str, tries: int) -> None:
    service = Service()
    with serving(service) as url:
        if isinstance(expected, str):
            with pytest.raises(ServiceFailed, match=expected):
                score(f"# {what}", DOUBLE, sandbox_fusion_url=url, memory_limit_mb=64)
        else:
            assert score(f"# {what}", DOUBLE, sandbox_fusion_url=url, memory_limit_mb=64) == expected
    assert len(service.bodies) == tries
    body = service.bodies[0]
    asked = {"path": "/run_code", "language": "python", "memory_limit_MB": 64, "run_timeout": 10}
    assert {name: body[name] for name in asked} == asked


def test_a_service_that_is_not_there(no_pauses: None) -> None:
    with pytest.raises(ServiceFailed, match=r"127\.0\.0\.1:9/x gave no usable answer in 4 tries"):
        score("print(1)", DOUBLE, sandbox_fusion_url="http://127.0.0.1:9/x")
    with pytest.raises(ServiceFailed, match="no http"):
        score("print(1)", DOUBLE, sandbox_fusion_url="file:///etc/passwd")


def test_a_service_runs_a_test_and_the_program_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def service(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        ran = local.run(body["code"], body["stdin"])
        result = {"status": "Finished", "stdout": ran.output, "stderr": ran.note}
        return 200, {"status": "Success" if ran.finished else "Failed", "message": "", "run_result": result}

    monkeypatch.setattr(sandbox_service, "TURNS", 5)
    cases = ["assert apply(lambda x: x + 1, 3) == 4", "assert gcd(1, 2) == 1"]
    with serving(service) as url:
        assert score(ALL_KINDS, {"assert_case": cases}, sandbox_fusion_url=url) == 0.5
        with pytest.raises(ServiceFailed, match="more than 5 times in turn"):
            score(ALL_KINDS, {"assert_case": ["assert sum(count_to(9)) == 36"]}, sandbox_fusion_url=url)


def test_programs_at_a_time_at_a_service() -> None:
    service, semaphore = Service(), threading.Semaphore(2)
    with serving(service) as url:
        many = {"inputs": ["1"] * 10, "outputs": ["2"] * 10}
        limits = {"concurrent_semaphore": semaphore, "max_concurrent": 8}
        assert score("# right", many, sandbox_fusion_url=url, **limits) == 1.0
    assert len(service.bodies) == 10 and service.most_at_once <= 2


def test_a_run_scores_code(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Service()) as url:
        for where, program in (([], "print(int(input()) * 2)"), ([f"sandbox_fusion.url={url}"], "# right")):
            runner = RewardRunner(None, settings=settings("reward_model.num_workers=1", *where))
            row = {"truth": DOUBLE, "data_source": "taco"}
            right, wrong = (trajectory_of(fenced(text), **row, extra_info={}) for text in (program, ""))
            asyncio.run(runner.score_batch([right, wrong]))
            assert (right.score, wrong.score) == (1.0, 0.0), (right.score_error, wrong.score_error)
            if not where:
                right.prompt.extra_info["answer"] = "Twice the number."
                asyncio.run(precheck(runner, [right.prompt]))
                assert "a program without output scores 0" in capsys.readouterr().err
                right.prompt.extra_info["answer"] = right.text
                asyncio.run(precheck(runner, [right.prompt]))
                assert "scores 1, an empty response 0" in capsys.readouterr().err
            runner.close()


def test_programs_at_a_time_are_shared_by_the_processes() -> None:
    def shares(*words: str) -> tuple[int, Any]:
        found = settings("sandbox_fusion.url=http://x", *words)
        return found.num_workers, found.function.kwargs["max_concurrent"]

    assert shares() == (8, 8)
    assert shares("sandbox_fusion.max_concurrent=3") == (3, 1)
    assert shares("sandbox_fusion.max_concurrent=20", "reward_model.num_workers=4") == (4, 5)
