"""Agent programs of other packages, unmodified, trained for two steps. A program that is not installed is skipped.

A scripted sampler answers, whose log-probs are those of transformers for what was asked: the trainer computes the same
of the rows, so every turn stands in them at exactly its prefix."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.runs import TinyRun, records
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.rollout.test_session import _QWEN
from verl.trainer.main_ppo import main

pytestmark = pytest.mark.long  # `make test-packages`
AGENTS = Path(__file__).parent / "agents"
ROLLOUT = "actor_rollout_ref.rollout."


def call(name: str = "calculate", text: str = "", **arguments: str) -> str:
    return text + "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


CALL, ANSWER = call(expression="3*4"), "It is 12."
THINKS = "<think>\nA product.\n</think>\n\nI compute." + CALL
FINAL = call("final_answer", answer="12")
CODE = "Thought: I compute.\n<code>\nfinal_answer(calculate('3*4'))\n</code>"
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
PROGRAMS = {
    # package → program, what the policy says, segments of a trajectory
    "openai": ("openai_chat.py", ["I compute." + CALL, ANSWER, "12.", "Yes.", "Sure."], 3),
    "openai.types.responses": ("openai_responses.py", [THINKS, ANSWER, "Yes."], 1),
    "anthropic": ("anthropic_messages.py", [THINKS, ANSWER], 1),
    "litellm": ("litellm_client.py", ["I compute." + CALL, ANSWER] * 2, 2),
    "pydantic_ai": ("pydantic_agent.py", [CALL, ANSWER] * 4, 4),
    "agents": ("openai_agents.py", [CALL, ANSWER] * 4, 4),
    "smolagents": ("smol_agents.py", [CALL, FINAL, CALL, FINAL, CODE], 0),
    "langgraph": ("lang_graph.py", [CALL, ANSWER] * 2, 2),
    "minisweagent": ("mini_swe.py", [call("bash", command="echo 12 > answer"), call("bash", command=DONE)], 1),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    tiny = TinyRun(tmp_path_factory.mktemp("programs"))
    tiny_model(tiny.model, max_position_embeddings=2**16)
    tiny_tokenizer(template=_QWEN.replace("%THINK%", "")).save_pretrained(tiny.model)
    return tiny


def trained(tiny: TinyRun, folder: Path, command: str, texts: list[str], *words: str) -> list[dict]:
    """Numbers of two steps in which a program is played, each trajectory with the reward 1."""
    (folder / "script.json").write_text(json.dumps(texts))
    os.environ["VERL_SCRIPT"] = str(folder / "script.json")
    more = [
        "actor_rollout_ref.model.external_lib=tests.packages.scripted_sampler",
        f"{ROLLOUT}name=scripted",
        f"{ROLLOUT}agent.environment.name=command",
        f"{ROLLOUT}agent.environment.path='{command}'",
        f"{ROLLOUT}agent.num_workers=1",
        f"{ROLLOUT}agent.max_resamples=0",
        f"{ROLLOUT}n=2",
        "data.train_batch_size=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "data.max_prompt_length=1000",
        "data.max_response_length=30000",
        "actor_rollout_ref.actor.entropy_coeff=0.1",  # a gradient, whatever the rewards
        "trainer.total_training_steps=2",
        "trainer.test_freq=0",
        "trainer.val_before_train=False",
    ]
    assert main(tiny.overrides(folder / "run", *more, *words)) == 0
    steps = [record for record in records(folder / "run").values() if "actor/grad_norm" in record]
    assert len(steps) == 2
    for record in steps:
        assert record["training/rollout_logprob_abs_diff/max"] < 1e-4
        assert record["agent/status/completed"] == 1.0 == record["agent/step_reward/min"]
        assert record["actor/grad_norm"] > 0
    return steps


@pytest.mark.parametrize("package", PROGRAMS)
def test_a_program_of_python_is_trained(tiny: TinyRun, tmp_path: Path, package: str) -> None:
    program, texts, segments = PROGRAMS[package]
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"the package {package} is not installed")
    steps = trained(tiny, tmp_path, f"{sys.executable} {AGENTS / program}", texts)
    assert not segments or [step["agent/segments_per_trajectory/max"] for step in steps] == [segments] * 2


WROTE = "answer.txt\n```\n12\n```\n"
WRITES = call("bash", command="echo 12 > answer")
TERMINAL_AGENTS = {"VERL_AIDER": ("aider_cli.py", [WROTE], 1), "VERL_PI": ("pi_cli.py", [WRITES, "Done."] * 3, 3)}


@pytest.mark.parametrize("program", TERMINAL_AGENTS)
def test_an_agent_of_the_terminal_is_trained(tiny: TinyRun, tmp_path: Path, program: str) -> None:
    script, texts, segments = TERMINAL_AGENTS[program]
    if shutil.which(os.environ.get(program, "")) is None:
        pytest.skip(f"{program} names no program")
    steps = trained(tiny, tmp_path, f"{sys.executable} {AGENTS / script}", texts)
    assert [step["agent/segments_per_trajectory/max"] for step in steps] == [segments] * 2
