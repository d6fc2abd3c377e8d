"""Run by the Python of a virtual environment that has `verifiers` (version 1 environments), and not verl: imports
nothing of verl.

    run ──lines of JSON on stdin──→ EnvClient → EnvServer of one environment → session URL (/inference/v1/generate)
        ←─lines on stdout──────────

First line: {"environment": …, "tokenizer": …, "renderer": …}; then {"id", "url", "task" or "index"} starts an episode,
{"cancel": id} ends one; {"id", "ping"} is answered with {"id"}. Answers: {"ready": true} or {"refused": text}, {"id",
"reward", …} or {"id", "error": text}. Ends when stdin closes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any, TextIO

SHUTDOWN_SECONDS = 5.0
_PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
_FUNCTION = {"name": "find", "description": "Finds.", "parameters": _PARAMETERS}
_TOOL = {"type": "function", "function": _FUNCTION}
_CALL = {"id": "call_0", "type": "function", "function": {"name": "find", "arguments": {"text": "a"}}}
_DIALOGUE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_0", "name": "find", "content": "b"},
]


class Episodes:
    """The environment server, and a client of it, in one process."""

    def __init__(self, first: dict[str, Any], out: TextIO, folder: str):
        from verifiers.v1.configs.client import TrainClientConfig
        from verifiers.v1.serve import EnvClient, EnvServer
        from verifiers.v1.utils.loaders import resolve_env_config

        self._out, self._tokenizer = out, first["tokenizer"]
        self._client_config = TrainClientConfig
        self._renderer = first.get("renderer") or renderer_of(self._tokenizer)
        self.server = EnvServer(resolve_env_config(first["environment"]), address=f"ipc://{folder}/server")
        self._client = EnvClient(self.server.address)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._tasks: list[Any] = []
        self._further: Iterator[Any] | None = None

    def say(self, message: dict[str, Any]) -> None:
        """One line to the run."""
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def take(self, message: dict[str, Any]) -> None:
        """Start or cancel an episode."""
        if "cancel" in message:
            if (running := self._running.get(message["cancel"])) is not None:
                running.cancel()
        elif "ping" in message:
            self.say({"id": message["id"]})
        else:
            self._running[message["id"]] = asyncio.ensure_future(self._run(message))

    async def _run(self, message: dict[str, Any]) -> None:
        try:
            answer = await self._episode(message)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        finally:
            self._running.pop(message["id"], None)
        self.say({"id": message["id"], **answer})

    async def _episode(self, message: dict[str, Any]) -> dict[str, Any]:
        from verifiers.v1.types import SamplingConfig

        config = {"type": "train", "base_url": message["url"], "renderer_model_name": self._tokenizer}
        episode = await self._client.run(
            client=self._client_config.model_validate(config | {"renderer": self._renderer}),
            model="policy",
            sampling=SamplingConfig(),
            task_data=message["task"] or self._task(message["index"]),
        )
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        failed = [*episode.errors, *(error for trace in traces for error in trace.errors)]
        if not episode.ok or not traces or not all(trace.ok for trace in traces):
            return {"error": f"{failed[-1].type}: {failed[-1].message}" if failed else "the episode failed"}
        return _summary(traces)

    def _task(self, index: Any) -> dict[str, Any]:
        """The data of the task at a place. A taskset may be infinite: it is read up to the furthest place asked for."""
        if not isinstance(index, int) or index < 0:
            raise ValueError(f"a row needs extra_info.task, or extra_info.index, which is {index!r}")
        self._further = self._further or iter(self.server.env.taskset)
        self._tasks += itertools.islice(self._further, max(0, index + 1 - len(self._tasks)))
        if index >= len(self._tasks):
            raise ValueError(f"extra_info.index is {index}, the taskset has {len(self._tasks)} tasks")
        return dict(self._tasks[index].data.model_dump(mode="json"))


def renderer_of(tokenizer: str) -> dict[str, str] | None:
    """The renderer that the architecture of a model's folder is named after, if it writes a dialogue with tools as the
    chat template does. None: the package chooses by the tokenizer's name."""
    from renderers import config_from_name, create_renderer
    from renderers.base import MODEL_RENDERER_MAP, load_tokenizer

    try:
        with open(os.path.join(tokenizer, "config.json"), encoding="utf-8") as file:
            architecture = _letters(json.load(file)["model_type"])
    except (OSError, ValueError, KeyError):
        return None
    names = [name for name in set(MODEL_RENDERER_MAP.values()) if architecture.startswith(_letters(name))]
    if tokenizer in MODEL_RENDERER_MAP or not names:
        return None
    name = max(names, key=len)
    loaded = load_tokenizer(tokenizer)
    try:
        options = {"tools": [_TOOL], "add_generation_prompt": True}
        rendered = create_renderer(loaded, config_from_name(name)).render_ids(_DIALOGUE, **options)
        templated = loaded.apply_chat_template(_DIALOGUE, return_dict=False, **options)
    except Exception as error:
        print(f"the renderer {name} does not take {tokenizer}: {error!r}", file=sys.stderr)
        return None
    return {"name": name} if list(rendered) == list(templated) else None


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def _summary(traces: list[Any]) -> dict[str, Any]:
    from verifiers.v1.dialects.chat import message_to_wire

    metrics: dict[str, Any] = {}
    for trace in traces:
        rewards = {name: reward for name, reward in trace.rewards.items() if reward is not None}
        metrics |= {name: value for name, value in trace.metrics.items() if value is not None}
        metrics |= {f"reward/{name}": reward.score for name, reward in rewards.items()}
    return {
        "reward": sum(trace.reward for trace in traces) / len(traces),
        "metrics": metrics,
        "stop": traces[-1].stop_condition,
        "messages": [message_to_wire(message) for message in traces[-1].messages],
    }


async def serve(episodes: Episodes, lines: TextIO) -> None:
    """Handle lines until they end."""
    server = asyncio.ensure_future(episodes.server.run())
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def read() -> None:
        for line in lines:
            loop.call_soon_threadsafe(episodes.take, json.loads(line))
        loop.call_soon_threadsafe(ended.set)
        threading.Event().wait(SHUTDOWN_SECONDS)
        os._exit(1)  # the environment holds the process up

    threading.Thread(target=read, daemon=True).start()
    episodes.say({"ready": True})
    shutdown = asyncio.ensure_future(ended.wait())
    await asyncio.wait([server, shutdown], return_when=asyncio.FIRST_COMPLETED)
    server.cancel()
    await asyncio.gather(server, return_exceptions=True)


def main() -> None:
    """What the environment prints goes to stderr: stdout is the run's."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    first = json.loads(sys.stdin.readline())
    with tempfile.TemporaryDirectory(prefix="verl-verifiers-") as folder:
        try:
            episodes = Episodes(first, out, folder)
        except Exception as error:
            print(json.dumps({"refused": f"{type(error).__name__}: {error}"}), file=out, flush=True)
            return
        asyncio.run(serve(episodes, sys.stdin))


if __name__ == "__main__":
    main()
