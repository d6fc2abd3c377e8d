"""Sampling with vLLM: its asynchronous engine in processes of its own, weights brought there through shared memory.

    caller's loop or thread ── generate ──▶ thread with vLLM's loop ── vLLM's sockets ──▶ engine process(es)
              load_weights ── BucketSender ───── shared memory ───────────────────────────▶ worker extension

Two ways to ask, one name: `await generate(token_ids, sampling, request_id=...)` is the request of `RolloutEngine`;
`generate(["text", ...], sampling_params={...})` responses a list at once and needs no event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from verl.engine.rollout.base import Completion, EngineDead, RolloutEngine, SamplingParams
from verl.engine.rollout.vllm import launch
from verl.engine.rollout.vllm.adapter import vllm
from verl.engine.rollout.vllm.adapter_folder import AdapterFolder
from verl.engine.rollout.vllm.arguments import (
    EngineSettings,
    check_request,
    engine_arguments,
    request_arguments,
)
from verl.engine.rollout.vllm.batch import BatchCall, Prompts, end_token_ids
from verl.engine.rollout.vllm.host import LoopThread
from verl.engine.rollout.vllm.live import Counters, Live, ended_at_seam
from verl.engine.rollout.vllm.loading import RPC_TIMEOUT, Loading
from verl.engine.rollout.vllm.worker import remove_shared

if TYPE_CHECKING:
    from verl.weight_sync.base import SyncResult

_BUCKET_BYTES = 256 << 20
_OPEN: weakref.WeakSet[VLLMEngine] = weakref.WeakSet()


class VLLMEngine(RolloutEngine):
    """Samples with vLLM.

    model_path: a Hugging Face directory or id. load_format: "auto" reads its weights, "dummy" makes random ones, to be
        replaced by `load_weights` before anything is sampled.
    eos_token_ids: tokens that end a response; None: those that the model, its generation config and its tokenizer name.
    tokenizer_path: where the tokenizer is, if not with the model; needed for texts, and for stop strings, for which
        skip_tokenizer_init must be off.
    free_cache_engine: `sleep` gives memory back (on devices where vLLM can). bucket_bytes: size of one weight transfer.
    lora: the adapter_config.json of an adapter that vLLM adds to the model itself; `load_weights` then brings the adapter's
        tensors (names of peft's files less their prefix) and not the model's.
    engines: how many of these share the machine's memory; on a CPU each takes its part of the share.
    engine_kwargs: further arguments of vLLM, checked against those of the installed version.
    The other names are vLLM's and those of `rollout.*` (docs/vllm.md). Raises UserError (EnginePackageError) if vLLM is
    absent or of a version out of range, or an argument cannot be passed.
    """

    def __init__(
        self,
        model_path: str,
        *,
        eos_token_ids: Sequence[int] | None = None,
        bucket_bytes: int = _BUCKET_BYTES,
        notice: Callable[[str], None] = lambda text: None,
        **settings: Any,
    ):
        self._settings = s = EngineSettings(str(model_path), **settings)
        api = vllm()
        arguments = engine_arguments(s, api.arguments, cpu=api.cpu, sleeps=api.sleeps, notice=notice)
        launch.check_main_script()
        model_config, self._config_folder = launch.model_config(s, arguments)
        launch.check_model(model_config, s.tensor_parallel_size, cpu=api.cpu)
        if api.cpu:
            launch.cpu_arguments(s, model_config, arguments)
        self._api, self._eos = api, eos_token_ids
        self._live: dict[str, Live] = {}
        self._counters = Counters()
        self._version = 0
        self._ready = s.load_format != "dummy" and s.lora is None
        self._adapter = AdapterFolder(s.lora) if s.lora is not None else None
        self._adapter_request: Any = None
        self._asleep = self._weights_gone = False
        self._processes: set[launch.Process] = set()
        self._shared = ""
        self._batch: BatchCall | None = None
        self._decoder: Any = None
        self._broken = ""
        self._closed = False
        self._host = LoopThread("vllm-engine")
        _OPEN.add(self)
        try:
            self._engine = self._host.call(self._start(arguments))
            devices = self._host.call(self._begin())
            self._loading = Loading(self._host, self._engine.collective_rpc, devices, bucket_bytes, notice)
        except BaseException:
            self.close()
            raise
        self._max_model_len = int(s.max_model_len or self._engine.model_config.max_model_len)
        if self._eos is None:
            self._eos = end_token_ids(
                model_config, s.model_path, None if s.skip_tokenizer_init else self.tokenizer
            )

    async def _start(self, arguments: dict[str, Any]) -> Any:
        with launch.environment(self._api.cpu, self._settings.tensor_parallel_size):
            return launch.start(self._api, arguments)

    async def _begin(self) -> list[str]:
        """Tell the workers whom to end with; learn what there is to clean up, and on which devices they are."""
        found = await self._engine.collective_rpc("verl_begin", args=launch.this_process())
        self._processes = {(int(pid), str(start)) for row in found for pid, start in row["processes"]}
        self._shared = str(found[0]["shared"])
        return [str(row["device"]) for row in found]

    # ---- requests

    @overload
    def generate(
        self,
        prompts: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        *,
        request_id: str,
        group: str | None = None,
        session: str | None = None,
        media: dict[str, Any] | None = None,
    ) -> Coroutine[Any, Any, Completion]: ...

    @overload
    def generate(
        self, prompts: Prompts, sampling: None = None, *, sampling_params: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]: ...

    def generate(  # type: ignore[override]
        self,
        prompts: Any,
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        *,
        request_id: str | None = None,
        group: str | None = None,
        media: dict[str, Any] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
    ) -> Coroutine[Any, Any, Completion] | list[dict[str, Any]]:
        """With SamplingParams and a request_id: the awaitable request of `RolloutEngine.generate`.

        With texts (or token ids, or conversations) and a dict: all responses, each {"text", "token_ids", "log_probs",
        "finish_reason", "prompt_index", "index"}, in the order of the prompts, n per prompt. The dict knows max_tokens (512),
        temperature (1.0), top_p, top_k, min_p, repetition_penalty, stop, stop_token_ids, ignore_eos, n, seed (None: anew
        with each call). ValueError for other names.
        """
        if isinstance(sampling, SamplingParams):
            if request_id is None:
                raise ValueError("generate: a request needs its request_id")
            return self.sample(prompts, sampling, request_id=request_id, group=group, media=media)
        if self._batch is None:
            self._batch = BatchCall(self.tokenizer, self._settings.seed)
        given = sampling_params if sampling_params is not None else sampling
        return self._host.call(self._batch.run(self, prompts, given))

    async def sample(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        *,
        request_id: str,
        group: str | None = None,
        media: dict[str, Any] | None = None,
    ) -> Completion:
        """See `RolloutEngine.generate`. `group` is not looked at: vLLM finds equal prompts by itself."""
        prompt = [int(i) for i in prompt_ids]
        self._check(request_id, prompt, sampling, media)
        live = self._live[request_id] = Live(request_id, prompt, [self._version])
        room = self._max_model_len - len(prompt)
        assert self._eos is not None
        arguments = request_arguments(
            sampling,
            room=room,
            end_ids=self._eos,
            final_only=self._api.final_only,
            known=self._api.sampling_arguments,
        )
        future = self._host.submit(self._response(live, arguments))
        done = await asyncio.wrap_future(future)
        if not (sampling.stop and sampling.start):
            return done
        return ended_at_seam(done, prompt[-sampling.start :], sampling.stop, self._text)

    def _check(
        self, request_id: str, prompt: list[int], sampling: SamplingParams, media: dict[str, Any] | None
    ) -> None:
        if self._asleep:
            raise RuntimeError("the sampler is asleep: call wake() before generate()")
        if self._broken:
            raise RuntimeError(f"the sampler must be started anew: a load of weights failed ({self._broken})")
        if not self._ready:
            raise RuntimeError(
                "the sampler has no weights yet (load_format=dummy): call load_weights() before generate()"
            )
        if request_id in self._live:
            raise ValueError(f"request_id {request_id!r} is being sampled already: ids must be unique")
        if media:
            raise ValueError("images are not in this release: leave media out")
        check_request(request_id, len(prompt), sampling, self._max_model_len)
        if sampling.stop and self._settings.skip_tokenizer_init:
            raise ValueError(
                f"request {request_id!r}: stop strings need vLLM's tokenizer: set rollout.skip_tokenizer_init=False "
                "(or stop_token_ids)"
            )

    async def _response(self, live: Live, arguments: dict[str, Any]) -> Completion:
        self._counters.begin()
        completion, prefilled = None, 0
        try:
            output = None
            if not live.aborted:
                params = self._api.sampling_params(**arguments)
                request, adapter = {"prompt_token_ids": live.prompt}, self._adapter_request
                stream = self._engine.generate(request, params, request_id=live.id, lora_request=adapter)
                async for final in stream:
                    output = final
            completion = live.completion(output)
            prefilled = len(live.prompt) - int(getattr(output, "num_cached_tokens", 0) or 0)
            return completion
        except Exception as error:
            if not getattr(self._engine, "errored", False):
                raise
            what = f"vLLM's own process ended ({type(error).__name__}): killed, out of memory, or crashed"
            raise EngineDead(f"{what}; what it printed before says why") from error
        finally:
            self._live.pop(live.id, None)
            self._counters.end(completion, prefilled)

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """See `RolloutEngine.abort`. Unknown or finished ids are ignored."""
        names = [n for n in list(self._live if request_ids is None else request_ids) if n in self._live]
        for name in names:
            self._live[name].aborted = True
        if names:
            self._host.submit(self._abort(names))

    async def _abort(self, names: list[str]) -> None:
        """Until they are gone: a request may be on its way to vLLM still."""
        while pending := [name for name in names if name in self._live]:
            await self._engine.abort(pending)
            await asyncio.sleep(0.005)

    # ---- weights

    def load_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """See `RolloutEngine.load_weights`, and `push_weights`."""
        self.push_weights(weights, version)

    def push_weights(
        self, weights: Iterable[tuple[str, Any]], version: int, *, checksums: bool = False
    ) -> SyncResult:
        """`load_weights` that says what the transfer took. Requests under way go on with the new weights, their cache
        computed anew. checksums: keep those of the arriving tensors for `checksums()`.

        Raises WeightSyncError with the worker's words for unknown or missing names; the engine is of no use after that.
        """
        with self._replacing(version):
            if self._adapter is None:
                return self._loading.send(weights, version, self.weights_dtype, checksums)
            return self._place_adapter(self._adapter, weights, version)

    @property
    def readers(self) -> list[str]:
        """See `RolloutEngine.readers`: every worker of vLLM reads for itself. An adapter is read here."""
        return self._loading.devices if self._adapter is None else [""]

    def try_channel(self, places: Sequence[tuple[str, int]], timeout: float) -> list[str]:
        """See `RolloutEngine.try_channel`."""
        if self._adapter is not None:
            return super().try_channel(places, timeout)
        return self._loading.try_channel(places, timeout).result(RPC_TIMEOUT)

    def receive_weights(
        self, places: Sequence[tuple[str, int]], version: int, *, timeout: float, verify: bool
    ) -> dict[str, str]:
        """See `RolloutEngine.receive_weights`, and `checksums`."""
        if self._adapter is not None:
            return super().receive_weights(places, version, timeout=timeout, verify=verify)
        with self._replacing(version):
            self._loading.from_channel(places, version, timeout, verify)
        return self.checksums() if verify else {}

    @contextlib.contextmanager
    def _replacing(self, version: int) -> Iterator[None]:
        """The block replaces the weights: memory for them is there, requests stand still, old cache is dropped after it."""
        if self._broken:
            raise RuntimeError(
                f"the sampler must be started anew: an earlier load of weights failed ({self._broken})"
            )
        self._ready = False
        if self._asleep and self._weights_gone:
            self._host.call(self._engine.wake_up(tags=["weights"]), RPC_TIMEOUT)
            self._weights_gone = False
        held = bool(self._live)
        if held:
            self._host.call(self._engine.pause_generation(mode="keep", clear_cache=True), RPC_TIMEOUT)
        try:
            yield
            if not self._host.call(self._engine.reset_prefix_cache(), RPC_TIMEOUT) and not held:
                raise RuntimeError("vLLM did not drop its prefix cache, which belongs to the old weights")
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            if held:  # nobody waits for ever for an engine that stands still
                self.abort()
                self._host.submit(self._engine.resume_generation())
            raise
        self._version, self._ready = version, True
        for live in list(self._live.values()):
            live.versions.append(version)
        if held:
            self._host.call(self._engine.resume_generation(), RPC_TIMEOUT)

    def _place_adapter(
        self, folder: AdapterFolder, weights: Iterable[tuple[str, Any]], version: int
    ) -> SyncResult:
        """Have every worker load the adapter anew, in place of the one before."""
        from verl.weight_sync.base import SyncResult
        from verl.weight_sync.verify import close_stream

        started = time.monotonic()
        try:
            path, moved = folder.write(weights, version, self.weights_dtype)
        finally:
            close_stream(weights)
        request, replacing = self._api.lora_requests(str(path))
        if replacing is None and self._adapter_request is not None:
            self._host.call(self._engine.remove_lora(request.lora_int_id), RPC_TIMEOUT)
        if not self._host.call(self._engine.add_lora(replacing or request), RPC_TIMEOUT):
            raise RuntimeError(f"vLLM did not take the adapter of version {version}")
        self._adapter_request = request
        return SyncResult(bytes=moved, seconds=time.monotonic() - started)

    @property
    def holds_adapter(self) -> bool:
        """True if vLLM adds the adapter itself: then that is what `load_weights` brings."""
        return self._adapter is not None

    def checksums(self) -> dict[str, str]:
        """Checksums by Hugging Face name of the tensors that every worker received in the last `load_weights` that asked for
        them, in the data type they travelled in. vLLM packs and fuses what it keeps, so those bytes cannot be compared.

        RuntimeError if two workers received different ones.
        """
        if self._adapter is not None:
            return self._adapter.checksums()
        found = self._host.call(self._engine.collective_rpc("verl_checksums"), RPC_TIMEOUT)
        if any(other != found[0] for other in found[1:]):
            raise RuntimeError("two workers of vLLM received different weights")
        return dict(found[0])

    @property
    def weights_dtype(self) -> Any:
        """What floating point weights are converted to on their way: vLLM's data type where that is a half one, else None."""
        import torch

        dtype = self._engine.model_config.dtype
        return dtype if dtype in (torch.bfloat16, torch.float16) else None

    @property
    def dead(self) -> bool:
        """See `RolloutEngine.dead`: vLLM's own process is gone, or a load of weights has failed."""
        return bool(self._broken) or bool(getattr(self._engine, "errored", False))

    # ---- memory

    def sleep(self) -> None:
        """Give the cache back, and the weights, where vLLM can; running requests end with "abort"."""
        if self._asleep:
            return
        self.abort()
        self._asleep = True
        if self._settings.free_cache_engine and self._api.sleeps:
            level = 2 if self._settings.load_format == "dummy" else 1
            self._host.call(self._engine.sleep(level=level), RPC_TIMEOUT)
            self._weights_gone = True
            self._ready = self._ready and level == 1

    def wake(self) -> None:
        """Undo `sleep`. Weights that were given back must be loaded again before the next request."""
        if self._asleep and self._settings.free_cache_engine and self._api.sleeps:
            # A load of weights in its sleep has woken these already.
            parts = {} if self._weights_gone else {"tags": ["kv_cache"]}
            self._host.call(self._engine.wake_up(**parts), RPC_TIMEOUT)
        self._asleep = self._weights_gone = False

    @property
    def version(self) -> int:
        return self._version

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers for this model."""
        from verl.data.tokenizer import load_tokenizer

        s = self._settings
        return load_tokenizer(
            s.model_path, tokenizer_path=s.tokenizer_path, trust_remote_code=s.trust_remote_code
        )

    def _text(self, ids: list[int]) -> str:
        """Special tokens included: a stop string may be one."""
        if self._decoder is None:
            self._decoder = self.tokenizer
        return str(self._decoder.decode(ids, skip_special_tokens=False))

    def stats(self) -> dict[str, float]:
        """Counters since the last call: busy_s, prompt_tokens (prefilled ones, without those found in the cache), tokens,
        preempted. A request counts when it is finished."""
        return self._counters.take()

    def close(self) -> None:
        """End vLLM and every process of it. May be called twice."""
        if self._closed:
            return
        self._closed = True
        _OPEN.discard(self)
        engine, self._engine = getattr(self, "_engine", None), None
        self.__dict__.pop("_loading", None)  # it holds the engine
        if engine is not None:
            with contextlib.suppress(concurrent.futures.TimeoutError):  # what is left is ended below
                self._host.call(_shutdown(engine), 60)
        del engine  # here, and not while the interpreter goes away: vLLM cleans up in __del__
        self._host.stop()
        launch.end(self._processes)
        remove_shared(self._shared)
        if self._config_folder is not None:
            self._config_folder.cleanup()
        if self._adapter is not None:
            self._adapter.remove()


async def _shutdown(engine: Any) -> None:
    engine.shutdown()


@atexit.register
def _close_all() -> None:
    for engine in list(_OPEN):
        engine.close()
