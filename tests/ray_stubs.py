"""Ray actors without a model, for tests of the controller; in a module that worker processes can import."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray

from verl.engine.rollout.base import Completion, EngineDead
from verl.errors import UserError
from verl.trajectory import Segment, flat
from verl.workers import payloads


class Where:
    """Says where it runs and what it sees."""

    def look(self) -> tuple[str, str | None]:
        return ray.get_runtime_context().get_node_id(), os.environ.get("ASCEND_RT_VISIBLE_DEVICES")


class Rank:
    """A training worker without a model."""

    def __init__(self) -> None:
        self.rows: list[Segment] = []

    def pid(self) -> int:
        return os.getpid()

    def work(self, what: str) -> str:
        if what == "user":
            raise UserError("set another key")
        if what == "bug":
            raise KeyError("lost")
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "peer":
            time.sleep(0.5)
            raise RuntimeError("connection closed by peer")
        return what

    def receive_rows(self, payload: Any, *inputs: Any) -> None:
        self.rows = payloads.decode(payload, inputs)

    def forward(self, phase: str, role: str, outputs: Mapping[str, str]) -> dict[str, np.ndarray]:
        return {column: flat(self.rows, "response_ids").astype(np.float32) for column in outputs.values()}


class Sampler:
    """Responses every request with its prompt reversed, `delay` seconds later; "die" in a stop string kills it once."""

    def __init__(self, delay: float, grave: str):
        self.delay, self.grave = delay, grave
        self.done: list[payloads.GenerateResult] = []
        self.open: dict[str, Any] = {}
        self.dead = False

    async def pid(self) -> int:
        return os.getpid()

    async def alive(self) -> None:
        pass

    async def submit(self, payload: Any, ended: list[str], *inputs: Any) -> None:
        for ask in payloads.decode_requests(payload, inputs):
            self.open[ask.id] = asyncio.create_task(self._serve(ask))

    async def _serve(self, ask: payloads.GenerateRequest) -> None:
        if "die" in ask.sampling.stop and (self.grave == "always" or not os.path.exists(self.grave)):
            if self.grave != "always":
                open(self.grave, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if "engine" in ask.sampling.stop and not os.path.exists(self.grave):
            open(self.grave, "w").close()
            self.dead = True
            return
        if "bad" in ask.sampling.stop:
            self.done.append(payloads.GenerateResult(ask.id, error=("ValueError", "too long")))
            return
        await asyncio.sleep(self.delay)
        ids = ask.prompt_ids[::-1].copy()
        done = Completion(ids, np.full(len(ids), os.getpid(), np.float32), "stop", (3,))
        self.done.append(payloads.GenerateResult(ask.id, done))

    async def results(self, timeout: float) -> Any:
        end = time.monotonic() + timeout
        if self.dead:
            raise EngineDead("its engine died (Core: killed)")
        while not self.done and not self.dead and time.monotonic() < end:
            await asyncio.sleep(0.01)
        done, self.done = self.done, []
        return payloads.encode_results(done)

    async def abort(self, ids: list[str]) -> None:
        for name in ids:
            self.open[name].cancel()
            empty = Completion(np.zeros(0, np.int64), np.zeros(0, np.float32), "abort", ())
            self.done.append(payloads.GenerateResult(name, empty))

    async def close(self) -> None:
        if self.grave != "always":
            with open(f"{self.grave}.closed", "a") as file:
                file.write(f"{os.getpid()}\n")

    async def sleep(self) -> None:
        pass

    async def stats(self) -> dict[str, float]:
        return {"tokens": 2.0, "busy_s": float(self.delay)}


class Staying:
    """A worker that is called by nobody."""

    def stay(self) -> None:
        threading.Event().wait()

    @ray.method(concurrency_group="other")
    def pid(self) -> int:
        return os.getpid()
