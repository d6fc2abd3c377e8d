"""Tool agents from the command line: GRPO with a calculator, agreement on every turn, exact resume, loop processes,
refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_vision_runs import VisionRun
from tests.runs import TinyRun, from_step, records, weights
from tests.tiny import CHAT_TEMPLATE, SPECIAL, VISION, tiny_tokenizer
from tests.unit.reward.test_reward_model import classifier, plain_scores
from tests.unit.rollout.test_session import _QWEN
from verl.trainer import main_generation
from verl.trainer.main_ppo import main
from verl.trajectory import Prompt, Trajectory

USER = Path(__file__).parents[1] / "unit" / "rollout" / "agents_of_a_user.py"
ROLLOUT = "actor_rollout_ref.rollout."
# A model that knows nothing ends a turn at any letter; the parser of the plug-in reads every turn as a call.
WORDS = [
    "actor_rollout_ref.model.external_lib=tests.integration.plug_in_parser",
    f"{ROLLOUT}multi_turn.enable=True",
    f"{ROLLOUT}multi_turn.function_tool_path={USER}",
    f"{ROLLOUT}multi_turn.format=every_turn_calls",
    f"{ROLLOUT}multi_turn.max_assistant_turns=3",
    f"{ROLLOUT}stop_token_ids={list(range(64, 128))}",
    "data.max_prompt_length=400",
    "data.max_response_length=300",
    "actor_rollout_ref.actor.observation_loss_coef=0.1",
    "algorithm.adv_estimator=rae",  # its baselines are in the checkpoint
    "trainer.total_training_steps=2",
    "trainer.test_freq=0",
    "trainer.val_before_train=False",
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    tiny = TinyRun(tmp_path_factory.mktemp("agents"))
    tiny_tokenizer(template=_QWEN.replace("%THINK%", "")).save_pretrained(tiny.model)
    return tiny


def run(tiny: TinyRun, out: Path, workers: int, *more: str) -> list[dict[str, Any]]:
    words = [
        *WORDS,
        f"{ROLLOUT}agent.num_workers={workers}",
        f"trainer.rollout_data_dir={out / 'dump'}",
        *more,
    ]
    assert main(tiny.overrides(out, *words)) == 0
    files = sorted((out / "dump").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_a_calculator_trains_resumes_exactly_and_is_the_same_in_two_processes(
    tiny: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tiny, tmp_path / "whole", 0)
    found = [r for r in records(tmp_path / "whole").values() if "actor/grad_norm" in r]
    assert len(found) == 2
    for record in found:
        assert record["num_turns/max"] == 6 and record["agent/status/max_turns"] > 0
        assert record["tool_call_counts/mean"] > 1 and record["agent/valid_call_ratio"] == 1
        assert record["training/rollout_logprob_abs_diff/max"] < 1e-4, "sampler and trainer agree on every turn"
        assert record["agent/segments_per_trajectory/max"] == 1 and record["actor/grad_norm"] > 0
        assert record["agent/unrecorded_tokens"] == 0 and record["actor/observation_loss"] > 0
        assert record["agent/prefix_reuse_ratio"] == 1.0, "later turns prefill only what is new"

    parts = from_step(tmp_path / "whole", 1, tmp_path / "parts")
    run(tiny, parts, 0)
    assert weights(parts, 2) == weights(tmp_path / "whole", 2)

    monkeypatch.setattr("verl.rollout.loop_processes.usable", lambda: 2)  # whatever this machine has
    there = run(tiny, tmp_path / "two", 2)
    assert [(r["uid"], r["input"], r["output"]) for r in there] == [(r["uid"], r["input"], r["output"]) for r in whole]
    numbers = [r for r in records(tmp_path / "two").values() if "actor/grad_norm" in r]
    for ours, theirs in zip(found, numbers, strict=True):
        assert theirs == pytest.approx(ours, rel=1e-3, abs=1e-5)


def test_generation_plays_the_loop_and_counts_what_it_did(tiny: TinyRun, tmp_path: Path) -> None:
    words = [word.replace("actor_rollout_ref.", "") for word in WORDS if "rollout_ref" in word]
    more = [
        "rollout.agent.num_workers=0",
        "rollout.prompt_length=400",
        "rollout.response_length=300",
        "data.n_samples=1",
        "trainer.device=cpu",
    ]
    places = [
        f"model.path={tiny.model}",
        f"data.path={tiny.val}",
        f"data.output_path={tmp_path / 'o.parquet'}",
    ]
    assert main_generation.main([*words, *more, *places]) == 0
    [record] = [json.loads(line) for line in (tmp_path / "o_generation/metrics.jsonl").read_text().splitlines()]
    assert record["num_turns/max"] == 6 and record["agent/status/max_turns"] > 0
    assert record["tool_call_counts/mean"] > 1 and record["agent/calls/max"] == 3
    assert record["timing_s/agent_loop/tool_calls/max"] > 0


SHOWS = """
from tests.integration.test_vision_runs import drawn
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse

@function_tool
def calculate(expression: str) -> ToolResponse:
    '''Draws.

    Args:
        expression: Like 3*4.
    '''
    size = int(expression.split("*")[0])
    if size % 5 == 4:
        return ToolResponse("unreadable", image=[b"no image"])
    return ToolResponse(f"{size} drawn", image=[drawn(size)] * (size % 3))
"""
SEES = (
    "{% macro said(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if p.type == 'image' else p.text }}"
    "{% endfor %}{% endif %}{% endmacro %}"
) + _QWEN.replace("%THINK%", "").replace("m.content +", "said(m.content) +")


@pytest.mark.slow
def test_images_of_tools_are_sampled_and_trained_on(tmp_path: Path, tiny: TinyRun) -> None:
    seeing = VisionRun(tmp_path / "seeing")
    tiny_tokenizer(seeing.model, template=SEES, special=SPECIAL + VISION)
    (tmp_path / "tools.py").write_text(SHOWS)
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    shown = extra_info.get('shown_images', [])\n"
        "    assert all(uri.startswith('data:image/jpeg') for uri in shown)\n"
        "    return {'score': len(solution_str) % 7, 'shown': len(shown), 'own': len(extra_info.get('images', []))}\n"
    )
    words = [
        f"custom_reward_function.path={tmp_path / 'reward.py'}",
        "reward_model.images=True",
        f"{ROLLOUT}multi_turn.function_tool_path={tmp_path / 'tools.py'}",
        f"{ROLLOUT}stop_token_ids={list(range(32, 128))}",
        "data.max_prompt_length=500",
        "trainer.total_training_steps=1",
    ]
    here, there = (run(seeing, tmp_path / str(workers), workers, *words) for workers in (0, 1))
    assert [(r["uid"], r["output"]) for r in here] == [(r["uid"], r["output"]) for r in there]
    shown = [m["content"] for row in here for m in row["messages"] if m["role"] == "tool"]
    in_text = [sum(m["content"].count("<image>") for m in row["messages"] if m["role"] == "tool") for row in here]
    assert [row["shown"] for row in here] == in_text == [row["shown"] for row in there] and any(in_text)
    assert max(row["own"] for row in here) == 1
    assert any(text.startswith("<image><image>") for text in shown) and any("undecodable" in t for t in shown)
    kept = [json.loads(line) for line in (tmp_path / "0" / "trajectories" / "1.jsonl").read_text().splitlines()]
    assert all(row["shown"][0].startswith("data:image/jpeg") for row in kept if "drawn" in str(row["messages"]))
    record = records(tmp_path / "0")[1]
    assert record["training/rollout_logprob_abs_diff/max"] < 1e-4 and record["agent/unrecorded_tokens"] == 0
    assert record["agent/segments_per_trajectory/max"] == 3 and record["actor/grad_norm"] > 0


BAD = {
    "NoSuch": ("tool_config_path", "tools:\n  - class_name: {user}:NoSuch"),
    "is no JSON schema": (
        "tool_config_path",
        "tools:\n  - class_name: verl.tools.base_tool.BaseTool\n"
        "    tool_schema: {{function: {{name: x, parameters: {{type: thing}}}}}}",
    ),
    "2 tools are called 'calculate'": (
        "tool_config_path",
        "tools:\n  - class_name: verl.tools.base_tool.BaseTool\n    tool_schema: {{function: {{name: calculate}}}}",
    ),
}  # fmt: skip


@pytest.mark.slow
def test_a_reward_model_scores_the_dialogues_with_tools(tiny: TinyRun, tmp_path: Path) -> None:
    path = classifier(tmp_path / "rm", template=_QWEN.replace("%THINK%", ""))
    words = ["enable=True", f"model.path={path}", "rollout.dtype=float32", "rollout.max_model_len=1000"]
    more = ["custom_reward_function.path=null", "trainer.total_training_steps=1"]
    rows = run(tiny, tmp_path / "out", 1, *(f"reward_model.{word}" for word in words), *more)
    nothing: Any = None
    told = [Trajectory(Prompt("", nothing, []), 0, segments=[], fields={"messages": r["messages"]}) for r in rows]
    assert {"tool", "assistant"} <= {m["role"] for r in rows for m in r["messages"]}
    assert [r["score"] for r in rows] == pytest.approx(plain_scores(path, told), abs=1e-5)
    assert records(tmp_path / "out")[1]["reward/errors"] == 0


ENVIRONMENT = f"{ROLLOUT}agent.environment."
# What is said of it → keys that no run can be made of.
WRONG = {
    "environment.path.*needs it": [f"{ENVIRONMENT}name=custom"],
    "NoSuch": [f"{ENVIRONMENT}name=custom", f"{ENVIRONMENT}path={USER}:NoSuch"],
    "the program 'no-such-program' is not found": [f"{ENVIRONMENT}name=command", f"{ENVIRONMENT}path=no-such-program"],
    "no OpenEnv server answers at|needs openenv: pip install": [
        f"{ENVIRONMENT}name=openenv",
        f"{ENVIRONMENT}path=http://127.0.0.1:9",
    ],
    "no-such-python is no program": [f"{ENVIRONMENT}name=verifiers", f"{ENVIRONMENT}path=no-such-python"],
    "does nobody listen there|need the package mcp": [f"{ROLLOUT}multi_turn.tool_config_path={{folder}}/mcp.yaml"],
    "config.timeout is 'soon'": [f"{ROLLOUT}multi_turn.tool_config_path={{folder}}/soon.yaml"],
    "unknown agent loop 'no_such_agent'": [f"{ROLLOUT}agent.default_agent_loop=no_such_agent"],
    "two interactions are called 'nags'": [f"{ROLLOUT}multi_turn.interaction_config_path={{folder}}/twice.yaml"],
}  # fmt: skip
FILES = {
    "mcp.yaml": "tools: [{config: {type: mcp}, mcp: {mcp_servers_config_path: FOLDER/servers.json}}]",
    "servers.json": '{"mcpServers": {"search": {"url": "http://127.0.0.1:9/mcp"}}}',
    "soon.yaml": "tools: [{class_name: verl.tools.base_tool.BaseTool, config: {timeout: soon}, "
    "tool_schema: {function: {name: x}}}]",
    "twice.yaml": f"interaction: [{{class_name: '{USER}:Nags', name: nags}}, "
    f"{{class_name: '{USER}:Nags', name: nags}}]",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_names_nothing_that_can_be_used_is_refused_with_one_message(
    tiny: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str], words: str
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text.replace("FOLDER", str(tmp_path)))
    more = [word.format(folder=tmp_path) for word in WRONG[words]]
    assert (
        main(
            [
                *tiny.overrides(tmp_path / "run", *WORDS, f"{ROLLOUT}multi_turn.format=hermes", *more),
                "--check",
            ]
        )
        == 2
    )
    said = capfd.readouterr().err
    assert re.search(words, said) and "Traceback" not in said and "1 problem" in said, said


def test_tools_that_no_row_uses_are_said(tiny: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*tiny.overrides(tmp_path, *WORDS, f"{ROLLOUT}multi_turn.enable=False"), "--check"]) == 0
    assert "multi_turn.function_tool_path: no row is of tool_agent" in capfd.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        *BAD,
        "kimi cannot read a call.*hermes or qwen can",
        "no support for tools",
        "max_response_length=40 cannot hold a turn after a call",
    ],
)
def test_what_cannot_work_is_refused_before_the_run(
    tiny: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str], words: str
) -> None:
    more = [f"{ROLLOUT}multi_turn.format=hermes"]
    if words in BAD:
        key, text = BAD[words]
        (tmp_path / "tools.yaml").write_text(text.format(user=USER))
        more.append(f"{ROLLOUT}multi_turn.{key}={tmp_path / 'tools.yaml'}")
    if words == "no support for tools":
        (tmp_path / "plain.jinja").write_text(CHAT_TEMPLATE)
        more.append(f"actor_rollout_ref.model.custom_chat_template={tmp_path / 'plain.jinja'}")
    if "cannot hold" in words:
        more.append("data.max_response_length=40")
    if words == "kimi cannot read a call.*hermes or qwen can":
        more.append(f"{ROLLOUT}multi_turn.format=kimi")
    assert main([*tiny.overrides(tmp_path, *WORDS, *more), "--check"]) == 2
    assert re.search(words, capfd.readouterr().err, re.S)
