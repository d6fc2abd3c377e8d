"""Trajectories in ATIF, the Agent Trajectory Interchange Format of the Harbor project (its RFC 0001), written and read.

    segment of a trajectory ─→ document    steps of user and agent; an agent's step has the ids of prompt and completion
                                           and the sampler's log-probs
    document ─→ messages, tools            as supervised training takes them

A trajectory of several segments is several documents of one session: a program that branches or rewrites its dialogue
has no single history.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from verl.errors import UserError
from verl.trajectory import SINGLE_TURN, Segment, Trajectory

VERSION = "ATIF-v1.7"
Decode = Callable[[np.ndarray], str]
"""Token ids, int64 [L], to text."""


def write(folder: Path, trajectory: Trajectory, step: int, decode: Decode, **about: str) -> int:
    """Write the documents of a trajectory below `folder`; returns how many. about: as `documents` takes it."""
    every = documents(trajectory, step, decode, **about)
    folder.mkdir(parents=True, exist_ok=True)
    for number, document in enumerate(every):
        name = "".join(c if c.isalnum() else "-" for c in f"{step}-{trajectory.uid}-{trajectory.index}-{number}")
        (folder / f"{name}.json").write_text(json.dumps(document, ensure_ascii=False) + "\n")
    return len(every)


def documents(t: Trajectory, step: int, decode: Decode, *, run: str, model: str, version: str) -> list[dict[str, Any]]:
    """A document for each segment, all of one session. run: its name; model: the policy's path; version: of the
    agent."""
    session = f"{run}/{step}/{t.uid}/{t.index}"
    agent = {"name": str(t.extra.get("agent_loop", SINGLE_TURN)), "version": version, "model_name": model}
    results = []
    for number, segment in enumerate(t.segments):
        turns = [end for _, end, sampled in _runs(segment) if sampled]
        messages = t.fields.get("messages") or [*(t.prompt.messages or ()), {"role": "assistant", "content": t.text}]
        by_role = len(t.segments) == 1 and sum(m["role"] == "assistant" for m in messages) == len(turns)
        steps = _steps_of(messages) if by_role else _steps_of_tokens(segment, decode)
        _add_metrics(steps, segment, t.extra.get("turns", ()) if by_role else ())
        totals = [s["metrics"] for s in steps if "metrics" in s]
        about = {
            "status": t.status,
            "reward": t.score,
            "reward_parts": t.score_parts,
            "versions": list(segment.versions),
        }
        if segment.parent is not None:
            about |= {"parent": f"{session}/{segment.parent}", "tokens_of_parent": segment.shared}
        results.append(
            {
                "schema_version": VERSION,
                "session_id": session,
                "trajectory_id": f"{session}/{number}",
                "agent": agent,
                "steps": [{"step_id": i, **fields} for i, fields in enumerate(steps, 1)],
                "final_metrics": {
                    "total_prompt_tokens": sum(m["prompt_tokens"] for m in totals),
                    "total_completion_tokens": sum(m["completion_tokens"] for m in totals),
                    "total_steps": len(steps),
                },
                "extra": json.loads(json.dumps(about, default=str)),
            }
        )
    return results


def _runs(segment: Segment) -> list[tuple[int, int, bool]]:
    """(first, end, whether the policy wrote them) of the response tokens that follow each other."""
    runs, end = [], 0
    for sampled, group in groupby(segment.response_mask.tolist()):
        first, end = end, end + len(list(group))
        runs.append((first, end, sampled))
    return runs


def _text(content: Any) -> str:
    parts = [content] if isinstance(content, str) else content or ()
    return "".join(p if isinstance(p, str) else p.get("text") or f"<{p.get('type')}>" for p in parts)


def _steps_of(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A step for each message; results of tools are what the agent's step before them observed."""
    steps: list[dict[str, Any]] = []
    for message in messages:
        text, calls = _text(message.get("content")), message.get("tool_calls") or ()
        if message["role"] in ("tool", "function") and steps and steps[-1]["source"] == "agent":
            call_ids = {call["tool_call_id"] for call in steps[-1].get("tool_calls", ())}
            source = message.get("tool_call_id")
            result = {"content": text} | ({"source_call_id": source} if source in call_ids else {})
            steps[-1].setdefault("observation", {"results": []})["results"].append(result)
            continue
        source = {"assistant": "agent", "system": "system", "developer": "system"}.get(message["role"], "user")
        steps.append({"source": source, "message": text})
        if calls:
            steps[-1]["tool_calls"] = [_call(call, number) for number, call in enumerate(calls)]
    return steps


def _call(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    name = call.get("id") or f"call_{number}"
    return {"tool_call_id": name, "function_name": function["name"], "arguments": arguments}


def _steps_of_tokens(segment: Segment, decode: Decode) -> list[dict[str, Any]]:
    """The context as what the user said, each turn of the policy, and what came between as what it observed."""
    steps: list[dict[str, Any]] = [{"source": "user", "message": decode(segment.context_ids)}]
    for first, end, sampled in _runs(segment):
        text = decode(segment.response_ids[first:end])
        if sampled:
            steps.append({"source": "agent", "message": text})
        elif steps[-1]["source"] == "agent":
            steps[-1]["observation"] = {"results": [{"content": text}]}
        else:
            steps.append({"source": "user", "message": text})
    return steps


def _add_metrics(steps: list[dict[str, Any]], segment: Segment, turns: Sequence[Mapping[str, Any]]) -> None:
    """The tokens of each of the agent's steps, and what it earned."""
    of_agent = [step for step in steps if step["source"] == "agent"]
    sampled = [(first, end) for first, end, of_policy in _runs(segment) if of_policy]
    for number, (step, (first, end)) in enumerate(zip(of_agent, sampled, strict=True)):
        prompt = [*segment.context_ids.tolist(), *segment.response_ids[:first].tolist()]
        step["metrics"] = {
            "prompt_tokens": len(prompt),
            "completion_tokens": end - first,
            "prompt_token_ids": prompt,
            "completion_token_ids": segment.response_ids[first:end].tolist(),
        }
        if segment.rollout_log_probs is not None:
            step["metrics"]["logprobs"] = [float(value) for value in segment.rollout_log_probs[first:end]]
        if number < len(turns) and "reward" in turns[number]:
            step["extra"] = {"reward": turns[number]["reward"]}


# -- reading -----------------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    """A document of any producer and version 1. UserError for a file that is none."""
    try:
        document = json.loads(path.read_text())
        version = str(document["schema_version"])
        if not version.startswith("ATIF-v1.") or not document["steps"]:
            raise ValueError(f"{version or 'no version'} with {len(document['steps'])} steps")
        return dict(document)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"{path}: no trajectory of ATIF version 1 ({type(error).__name__}: {error})") from error


def dialogue(document: Mapping[str, Any]) -> dict[str, Any]:
    """`messages` and `tools` of a document, as chat templates take them. Steps that were copied from another trajectory
    are left out, as the format demands of training; so is what is no text."""
    messages: list[dict[str, Any]] = []
    for step in document["steps"]:
        if step.get("is_copied_context"):
            continue
        role = {"agent": "assistant"}.get(step["source"], step["source"])
        message: dict[str, Any] = {"role": role, "content": _text(step["message"])}
        if thought := step.get("reasoning_content"):
            message["reasoning_content"] = thought
        if calls := step.get("tool_calls"):
            message["tool_calls"] = [
                {
                    "id": call["tool_call_id"],
                    "type": "function",
                    "function": {"name": call["function_name"], "arguments": call["arguments"]},
                }
                for call in calls
            ]
        messages.append(message)
        for result in (step.get("observation") or {}).get("results", ()):
            text, source = _text(result.get("content")), result.get("source_call_id")
            seen = {"role": "tool", "tool_call_id": source} if source else {"role": "user"}
            messages.append({**seen, "content": text})
    return {"messages": messages, "tools": document["agent"].get("tool_definitions") or []}
