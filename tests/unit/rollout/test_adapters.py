"""Environments of other packages: gymnasium, verifiers, OpenEnv, an openai client. Where a package is missing its test
is skipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.chaos.fork_server import until
from tests.ranks import free_port, listens
from tests.tiny import SPECIAL, tiny_tokenizer
from tests.unit.rollout.test_agents import play
from tests.unit.rollout.test_session import _QWEN
from verl.config import load
from verl.preflight.check import check
from verl.rollout import environments, verifiers_program, verifiers_server
from verl.rollout.groups import RolloutError

HERE = Path(__file__).parent
VERIFIERS = os.environ.get("VERL_VERIFIERS_PYTHON")
ENV = {"agent_name": "environment_agent"}


def test_a_text_game_of_gymnasium() -> None:
    gymnasium = pytest.importorskip("gymnasium", reason="the package gymnasium is not installed")

    class Corridor(gymnasium.Env):
        observation_space = action_space = gymnasium.spaces.Text(20)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return "corridor", {}

        def step(self, action):
            return f"you go {action}", 1.0, action == "east", False, {}

    gymnasium.register("Corridor-v0", Corridor)
    own = {"environment": {"name": "gym", "path": "gymnasium:make", "kwargs": {"id": "Corridor-v0"}}}
    (t,), _ = play(["west", "east"], row={"columns": own, **ENV})
    said = [m["content"] for m in t.fields["messages"]]
    assert (t.status, t.score, said[2]) == ("completed", 2.0, "you go west") and said[0].endswith("corridor")
    words = ["agent.environment.name=gym", "agent.environment.path=gymnasium:make"]
    assert "`Nope` doesn't exist" in problems([*words, "agent.environment.kwargs.id=Nope-v0"])
    assert "gymnasium" not in problems([*words, "agent.environment.kwargs.id=Corridor-v0"])


@pytest.mark.parametrize(
    ("space", "arguments", "text", "action"),
    [
        ("Discrete", (4,), "I was at 7. Go 3", 3),
        ("Discrete", (4,), "4", None),
        ("Discrete", (4,), "1.5", None),
        ("MultiDiscrete", ([2, 3],), "Not 5 but 1, 2.", [1, 2]),
        ("MultiDiscrete", ([2, 3],), "1", None),
        ("Box", (-1, 1, (2,)), "-0.5 .25e0", [-0.5, 0.25]),
        ("Box", (-1, 1, (2,)), "2 0", None),
    ],
)
def test_numbers_as_actions_of_gymnasium(space: str, arguments: tuple, text: str, action: Any) -> None:
    spaces = pytest.importorskip("gymnasium", reason="the package gymnasium is not installed").spaces
    acts: list = []
    env = SimpleNamespace(action_space=getattr(spaces, space)(*arguments))
    env.step = lambda act: (acts.append(np.asarray(act).tolist()), 0.0, True, False, {})
    result = environments.GymEnv(env).step({"content": text})
    assert result.invalid is (action is None) and acts == [action] * (action is not None)
    assert not result.invalid or f"in {space}(" in result.messages[0]["content"]


FAKE = """
import json, os, sys, time, urllib.request
first = json.loads(sys.stdin.readline())
if "taskset" not in first["environment"]:
    print(json.dumps({"refused": "no taskset"}), flush=True)
    sys.exit()
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    if message.get("task") == "die":
        sys.exit("no licence")
    if message.get("task") == "hang" and not os.path.exists(__file__ + ".hung"):
        open(__file__ + ".hung", "w").close()
        time.sleep(60)
    if "url" not in message:
        continue
    if message["task"] == "raise":
        print(json.dumps({"id": message["id"], "error": "TaskError: no game"}), flush=True)
        continue
    body = json.dumps({"messages": [{"role": "user", "content": "3*4?"}]}).encode()
    urllib.request.urlopen(message["url"] + "/chat/completions", body).read()
    if os.path.exists(os.environ.get("KILL", "")):
        os.unlink(os.environ["KILL"])
        os.kill(os.getpid(), 9)
    print(json.dumps({"id": message["id"], "reward": 2.0, "metrics": {"turns": 1}, "stop": None, "messages": []}), flush=True)
"""


def fake_python(folder: Path) -> Path:
    """A program in the place of a Python that has verifiers: it speaks as `verifiers_program` does."""
    fake = folder / "python"
    fake.write_text(f"#!{sys.executable}\n{FAKE}")
    fake.chmod(0o755)
    return fake


def server_words(python: str, **kwargs: str) -> list[str]:
    return [
        "agent.environment.name=verifiers", f"agent.environment.path={python}", "agent.max_resamples=1",
        *(f"agent.environment.kwargs.{name}={value}" for name, value in kwargs.items()),
    ]  # fmt: skip


def problems(words: list[str]) -> str:
    """What `--check` says."""
    return "\n".join(map(str, check(load([f"actor_rollout_ref.rollout.{word}" for word in words])).problems))


@pytest.mark.parametrize(
    ("task", "message"),
    [("", ""), ("raise", "TaskError: no game"), ("die", r"(?s)/python ended with status 1.*no licence")],
)
def test_the_server_of_an_environment_is_started_watched_and_started_again(
    tmp_path: Path, task: str, message: str
) -> None:
    fake = fake_python(tmp_path)
    row, events = {"extra_info": {"task": task}}, []
    if not message:
        (t,), _ = play(["12"], *server_words(str(fake), taskset="a"), row=row)
        assert (t.status, t.score, t.fields["environment_metrics"]) == ("completed", 2.0, {"turns": 1})
        return
    with pytest.raises(RolloutError, match=message):
        play(["12"], *server_words(str(fake), taskset="a"), row=row, events=events)
    assert len(events) == 2
    refused = problems(server_words(str(fake)))
    assert "cannot serve the verifiers environment of environment.kwargs: no taskset" in refused


@pytest.mark.skipif(not VERIFIERS, reason="VERL_VERIFIERS_PYTHON names no Python that has verifiers")
@pytest.mark.parametrize(("fail", "message"), [("", ""), ("raise", "no game"), ("die", "ended with status 3")])
def test_an_environment_of_verifiers(tmp_path: Path, monkeypatch, fail: str, message: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    name = "verifiers_environment_of_a_user"
    words = server_words(str(VERIFIERS), **{"taskset.id": name, "agent.runtime.type": "subprocess"})
    row = {"extra_info": {"index": 1, "task": {"prompt": "3*4?", "answer": "12", "fail": fail} if fail else None}}
    tiny_tokenizer(tmp_path, template=_QWEN.replace("%THINK%", ""))
    if fail:
        with pytest.raises(RolloutError, match=message):
            play(["12"], *words, row=row, model=tmp_path)
        return
    (t,), _ = play(["16", "Yes, 16."], *words, row=row, model=tmp_path)
    assert (t.status, t.score, t.fields["environment_metrics"]["turns"]) == ("completed", 2.0, 2.0)
    assert [m["content"] for m in t.fields["messages"]] == ["4*4?", "16", "Sure?", "Yes, 16."]
    assert len(t.segments) == 1


QWEN3 = (
    "{%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{{- '<|im_start|>system\n' + system + '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}"
    "{{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}"
    "{%- for tool in tools %}{{- '\n' + tool | tojson }}{% endfor %}"
    "{{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within ' }}"
    '{{- \'<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\' }}'
    "{{- '\n</tool_call><|im_end|>\n' }}"
) + _QWEN.replace("%THINK%", "").partition("{% endif %}")[2].replace("in messages", "in messages[1:]")


@pytest.mark.skipif(not VERIFIERS, reason="VERL_VERIFIERS_PYTHON names no Python that has verifiers")
@pytest.mark.parametrize(
    ("architecture", "template", "renderer"),
    [
        ("qwen3_moe", QWEN3, "{'name': 'qwen3'}"),
        ("qwen3", _QWEN.replace("%THINK%", ""), "None"),
        ("llama", QWEN3, "None"),
    ],
)
def test_the_renderer_of_an_architecture_whose_template_it_writes(
    tmp_path: Path, architecture: str, template: str, renderer: str
) -> None:
    tags = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    tiny_tokenizer(tmp_path, template=template, special=(*SPECIAL, *tags))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": architecture}))
    code = f"import runpy; print(runpy.run_path({verifiers_program.__file__!r})['renderer_of']({str(tmp_path)!r}))"
    said = subprocess.run([str(VERIFIERS), "-c", code], capture_output=True, text=True)
    assert said.stdout.strip() == renderer, said.stderr


def test_a_task_is_taken_of_a_taskset_that_never_ends() -> None:
    episodes = object.__new__(verifiers_program.Episodes)
    endless = (SimpleNamespace(data=SimpleNamespace(model_dump=lambda mode, n=n: {"n": n})) for n in count())
    episodes.server = SimpleNamespace(env=SimpleNamespace(taskset=endless))
    episodes._tasks, episodes._further = [], None
    assert [episodes._task(index)["n"] for index in (4, 1, 6)] == [4, 1, 6] and len(episodes._tasks) == 7
    with pytest.raises(ValueError, match=r"extra_info\.index, which is None"):
        episodes._task(None)


def test_an_environment_imports_the_packages_that_it_names(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "verifiers.py").write_text("import openenv\n")
    (tmp_path / "openenv.py").write_text("raise RuntimeError('the package itself')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "RuntimeError: the package itself" in problems(server_words(sys.executable, taskset="a"))


def call(name: str, **arguments: int | str) -> str:
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


OPENAI = """
import asyncio, json, os
import openai
client, row = openai.OpenAI(), json.loads(os.environ["VERL_ROW"])
model = client.models.list().data[0].id
tools = [{"type": "function", "function": {"name": "calculate", "parameters": {"type": "object", "properties": {}}}}]
messages = row["messages"]
while True:
    choice = client.chat.completions.create(model=model, messages=messages, tools=tools, temperature=0.1).choices[0]
    messages.append(choice.message)
    if choice.finish_reason != "tool_calls":
        break
    for call in choice.message.tool_calls:
        arguments = json.loads(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": arguments["expression"]})
def ask(**how):
    messages.append({"role": "user", "content": "And?"})
    return client.chat.completions.create(model=model, messages=messages, **how)

choice = ask(logprobs=True, stop="STOP").choices[0]
assert [t.token for t in choice.logprobs.content] == [*"STOP", "<|im_end|>"] and bytes(choice.logprobs.content[0].bytes) == b"S"
assert choice.message.content == "" and choice.finish_reason == "stop"
messages.append(choice.message)
deltas, reasons, used = [], [], None
for chunk in ask(stream=True, tools=tools, stream_options={"include_usage": True}):
    deltas += [choice.delta for choice in chunk.choices]
    reasons += [choice.finish_reason for choice in chunk.choices]
    used = chunk.usage or used
(called,) = deltas[0].tool_calls
assert (called.index, called.function.name) == (0, "calculate") and reasons == [None, None, "tool_calls"] and used.completion_tokens
called = {"id": called.id, "type": "function", "function": {"name": "calculate", "arguments": called.function.arguments}}
messages += [{"role": "assistant", "tool_calls": [called]}, {"role": "tool", "tool_call_id": called["id"], "content": [{"type": "text", "text": "4"}]}]
with client.chat.completions.stream(model=model, messages=messages, tools=tools) as stream:
    messages.append(stream.get_final_completion().choices[0].message)
legacy = client.completions.create(model=model, prompt=["abc", "d"], logprobs=0, max_tokens=1)
assert [choice.logprobs.token_logprobs for choice in legacy.choices] == [[-0.5]] * 2

async def later():
    async with openai.AsyncOpenAI() as client:
        asked = [client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}]) for text in "ab"]
        return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

try:
    client.chat.completions.create(model=model, messages=messages, n=200)
except openai.BadRequestError as error:
    print(json.dumps({"reward": 0.5, "metrics": {"refused": error.message, "later": asyncio.run(later())}}))
"""


def test_the_client_of_openai(tmp_path: Path) -> None:
    pytest.importorskip("openai", reason="the package openai is not installed")
    (tmp_path / "agent.py").write_text(OPENAI)
    words = [
        w.replace("name=verifiers", "name=command") for w in server_words(f"'{sys.executable} {tmp_path}/agent.py'")
    ]
    said = [call("calculate", expression="3*4"), "It is 12.", "STOP", call("calculate", expression="2*2")]
    (t,), _ = play([*said, "It is 4.", "ab", "c", "Fine."], *words)
    assert (t.status, t.score, len(t.segments)) == (
        "completed",
        0.5,
        6,
    )  # of a dialogue, its turn without tools, two texts, two more questions
    assert "n must be a number" in t.fields["environment_metrics"]["refused"]
    assert t.fields["environment_metrics"]["later"] == ["Fine."] * 2


def test_a_server_that_hangs_is_ended_after_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers_server, "ANSWER_SECONDS", 0.1)
    words = server_words(str(fake_python(tmp_path)), taskset="a")
    (t,), _ = play(
        ["12"],
        *words,
        "agent.max_resamples=3",
        "agent.trajectory_timeout=1.5",
        row={"extra_info": {"task": "hang"}},
    )
    assert (t.status, t.score) == ("completed", 2.0) and (tmp_path / "python.hung").exists()


@contextmanager
def serving(*words: str, cwd: Path = HERE) -> Iterator[str]:
    """A server on a free port (the last word of its command) until the block ends; its URL."""
    port = free_port()
    server = subprocess.Popen([sys.executable, *words, str(port)], cwd=cwd, start_new_session=True)
    try:
        until(lambda: listens(port), pause=0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def openenv_words(url: str, **kwargs: str) -> list[str]:
    return [w.replace("name=verifiers", "name=openenv") for w in server_words(url, **kwargs)]


def test_the_example_of_openenv(tmp_path: Path) -> None:
    pytest.importorskip("openenv", reason="the package openenv is not installed")
    made = [sys.executable, "-m", "openenv.cli", "init", "echo_env", "--output-dir", str(tmp_path)]
    subprocess.run(made, check=True, capture_output=True)
    with serving("-m", "uvicorn", "server.app:app", "--port", cwd=tmp_path / "echo_env") as url:
        words = openenv_words(url, observation="echoed_message")
        (t, u), _ = play(
            ["Hi", "Hello."], *words, "multi_turn.max_assistant_turns=2", n=2
        )  # the server takes one at a time
        assert (t.status, u.status) == ("max_turns", "max_turns") and t.score == pytest.approx(0.8)
        said = [m["content"] for m in t.fields["messages"]]
        assert said == ["3*4?\n\nEcho Env environment ready!", "Hi", "Hi", "Hello."]
        assert "OpenEnv" not in problems(words)
    assert f"no OpenEnv server answers at {url}" in problems(words) and "start it there" in problems(words)


def test_a_server_of_openenv_that_is_killed_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openenv", reason="the package openenv is not installed")
    monkeypatch.setenv("KILL", str(tmp_path / "kill"))
    (tmp_path / "kill").touch()
    starts_again = "import subprocess, sys\nwhile subprocess.call([sys.executable, *sys.argv[1:]]) == -9: pass"
    with serving("-c", starts_again, str(HERE / "openenv_server_of_a_user.py"), "act") as url:
        (t, u), _ = play([call("act", a=2, b=2), call("act", a=3, b=4)], *openenv_words(url), n=2)
        assert [t.status, u.status] == ["completed"] * 2 and 1 in (
            t.extra.get("resamples"),
            u.extra.get("resamples"),
        )


@pytest.mark.parametrize("kind", ["act", "tools"])
def test_actions_of_openenv_as_calls(kind: str) -> None:
    pytest.importorskip("openenv", reason="the package openenv is not installed")
    with serving(str(HERE / "openenv_server_of_a_user.py"), kind) as url:
        if kind == "act":
            turns = [call("act", a=1, b="x"), call("act", a=2, b=2), call("act", a=3, b=4)]
            row = {"extra_info": {"reset_kwargs": {"hint": "Two factors."}}}
            (t,), _ = play(turns, *openenv_words(url), row=row)
            said = [m["content"] for m in t.fields["messages"] if m["role"] != "assistant"]
            assert (t.status, t.score, said[0], said[2]) == (
                "completed",
                1.0,
                "3*4?\n\nMake 12. Two factors.",
                "4",
            )
            assert said[1] == "Error: the action does not fit its schema"
        else:
            (t,), _ = play([call("multiply", a=3, b=4), "It is 12."], *openenv_words(url))
            assert (t.status, t.fields["messages"][2]["content"]) == ("completed", "12")
