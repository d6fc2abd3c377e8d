"""Environments of `verifiers` (version 1): `environment.name=verifiers`, `path` the Python of a virtual environment
that has the package.

Each process that runs agent loops starts a server of the environment (`verifiers_program`, in that Python) with its
first trajectory and another when one has ended. An episode asks the trajectory's session over HTTP for its turns;
reward and metrics come back.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from verl.errors import UserError
from verl.platform.child_process import LONGEST_MESSAGE
from verl.rollout.programs import Output, kill
from verl.rollout.record import EnvironmentFailed

# -P: the program's folder, whose `openenv` is not the package of that name, stays off its sys.path.
_PROGRAM = ("-P", str(Path(__file__).with_name("verifiers_program.py")))
START_SECONDS = 120.0
ANSWER_SECONDS = 5.0


def check(spec: Mapping[str, Any], tokenizer: str) -> None:
    """Start the server once. UserError with what it says where it cannot serve the environment."""
    python = str(spec["path"])
    if shutil.which(python) is None:
        raise UserError(
            f"environment.path={python} is no program: name the Python of a virtual environment that has verifiers, "
            "like /path/to/venv/bin/python"
        )
    try:
        process = subprocess.run(
            [python, *_PROGRAM], input=_first(spec, tokenizer), capture_output=True, timeout=START_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"the verifiers environment did not start within {START_SECONDS:g} s") from error
    answer = json.loads(process.stdout.partition(b"\n")[0] or b"{}")
    if "ready" not in answer:
        problem = answer.get("refused") or process.stderr.decode(errors="replace").strip()[-500:]
        raise UserError(f"{python} cannot serve the verifiers environment of environment.kwargs: {problem}")


def _first(spec: Mapping[str, Any], tokenizer: str) -> bytes:
    environment = dict(spec.get("kwargs") or {})
    renderer = environment.pop("renderer", None)
    first = {"environment": environment, "renderer": renderer, "tokenizer": tokenizer}
    return json.dumps(first).encode() + b"\n"


class VerifiersServer:
    """The server of one environment. All calls are made on one event loop."""

    def __init__(self, spec: Mapping[str, Any], tokenizer: str):
        self._python, self._line = str(spec["path"]), _first(spec, tokenizer)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._check: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def run(self, url: str, task: Any, index: Any) -> dict[str, Any]:
        """Play a task (its data, or its place in the taskset) through a session's URL: reward, metrics, stop, messages.
        EnvironmentFailed where the episode or the server fails."""
        async with self._starting:
            if self._process is None:
                await self._start()
        try:
            answer = await self._ask({"url": url, "task": task, "index": index})
        except asyncio.CancelledError:
            self._check = asyncio.ensure_future(self._end_if_hung())
            raise
        if "error" in answer:
            raise EnvironmentFailed(f"verifiers: {answer['error']}")
        return answer

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"id": number} | message)
            return await answer
        except asyncio.CancelledError:
            self._send({"cancel": number})
            raise
        finally:
            del self._waiting[number]

    async def _end_if_hung(self) -> None:
        """After an episode past its deadline: a server that does not answer would keep all others waiting."""
        process = self._process
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._ask({"ping": True})
        except TimeoutError:
            if process is not None:
                kill(process)

    def _send(self, message: dict[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _start(self) -> None:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            self._python,
            *_PROGRAM,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            limit=LONGEST_MESSAGE,
            start_new_session=True,
        )
        stderr = Output(process.stderr, echo=True)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(self._line)
        answer = {"refused": "it ended"}
        try:
            async with asyncio.timeout(START_SECONDS):
                answer |= json.loads(await process.stdout.readline() or b"{}")
        except (TimeoutError, ValueError) as error:
            answer["refused"] = type(error).__name__
        finally:
            if "ready" not in answer:
                kill(process)
        if "ready" not in answer:
            why = answer["refused"] + await stderr.last_lines()
            raise EnvironmentFailed(f"the verifiers server of {self._python} did not start: {why}")
        self._process = process
        self._reader = asyncio.ensure_future(self._read(process, stderr))

    async def _read(self, process: asyncio.subprocess.Process, stderr: Output) -> None:
        assert process.stdout is not None
        with suppress(ValueError):
            async for line in process.stdout:
                answer = json.loads(line)
                future = self._waiting.get(answer["id"])
                if future is not None and not future.done():
                    future.set_result(answer)
        self._process, unanswered = None, list(self._waiting.values())
        kill(process)
        status, last_lines = await process.wait(), await stderr.last_lines()
        ended = f"the environment server of {self._python} ended with status {status}{last_lines}"
        for future in unanswered:
            if not future.done():
                future.set_result({"error": ended})


_SERVERS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bytes, VerifiersServer]] = WeakKeyDictionary()


def server_of(spec: Mapping[str, Any], tokenizer: str) -> VerifiersServer:
    """The server of an environment in this event loop."""
    servers = _SERVERS.setdefault(asyncio.get_running_loop(), {})
    key = str(spec["path"]).encode() + _first(spec, tokenizer)
    if key not in servers:
        servers[key] = VerifiersServer(spec, tokenizer)
    return servers[key]
