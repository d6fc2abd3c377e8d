"""What a turn over HTTP costs the process that serves the sessions: 1,000 sessions open at once, an engine that answers at once.

    python benchmarks/gateway.py [--sessions 1000] [--turns 4] [--clients 50] [--out benchmarks/results/gateway.json]

Each session plays a dialogue of so many turns with calls of a tool, in each dialect, as a whole and as a stream;
another process asks, so many requests at a time. Reported: milliseconds of processor time of the serving process per turn, the
session's work (template, tokens, record) included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "examples/quickstart"), str(HERE.parent), str(HERE)]

from agent_overhead import CALL, TEMPLATE, AtOnce  # noqa: E402

from verl.config import load  # noqa: E402
from verl.engine.rollout.base import SamplingParams  # noqa: E402
from verl.rollout.attempt import Attempt  # noqa: E402
from verl.rollout.resumable import ResumableGeneration  # noqa: E402
from verl.rollout.session import LoopSetup, Session  # noqa: E402
from verl.trajectory import Prompt  # noqa: E402

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
            messages += [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": f"call_{n}", "content": "3"}]
        return "/chat/completions", {"messages": messages, "tools": tools}
    if dialect == "responses":
        items = [{"role": "user", "content": "1 + 2?"}]
        for n in called:
            items += [{"type": "function_call", "call_id": f"call_{n}", "name": "add", "arguments": '{"a": 1, "b": 2}'},
                      {"type": "function_call_output", "call_id": f"call_{n}", "output": "3"}]
        return "/responses", {"input": items, "tools": [{"type": "function", "name": "add", "parameters": PARAMETERS}]}
    messages = [{"role": "user", "content": "1 + 2?"}]
    for n in called:
        messages += [{"role": "assistant", "content": [{"type": "tool_use", "id": f"call_{n}", "name": "add", "input": {"a": 1, "b": 2}}]},
                     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"call_{n}", "content": "3"}]}]
    return "/messages", {"messages": messages, "max_tokens": 100, "tools": [{"name": "add", "input_schema": PARAMETERS}]}

async def main():
    urls, room = json.loads(sys.stdin.read()), asyncio.Semaphore(clients)
    async def play(url):
        for number in range(turns):
            async with room:
                await post(url, *body(number))
    await asyncio.gather(*map(play, urls))

asyncio.run(main())
"""


async def measure(folder: Path, args: argparse.Namespace, dialect: str, stream: bool) -> float:
    """Milliseconds of processor time a turn."""
    from build_model import build_tokenizer
    from transformers import AutoTokenizer

    build_tokenizer(["go on", CALL, TEMPLATE], folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    ids = [np.array(tokenizer(text + "<|end|>")["input_ids"]) for text in (CALL, "3")]
    rollout = "actor_rollout_ref.rollout."
    config = load(
        [f"actor_rollout_ref.model.path={folder}", f"{rollout}prompt_length=1024", f"{rollout}response_length=8192"]
    )
    setup, requests = LoopSetup(tokenizer, config), ResumableGeneration(Streaming(*ids, args.turns))
    messages = [{"role": "user", "content": "1 + 2?"}]
    opening = np.array(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    sessions = [
        Session(
            Attempt(requests, Prompt(f"0:{i}@0", opening, messages), 0, "", True),
            SamplingParams(max_tokens=8192),
            setup,
        )
        for i in range(args.sessions)
    ]
    urls = [session.base_url for session in sessions]
    words = [json.dumps(PARAMETERS), dialect, str(stream), str(args.turns), str(args.clients)]
    client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, *words, stdin=asyncio.subprocess.PIPE)
    before = time.process_time()
    await client.communicate(json.dumps(urls).encode())
    spent = time.process_time() - before
    assert client.returncode == 0 and all(len(session.segments()) == 1 for session in sessions), (
        "a dialogue is one segment"
    )
    assert all(session.record.calls == args.turns for session in sessions)
    for session in sessions:
        session.close()
    return 1000 * spent / (args.sessions * args.turns)


class Streaming(AtOnce):
    """Says each token by itself."""

    streams = True

    async def generate(self, prompt_ids: Any, sampling: SamplingParams, **about: Any) -> Any:
        completion = await super().generate(prompt_ids, sampling, **about)
        for token in completion.token_ids.tolist() if about.get("on_tokens") else ():
            about["on_tokens"]([token])
        return completion


def main() -> None:
    """Measure every dialect and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, float] = {}
    for dialect in ("chat", "responses", "messages"):
        for stream in (False, True):
            name = f"{dialect}{', streamed' if stream else ''}"
            with tempfile.TemporaryDirectory() as folder:
                found[name] = asyncio.run(measure(Path(folder), args, dialect, stream))
            print(f"{name}: {found[name]:.2f} ms a turn", flush=True)
    if args.out:
        about = {
            "processor": platform.processor() or platform.machine(),
            "sessions": args.sessions,
            "turns": args.turns,
        }
        args.out.write_text(json.dumps(about | {"ms_per_turn": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
