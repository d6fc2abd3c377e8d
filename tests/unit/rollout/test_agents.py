"""Agent loops over a scripted sampler: tools, interactions, environments, programs, statuses, the public system's
loops."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.scripted_record import ScriptedEngine
from tests.tiny import tiny_tokenizer
from tests.unit.rollout import agents_of_a_user
from tests.unit.rollout.test_session import _QWEN
from verl.config import load
from verl.engine.rollout.base import Completion, SamplingParams
from verl.errors import UserError
from verl.preflight.check import check
from verl.reward.runner import RewardRunner
from verl.rollout import agent_loop, environment_agent, verifiers_server
from verl.rollout.attempt import RolloutSettings
from verl.rollout.groups import RolloutError, RolloutManager
from verl.rollout.loop_processes import LoopEnded, LoopProcesses
from verl.rollout.record import Outcome
from verl.trajectory import Batch, Prompt, Trajectory

USER = agents_of_a_user.__name__
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "3*4"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "calc'


class Says(ScriptedEngine):
    """Says its texts, turn by turn of every trajectory, each ended; a text with … is cut there."""

    version = 0

    def __init__(self, tokenizer: Any, *texts: str, delay: float = 0.0):
        self.tokenizer, self.texts, self.delay = tokenizer, texts, delay
        self.turns: dict[str, int] = {}
        self.seeds: list[int] = []

    async def generate(self, prompt_ids, sampling, *, request_id, group=None, session=None, media=None):
        self.seeds.append(sampling.seed)
        await asyncio.sleep(self.delay)
        text = self.texts[min(sampling.call, len(self.texts) - 1)]
        whole = self.tokenizer(text.removesuffix("…") + "<|im_end|>" * (not text.endswith("…")))["input_ids"]
        ids = whole[: sampling.max_tokens]
        reason = "length" if len(ids) < len(whole) or text.endswith("…") else "stop"
        return Completion(np.array(ids), np.full(len(ids), -0.5, np.float32), reason)


def play(
    texts: list[str],
    *words: str,
    row: dict[str, Any] | None = None,
    n: int = 1,
    delay: float = 0.0,
    events: list | None = None,
    model: Path | None = None,
    processes: int = 0,
    max_lost_ratio: float = 0.99,
    room: int = 600,
) -> tuple[Batch, Says]:
    """One prompt through the manager, its loop in this process or in so many others. words: keys below
    actor_rollout_ref.rollout."""
    config = load(
        [f"data.max_response_length={room}", "data.max_prompt_length=600",
         *(f"actor_rollout_ref.rollout.{word}" for word in words),
         *([f"actor_rollout_ref.model.path={model}"] if model else [])],
    )  # fmt: skip
    tokenizer = tiny_tokenizer(template=_QWEN.replace("%THINK%", ""))
    agent = config.actor_rollout_ref.rollout.agent
    settings = RolloutSettings(
        SamplingParams(max_tokens=room), n=n, seed=1, default_loop=agent.default_agent_loop,
        on_status=dict(agent.on_status), max_resamples=agent.max_resamples, max_lost_ratio=max_lost_ratio,
    )  # fmt: skip

    async def score(trajectory: Trajectory) -> None:
        trajectory.score = 1.0

    async def go() -> tuple[Batch, Says]:
        engine = Says(tokenizer, *texts, delay=delay)
        manager = RolloutManager(
            engine, settings, decode=tokenizer.decode, on_finished=score, tokenizer=tokenizer, config=config,
            event=lambda kind, **fields: None if events is None else events.append((kind, fields)),
            processes=(lambda: LoopProcesses(processes, config)) if processes else None,
        )  # fmt: skip
        messages = [{"role": "user", "content": "3*4?"}]
        ids = np.array(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        prompt = Prompt("0:0@0", **{"ids": ids, "messages": messages, **(row or {})})
        try:
            batch = await manager.take([prompt])
            await manager.scored(batch)
        finally:
            await manager.stop()
        return batch, engine

    return asyncio.run(go())


TOOLS = [f"multi_turn.function_tool_path=pkg://{USER}", "multi_turn.enable=True"]


def test_the_model_calls_a_tool_and_answers() -> None:
    (t,), _ = play([CALL, "It is 12."], *TOOLS)
    assert (t.status, t.num_turns, t.score, len(t.segments)) == ("completed", 4, 1.0, 1)
    assert [m["role"] for m in t.fields["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert t.fields["messages"][2]["content"] == "12" and t.fields["tool_metrics"] == [
        {"tool": "calculate", "products": 1}
    ]
    assert t.extra["reward_scores"] == {"tool_rewards": [0.25]}
    text = t.text
    assert "<tool_response>\n12\n</tool_response>" in text and text.endswith("It is 12.<|im_end|>")
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(t.response_ids[t.response_mask]) == f"{CALL}<|im_end|>It is 12.<|im_end|>"


def test_a_parser_of_a_user_reads_the_calls() -> None:
    (t,), _ = play(['calculate "3*4"', "calculate 3*4", "It is 12."], *TOOLS, "multi_turn.format=bare")
    said = [m["content"] for m in t.fields["messages"]]
    assert said[1:3] == ['calculate "3*4"', "12"] and said[4].startswith("Error: the arguments are no valid JSON")
    assert t.status == "completed" and said[5] == "It is 12."
    with pytest.raises(RolloutError, match=r"Bare\.extract_tool_calls gives no \(text, calls\)"):
        play(["Hm.…"], *TOOLS, "multi_turn.format=bare")


@pytest.mark.parametrize(
    ("texts", "words", "status", "counts"),
    [
        ([BROKEN, "Well."], [], "completed", {"calls": 1, "invalid": 1}),
        ([BROKEN], [], "invalid_calls", {"calls": 2, "invalid": 2}),
        ([CALL], ["multi_turn.max_assistant_turns=2"], "max_turns", {"calls": 1}),
        ([CALL], ["multi_turn.max_user_turns=1"], "max_turns", {"calls": 1}),
        ([CALL], ["agent.max_calls=1"], "max_calls", {"calls": 1}),
        ([CALL + CALL, "Both."], ["multi_turn.max_parallel_calls=2"], "completed", {"calls": 2}),
        ([CALL + "…"], [], "length", {}),
        ([CALL + "x" * 300], [], "length", {"calls": 1}),
    ],
)
def test_how_a_dialogue_ends(texts: list[str], words: list[str], status: str, counts: dict) -> None:
    (t,), _ = play(texts, *TOOLS, *words)
    assert (t.status, t.extra["tool_counts"]) == (status, counts)
    assert t.score == 1.0 and t.length <= 600


def test_a_tool_that_the_row_did_not_choose_is_called_invalidly(tmp_path: Path) -> None:
    tool = '@function_tool\ndef {}() -> str:\n    """Does."""\n    return ""\n'
    head = "from verl.tools.function_tool import function_tool\n"
    (tmp_path / "two.py").write_text(head + tool.format("chosen") + tool.format("other"))
    words = ["multi_turn.enable=True", f"multi_turn.function_tool_path={tmp_path / 'two.py'}"]
    row = {"extra_info": {"tool_selection": ["chosen"]}}
    for name, status in (("other", "invalid_calls"), ("chosen", "max_turns")):
        call = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
        (t,), _ = play([call], *words, "multi_turn.max_assistant_turns=4", row=row)
        assert t.status == status


def test_an_interaction_answers_where_no_tool_is_called(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "i.yaml").write_text(f"interaction: [{{name: nags, class_name: '{USER}:Nags', config: {{}}}}]")
    from verl.interactions.utils.interaction_registry import initialize_interactions_from_config

    assert list(initialize_interactions_from_config(str(tmp_path / "i.yaml"))) == ["nags"]
    words = ["multi_turn.enable=True", f"multi_turn.interaction_config_path={tmp_path / 'i.yaml'}"]
    row = {"extra_info": {"interaction_kwargs": {"name": "nags", "word": "No.", "unused": None}}}
    (t,), _ = play(["12", "13"], *words, row=row)
    assert t.status == "completed" and t.extra["reward_scores"]["turn_scores"] == [0.5, 1.0]
    assert [m["content"] for m in t.fields["messages"]] == ["3*4?", "12", "No.", "13"]
    assert t.fields["tool_metrics"] == [{"interaction": "nags", "said": 1}, {"interaction": "nags", "said": 2}]
    assert caplog.text.count("it ends badly") == 1
    batch, _ = play(["12"], *TOOLS, row=row, n=2)
    assert [t.status for t in batch] == ["completed"] * 2
    assert caplog.text.count("there is no multi_turn.interaction_config_path") == 1
    row["extra_info"]["interaction_kwargs"]["word"] = "hangs"
    with pytest.raises(RolloutError, match="environment_error: interaction: TimeoutError: no answer"):
        play(["12"], *words, "agent.tool_timeout=0.1", "agent.max_resamples=0", row=row)


ENV = ["agent.environment.name=custom", f"agent.environment.path={USER}:Guess"]


@pytest.mark.parametrize("rewards", ["sum", "tokens"])
def test_an_environment_gives_the_reward(rewards: str) -> None:
    (t,), _ = play(["5", "7"], *ENV, f"agent.step_rewards={rewards}")
    assert (t.status, t.score, t.fields["environment_reward"]) == ("completed", 0.75, 0.75)
    assert t.fields["environment_metrics"] == {"left": 0} and "Guess 0:0@0" in tiny_tokenizer().decode(t.context_ids)
    if rewards == "tokens":
        scores = t.extra["token_scores"]
        ends = np.flatnonzero(t.response_ids == 258)[[0, -1]]
        assert scores.shape == (t.length,) and scores[ends].tolist() == [0.25, 0.5] and scores.sum() == 0.75


@pytest.mark.parametrize(
    ("texts", "words", "status", "turns"),
    [
        (["5"], ["multi_turn.max_assistant_turns=2"], "max_turns", 2),
        (["5"], ["multi_turn.max_user_turns=2"], "max_turns", 3),
        ([CALL], ["agent.environment.kwargs.fail=call", "agent.max_calls=1"], "max_calls", 2),
        (["5" * 100], [], "length", 4),
    ],
)
def test_limits_end_an_episode(texts: list[str], words: list[str], status: str, turns: int) -> None:
    (t,), _ = play(texts, *ENV, "agent.environment.kwargs.steps=9", *words, room=500)
    assert (t.status, t.extra["sampler_calls"]) == (status, turns)
    assert len(t.context_ids) == Batch([t]).prompt_lengths[0] != len(t.prompt.ids)


def test_first_messages_without_room_are_a_failure_of_the_environment() -> None:
    with pytest.raises(RolloutError, match=r"its first messages do not fit: the dialogue's 1\d{3} tokens"):
        play(["5"], *ENV, "agent.environment.kwargs.fail=long", "agent.max_resamples=0")


def test_a_loop_that_asks_without_room_ends_with_what_was_written(caplog: pytest.LogCaptureFixture) -> None:
    (t,), _ = play(["5" * 50], "agent.default_agent_loop=never_done", room=300)
    assert (t.status, t.score, t.extra["sampler_calls"]) == ("length", 1.0, 4) and t.policy_tokens > 150
    assert "failure" not in t.fields
    with pytest.raises(RolloutError, match="no room for another turn"):
        play(["5"], "agent.default_agent_loop=never_done", "max_model_len=20")
    play(["5"], "agent.default_agent_loop=never_done", "max_model_len=100", room=90)
    assert "max_model_len=100 leaves" in caplog.text


def test_an_environment_makes_the_prompt_that_a_row_lacks() -> None:
    row = {"ids": np.zeros(0, np.int64), "messages": []}
    (t,), _ = play(["5", "7"], *ENV, row=row)
    assert t.status == "completed" and t.fields["messages"][0]["content"] == "Guess 0:0@0"
    words = ["agent.environment.kwargs.fail=silent", "agent.max_resamples=0"]
    with pytest.raises(RolloutError, match="reset gives no messages, and the row has no prompt"):
        play(["5"], *ENV, *words, row=row)


def test_nulls_of_the_configuration_reach_the_environment_and_those_of_parquet_do_not() -> None:
    row = {"columns": {"environment": {"name": None, "kwargs": {"steps": None}}}}
    (t,), _ = play(["5", "7"], *ENV, row=row)
    assert t.status == "completed"
    with pytest.raises(RolloutError, match="NoneType"):
        play(["5"], *ENV, "agent.environment.kwargs.steps=null", "agent.max_resamples=0")
    with pytest.raises(UserError, match=r"environment\.kwargs\.HOME=null"):
        environment_agent.check({"name": "command", "path": "env", "kwargs": {"HOME": None}}, "")
    python = {"path": "python", "kwargs": {"a": None, "renderer": None}}
    assert json.loads(verifiers_server._first(python, "t"))["environment"] == {"a": None}


@pytest.mark.parametrize(
    ("texts", "status", "roles", "counts"),
    [
        ([BROKEN, CALL, CALL], "completed", "tool assistant user assistant", {"calls": 3, "invalid": 1}),
        ([CALL + BROKEN, CALL], "completed", "tool user assistant", {"calls": 3, "invalid": 1}),
        ([BROKEN], "invalid_calls", "tool assistant tool assistant", {"calls": 3, "invalid": 3}),
    ],
)
def test_calls_that_an_environment_cannot_see_are_answered(
    texts: list[str], status: str, roles: str, counts: dict
) -> None:
    (t,), _ = play(texts, *ENV, "agent.environment.kwargs.fail=call")
    assert (t.status, t.extra["tool_counts"]) == (status, counts)
    said = t.fields["messages"][2:]
    assert [m["role"] for m in said] == roles.split()
    assert said[0]["content"].startswith("Error: the call is no valid JSON")


def test_a_text_environment_of_gymnasium() -> None:
    own = {"environment": {"name": "gym", "path": f"{USER}:Room", "kwargs": None}}
    (t,), _ = play(["north"], row={"columns": own, "agent_name": "environment_agent"})
    assert (t.status, t.score) == ("max_turns", 3.0)
    assert [m["content"] for m in t.fields["messages"]] == [
        "3*4?\n\nroom True",
        "north",
        "you north",
        "north",
    ]


@pytest.mark.parametrize(
    ("texts", "status", "counts"),
    [
        (["Both up.", "Not 7, but 1 and 2.", "3 0", "2, 0"], "max_turns", {"calls": 4, "invalid": 2}),
        (["1"], "invalid_calls", {"calls": 3, "invalid": 3}),
    ],
)
def test_numbers_are_actions_of_gymnasium(texts: list[str], status: str, counts: dict) -> None:
    (t,), _ = play(texts, "agent.environment.name=gym", f"agent.environment.path={USER}:Levers")
    assert (t.status, t.extra["tool_counts"]) == (status, counts)
    said = [m["content"] for m in t.fields["messages"][::2]]
    assert said[0].endswith("[0 0]") and said[1].startswith("Error: no valid action; end with 2 integers in ")
    assert status != "max_turns" or said[2] == "you [1 2]"


@pytest.mark.parametrize(
    ("fail", "said"),
    [
        ("open", "no table"),
        ("slow", "make: TimeoutError: no answer"),
        ("reset", "no game"),
        ("hang", "no answer"),
        ("tuple", "StepResult, not tuple.*name=gym"),
        ("text", "not 'higher'"),
        ("parts", "the chat template does not take the environment's messages"),
    ],
)
def test_an_environment_that_fails_is_never_a_zero(fail: str, said: str) -> None:
    words = [
        *ENV,
        f"agent.environment.kwargs.fail={fail}",
        "agent.max_resamples=2",
        "agent.tool_timeout=0.25",
    ]
    events: list = []
    with pytest.raises(RolloutError, match=rf"no trajectory of this step.*environment_error.*{said}"):
        play(["5"], *words, events=events)
    assert [fields["attempt"] for kind, fields in events if kind == "trajectory_failed"] == [0, 1, 2]
    if fail == "reset":  # before there is a token there is nothing to score
        with pytest.raises(RolloutError, match=rf"no trajectory of this step.*environment_error: {USER}:Guess: reset"):
            play(["5"], *words, "agent.on_status.environment_error=score")


@pytest.mark.parametrize("policy", ["score", "mask", "drop", "resample"])
def test_a_trajectory_past_its_deadline_and_its_policies(policy: str) -> None:
    words = [
        *ENV, "agent.environment.kwargs.steps=9", "agent.trajectory_timeout=0.5", "agent.max_resamples=1",
        f"agent.on_status.timeout={policy}",
    ]  # fmt: skip
    if policy in ("drop", "resample"):
        with pytest.raises(RolloutError, match=r"longer than rollout\.agent\.trajectory_timeout"):
            play(["5"], *words, delay=0.2)
        return
    (t,), engine = play(["5"], *words, delay=0.2)
    assert t.status == "timeout" and t.scored and len(set(engine.seeds)) == 1
    assert t.extra.get("without_gradient", False) is (policy == "mask")
    earned = 0.25 * (len(t.fields["messages"]) // 2)
    assert t.score == t.fields["environment_reward"] == t.extra["step_reward"] == earned > 0


def test_what_tools_earned_is_known_of_a_trajectory_past_its_deadline() -> None:
    words = [*TOOLS, "agent.trajectory_timeout=0.5", "agent.on_status.timeout=score"]
    (t,), _ = play([CALL], *words, delay=0.2)
    assert t.status == "timeout" and t.extra["tool_counts"]["calls"] == len(t.fields["tool_rewards"]) > 0
    assert t.num_turns == len(t.fields["messages"]) and "longer than" in t.fields["failure"]


@pytest.mark.parametrize("policy", ["score", "mask", "drop", "resample"])
def test_the_end_of_a_loop_process_is_no_loss_of_the_samplers(policy: str, monkeypatch: Any) -> None:
    async def ends(self: Any, name: str, record: Any, sampling: Any, row: dict) -> Outcome:
        if row["sample_index"]:
            raise LoopEnded("out of memory")
        record.add(record.place(row["prompt_ids"]), Completion(np.array([5, 258]), np.zeros(2, np.float32), "stop"))
        return Outcome()

    monkeypatch.setattr(LoopProcesses, "run", ends)
    words = [*ENV, f"agent.on_status.environment_error={policy}", "agent.max_resamples=1"]
    batch, _ = play([], *words, n=2, processes=1, max_lost_ratio=0.0)
    assert [(t.finish_reason, t.status, t.scored) for t in batch] == [
        ("stop", "completed", True), ("lost", "environment_error", False)
    ]  # fmt: skip
    assert batch.meta["lost"] == 0 and batch.trajectories[1].extra.get("resamples", 0) == (policy == "resample")


PROGRAM = """
import json, os, sys, urllib.request
row, base = json.load(open(os.environ["VERL_ROW_FILE"])), os.environ["OPENAI_BASE_URL"]
if row["extra_info"]:
    assert len(row["extra_info"]["text"]) == 200_000 and "VERL_ROW" not in os.environ
else:
    assert json.loads(os.environ["VERL_ROW"]) == row
def post(path, body):
    request = urllib.request.Request(base + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.loads(urllib.request.urlopen(request).read())
messages = row["messages"]
for _ in range(2):
    for _ in range(1 + int(os.environ.get("AGAIN", 0))):
        message = post("/chat/completions", {"model": "policy", "messages": messages})["choices"][0]["message"]
    messages += [message, {"role": "user", "content": "Sure?"}]
if len(sys.argv) > 1:
    print("no licence", file=sys.stderr)
    sys.exit(int(sys.argv[1]))
print("done")
print(json.dumps({"reward": 0.5, "metrics": {"asked": 2}}))
"""


@pytest.mark.parametrize(("status", "long"), [("", False), (" 3", False), ("", True)])
def test_a_program_acts_through_its_sessions_url(
    tmp_path: Path, status: str, long: bool, capfd: pytest.CaptureFixture
) -> None:
    program = tmp_path / "agent.py"
    program.write_text(PROGRAM)
    words = [
        "agent.environment.name=command",
        f"agent.environment.path='{sys.executable} {program}{status}'",
        "agent.max_resamples=0",
    ]
    if status:
        with pytest.raises(RolloutError, match=r"(?s)agent\.py 3: exit status 3.*no licence"):
            play(["12", "Yes."], *words)
        assert "no licence" in capfd.readouterr().err
        (t,), _ = play(
            ["12", "Yes."], *words, max_lost_ratio=1.0
        )  # main_generation counts what is lost of all its prompts
        assert t.finish_reason == "lost"
        return
    with pytest.raises(RolloutError, match="environment_error: no_such_program cannot be started"):
        play(["12"], *words, "agent.environment.path=no_such_program")
    row = {"extra_info": {"text": "x" * 200_000}} if long else None
    (t,), _ = play(["12", "Yes."], *words, row=row)
    assert (t.status, t.score, len(t.segments)) == ("completed", 0.5, 1)
    assert t.text.startswith("12<|im_end|>\n<|im_start|>user\nSure?") and t.fields["environment_metrics"] == {
        "asked": 2
    }
    (t,), _ = play(["", "12", "", "Yes."], *words, "agent.environment.kwargs.AGAIN=1", row=row)
    assert t.text.startswith("12<|im_end|>\n<|im_start|>user\nSure?") and len(t.segments) == 1
    assert t.extra["session_counts"] == {"repeated_requests": 2} and t.extra["sampler_calls"] == 4


ASKS = """
import json, os, sys, urllib.request
def ask(**how):
    body = {"messages": [{"role": "user", "content": "Well?"}], **how}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.loads(urllib.request.urlopen(request).read())["choices"][0]["message"]
"""
TOOL = '[{"type": "function", "function": {"name": "add", "parameters": {}}}]'


@pytest.mark.parametrize(
    ("code", "reward", "problem"),
    [
        ('ask(); print(json.dumps({"reward": 0.25})); print("done, bye")', 0.25, ""),
        ('ask(); print("{}"); print("[1]")', None, "no line of its output is JSON"),
        ("ask(); print(json.dumps({'reward': 'much'}))", None, "gives no reward: could not convert"),
        ("print(json.dumps({'reward': 1.0}))", None, "it ended without a request to the model"),
        ('m = ask(max_tokens=1); print(json.dumps({"reward": len(m["content"])}))', 1.0, ""),
        (f'm = ask(tools={TOOL}); print(json.dumps({{"reward": m["content"].count("tool_call")}}))', 1.0, ""),
    ],
)
def test_what_a_program_says_it_earned(
    tmp_path: Path, code: str, reward: float | None, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "agent.py").write_text(ASKS + code)
    words = ["agent.environment.name=command", f"agent.environment.path='{sys.executable} {tmp_path}/agent.py'"]
    words.append("agent.max_resamples=0")
    if reward is None and "no line" not in problem:
        with pytest.raises(RolloutError, match=problem):
            play([BROKEN], *words)
        return
    (t,), _ = play([BROKEN], *words)
    assert (t.status, t.fields["environment_reward"]) == ("completed", reward or 0.0)
    assert problem in caplog.text
    assert t.extra.get("tool_counts") == ({"calls": 1, "invalid": 1} if "tools=" in code else None)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["agent.agent_loop_config_path=loops.yaml"], "the agent loops mine: no row chooses one"),
        (["agent.agent_loop_config_path=loops.yaml", "agent.default_agent_loop=mine"], ""),
        ([*ENV, "agent.max_calls=3"], ""),
        (["agent.environment.name=command", "agent.environment.path=true", "agent.max_calls=3"], "agent.max_calls: "),
    ],
)
def test_settings_of_agents_without_effect_are_told(
    tmp_path: Path, words: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loops.yaml").write_text("- {name: mine, _target_: tests.unit.rollout.agents_of_a_user.PublicLoop}")
    notices = check(load([f"actor_rollout_ref.rollout.{word}" for word in words])).notices
    unused = [text for text in map(str, notices) if text.startswith("no effect: ")]
    assert [told in text for text in unused] == [True] * bool(told)


def test_a_loop_of_the_public_system(tmp_path: Path) -> None:
    listed = tmp_path / "loops.yaml"
    listed.write_text("- {name: listed_loop, _target_: tests.unit.rollout.agents_of_a_user.PublicLoop, greeting: More}")
    words = ["agent.default_agent_loop=listed_loop", f"agent.agent_loop_config_path={listed}"]
    (t,), _ = play(["12", "Yes."], *words)
    assert t.text == "12<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>"
    assert (t.policy_tokens, t.num_turns, "unrecorded_tokens" in t.extra) == (3 + 5, 4, False)
    assert (t.rollout_log_probs[t.response_mask] == -0.5).all() and not t.rollout_log_probs[~t.response_mask].any()
    (t,), _ = play(["12", "Yes."], "agent.default_agent_loop=public_loop", row={"extra_info": {"adds": True}})
    assert t.extra["unrecorded_tokens"] == 1 and not t.response_mask[-1] and t.rollout_log_probs[-1] == 0
    row = {"extra_info": {"index": 3, "tools_kwargs": {"add": {}}}}
    play(["12", "Yes."], "agent.default_agent_loop=public_loop", row=row)
    row = {"extra_info": {"image_data": [b"png"]}}
    with pytest.raises(RolloutError, match=r"generate takes no image_data.*session\.chat"):
        play(["12"], "agent.default_agent_loop=public_loop", row=row)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{name: a}", "must hold a list"),
        ("- {_target_: tests.unit.rollout.agents_of_a_user.PublicLoop}", "it needs name"),
    ],
)
@pytest.mark.parametrize("entry", ["ppo", "generation"])
def test_a_file_of_loops_that_cannot_be_used_is_refused(
    tmp_path: Path, text: str | None, message: str, entry: str
) -> None:
    if text is not None:
        (tmp_path / "loops.yaml").write_text(text)
    key = f"{'actor_rollout_ref.' * (entry == 'ppo')}rollout.agent.agent_loop_config_path"
    found = map(str, check(load([f"{key}={tmp_path / 'loops.yaml'}"], entry=entry)).problems)
    (problem,) = [text for text in found if key in text]
    assert message in problem


def test_a_users_own_test_of_a_loop_brings_its_server_manager() -> None:
    tokenizer, config = tiny_tokenizer(template=_QWEN.replace("%THINK%", "")), load([])

    class Sampler:
        async def generate(self, request_id, *, prompt_ids, sampling_params):
            return agent_loop.TokenOutput(tokenizer("Yes<|im_end|>")["input_ids"], [-0.5] * 4)

    loop = agents_of_a_user.PublicLoop(
        agent_loop.DictConfigWrap(config), Sampler(), tokenizer, tools=agent_loop.ToolListWrap([])
    )
    said = [{"role": "user", "content": "Well?"}]
    found = asyncio.run(loop.run({}, raw_prompt=said, extra_info={}))
    assert tokenizer.decode(found.prompt_ids) == "<|im_start|>user\nWell?<|im_end|>\n<|im_start|>assistant\n"
    between = "\n<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(found.response_ids) == f"Yes<|im_end|>{between}Yes<|im_end|>"
    assert tokenizer.decode(np.array(found.response_ids)[np.array(found.response_mask) == 0]) == between


def test_the_reward_function_sees_the_dialogue_and_the_environments_reward_is_added(tmp_path: Path) -> None:
    function = tmp_path / "reward.py"
    function.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    e = extra_info\n"
        "    return len(e['messages']) + 10 * e['environment_reward'] + 100 * e['num_turns']\n"
    )
    (t,), _ = play(["5", "7"], *ENV)
    t.score = None
    rewards = RewardRunner(load([f"custom_reward_function.path={function}", "reward_model.num_workers=1"]))
    try:
        asyncio.run(rewards.score(t))
    finally:
        rewards.close()
    assert t.score == 4 + 7.5 + 400 + 0.75, t.score_error


def test_the_example_of_an_agent_program_plays_its_game() -> None:
    words = ["agent.environment.name=command", "agent.default_agent_loop=environment_agent"]
    words.append(f"agent.environment.path='{sys.executable} examples/agents/guess_program.py'")
    row = {"extra_info": {"number": 6}, "messages": [{"role": "user", "content": "a number from 1 to 10"}]}
    for texts, reward in ((["5", "8", "6"], 1.0), (["5", "hm"], 0.0)):
        (t,), _ = play(texts, *words, row=row)
        assert t.fields["environment_reward"] == reward and len(t.segments) == 1
        hints = [m["content"] for m in t.fields["messages"][2::2]]
        assert hints == ["higher", "lower"][: len(texts) - 1] and t.extra["sampler_calls"] == len(texts)
