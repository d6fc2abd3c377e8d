"""One sampling engine in a process of its own: requests come in lists, finished responses leave in lists.

All coroutines run on one event loop, the engine's too. Arguments and results are arrays and JSON-like values, see
`verl.workers.payloads`. Knows nothing of how it is called from afar.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np

from verl.config import Map
from verl.data.rows import text_of
from verl.data.tokenizer import tokenizer_of
from verl.engine.registry import ROLLOUT_ENGINES, NodePart
from verl.engine.rollout.base import Completion, EngineDead
from verl.platform import detect, processes, thread_stacks
from verl.platform.processes import Identity
from verl.tracking.profiler import open_profiler
from verl.tracking.timer import Profiled
from verl.weight_sync.collective import DELTA, Channel, Rendezvous, relay
from verl.weight_sync.delta import SentBuckets
from verl.workers import build, payloads
from verl.workers.payloads import Payload
from verl.workers.training_worker import prepare_process

T = TypeVar("T")
_GATHER_S, _GATHER_MOST_S = 2e-4, 0.2
"""For each response under way, and at most: seconds in which finished ones are gathered before they leave."""


class RolloutWorker(Profiled):
    """`config` is the resolved configuration as plain data; `number` of this engine among its pool's."""

    def __init__(self, config: dict[str, Any], number: int):
        self.config = Map.of(config)
        self.number = number
        self.engine: Any = None  # a `RolloutEngine` and a `WeightReceiver`, from `start` on
        self._decode: Callable[[np.ndarray], str] | None = None
        self._done: list[payloads.GenerateResult] = []
        self._death = ""
        self._relayed = SentBuckets()
        self._receiving: tuple[asyncio.Future[dict[str, str]], list[tuple[str, int]], int] | None = None
        self._wakeup = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        thread_stacks.register()

    async def pid(self) -> int:
        """Of this process, before anything is loaded."""
        return os.getpid()

    async def start(self, part: NodePart | None = None) -> dict[str, Any]:
        """Build the engine, or its part on this node. Its weights are good after the first `receive_weights`. UserError
        if it cannot be.

        Returns what a sender of weights has to know: who reads, and the data type to send (None: as they are).
        """
        prepare_process(self.config)
        if part is not None:
            ROLLOUT_ENGINES.named(self.config.actor_rollout_ref.rollout.name).span(self.config, part)
        model = self.config.actor_rollout_ref.model
        tokenizer = tokenizer_of(model, self.config.data.tokenizer)
        platform = detect(self.config.trainer.device)
        self.engine = build.own_sampler(self.config, tokenizer, platform)
        self._decode = partial(text_of, tokenizer)
        self.profiler = open_profiler(self.config, roles=("rollout",), rank=self.number, platform=platform)
        dtype = self.engine.weights_dtype
        return {
            "pid": os.getpid(),
            "readers": [processes.identity()] * len(self.engine.readers),
            "devices": self.engine.readers,
            "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        }

    async def submit(self, payload: Payload, ended: Sequence[str] = (), *inputs: Mapping[str, np.ndarray]) -> None:
        """End these sessions, then begin requests; returns at once. A request id that is under way is left as it is.
        inputs: of the requests' images."""
        for session in ended:
            self.engine.end_session(session)
        running = {task.get_name() for task in self._running}
        for request in payloads.decode_requests(payload, inputs):
            if request.id not in running:
                task = asyncio.create_task(self._serve(request), name=request.id)
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    async def _serve(self, request: payloads.GenerateRequest) -> None:
        try:
            optional = {"session": request.session, "media": request.media}
            more = {name: value for name, value in optional.items() if value is not None}
            completion = await self.engine.generate(
                request.prompt_ids, request.sampling, request_id=request.id, group=request.group, **more
            )
            completion.text = self._text(request, completion)
            self._done.append(payloads.GenerateResult(request.id, completion))
        except Exception as error:  # it is the result: the driver raises it where the request was made
            if self.engine.dead:
                self._note_death(error)
            else:
                self._done.append(payloads.GenerateResult(request.id, error=(type(error).__name__, str(error))))
        self._wakeup.set()

    def _text(self, request: payloads.GenerateRequest, completion: Completion) -> str | None:
        """See `Completion.text`. None for a response that was stopped: mostly it goes on, and is decoded at its end."""
        if completion.finish_reason == "abort" or self._decode is None:
            return None
        begun = request.prompt_ids[len(request.prompt_ids) - request.sampling.start :]
        return self._decode(np.concatenate([begun, completion.token_ids]))

    def _note_death(self, error: Exception) -> EngineDead:
        """The engine is dead: no request gets its error as its result, the worker is to be replaced."""
        kind = "" if isinstance(error, EngineDead) else f"{type(error).__name__}: "
        self._death = self._death or f"its engine died ({kind}{error})"
        return EngineDead(self._death)

    def _survived(self, call: Callable[[], T]) -> T:
        """call(), and EngineDead for what it raises if the engine does not survive it."""
        try:
            return call()
        except Exception as error:
            if self.engine.dead:
                raise self._note_death(error) from error
            raise

    async def results(self, timeout: float) -> Payload:
        """Finished responses, soon after the first of them; none after `timeout` seconds. EngineDead after the last."""
        if not self._done and not self._death:
            self._wakeup.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wakeup.wait(), timeout)
        # Each of these calls costs the driver as much as many responses. Where many are under way none is waited for
        # alone; where few are, only those that end in the same pass of the model leave together.
        await asyncio.sleep(min(len(self._running) * _GATHER_S, _GATHER_MOST_S))
        if not self._done and self._death:
            raise EngineDead(self._death)
        finished, self._done = self._done, []
        return payloads.encode_results(finished)

    async def alive(self) -> None:
        """Returns; EngineDead if the engine can answer nothing any more."""
        if self._death or self.engine.dead:
            raise self._note_death(RuntimeError("found before a transfer of weights"))

    async def abort(self, request_ids: list[str] | None) -> None:
        """Stop requests (None: all); their responses come through `results`."""
        await asyncio.sleep(0)  # what was submitted just before this call has begun
        self.engine.abort(request_ids)

    async def receive_weights(
        self, places: list[tuple[str, int]], version: int, timeout: float, verify: str
    ) -> dict[str, str]:
        """See `WeightReceiver.receive_weights`. EngineDead if the engine does not survive a load that failed.

        An earlier transfer that still waits for its sender is over: it was given up before this call came.
        """

        def load() -> dict[str, str]:
            with self.span("update_weights"):
                return self.engine.receive_weights(places, version, timeout=timeout, verify=verify)

        if self._receiving is not None and not self._receiving[0].done():
            from verl.weight_sync.channel import called_off

            earlier, its_places, its_version = self._receiving
            with called_off(its_places, its_version, "another transfer has begun"):
                await asyncio.wait({earlier})
        loading = asyncio.ensure_future(asyncio.to_thread(self._survived, load))
        self._receiving = loading, places, version
        return await loading

    async def try_channel(self, places: list[tuple[str, int]], timeout: float) -> list[str]:
        """See `WeightReceiver.try_channel`."""
        return await asyncio.to_thread(self.engine.try_channel, places, timeout)

    async def relay_weights(
        self,
        rendezvous: dict[str, Any],
        rank: int,
        channel: str,
        readers: list[Identity],
        timeout: float,
        node: str = "",
    ) -> None:
        """Take part in a broadcast for this node, and hand it on to the node's readers, this worker's among them.

        node: which one, of those of an engine on several.
        """
        backend = self.config.actor_rollout_ref.rollout.checkpoint_engine.backend
        platform = detect(self.config.trainer.device)

        def work() -> None:
            with closing(Rendezvous(**rendezvous).join(rank, backend, platform)) as group:
                last = self._relayed if backend == DELTA else None
                relay(group, Channel(channel, len(readers), expected=readers, timeout=timeout), last)

        await asyncio.to_thread(work)

    async def sleep(self) -> None:
        """Give memory back while the devices train."""
        self._survived(self.engine.sleep)

    async def wake(self) -> None:
        """Undo `sleep`."""
        self._survived(self.engine.wake)

    async def stats(self) -> dict[str, float]:
        """The engine's counters since the last call."""
        return self._survived(self.engine.stats)

    async def close(self) -> None:
        """Release everything."""
        if self.engine is not None:
            self.engine.close()
