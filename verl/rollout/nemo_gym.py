"""Resources servers of NeMo Gym as environments: `environment.name=nemo_gym`, `path` the URL of one.

    reset ─→ POST /seed_session    the task, by which the server sets up what its cookie then names
    step  ─→ POST /TOOL            the arguments of a call; what comes back is what the policy sees
    final ─→ POST /verify          the task and a response of the Responses API with all turns; the reward comes back

A task is a row of NeMo Gym's data sets: `responses_create_params` (input, tools) and whatever the server reads. It is
the row's `extra_info.task`, or the row itself where that has the column `responses_create_params`.
"""

from __future__ import annotations

import http.cookiejar
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from verl.data.rows import without_nulls
from verl.errors import UserError
from verl.rollout.environments import Messages, Observation, StepResult
from verl.rollout.record import EnvironmentFailed

_SECONDS = 600.0  # of a request at most; `tool_timeout` ends the wait before
_PARAMETERS = "responses_create_params"


def check(url: str) -> None:
    """UserError if no web server answers at `url`."""
    try:
        urllib.request.urlopen(f"{url.rstrip('/')}/openapi.json", timeout=10).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except (OSError, ValueError) as error:
        problem = f"no resources server answers at {url} ({type(error).__name__}: {error})"
        raise UserError(f"{problem}: start it there, or correct rollout.agent.environment.path") from error


class NemoGym:
    """A session with a server. url: its address. done: whether a result with `"done": true` ends the episode."""

    def __init__(self, url: str, done: bool = False):
        self._url, self._ends = url.rstrip("/"), done
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
        self._task: dict[str, Any] = {}
        self._output: list[dict[str, Any]] = []

    def reset(self, row: Mapping[str, Any]) -> Observation:
        """The task's own messages and tools."""
        extra = row["extra_info"] or {}
        task = extra.get("task") or {name: row[name] for name in row if name not in ("raw_prompt", "extra_info")}
        self._task = without_nulls(json.loads(task) if isinstance(task, str) else dict(task))
        if _PARAMETERS not in self._task:
            raise EnvironmentFailed(f"the row has neither extra_info.task nor a column {_PARAMETERS}")
        self._answer("seed_session", self._task)
        parameters = self._task[_PARAMETERS]
        items = (
            parameters["input"]
            if not isinstance(parameters["input"], str)
            else [{"role": "user", "content": parameters["input"]}]
        )
        if parameters.get("instructions"):
            items = [{"role": "system", "content": parameters["instructions"]}, *items]
        names = ("name", "description", "parameters")
        tools = [
            {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}
            for tool in parameters.get("tools") or ()
        ]
        return Observation([_message(item) for item in items], tools or None)

    def step(self, message: Mapping[str, Any]) -> StepResult:
        """Make the calls of a turn; a turn without one is the last. What the server refuses is text for the policy."""
        thought, _, text = message["content"].rpartition("</think>")
        if thought:
            summary = [{"type": "summary_text", "text": thought.removeprefix("<think>")}]
            self._output.append({"id": f"rs_{uuid4().hex}", "type": "reasoning", "summary": summary})
        calls = message.get("tool_calls") or ()
        if text.strip() or not calls:
            part = {"type": "output_text", "text": text, "annotations": []}
            about = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "status": "completed"}
            self._output.append(about | {"content": [part]})
        answers: Messages = []
        ended = not calls
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            text = self._post(name, arguments)
            about = {"id": f"fc_{uuid4().hex}", "call_id": call["id"], "name": name, "status": "completed"}
            self._output.append(about | {"type": "function_call", "arguments": json.dumps(arguments)})
            self._output.append({"type": "function_call_output", "call_id": call["id"], "output": text})
            answers.append({"role": "tool", "content": text, "name": name, "tool_call_id": call["id"]})
            ended = ended or (self._ends and _says_done(text))
        return StepResult(answers, done=ended)

    def final(self) -> StepResult:
        """What the server says of the whole episode. A sample that it masks is a failure of the environment."""
        parameters = self._task[_PARAMETERS]
        response = {"id": f"resp_{uuid4().hex}", "object": "response", "created_at": 0, "model": "policy"}
        response |= {"output": self._output, "tools": parameters.get("tools") or [], "tool_choice": "auto"}
        verdict = self._answer("verify", self._task | {"response": response | {"parallel_tool_calls": True}})
        if verdict.get("mask_sample"):
            raise EnvironmentFailed(f"verify masks the sample: {verdict.get('failure_reason')}")
        left_out = ("response", _PARAMETERS, "reward", "mask_sample", *self._task)
        metrics = {k: v for k, v in verdict.items() if k not in left_out and isinstance(v, int | float)}
        return StepResult(reward=float(verdict["reward"]), done=True, metrics=metrics)

    def close(self) -> None:
        """The server forgets a session by itself."""

    def _post(self, path: str, body: Any) -> str:
        """What the server answers, its refusals too. OSError where it does not."""
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/{path}", data, headers, method="POST")
        try:
            with self._opener.open(request, timeout=_SECONDS) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            if path in ("seed_session", "verify") or error.code >= 500:
                raise EnvironmentFailed(f"/{path}: status {error.code}: {error.read()[:500]!r}") from error
            return error.read().decode(errors="replace")

    def _answer(self, path: str, body: Any) -> dict[str, Any]:
        return dict(json.loads(self._post(path, body)))


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    content = item["content"]
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    role = "system" if item["role"] == "developer" else item["role"]
    return {"role": role, "content": content}


def _says_done(text: str) -> bool:
    try:
        result = json.loads(text)
    except ValueError:
        return False
    return isinstance(result, dict) and bool(result.get("done"))
