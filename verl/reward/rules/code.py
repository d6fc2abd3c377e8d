r"""Code: the response's program is run on test cases, in a sandbox; the score is the share of cases that it passes.

    response ─→ program ─┬ + a case's input     ─→ what it prints         ≟ the case's output
                         ├ + a call of fn_name  ─→ the result, as JSON    ≟ the case's output
                         └ ⇄ an assert          in a process of its own, which ends well if it holds

Expected outputs stay here: the program cannot print what it does not know. Nor does it run where an
assert is evaluated: that process calls it by messages (`remote_objects`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from verl.reward.sandbox import local, remote_objects, service

MAX_CASES = 10
SECONDS = 10.0
TOLERANCE = 1e-6
TIMES_LONGER, ROOM = 16, 4096
"""An output longer than this many times the expected one plus ROOM characters differs from it: it is not parsed."""

# Solutions to tasks about a function or class use these without importing them. The last line: math has its own `pow`.
_IMPORTS = """import bisect, collections, functools, heapq, itertools, math, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
from builtins import *
"""
_CALL = """

import json as _json, sys as _sys
_arguments = [_json.loads(_line) for _line in _sys.stdin.read().splitlines() if _line.strip()]
_function = getattr(Solution(), {name!r}) if hasattr(globals().get("Solution"), {name!r}) else {name}
_sys.stdout.write("\\n" + _json.dumps(_function(*_arguments), default=list) + "\\n")
"""
_SERVED = """

connect()
_main = sys.modules["__main__"] = type(sys)("__main__")
exec({imports!r}, _main.__dict__)
_before = dict(_main.__dict__)
exec(compile({program!r}, "program.py", "exec"), _main.__dict__)
OPERATIONS["names"] = lambda _, names: {{
    name: value for name, value in _main.__dict__.items() if name in names and value is not _before.get(name)
}}
serve()
"""
# A name that means something without the program means that: a program might define an `abs`. Where there is no other
# name it is the innermost calls that are tested.
_TEST = """

import ast, traceback
connect()
del OPERATIONS["getattr"]
_main = {{"__name__": "__main__"}}
try:
    exec({imports!r}, _main)
    _nodes = list(ast.walk(ast.parse({case!r})))
    _bound = {{node.arg for node in _nodes if isinstance(node, ast.arg)}}
    _bound |= {{getattr(node, name, None) for node in _nodes for name in ("name", "asname")}}
    _bound |= {{node.id for node in _nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}}
    _names = {{node.id for node in _nodes if isinstance(node, ast.Name)}} - _bound - _main.keys()
    _calls = [node for node in _nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    _inner = [call for call in _calls if sum(isinstance(node, ast.Call) for node in ast.walk(call)) == 1]
    _names = sorted(_names or {{call.func.id for call in _inner}} - _bound)
    _main.update((name, value) for name, value in ask(None, "names", _names).items() if name in _names)
    exec(compile({case!r}, "test.py", "exec"), _main)
except BaseException:
    traceback.print_exc()
    os._exit(1)
os._exit(0)
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One run: what is put before and after the solution, the input, what makes the output right; or `test`, a program
    that asserts something of the solution."""

    before: str = ""
    after: str = ""
    text: str = ""
    passes: Callable[[str], bool] = bool
    test: str = ""


def program_of(response: str) -> str | None:
    """The last ```` ```python ```` block, else the first fenced block, None without any. A last block may be open."""
    if "```python" in response:
        return response.rsplit("```python", 1)[1].split("```", 1)[0]
    parts = response.split("```", 2)
    if len(parts) < 3:
        return None
    first, _, body = parts[1].partition("\n")
    return body if first.strip().isalnum() else parts[1]


def cases_of(ground_truth: Any) -> list[Case]:
    """The first MAX_CASES cases. ValueError says what is wrong with the row's tests."""
    tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(tests, Mapping):
        raise ValueError("code: the ground truth must hold inputs and outputs, or assert_case")
    asserts = tests.get("assert_case")
    if asserts:
        return [_assert(case) for case in _listed(asserts)[:MAX_CASES]]
    inputs, outputs = _listed(tests.get("inputs")), _listed(tests.get("outputs"))
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"code: the ground truth has {len(inputs)} inputs and {len(outputs)} outputs")
    name = tests.get("fn_name")
    if name and not str(name).isidentifier():
        raise ValueError(f"code: fn_name {name!r} is no name of a function")
    pairs = list(zip(inputs, outputs, strict=True))[:MAX_CASES]
    return [_call(str(name), *pair) if name else _printed(*pair) for pair in pairs]


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else list(value or [])


def _assert(case: str) -> Case:
    return Case(test=_head() + _TEST.format(imports=_IMPORTS, case=case))


@cache
def _head() -> str:
    return Path(remote_objects.__file__).read_text("utf-8")


def _call(name: str, inputs: Any, expected: Any) -> Case:
    """Arguments are one JSON value a line, or a list of them; a result may stand in a list of its own."""
    if isinstance(inputs, str):
        inputs = [json.loads(line) for line in inputs.splitlines() if line.strip()]
    target = _json_or_text(expected) if isinstance(expected, str) else json.loads(json.dumps(expected))

    def passes(output: str) -> bool:
        line = _last_line(output)
        if _too_long(line, json.dumps(target)):
            return False
        result = _json_or_text(line)
        return _same(result, target) or (isinstance(target, list) and _same([result], target))

    return Case(_IMPORTS, _CALL.format(name=name), "\n".join(map(json.dumps, inputs)), passes)


def _printed(inputs: Any, expected: Any) -> Case:
    text, target = ("\n".join(map(str, v)) if isinstance(v, list) else str(v) for v in (inputs, expected))
    return Case(text=text, passes=lambda output: _same_text(output, target))


def _last_line(output: str) -> str:
    return output.rstrip().rsplit("\n", 1)[-1]


def _too_long(output: str, expected: str) -> bool:
    return len(output) > TIMES_LONGER * len(expected) + ROOM


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _same(result: Any, expected: Any) -> bool:
    """Equal; numbers with a fraction within TOLERANCE."""
    if isinstance(result, list) and isinstance(expected, list):
        return len(result) == len(expected) and all(map(_same, result, expected))
    if isinstance(result, float) or isinstance(expected, float):
        return _close(result, expected)
    return bool(result == expected)


def _same_text(output: str, expected: str) -> bool:
    """The same words line by line; blanks and empty lines at the end do not count, nor the digits of a fraction."""
    output = output.rstrip()
    if _too_long(output, expected):
        return False
    mine, target = ([line.split() for line in text.rstrip().splitlines()] for text in (output, expected))
    return len(mine) == len(target) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(mine, target, strict=True)
    )


def _same_word(word: str, expected: str) -> bool:
    return word == expected or ("." in expected and _close(word, expected))


def _close(result: Any, expected: Any) -> bool:
    """True for two numbers, or texts of numbers, within TOLERANCE."""
    try:
        return math.isclose(float(result), float(expected), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except (TypeError, ValueError, OverflowError):
        return False


def compute_score(
    solution_str: str,
    ground_truth: Any,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    max_concurrent: int = 1,
) -> float:
    """Passed cases over cases run; 0 without a program. Arguments and errors as `results`."""
    passed = results(
        solution_str, ground_truth, sandbox_fusion_url, concurrent_semaphore, memory_limit_mb, max_concurrent
    )
    return sum(passed) / len(passed)


def results(
    solution_str: str,
    ground_truth: Any,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    max_concurrent: int = 1,
    seconds: float = SECONDS,
) -> list[bool]:
    """Whether the response's program passes, case by case. SandboxFailed or ServiceFailed where it cannot be run;
    ValueError without tests.

    With `sandbox_fusion_url` the service there runs the programs, at most `max_concurrent` at a time, each under
    `concurrent_semaphore` if there is one; else a local sandbox, one after another.
    """
    cases = cases_of(ground_truth)
    program = program_of(solution_str)
    if program is None or not program.strip():
        return [False] * len(cases)
    run, run_test = local.run, local.run_test
    if sandbox_fusion_url is not None:
        run, run_test = (
            partial(service.run, sandbox_fusion_url),
            partial(service.run_test, sandbox_fusion_url),
        )
    limits: dict[str, Any] = {"seconds": seconds, "memory_mb": memory_limit_mb or 1024}

    def passed(case: Case) -> bool:
        if case.test:
            served = _head() + _SERVED.format(imports=_IMPORTS, program=program)
            with concurrent_semaphore or nullcontext():
                return run_test(case.test, served, **limits).finished
        # A program with imports from __future__ must begin with them.
        before = "" if "from __future__" in program else case.before
        source = before + program + case.after
        with concurrent_semaphore or nullcontext():
            ran = run(source, case.text, **limits)
        return ran.finished and case.passes(ran.output)

    if sandbox_fusion_url is None or max_concurrent == 1:
        return [passed(case) for case in cases]
    with ThreadPoolExecutor(max_concurrent) as threads:
        return list(threads.map(passed, cases))


def unmatched(ground_truth: Any) -> str:
    """ "": no program can be made from tests to try them. Raises for tests that `cases_of` cannot read."""
    cases_of(ground_truth)
    return ""
