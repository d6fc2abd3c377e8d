"""Run a Python program by a remote sandbox with the interface of SandboxFusion (`POST …/run_code`)."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from verl.reward.json_service import post_json
from verl.reward.outcome import ServiceFailed
from verl.reward.sandbox.local import ProgramResult

QUEUE_SECONDS = 30.0
"""What a service may take on top of the program's own time."""
TURNS = 32
"""Messages that a test and a program may exchange; each one costs two runs."""


def run(url: str, program: str, text: str = "", *, seconds: float = 10.0, memory_mb: int = 1024) -> ProgramResult:
    """As `local.run`, by the service at `url` (its address, or that of its `run_code`). ServiceFailed if it fails."""
    if not urlsplit(url).path.strip("/"):
        url = url.rstrip("/") + "/run_code"
    body = {
        "language": "python",
        "code": program,
        "stdin": text,
        "compile_timeout": seconds,
        "run_timeout": seconds,
        "memory_limit_MB": memory_mb,
        "files": {},
        "fetch_files": [],
    }
    answer = post_json(url, body, timeout=2 * seconds + QUEUE_SECONDS, problem=_problem)
    result = answer.get("run_result") or answer.get("compile_result") or {}
    finished = answer["status"] == "Success"
    note = "" if finished else f"{result.get('status')}: {result.get('stderr') or ''}"
    return ProgramResult(str(result.get("stdout") or ""), finished, note)


def run_test(url: str, test: str, program: str, **limits: Any) -> ProgramResult:
    """As `local.run_test`. A service runs one program at a time: each is run again with all that the other has printed
    so far, as long as the test asks for more. ServiceFailed after TURNS messages."""
    lines, replies = 0, ""
    for _ in range(TURNS):
        ran = run(url, test, replies, **limits)
        if ran.finished or ran.output.count("\n") <= lines:
            return ran
        lines = ran.output.count("\n")
        replies = run(url, program, ran.output, **limits).output
    raise ServiceFailed(
        f"an assert_case uses the program more than {TURNS} times in turn: make several cases of it, or use the local "
        "sandbox"
    )


def _problem(answer: Any) -> str | None:
    """A service that could not run the program says so in `status`; a program that failed is an answer."""
    if not isinstance(answer, dict) or not isinstance(answer.get("run_result") or {}, dict):
        return f"it is no result of a program: {answer!r}"
    status = answer.get("status")
    if status == "Failed" or (status == "Success" and answer.get("run_result")):
        return None
    return f"status {status!r}: {answer.get('message') or answer}"
