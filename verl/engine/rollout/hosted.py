"""What engines with processes of their own share: their event loop, how their processes end, and their requests."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import signal
import threading
import time
import weakref
import zlib
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from uuid import uuid4

import numpy as np

from verl.engine.registry import RolloutEngineRecord
from verl.engine.rollout.base import Completion, RolloutEngine, SamplingParams, check_request, not_finite
from verl.errors import UserError
from verl.models.inputs import special_token_ids
from verl.platform.processes import alive
from verl.trajectory import Media
from verl.weight_sync.receiver import WeightReceiver

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

T = TypeVar("T")
# A process: its id and when it started.
Process = tuple[int, int]
_BYTES_PER_CHARACTER = 4
# Seconds that a call of the processes may take.
RPC_TIMEOUT = 600.0


class LoopThread:
    """A thread with an event loop in which an asynchronous engine lives.

    The engine ties its sockets and tasks to one loop; callers come from any loop, and from none (weights, sleep,
    close).
    """

    def __init__(self, name: str):
        resource_tracker.ensure_running()  # its start would unblock the signal below
        self._runner, self._stopped = asyncio.Runner(loop_factory=asyncio.new_event_loop), asyncio.Event()
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # Its processes inherit this: an interrupt at the terminal is the driver's to handle.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with self._runner:  # its end cancels what was still running
            self._runner.run(self._stopped.wait())

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine. RuntimeError after `stop`."""
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("the sampling engine is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine and wait for what it returns."""
        future = self.submit(work)
        try:
            return future.result(timeout)
        except BaseException:  # nobody waits for it any more
            future.cancel()
            raise

    def stop(self) -> None:
        """End the thread; what was still running is cancelled."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(10)


def end(processes: set[Process], patience: float = 5.0) -> None:
    """Wait for processes to be gone; kill those that are not, and wait again. This process is never among them."""
    remaining = {p for p in processes if p[0] != os.getpid() and p[1]}
    for _ in range(2):
        deadline = time.monotonic() + patience
        while (remaining := {p for p in remaining if alive(*p)}) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid, _ in remaining:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def end_token_ids(model_config: PreTrainedConfig, path: str, tokenizer: Any) -> list[int]:
    """Every id that ends a response: the generation config's, the model's and the tokenizer's."""
    from transformers import GenerationConfig

    from verl.models.pretrained import end_token_ids as end_tokens_of

    generation: Any = None
    with contextlib.suppress(OSError):  # a model without one
        generation = GenerationConfig.from_pretrained(path)
    return end_tokens_of(generation, model_config, tokenizer)


def ended_at_seam(
    done: Completion, begun: Sequence[int], stops: Sequence[str], decode: Callable[[list[int]], str]
) -> Completion:
    """A response whose first tokens, `begun`, came with the prompt: cut where a stop string ends that began in those.
    The engine looks for stop strings only in what it writes itself."""
    reach = _BYTES_PER_CHARACTER * max(map(len, stops))
    before, ids = list(begun[-reach:]), done.token_ids.tolist()
    if any(stop in decode(before) for stop in stops):
        return done
    for count in range(1, min(len(ids), reach) + 1):
        text = decode(before + ids[:count])
        if any(stop in text for stop in stops):
            ids, log_probs = done.token_ids[:count], done.log_probs[:count]
            sets = None if done.sampling_mask is None else done.sampling_mask[:count]
            return replace(done, token_ids=ids, log_probs=log_probs, sampling_mask=sets, finish_reason="stop")
    return done


class BusyTime:
    """Time with requests running. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running = 0
        self._since = 0.0
        self._sum = 0.0

    def count(self, change: int) -> None:
        """So many more requests are under way (or fewer)."""
        with self._lock:
            now = time.monotonic()
            if self._running:
                self._sum += now - self._since
            self._since, self._running = now, self._running + change

    def take(self) -> float:
        """Seconds since the last call."""
        with self._lock:
            self.count(0)
            out, self._sum = self._sum, 0.0
            return out


@dataclass(slots=True)
class Live:
    """One request: the weight versions it has lived under, its images, its group, whether it was aborted. key: a name
    that no other request has, not even a later one with the same id."""

    id: str
    prompt: list[int]
    versions: list[int]
    media: Media | None = None
    group: str | None = None
    aborted: bool = False
    key: str = field(default_factory=lambda: uuid4().hex)

    def copy(self, copies: int) -> int:
        """Which copy of a model samples it: the samples of a group stay where their prompt is cached."""
        return zlib.crc32((self.group or self.id).encode()) % copies

    def completion(
        self, package: str, reason: str | None, token_ids: Sequence[int], log_probs: Sequence[float] | None, **more: Any
    ) -> Completion:
        """What the package's final output says; more: of Completion.

        RuntimeError when the package gave the request up; FloatingPointError when a log-prob is not a number.
        """
        ids, values = np.asarray(token_ids, np.int64), np.asarray(log_probs or [], np.float32)
        if reason not in ("stop", "length", "abort"):
            raise RuntimeError(f"{package} gave up request {self.id!r} after {len(ids)} tokens: {reason}")
        if len(values) != len(ids):
            raise RuntimeError(f"{package} returned {len(values)} log-probs for {len(ids)} tokens")
        if np.isnan(values).any():
            raise not_finite(int(np.isnan(values).argmax()), self.versions[-1])
        return Completion(ids, values, reason, tuple(self.versions), **more)


class ImageTokens:
    """The image tokens of prompts for a package that takes what the run's own processor made of the images.

    So sampler and trainer see the same tokens, pixels and grids. config: the model's. `forbidden`: tokens that are
    never sampled. UserError for a type of model that the record does not name.
    """

    def __init__(self, record: RolloutEngineRecord, config: PreTrainedConfig):
        if config.model_type not in record.capabilities.images:
            raise UserError(f"{record.name} is not shown images of {config.model_type} here; set rollout.name=native")
        self.forbidden = special_token_ids(config)
        self._token, self._patches = config.image_token_id, config.vision_config.spatial_merge_size**2

    def ranges(self, ids: Sequence[int], grids: Sequence[np.ndarray]) -> list[tuple[int, int]]:
        """(first token, number of tokens) of each image; grids: of each, [3]. ValueError where the image tokens are not
        those of the images."""
        places = np.flatnonzero(np.asarray(ids) == self._token)
        if not len(grids):
            if len(places):
                raise ValueError("a prompt without images holds image tokens")
            return []
        counts = [int(grid.prod()) // self._patches for grid in grids]
        if len(places) != sum(counts):
            raise ValueError(f"a prompt has {len(places)} image tokens for images of {sum(counts)}")
        starts = np.cumsum([0, *counts[:-1]])
        return [(int(places[start]), count) for start, count in zip(starts, counts, strict=True)]


_OPEN: weakref.WeakSet[HostedEngine] = weakref.WeakSet()


class HostedEngine(RolloutEngine, WeightReceiver):
    """An engine of another package, whose objects live in the thread of `_host` and whose work is done in processes of
    its own. package: its name in messages.

    settings: what it is built with: model_path, tokenizer_path, skip_tokenizer_init, trust_remote_code.
    """

    package: ClassVar[str]
    _max_model_len: int

    def __init__(self, settings: Any, *, ready: bool):
        self._settings, self._ready = settings, ready
        self._live: dict[str, Live] = {}
        self._busy = BusyTime()
        self._version = 0
        self._images: Any = None
        self._asleep = self._weights_gone = False
        self._broken = ""
        self._processes: set[Process] = set()
        self._engine: Any = None
        self._host = LoopThread(f"{self.package.lower()}-engine")
        _OPEN.add(self)

    # ---- requests

    async def sample(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        *,
        request_id: str,
        group: str | None = None,
        media: Media | None = None,
    ) -> Completion:
        """See `RolloutEngine.generate`. The packages find equal prefixes by themselves."""
        prompt = [int(i) for i in prompt_ids]
        self._check(request_id, len(prompt), sampling, media)
        live = self._live[request_id] = Live(request_id, prompt, [self._version], media, group)
        completion = await asyncio.wrap_future(self._host.submit(self._counted(live, sampling)))
        if not (sampling.stop and sampling.start):
            return completion
        done = ended_at_seam(completion, prompt[-sampling.start :], sampling.stop, self._text)
        if done.routed_experts is not None:
            done.routed_experts = done.routed_experts[: len(prompt) + len(done.token_ids) - 1]
        return done

    def _check(self, request_id: str, prompt_tokens: int, sampling: SamplingParams, media: Media | None) -> None:
        if self._asleep:
            raise RuntimeError("the sampler is asleep: call wake() before generate()")
        self._refuse_broken()
        if not self._ready:
            raise RuntimeError("the sampler has no weights yet: call load_weights() before generate()")
        if request_id in self._live:
            raise ValueError(f"request_id {request_id!r} is being sampled already: ids must be unique")
        if media is not None and self._images is None:
            raise ValueError(f"request {request_id!r} has images, and the model sees none")
        check_request(request_id, prompt_tokens, sampling, self._max_model_len)
        if sampling.stop and self._settings.skip_tokenizer_init:
            raise ValueError(f"stop strings need {self.package}'s tokenizer: set rollout.skip_tokenizer_init=False")

    def _refuse_broken(self) -> None:
        if self._broken:
            raise RuntimeError(f"the sampler must be started anew: a load of weights failed ({self._broken})")

    async def _counted(self, live: Live, sampling: SamplingParams) -> Completion:
        self._busy.count(1)
        try:
            return await self._response(live, sampling)
        finally:
            self._live.pop(live.id, None)
            self._busy.count(-1)

    @abstractmethod
    async def _response(self, live: Live, sampling: SamplingParams) -> Completion:
        """Sample one response, in the loop of `_host`. EngineDead when the package's process is gone."""

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """See `RolloutEngine.abort`. Unknown or finished ids are ignored."""
        names = list(self._live if request_ids is None else request_ids)
        requests = [live for name in names if (live := self._live.get(name)) is not None]
        for live in requests:
            live.aborted = True
        if requests:
            self._host.submit(self._abort(requests))

    async def _abort(self, requests: list[Live]) -> None:
        """Until they are gone: a request may be on its way to the package still."""
        while pending := [live.key for live in requests if self._live.get(live.id) is live]:
            await self._abort_now(pending)
            await asyncio.sleep(0.005)

    @abstractmethod
    async def _abort_now(self, keys: list[str]) -> None:
        """Have the package abort the requests with these keys, as far as it has them."""

    # ---- weights

    @contextlib.contextmanager
    def _replacing(self, version: int) -> Iterator[None]:
        """The block replaces the weights: memory is allocated, requests are paused, the old cache is dropped after. The
        engine is of no use after an error."""
        self._refuse_broken()
        self._ready = False
        if self._asleep and self._weights_gone:
            self._allocate_weights()
            self._weights_gone = False
        paused = self._pause()
        try:
            yield
            self._forget(paused)
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            if paused:  # nobody waits for ever for an engine that stands still
                self.abort()
                self._host.submit(self._resume())
            raise
        self._version, self._ready = version, True
        for live in list(self._live.values()):
            live.versions.append(version)
        if paused:
            self._call(self._resume())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop of `_host`."""
        return self._host.call(work, RPC_TIMEOUT)

    @abstractmethod
    def _allocate_weights(self) -> None:
        """Undo `sleep` for the weights."""

    @abstractmethod
    def _pause(self) -> bool:
        """Stop the requests under way, which forget their cache; False if there was nothing to stop."""

    @abstractmethod
    async def _resume(self) -> None:
        """Undo `_pause`."""

    @abstractmethod
    def _forget(self, paused: bool) -> None:
        """Drop all that was computed with the old weights. RuntimeError if that fails."""

    @property
    def version(self) -> int:
        return self._version

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers for this model."""
        from verl.data.tokenizer import load_tokenizer

        s = self._settings
        return load_tokenizer(s.model_path, tokenizer_path=s.tokenizer_path, trust_remote_code=s.trust_remote_code)

    def _text(self, ids: list[int]) -> str:
        """Special tokens included: a stop string may be one."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def stats(self) -> dict[str, float]:
        """See `RolloutEngine.stats`."""
        return {"busy_s": self._busy.take()}

    def close(self) -> None:
        """End the package's processes. May be called twice."""
        if self in _OPEN:
            _OPEN.discard(self)
            self._shut_down()
            self._host.stop()
            end(self._processes)
            self._clean_up()

    @abstractmethod
    def _shut_down(self) -> None:
        """Tell the package to end, and forget its objects."""

    def _clean_up(self) -> None:
        """Remove what the processes have left, once they are gone."""


@atexit.register
def _close_all() -> None:
    for engine in list(_OPEN):
        engine.close()
