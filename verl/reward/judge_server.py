"""A judge's model at an OpenAI-compatible address of this machine: a sampling engine, in a thread with its event loop.

scoring process ──POST /v1/chat/completions──▶ its template ──▶ RolloutEngine.generate ──▶ text
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data.media import ImageProcessor
from verl.data.rows import BadRow, ChatRenderer, text_of
from verl.engine.rollout.base import RolloutEngine, SamplingParams
from verl.errors import UserError
from verl.rollout.event_loop import BackgroundLoop
from verl.trajectory import Media

if TYPE_CHECKING:
    from verl.config.schema.reward import RewardModelConfig


class ServedJudge:
    """Answers chat completions with `engine` until it is closed. `settings`: the group `reward_model`. `offered`:
    arguments for a reward function that names them.

    `processor`: of a model that sees images (None: a request with images is an error).

    UserError for a tokenizer without chat template.
    """

    def __init__(self, engine: RolloutEngine, tokenizer: Any, settings: RewardModelConfig, processor: Any = None):
        self._engine, self._tokenizer, self._limit = (
            engine,
            tokenizer,
            int(settings.rollout.max_model_len or 0),
        )
        self._renderer, self._numbers = ChatRenderer(tokenizer), itertools.count()
        self._images = None if processor is None else ImageProcessor(processor)
        model = settings.model
        if not self._renderer.has_template:
            raise UserError(f"reward_model.model.path={model.path}: its tokenizer has no chat template")
        self._loop = BackgroundLoop("verl-judge").__enter__()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, name="verl-judge-http", daemon=True).start()
        # Scoring processes inherit it: what is here is not asked of a proxy.
        before = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
        os.environ["no_proxy"] = f"{before},127.0.0.1" if before else "127.0.0.1"
        self.offered = {
            "reward_router_address": f"http://127.0.0.1:{self._server.server_port}/v1",
            "reward_model_tokenizer": [model.path, model.trust_remote_code],
            "model": model.path,
        }

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """The chat completion of a request. BadRow, LookupError, TypeError or ValueError for one that is none."""
        return self._loop.run(self._answer(body))

    async def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, media = self._prompt(body["messages"])
        room = max(1, self._limit - len(ids))  # the engine refuses what cannot fit
        sampling = SamplingParams(
            max_tokens=min(room, int(body.get("max_tokens") or room)),
            temperature=float(body.get("temperature", 1.0)),
            top_p=float(body.get("top_p", 1.0)),
            seed=int(body.get("seed") or 0),
        )
        name = f"judge {next(self._numbers)}"
        output = await self._engine.generate(ids, sampling, request_id=name, media=media)
        message = {"role": "assistant", "content": text_of(self._tokenizer, output.token_ids)}
        choice = {"index": 0, "message": message, "finish_reason": output.finish_reason}
        return {"object": "chat.completion", "model": body.get("model"), "choices": [choice]}

    def _prompt(self, messages: list[dict[str, Any]]) -> tuple[np.ndarray, Media | None]:
        """Token ids int64 [P] of a request, and its images."""
        cells: list[str] = []
        messages = [message | _content(message, cells) for message in messages]
        if cells and self._images is None:
            raise ValueError("this judge sees no images (reward_model.images=True sends them)")
        text = self._renderer.text(messages)
        if cells and self._images:
            return self._images(text, cells, Path())
        return self._renderer.ids(text), None

    def sleep(self) -> None:
        """The trainer needs the device's memory: between two steps nothing is asked."""
        self._loop.run(_called(self._engine.sleep))

    def wake(self) -> None:
        """Undo `sleep`."""
        self._loop.run(_called(self._engine.wake))

    def close(self) -> None:
        """Answer nothing any more."""
        self._server.shutdown()
        self._server.server_close()
        self._loop.run(_called(self._engine.close))
        self._loop.__exit__()


def _content(message: dict[str, Any], cells: list[str]) -> dict[str, Any]:
    """The content of a message as the template takes it; the URIs of its images are put into `cells`."""
    content = message["content"]
    if isinstance(content, str):
        return {"content": content}
    cells += [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    return {"content": [{"type": "image"} if part["type"] == "image_url" else part for part in content]}


async def _called(work: Any) -> None:
    work()


class _Server(ThreadingHTTPServer):
    request_queue_size = 1024  # every scoring process may ask many times at once


def _handler(judge: ServedJudge) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            """Any path is that of a chat completion."""
            try:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, content = 200, judge.answer(json.loads(body))
            except Exception as error:  # it is the answer: the one who asked fails its response
                status = 400 if isinstance(error, (BadRow, LookupError, TypeError, ValueError)) else 500
                content = {"error": f"{type(error).__name__}: {error}"}
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *values: Any) -> None:
            """Nothing: failures are those of the response that asked."""

    return Handler
