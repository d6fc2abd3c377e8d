"""ATIF: what is written keeps the rules of the format, and reading gives the dialogue back."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from verl.data import atif
from verl.data.prepare import main as prepare
from verl.errors import UserError
from verl.trajectory import Prompt, Segment, Trajectory

CALL = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 and 1?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\n", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_0", "content": "2"},
    {"role": "assistant", "content": "2."},
]
ABOUT = {"run": "run", "model": "my/model", "version": "1"}
AGENT_ONLY = {"model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics"}


def segment(context: list[int], runs: list[tuple[int, bool]], **how: Any) -> Segment:
    size = sum(length for length, _ in runs)
    mask = np.concatenate([np.full(length, sampled) for length, sampled in runs])
    log_probs = np.where(mask, -np.arange(1, size + 1), 0).astype(np.float32)
    return Segment(np.array(context), np.arange(100, 100 + size), mask, rollout_log_probs=log_probs, **how)


def trajectory(*segments: Segment, **how: Any) -> Trajectory:
    prompt = Prompt("0:3@1", segments[0].context_ids, MESSAGES[:2])
    return Trajectory(prompt, 1, segments=segments, score=0.5, text="two", **how)


def documents(t: Trajectory) -> list[dict[str, Any]]:
    """Each checked by the rules that the format names, and by its package where that is installed."""
    made = atif.documents(t, 7, lambda ids: " ".join(map(str, ids)), **ABOUT)
    for document in json.loads(json.dumps(made)):
        assert [step["step_id"] for step in document["steps"]] == list(range(1, len(document["steps"]) + 1))
        assert {"name", "version"} <= document["agent"].keys() and document["schema_version"] == "ATIF-v1.7"
        for step in document["steps"]:
            assert step["source"] in ("system", "user", "agent") and isinstance(step["message"], str)
            assert step["source"] == "agent" or not AGENT_ONLY & step.keys()
            calls = {call["tool_call_id"] for call in step.get("tool_calls", ())}
            sources = [r.get("source_call_id") for r in step.get("observation", {}).get("results", ())]
            assert {source for source in sources if source} <= calls
            if metrics := step.get("metrics"):
                assert len(metrics["prompt_token_ids"]) == metrics["prompt_tokens"]
                sizes = {len(metrics["completion_token_ids"]), len(metrics["logprobs"]), metrics["completion_tokens"]}
                assert len(sizes) == 1
        if find_spec("atif"):
            from atif import Trajectory as Model

            assert Model.model_validate(document).to_json_dict() == document
    return made


def test_a_dialogue_with_its_tokens_and_back(tmp_path) -> None:
    t = trajectory(
        segment([1, 2, 3], [(2, True), (3, False), (1, True)]),
        fields={"messages": MESSAGES},
        extra={"agent_loop": "tool_agent", "turns": [{"at": 0.0, "reward": 0.25}, {"at": 1.0}]},
    )
    (document,) = documents(t)
    assert [step["source"] for step in document["steps"]] == ["system", "user", "agent", "agent"]
    first, second = document["steps"][2:]
    assert first["observation"]["results"] == [{"content": "2", "source_call_id": "call_0"}]
    assert first["metrics"]["completion_token_ids"] == [100, 101] and first["metrics"]["logprobs"] == [-1.0, -2.0]
    assert second["metrics"]["prompt_token_ids"] == [1, 2, 3, 100, 101, 102, 103, 104]
    assert first["extra"] == {"reward": 0.25} and document["extra"]["reward"] == 0.5
    assert document["final_metrics"] == {"total_prompt_tokens": 11, "total_completion_tokens": 3, "total_steps": 4}
    assert atif.dialogue(document) == {"messages": MESSAGES, "tools": []}
    assert atif.write(tmp_path / "of", t, 7, str, **ABOUT) == 1
    (path,) = (tmp_path / "of").iterdir()
    assert atif.read(path) == document
    out = ["--local_dataset_path", str(tmp_path / "of"), "--local_save_dir", str(tmp_path)]
    assert prepare(["atif", *out, "--least_reward", "0.5"]) == 0
    row = json.loads((tmp_path / "train.jsonl").read_text())
    assert row["messages"] == MESSAGES and row["extra_info"] == {"session_id": "run/7/0:3@1/1", "reward": 0.5}
    assert prepare(["atif", *out, "--least_reward", "0.6"]) == 2


def test_one_turn_and_branches() -> None:
    (document,) = documents(trajectory(segment([1], [(2, True)])))
    assert [step["message"] for step in document["steps"]] == ["Be brief.", "1 and 1?", "two"]
    branches = [
        segment([1, 2], [(2, True), (1, False), (1, True)]),
        segment([1, 2, 100], [(2, True)], parent=0, shared=3),
    ]
    first, second = documents(trajectory(*branches))
    assert first["session_id"] == second["session_id"] and first["trajectory_id"] != second["trajectory_id"]
    assert [step["message"] for step in first["steps"]] == ["1 2", "100 101", "103"]
    assert first["steps"][1]["observation"] == {"results": [{"content": "102"}]}
    assert second["extra"]["parent"] == first["trajectory_id"] and second["extra"]["tokens_of_parent"] == 3


def test_documents_of_others(tmp_path) -> None:
    """What our documents never have: copied steps, thinking apart, results without a call."""
    agent = {"name": "x", "version": "1", "tool_definitions": [{"type": "function"}]}
    thought = {"step_id": 3, "source": "agent", "message": [{"type": "text", "text": "b"}], "reasoning_content": "t"}
    thought["observation"] = {"results": [{"content": "seen"}]}
    copied = {"step_id": 1, "source": "agent", "message": "a", "is_copied_context": True}
    steps = [copied, {"step_id": 2, "source": "user", "message": "q"}, thought]
    (tmp_path / "t.json").write_text(json.dumps({"schema_version": "ATIF-v1.4", "agent": agent, "steps": steps}))
    read = atif.dialogue(atif.read(tmp_path / "t.json"))
    assert read["tools"] == agent["tool_definitions"]
    assert read["messages"] == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "b", "reasoning_content": "t"},
        {"role": "user", "content": "seen"},
    ]
    (tmp_path / "t.json").write_text('{"schema_version": "2", "steps": [1]}')
    with pytest.raises(UserError, match="no trajectory of ATIF version 1"):
        atif.read(tmp_path / "t.json")
