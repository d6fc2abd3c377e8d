"""Task folders of Harbor and terminal-bench, written from their documentation, in the sandbox and in containers of the
image VERL_TEST_IMAGE (one that has bash, on this machine); resources servers of NeMo Gym, against one written from its
documentation."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.rollout.test_agents import play
from verl.data.files import DataError, open_file
from verl.errors import UserError
from verl.rollout import harbor, nemo_gym
from verl.rollout.groups import RolloutError
from verl.rollout.record import EnvironmentFailed

HARBOR = {
    "task.toml": 'schema_version = "1.4"\n[environment]\nenv = {NAME = "ada"}\n[verifier]\ntimeout_sec = 60.0\n',
    "instruction.md": "Write your name into hello.txt.\n",
    "environment/Dockerfile": "FROM ubuntu:24.04\n# where it runs\nENV GREETING=hi\nWORKDIR /work\nCOPY seed.txt data/ ./in/\n",
    "environment/seed.txt": "seed",
    "environment/data/more.txt": "more",
    "tests/test.sh": '#!/bin/bash\n[ "$(cat hello.txt)" = ada ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n',
}
TERMINAL_BENCH = {
    "task.yaml": "instruction: |-\n  Make hello.txt.\nauthor_name: x\ndifficulty: easy\nparser_name: pytest\n",
    "Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
    "docker-compose.yaml": "services:\n  client:\n    build: .\n",
    "tests/test_outputs.py": "",
    "run-tests.sh": 'ls $TEST_DIR/test_outputs.py\n[ -e hello.txt ] && echo "PASSED t::a" || echo "FAILED t::a - no"\n',
}


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def run(command: str) -> dict[str, Any]:
    function = {"name": "bash", "arguments": {"command": command}}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def played(folder: Path, *commands: str, container: str = "sandbox", **how: Any) -> tuple[list[str], Any]:
    """What the policy saw of its commands, and what the episode earned."""

    async def go() -> tuple[list[str], Any]:
        task = harbor.Task(str(folder), container=container, **how)
        try:
            start = await task.reset({"extra_info": {}})
            assert start.messages and start.tools
            seen = [(await task.step(run(command))).messages[0]["content"] for command in commands]
            assert (await task.step({"role": "assistant", "content": "Done."})).done
            return seen, await task.final()
        finally:
            await task.close()

    return asyncio.run(go())


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Skip where the kernel does not let a user make namespaces."""
    try:
        harbor.check(str(written(tmp_path_factory.mktemp("task"), HARBOR)), container="sandbox")
    except UserError as error:
        pytest.skip(str(error))
    return "sandbox"


@pytest.fixture(params=["sandbox", "container"])
def container(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The sandbox, and the container tool with an image that is here."""
    if request.param == "sandbox":
        return str(request.getfixturevalue("sandbox"))
    image, program = os.environ.get("VERL_TEST_IMAGE", ""), harbor.container_here()
    if not (image and program):
        pytest.skip("no container tool answers, or VERL_TEST_IMAGE names no image")
    for task, file in ((HARBOR, "environment/Dockerfile"), (TERMINAL_BENCH, "Dockerfile")):
        monkeypatch.setitem(task, file, task[file].replace("ubuntu:24.04", image))
    return program


def test_a_task_of_harbor_is_played_and_tested(tmp_path: Path, container: str) -> None:
    folder = written(tmp_path / "hello", HARBOR)
    first = 'pwd; cat in/seed.txt in/more.txt; echo " $GREETING"; false'
    seen, earned = played(folder, first, "echo $NAME > hello.txt", container=container)
    assert seen == ["/work\nseedmore hi\n\n(status 1)", ""] and (earned.reward, earned.done) == (1.0, True)
    planted = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"
    assert played(folder, planted, container=container)[1].reward == 0.0
    slow, _ = played(folder, "sleep 5; echo late", "seq 1000", seconds=1.0, characters=20, container=container)
    assert slow[0] == "Error: no end within 1 s" and "characters …" in slow[1] and len(slow[1]) < 60
    rewards = 'echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json\n'
    (folder / "tests/test.sh").write_text(rewards)
    earned = played(folder, container=container)[1]
    assert earned.reward == 0.5 and earned.metrics == {"a": 1.0, "b": 0.0}
    (folder / "tests/test.sh").write_text("echo broken\n")
    with pytest.raises(EnvironmentFailed, match=r"(?s)the tests wrote no reward.*broken"):
        played(folder, container=container)


@pytest.mark.usefixtures("sandbox")
def test_a_command_reaches_nothing_outside(tmp_path: Path) -> None:
    """Neither files of this machine, nor its network, processes or privileges; a link that it plants leads nowhere."""
    secret = tmp_path / "secret"
    secret.write_text("kept")
    folder = written(tmp_path / "hello", HARBOR)
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    tries = [
        f"cat {secret}",
        f"exec 3<>/dev/tcp/127.0.0.1/{server.server_port} && echo reached",
        "echo x > /usr/bin/x",
        "mount -t tmpfs none /mnt",
        "unshare --user true",
        "ls /proc | grep -cE '^[0-9]+$'",
        "env | grep -c PATH_OF_A_SECRET",
        f"rm -rf /tests; ln -s {tmp_path} /tests; ls /tests/",
    ]
    seen, _ = played(folder, *tries)
    server.server_close()
    for command, text in zip(tries[:5], seen, strict=False):
        assert "(status" in text and "reached" not in text and "kept" not in text, command
    assert int(seen[5].split()[0]) <= 4 and seen[6].startswith("0") and "cannot access" in seen[7]
    assert secret.read_text() == "kept" and sorted(p.name for p in tmp_path.iterdir()) == ["hello", "secret"]


def test_a_task_of_terminal_bench(tmp_path: Path, container: str) -> None:
    folder = written(tmp_path / "hello", TERMINAL_BENCH)
    rewards = [played(folder, *words, container=container)[1].reward for words in ((), ("touch hello.txt",))]
    assert rewards == [0.0, 1.0]


@pytest.mark.usefixtures("sandbox")
def test_the_policy_acts_by_its_tool(tmp_path: Path) -> None:
    written(tmp_path / "hello", HARBOR)
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo ada > hello.txt"}}\n</tool_call>'
    keys = ["environment.name=harbor", f"environment.path={tmp_path}", "environment.kwargs.container=sandbox"]
    words = [f"agent.{key}" for key in (*keys, "default_agent_loop=environment_agent")]
    for texts, score, status in (
        ([call, "Done."], 1.0, "completed"),
        (["Done."], 0.0, "completed"),
        ([call, "Hm…"], 1.0, "length"),
    ):
        (t,), _ = play(texts, *words, row={"messages": [], "extra_info": {"task": "hello"}}, room=900)
        assert (t.fields["environment_reward"], t.status) == (score, status)
        assert t.fields["messages"][0]["content"] == HARBOR["instruction.md"]


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("task.toml", "[environment", "cannot be read"),
        ("task.toml", '[[steps]]\nname = "one"', "steps of task.toml is not supported"),
        ("task.toml", '[environment]\nos = "windows"', "environment.os of task.toml"),
        ("task.toml", '[environment]\nnetwork_mode = "allowlist"', "network_mode allowlist"),
        ("task.toml", '[environment]\nnetwork_mode = "public"', "it asks for the network"),
        ("task.toml", '[environment]\ndocker_image = "x"', "it needs the image x"),
        ("environment/Dockerfile", "FROM a\nRUN apt-get update", "its Dockerfile has RUN"),
        ("environment/Dockerfile", "", "neither environment/Dockerfile nor docker_image"),
        ("environment/docker-compose.yaml", "services: {a: {}, b: {}}", "several containers"),
    ],
)
def test_tasks_that_cannot_run_are_refused_by_name(tmp_path: Path, file: str, text: str, problem: str) -> None:
    folder = written(tmp_path / "task", HARBOR | {file: text})
    with pytest.raises(UserError, match=problem):
        harbor.check(str(tmp_path), container="sandbox")
    with pytest.raises(UserError, match="use docker, podman or sandbox"):
        harbor.box_of(harbor.TaskFolder(written(tmp_path / "other", HARBOR)), "chroot")
    shutil.rmtree(folder)
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(UserError, match="no folder of tasks"):
        harbor.check(str(tmp_path))


def test_rows_of_tasks_without_a_file(tmp_path: Path) -> None:
    for name in ("b", "a"):
        written(tmp_path / name, TERMINAL_BENCH)
    file = open_file(f"tasks:{tmp_path}")
    assert [row["extra_info"] for row in file.rows(0, len(file))] == [{"task": "a"}, {"task": "b"}]
    assert file.row(0)["data_source"] == tmp_path.name
    indices = [[row["extra_info"]["index"] for row in open_file(f"tasks:{t}").first(9)] for t in ("3", "5-7")]
    assert indices == [[0, 1, 2], [5, 6]]
    for wrong in ("tasks:7-5", f"tasks:{tmp_path}/none"):
        with pytest.raises(DataError, match="tasks:"):
            open_file(wrong)


# -- NeMo Gym


class Counter(http.server.BaseHTTPRequestHandler):
    """A resources server: a session's counter, a tool that adds to it, and a reward for the right sum and a last
    text."""

    sums: dict[str, int] = {}  # noqa: RUF012
    verified: list[dict] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.answer(200, {"openapi": "3.1.0"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        session = (self.headers.get("Cookie") or "").partition("session=")[2]
        if self.path == "/seed_session":
            session = str(len(self.sums))
            self.sums[session] = body["start"]
            self.answer(200, {}, f"session={session}; Path=/")
        elif self.path == "/add" and "n" in body:
            self.sums[session] += body["n"]
            self.answer(200, {"sum": self.sums[session], "done": self.sums[session] > 90})
        elif self.path == "/verify":
            self.verified.append(body)
            reward = float(self.sums[session] == body["wanted"])
            self.answer(200, body | {"reward": reward, "calls": 1, "mask_sample": body["wanted"] < 0})
        else:
            self.answer(422, {"detail": "n is missing"})

    def answer(self, status: int, body: dict, cookie: str = "") -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        if cookie:
            self.send_header("Set-Cookie", cookie)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def gym() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Counter)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_server_of_nemo_gym(gym: str) -> None:
    tool = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
    asked = {
        "input": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "5?"}],
        "tools": [tool],
    }
    words = ["agent.environment.name=nemo_gym", f"agent.environment.path={gym}", "agent.environment.kwargs.done=True"]
    words.append("agent.default_agent_loop=environment_agent")

    def said(**arguments: Any) -> str:
        return f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(arguments)}}}\n</tool_call>'

    def earned(texts: list[str], wanted: int, row: dict) -> Any:
        (t,), _ = play(texts, *words, row={"messages": [], **row}, room=900)
        return t

    task = {"responses_create_params": asked, "start": 2, "wanted": 5}
    t = earned(["<think>\nhm\n</think>\n\n" + said(n=3), said(), "It is 5."], 5, {"extra_info": {"task": task}})
    assert (t.fields["environment_reward"], t.status, t.fields["environment_metrics"]) == (
        1.0,
        "completed",
        {"calls": 1},
    )
    roles = [message["role"] for message in t.fields["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert (
        t.fields["messages"][3]["content"] == '{"sum": 5, "done": false}'
        and "n is missing" in t.fields["messages"][5]["content"]
    )
    body = Counter.verified[-1]
    assert body["wanted"] == 5 and body["responses_create_params"] == asked
    kinds = [item["type"] for item in body["response"]["output"]]
    assert kinds == [
        "reasoning",
        "function_call",
        "function_call_output",
        "function_call",
        "function_call_output",
        "message",
    ]
    assert body["response"]["output"][-1]["content"][0]["text"] == "It is 5."
    row = {"columns": {"responses_create_params": asked, "start": 90, "wanted": 95}}
    t = earned([said(n=5), "never"], 95, row)
    assert (t.fields["environment_reward"], len(t.fields["messages"])) == (1.0, 3), "its result said done"
    with pytest.raises(RolloutError, match="verify masks the sample"):
        earned(["It is 5."], -1, {"extra_info": {"task": task | {"wanted": -1}}})
    nemo_gym.check(gym)
    with pytest.raises(UserError, match="no resources server answers"):
        nemo_gym.check("http://127.0.0.1:9")
