"""What a turn of a dialogue costs beside the model and the tool: an engine that answers at once, a tool that returns at
once.

    python benchmarks/agent_overhead.py [--trajectories 1000] [--turns 4] [--processes 0 1 2] [--rounds 3] [--http]
    [--out benchmarks/results/agent_overhead.json]

All trajectories are open at once. Each turn is a call of a tool that the engine has ready, the last one a plain answer;
the prompts and the template are those of the quickstart's agent. Reported: milliseconds of wall time per turn over all,
median of the rounds.

--http: another process asks the sessions, which one port serves, `--clients` requests at a time, in each dialect, as a
whole and as a stream. Reported: milliseconds of processor time of the serving process per turn, the session's work
(template, tokens, record) included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "examples/quickstart"), str(HERE.parent)]

from verl.config import load  # noqa: E402
from verl.engine.rollout.base import Completion, RolloutEngine, SamplingParams  # noqa: E402
from verl.rollout.attempt import Attempt, RolloutSettings  # noqa: E402
from verl.rollout.groups import RolloutManager  # noqa: E402
from verl.rollout.loop_processes import LoopProcesses  # noqa: E402
from verl.rollout.resumable import ResumableGeneration  # noqa: E402
from verl.rollout.session import LoopSetup, Session  # noqa: E402
from verl.trajectory import Prompt, Trajectory  # noqa: E402

TEMPLATE = (
    "{%- if tools %}<|start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>\n{% endif %}"
    "{%- for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>"
    "{%- endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
MESSAGES = [{"role": "user", "content": "1 + 2?"}]
TOOL = '''from verl.tools.function_tool import function_tool


@function_tool
def add(a: int, b: int) -> int:
    """The sum of two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b
'''


PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
CLIENT = """
import asyncio, json, sys
PARAMETERS = json.loads(sys.argv[1])
dialect, stream, turns, clients = sys.argv[2], sys.argv[3] == "True", int(sys.argv[4]), int(sys.argv[5])

async def post(url, path, body):
    host, _, rest = url.removeprefix("http://").partition("/")
    name, port = host.split(":")
    reader, writer = await asyncio.open_connection(name, int(port))
    data = json.dumps(body | {"model": "policy", "stream": stream}).encode()
    head = f"POST /{rest}{path} HTTP/1.1\\r\\nConnection: close\\r\\nContent-Length: {len(data)}\\r\\n\\r\\n"
    writer.write(head.encode() + data)
    head, _, text = (await reader.read()).partition(b"\\r\\n\\r\\n")
    writer.close()
    assert b" 200 " in head, text
    return text.decode() if stream else json.loads(text)

# The turns that were sampled, as a client sends them back: the answers are known, so that streams need not be read.
def body(number):
    called = range(number)
    if dialect == "chat":
        tools = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
        messages = [{"role": "user", "content": "1 + 2?"}]
        for n in called:
            call = {"id": f"call_{n}", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
            result = {"role": "tool", "tool_call_id": f"call_{n}", "content": "3"}
            messages += [{"role": "assistant", "tool_calls": [call]}, result]
        return "/chat/completions", {"messages": messages, "tools": tools}
    if dialect == "responses":
        items = [{"role": "user", "content": "1 + 2?"}]
        for n in called:
            items += [{"type": "function_call", "call_id": f"call_{n}", "name": "add", "arguments": '{"a": 1, "b": 2}'},
                      {"type": "function_call_output", "call_id": f"call_{n}", "output": "3"}]
        return "/responses", {"input": items, "tools": [{"type": "function", "name": "add", "parameters": PARAMETERS}]}
    messages = [{"role": "user", "content": "1 + 2?"}]
    for n in called:
        call = {"type": "tool_use", "id": f"call_{n}", "name": "add", "input": {"a": 1, "b": 2}}
        result = {"type": "tool_result", "tool_use_id": f"call_{n}", "content": "3"}
        messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    tools = [{"name": "add", "input_schema": PARAMETERS}]
    return "/messages", {"messages": messages, "max_tokens": 100, "tools": tools}

async def main():
    urls, room = json.loads(sys.stdin.read()), asyncio.Semaphore(clients)
    async def play(url):
        for number in range(turns):
            async with room:
                await post(url, *body(number))
    await asyncio.gather(*map(play, urls))

asyncio.run(main())
"""


class AtOnce(RolloutEngine):
    """Calls the tool in every turn but the last, without a wait."""

    version = 0

    def __init__(self, call: np.ndarray, answer: np.ndarray, turns: int):
        self._turns = turns
        self._ready = [Completion(ids, np.full(len(ids), -0.5, np.float32), "stop") for ids in (call, answer)]

    async def generate(self, prompt_ids: Any, sampling: SamplingParams, **about: Any) -> Completion:
        """The completion of this turn."""
        return self._ready[sampling.call + 1 >= self._turns]

    def abort(self, request_ids: Any = None) -> None:
        """Nothing is in flight."""

    def sleep(self) -> None:
        """Nothing to release."""

    def wake(self) -> None:
        """Nothing to fetch."""


class Streaming(AtOnce):
    """Says each token by itself."""

    streams = True

    async def generate(self, prompt_ids: Any, sampling: SamplingParams, **about: Any) -> Any:
        completion = await super().generate(prompt_ids, sampling, **about)
        for token in completion.token_ids.tolist() if about.get("on_tokens") else ():
            about["on_tokens"]([token])
        return completion


async def unscored(trajectory: Trajectory) -> None:
    """No reward."""
    trajectory.score = 0.0


def prepared(folder: Path, *words: str) -> tuple[Any, list[np.ndarray], Any, np.ndarray]:
    """The tokenizer, the ids of a call and of an answer, the configuration, and the ids of the prompt."""
    from build_model import build_tokenizer
    from transformers import AutoTokenizer

    build_tokenizer(["go on", CALL, TEMPLATE], folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    ids = [np.array(tokenizer(text + "<|end|>")["input_ids"]) for text in (CALL, "3")]
    keys = ("prompt_length=1024", "response_length=8192", *words)
    config = load([f"actor_rollout_ref.model.path={folder}", *(f"actor_rollout_ref.rollout.{key}" for key in keys)])
    opening = np.array(tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False))
    return tokenizer, ids, config, opening


async def play(folder: Path, args: argparse.Namespace, processes: int) -> float:
    """Milliseconds of wall time per turn, median of the rounds; a first round starts processes."""
    (folder / "tools.py").write_text(TOOL)
    tools = ("multi_turn.enable=True", f"multi_turn.function_tool_path={folder / 'tools.py'}")
    tokenizer, ids, config, opening = prepared(folder, *tools)
    settings = RolloutSettings(SamplingParams(max_tokens=8192), n=8, seed=1, default_loop="tool_agent")
    manager = RolloutManager(
        AtOnce(*ids, args.turns), settings, decode=tokenizer.decode, on_finished=unscored, tokenizer=tokenizer,
        config=config,
        processes=(lambda: LoopProcesses(processes, config)) if processes else None,
    )  # fmt: skip
    seconds = []
    for round_ in range(args.rounds + 1):
        prompts = [Prompt(f"0:{i}@{round_}", opening, MESSAGES) for i in range(args.trajectories // 8)]
        began = time.perf_counter()
        batch = await manager.take(prompts)
        seconds.append((time.perf_counter() - began) / (len(batch) * args.turns))
        assert all(t.status == "completed" and t.extra["sampler_calls"] == args.turns for t in batch)
    await manager.stop()
    return 1000 * statistics.median(seconds[1:])


async def serve(folder: Path, args: argparse.Namespace, dialect: str, stream: bool) -> float:
    """Milliseconds of processor time a turn over HTTP."""
    tokenizer, ids, config, opening = prepared(folder)
    setup, requests = LoopSetup(tokenizer, config), ResumableGeneration(Streaming(*ids, args.turns))
    sessions = [
        Session(Attempt(requests, Prompt(f"0:{i}@0", opening, MESSAGES), 0, "", True), SamplingParams(8192), setup)
        for i in range(args.trajectories)
    ]
    urls = [session.base_url for session in sessions]
    words = [json.dumps(PARAMETERS), dialect, str(stream), str(args.turns), str(args.clients)]
    client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, *words, stdin=asyncio.subprocess.PIPE)
    before = time.process_time()
    await client.communicate(json.dumps(urls).encode())
    spent = time.process_time() - before
    assert client.returncode == 0 and all(len(session.segments()) == 1 for session in sessions), "one segment each"
    assert all(session.record.calls == args.turns for session in sessions)
    for session in sessions:
        session.close()
    return 1000 * spent / (args.trajectories * args.turns)


def main() -> None:
    """Measure every number of processes, or every dialect, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--processes", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cases: dict[str, Any] = {
        f"{number} loop processes": lambda folder, n=number: play(folder, args, n) for number in args.processes
    }
    if args.http:
        cases = {
            f"{dialect}{', streamed' if stream else ''}": lambda folder, d=dialect, s=stream: serve(folder, args, d, s)
            for dialect in ("chat", "responses", "messages")
            for stream in (False, True)
        }
    measured = {}
    for name, case in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            measured[name] = asyncio.run(case(Path(folder)))
        print(f"{name}: {measured[name]:.2f} ms a turn", flush=True)
    if args.out:
        about = {"processor": platform.processor() or platform.machine()}
        about |= {"trajectories": args.trajectories, "turns": args.turns}
        args.out.write_text(json.dumps(about | {"ms_per_turn": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
