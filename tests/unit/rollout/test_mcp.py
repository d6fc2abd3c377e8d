"""Tools of MCP servers, real ones: over stdio and HTTP, errors, a server that dies or hangs, files that cannot be
used."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from verl.rollout.agent_loop import EnvironmentFailed

from tests.chaos.fork_server import until
from tests.ranks import free_port, listens
from tests.tiny import tiny_tokenizer
from tests.unit.rollout.test_agents import play
from verl.rollout.groups import RolloutError
from verl.rollout.tools import mcp_servers
from verl.rollout.tools.parsers import ToolCall
from verl.rollout.tools.tool import ToolError
from verl.rollout.tools.toolbox import Toolbox, ToolRun
from verl.rollout.turn_boundaries import Boundaries

pytestmark = pytest.mark.skipif(
    find_spec("mcp") is None, reason="the package mcp is not installed (pip install 'verl[mcp]')"
)
SERVER = Path(__file__).with_name("mcp_server_of_a_user.py")
STDIO = {"command": sys.executable, "args": [str(SERVER)]}


def tools_file(folder: Path, servers: Any, **options: Any) -> str:
    """A tools file with one entry of type mcp."""
    (folder / "servers.json").write_text(json.dumps({"mcpServers": servers}))
    options = {"mcp_servers_config_path": str(folder / "servers.json"), **options}
    (folder / "tools.yaml").write_text(json.dumps({"tools": [{"config": {"type": "mcp"}, "mcp": options}]}))
    return str(folder / "tools.yaml")


def toolbox(path: str) -> Toolbox:
    return Toolbox.load(path)


def asks(box: Toolbox, *calls: tuple[str, dict], timeout: float = 30.0) -> list[str]:
    async def go() -> list[str]:
        run = ToolRun(box.by_name, {}, timeout=timeout, longest=200, side="right")
        return [await run.call(ToolCall(name, arguments)) for name, arguments in calls]

    return asyncio.run(go())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_dialogue_with_the_tools_of_a_program(tmp_path: Path) -> None:
    path = tools_file(tmp_path, {"calculator": STDIO}, tool_selected_list=["calculate", "die"])
    words = ["multi_turn.enable=True", f"multi_turn.tool_config_path={path}", "agent.max_resamples=1"]
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "3*4"}}</tool_call>'
    (t,), _ = play([call, "It is 12."], *words)
    assert (t.status, t.fields["messages"][2]["content"]) == ("completed", "12")
    events: list = []
    with pytest.raises(
        RolloutError, match=r"(?s)MCP server 'calculator' \(.*mcp_server_of_a_user.py\) is gone.*no licence"
    ):
        play(['<tool_call>{"name": "die", "arguments": {}}</tool_call>'], *words, events=events)
    assert [fields["attempt"] for _, fields in events] == [0, 1]


def test_images_are_shown_or_the_text_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    box, boundaries = toolbox(tools_file(tmp_path, {"calculator": STDIO})), Boundaries(tiny_tokenizer())
    monkeypatch.setattr(ToolRun, "show_images", lambda run, cells: boundaries.image_parts(cells))
    assert asks(box, ("photo", {})) == ["here it is\n(image left out)"]
    monkeypatch.setattr(ToolRun, "show_images", lambda run, cells: [{"type": "image", "image": cell} for cell in cells])
    ((image, text),) = asks(box, ("photo", {}))
    assert image["image"].startswith("data:image/png;base64,") and text == {"type": "text", "text": "here it is"}


def test_what_the_server_says_is_wrong_is_text_and_one_that_hangs_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_servers, "_ANSWER_SECONDS", 0.5)
    box = toolbox(tools_file(tmp_path, {"calculator": STDIO}))
    assert box.schemas["calculate"]["function"]["parameters"]["required"] == ["expression"]
    texts = asks(box, ("calculate", {"expression": "x"}), ("calculate", {"y": 1}), ("pid", {}))
    assert texts[0].startswith("Error: tool 'calculate': RuntimeError: ") and "expression" in texts[1]
    assert asks(box, ("hang", {}), timeout=0.5) == ["Error: tool 'hang': no answer within 0.5 s"]
    until(lambda: not alive(int(texts[2])))
    (other,) = asks(box, ("pid", {}))
    assert other.isdigit() and other != texts[2]


KILLED = """
import asyncio, os
from verl.rollout.tools.toolbox import Toolbox
tool = Toolbox.load({path!r}).by_name["pid"]
print(asyncio.run(tool.execute("", {{}}))[0].text, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_servers_process_does_not_outlive_the_run(tmp_path: Path) -> None:
    path = tools_file(tmp_path, {"calculator": STDIO})
    code = KILLED.format(path=path)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == -9 and found.stdout.strip().isdigit(), found.stderr
    until(lambda: not alive(int(found.stdout)))


def test_a_server_over_http_that_ends_and_comes_back(tmp_path: Path) -> None:
    port = free_port()
    spec = {"url": f"http://127.0.0.1:{port}/mcp", "auth_token": "secret"}
    path = tools_file(tmp_path, {"calculator": spec})
    with pytest.raises(ToolError, match=r"MCP server 'calculator'.*does nobody listen there\?"):
        toolbox(path)

    def start() -> subprocess.Popen:
        server = subprocess.Popen([sys.executable, str(SERVER), str(port)], stderr=subprocess.DEVNULL)
        until(lambda: listens(port), pause=0.1)
        return server

    server = start()
    try:
        box = toolbox(path)
        assert asks(box, ("pid", {})) == [str(server.pid)]
        server.kill()
        server.wait()
        with pytest.raises(EnvironmentFailed, match="is gone"):
            asks(box, ("pid", {}))
        server = start()
        assert asks(box, ("pid", {})) == [str(server.pid)]
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize(
    ("servers", "options", "message"),
    [
        ({"a": {"command": "no-such-program"}}, {}, "'a': the command 'no-such-program' is not found: install it"),
        ({"a": {"args": []}}, {}, "'a': it needs command .* or url"),
        ({"a": {"url": "http://x", "type": "sse"}}, {}, "older SSE transport"),
        (["a"], {}, "servers.json must hold"),
        ({"a": {"command": sys.executable, "args": ["-c", "import nowhere"]}}, {},
         r"(?s)\(MCP server 'a'\).* gave no list of tools.*No module named 'nowhere'"),
        ({"a": STDIO}, {"tool_selected_list": ["add"]}, "tool_selected_list names 'add', which no server"),
        ({"a": STDIO, "b": STDIO}, {}, "calculate.* collide: 2 tools are called 'calculate': in .*'a'.* and in .*'b'.*'die': in .*'a'.* and in .*'b'"),
        ({}, {"mcp_servers_config_path": None}, "type mcp needs mcp: {mcp_servers_config_path"),
    ],
)  # fmt: skip
def test_files_and_servers_that_cannot_be_used(tmp_path: Path, servers: Any, options: dict, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        toolbox(tools_file(tmp_path, servers, **options))
