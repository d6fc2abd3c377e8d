"""Sampling with SGLang: its tokenizer manager in a thread of this process, its schedulers in processes of their own."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import os
import signal
import uuid
import weakref
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from verl.config import Config
from verl.config.model_facts import look
from verl.engine.registry import EnginePackageError
from verl.engine.rollout.base import (
    Completion,
    EngineDead,
    RolloutEngine,
    SamplingParams,
    check_request,
    not_finite,
)
from verl.engine.rollout.hosted import BusyTime, LoopThread, Process, end, end_token_ids, ended_at_seam
from verl.engine.rollout.settings import trainer_dtype
from verl.engine.rollout.sglang import ENGINE
from verl.engine.rollout.sglang.arguments import EngineSettings, engine_arguments, engine_settings, request_arguments
from verl.engine.rollout.sglang.kwargs import NO_PENALTY, problems, sglang_arguments
from verl.errors import UserError
from verl.models.pretrained import load_config
from verl.platform import Platform
from verl.platform.processes import alive, process_start_time, started_by
from verl.trajectory import Media
from verl.weight_sync.receiver import WeightReceiver
from verl.weight_sync.verify import WeightSyncError, close_stream, digesting

_RPC_TIMEOUT = 600.0
_BUCKET_BYTES = 256 << 20
_HEAD = "lm_head.weight"
_OPEN: weakref.WeakSet[SGLangEngine] = weakref.WeakSet()


@dataclass(slots=True)
class _Live:
    """One request. `rid`: its name in SGLang, which aborts all requests whose names begin like that of an aborted one."""

    rid: str
    versions: list[int]
    aborted: bool = False


class SGLangEngine(RolloutEngine, WeightReceiver):
    """Samples with SGLang.

    model_path: a Hugging Face directory. load_format: "auto" reads its weights, "dummy" makes random ones, to be replaced
        by `load_weights` before anything is sampled.
    device: "cpu" or "cuda". eos_token_ids: tokens that end a response; None: those that the model and its generation
        config name. bucket_bytes: size of one weight transfer.
    free_cache_engine: `sleep` releases memory (not on a CPU).
    engine_kwargs: further arguments of SGLang's ServerArgs.
    Seeds decide draws only with engine_kwargs enable_deterministic_inference. Raises UserError (EnginePackageError) if
    SGLang is absent or of a version that is not supported, or an argument cannot be passed.
    """

    def __init__(
        self,
        model_path: str,
        *,
        device: str = "cpu",
        eos_token_ids: Sequence[int] | None = None,
        bucket_bytes: int = _BUCKET_BYTES,
        **settings: Any,
    ):
        self._settings = s = EngineSettings(str(model_path), **settings)
        version, cpu = ENGINE.installed(), device == "cpu"
        if wrong := problems(s.engine_kwargs, sglang_arguments()):
            raise UserError("; ".join(f"{key}: {message}" for key, message in wrong))
        config = load_config(
            s.model_path, {"override_config": s.override_config, "trust_remote_code": s.trust_remote_code}
        )
        text = config.get_text_config()
        self._vocabulary = int(text.vocab_size)
        tied = bool(getattr(config, "tie_word_embeddings", False))
        self._names = set(look(s.model_path).weight_names()) - ({_HEAD} if tied else set())
        self._eos = list(end_token_ids(config, s.model_path, None) if eos_token_ids is None else eos_token_ids)
        self._sleeps = s.free_cache_engine and not cpu
        self._bucket_bytes = bucket_bytes
        self._live: dict[str, _Live] = {}
        self._busy = BusyTime()
        self._version = 0
        self._ready = s.load_format != "dummy"
        self._asleep = self._weights_gone = False
        self._broken = ""
        self._processes: set[Process] = set()
        self._engine: Any = None
        self._host = LoopThread("sglang-engine")
        _OPEN.add(self)
        try:
            arguments = engine_arguments(s, vocabulary=self._vocabulary, cpu=cpu)
            self._engine = self._host.call(_start(arguments, version, cpu))
            pids = self._engine.get_all_child_pids()
            self._processes = {(pid, process_start_time(pid)) for pid in pids}
        except BaseException:
            self.close()
            raise

    # ---- requests

    async def generate(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        *,
        request_id: str,
        group: str | None = None,
        session: str | None = None,
        media: Media | None = None,
    ) -> Completion:
        """See `RolloutEngine.generate`. Groups and sessions are not named: SGLang finds equal prefixes by itself."""
        prompt = [int(i) for i in prompt_ids]
        self._check(request_id, prompt, sampling, media)
        live = self._live[request_id] = _Live(uuid.uuid4().hex, [self._version])
        try:
            work = self._host.submit(self._response(live, prompt, sampling))
            completion = await asyncio.wrap_future(work)
        finally:
            self._live.pop(request_id, None)
        if not (sampling.stop and sampling.start):
            return completion
        return ended_at_seam(completion, prompt[-sampling.start :], sampling.stop, self._text)

    def _check(self, request_id: str, prompt: list[int], sampling: SamplingParams, media: Media | None) -> None:
        if self._asleep:
            raise RuntimeError("the sampler is asleep: call wake() before generate()")
        self._refuse_broken()
        if not self._ready:
            raise RuntimeError("the sampler has no weights yet: call load_weights() before generate()")
        if request_id in self._live:
            raise ValueError(f"request_id {request_id!r} is being sampled already: ids must be unique")
        if media is not None:
            raise ValueError(f"request {request_id!r} has images, which the sglang engine does not take")
        check_request(request_id, len(prompt), sampling, self._settings.max_model_len)
        if sampling.repetition_penalty != 1:
            raise ValueError(f"{sampling.repetition_penalty=}: {NO_PENALTY}")
        if sampling.min_p and self._settings.engine_kwargs.get("enable_deterministic_inference"):
            raise ValueError(f"{sampling.min_p=}: SGLang cannot combine it with enable_deterministic_inference")
        if sampling.ignore_eos and sampling.stop_token_ids:
            raise ValueError("SGLang takes no stop_token_ids with ignore_eos: set one of them")
        if sampling.stop and self._settings.skip_tokenizer_init:
            raise ValueError("stop strings need SGLang's tokenizer: build the engine with skip_tokenizer_init=False")

    def _refuse_broken(self) -> None:
        if self._broken:
            raise RuntimeError(f"the sampler must be started anew: a load of weights failed ({self._broken})")

    async def _response(self, live: _Live, prompt: list[int], sampling: SamplingParams) -> Completion:
        from sglang.srt.managers.io_struct import GenerateReqInput

        room = self._settings.max_model_len - len(prompt)
        arguments, cut = request_arguments(sampling, room=room, end_ids=self._eos, vocabulary=self._vocabulary)
        if live.aborted:
            return Completion(np.zeros(0, np.int64), np.zeros(0, np.float32), "abort", tuple(live.versions))
        options = {"return_logprob": True, "return_sampling_mask": cut, "rid": live.rid}
        request = GenerateReqInput(input_ids=prompt, sampling_params=arguments, **options)
        self._busy.count(1)
        try:
            output = await self._unless_dead(anext(self._manager.generate_request(request, None)))
        finally:
            self._busy.count(-1)
        return self._completion(output, live, len(prompt), cut)

    async def _unless_dead(self, work: Any) -> Any:
        """What the coroutine returns. EngineDead when a process of SGLang ends before: nothing answers then."""
        task = asyncio.ensure_future(work)
        while not (await asyncio.wait([task], timeout=1.0))[0]:
            if self.dead:
                task.cancel()
                raise EngineDead("a process of SGLang ended; what it printed before says why")
        return task.result()

    def _completion(self, output: dict[str, Any], live: _Live, prompt_tokens: int, cut: bool) -> Completion:
        """RuntimeError when SGLang gave the request up; FloatingPointError when a log-prob is not a number."""
        meta = output["meta_info"]
        ids = np.asarray(output["output_ids"], np.int64)
        reason = (meta["finish_reason"] or {}).get("type")
        if reason not in ("stop", "length", "abort"):
            raise RuntimeError(f"SGLang gave up a request after {len(ids)} tokens: {meta['finish_reason']}")
        if cut:
            values = meta.get("output_token_sampling_logprobs") or []
        else:
            values = [value for value, *_ in meta.get("output_token_logprobs") or []]
        log_probs = np.asarray(values, np.float32)
        if len(log_probs) != len(ids):
            raise RuntimeError(f"SGLang returned {len(log_probs)} log-probs for {len(ids)} tokens")
        if np.isnan(log_probs).any():
            raise not_finite(int(np.isnan(log_probs).argmax()), live.versions[-1])
        return Completion(
            token_ids=ids,
            log_probs=log_probs,
            finish_reason=reason,
            versions=tuple(live.versions),
            num_preempted=int(meta.get("num_retractions") or 0),
            prefilled=prompt_tokens - int(meta.get("cached_tokens") or 0),
        )

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """See `RolloutEngine.abort`. Unknown or finished ids are ignored."""
        names = [n for n in list(self._live if request_ids is None else request_ids) if n in self._live]
        for name in names:
            self._live[name].aborted = True
        if names:
            self._host.submit(self._abort([self._live[name].rid for name in names]))

    async def _abort(self, rids: list[str]) -> None:
        """Until they are gone: a request may be on its way to SGLang still."""
        while pending := {live.rid for live in list(self._live.values())}.intersection(rids):
            for rid in pending:
                self._manager.abort_request(rid)
            await asyncio.sleep(0.005)

    @property
    def _manager(self) -> Any:
        return self._engine.tokenizer_manager

    # ---- weights

    def load_weights(self, weights: Iterable[tuple[str, Any]], version: int, *, verify: str = "") -> dict[str, str]:
        """See `WeightReceiver.load_weights`. Requests under way go on with the new weights, their cache computed anew.

        Checksums are of what was handed to SGLang, which fuses its weights. Names are compared with those of the model's
        files: SGLang itself passes over what it does not know. The engine is of no use after an error.
        """
        self._refuse_broken()
        self._ready = False
        sums: dict[str, str] = {}
        try:
            with self._paused():
                self._send(digesting(weights, sums, verify) if verify else weights)
                for live in list(self._live.values()):
                    live.versions.append(version)
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            self.abort()
            raise
        finally:
            close_stream(weights)
        self._version, self._ready = version, True
        return sums

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """The block replaces weights: their memory is allocated, requests wait and lose their cache."""
        from sglang.srt.managers import io_struct

        if self._asleep and self._weights_gone:
            self._resume(["weights"])
            self._weights_gone = False
        self._call(self._manager.pause_generation(io_struct.PauseGenerationReqInput(mode="retract")))
        try:
            yield
            if not self._call(self._manager.flush_cache()).success:
                raise WeightSyncError("SGLang did not drop its prefix cache, which belongs to the old weights")
        finally:
            self._call(self._manager.continue_generation(io_struct.ContinueGenerationReqInput()))

    def _send(self, weights: Iterable[tuple[str, Any]]) -> None:
        """WeightSyncError with SGLang's message, ValueError for unknown or missing names."""
        from sglang.srt.managers import io_struct

        received: set[str] = set()
        bucket: list[tuple[str, torch.Tensor]] = []
        size = 0
        self._agreed(self._manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(selector="all")))
        for name, tensor in weights:
            if self._names and name not in self._names and name != _HEAD:
                raise ValueError(f"load_weights: {name!r} is no weight here")
            dtype = self.weights_dtype if tensor.is_floating_point() else None
            # Memory of its own: what a stream yields is overwritten by what it yields next.
            bucket.append((name, tensor.detach().to(dtype=dtype or tensor.dtype, copy=True)))
            received.add(name)
            size += tensor.nbytes
            if size >= self._bucket_bytes:
                self._update(bucket)
                bucket, size = [], 0
        if bucket:
            self._update(bucket)
        self._agreed(self._manager.end_weight_update(io_struct.EndWeightUpdateReqInput()))
        if missing := sorted(self._names - received):
            raise ValueError(f"load_weights: no value came for {len(missing)} weights, among them {missing[:3]}")

    def _update(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        payloads = [MultiprocessingSerializer.serialize(bucket) for _ in range(self._settings.tensor_parallel_size)]
        request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=payloads, flush_cache=False)
        self._agreed(self._manager.update_weights_from_tensor(request))

    def _agreed(self, work: Coroutine[Any, Any, tuple[bool, str]]) -> None:
        """SGLang reports a failed update by what it returns."""
        success, message = self._call(work)
        if not success:
            raise WeightSyncError(f"SGLang could not load the weights: {message}")

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._host.call(self._unless_dead(work), _RPC_TIMEOUT)

    @property
    def weights_dtype(self) -> Any:
        """The type that floating point weights are converted to for transfer: SGLang's if it is a half one, else None."""
        dtype = getattr(torch, self._settings.dtype, None)
        return dtype if dtype in (torch.bfloat16, torch.float16) else None

    @property
    def dead(self) -> bool:
        """See `RolloutEngine.dead`: a process of SGLang is gone, or a load of weights has failed."""
        return bool(self._broken) or self._engine is None or not all(alive(*process) for process in self._processes)

    # ---- memory

    def sleep(self) -> None:
        """Give the cache and the weights back (not on a CPU); running requests end with "abort"."""
        if self._asleep:
            return
        self.abort()
        self._asleep = True
        if self._sleeps:
            from sglang.srt.managers import io_struct

            tags = ["kv_cache", "weights"]
            request = io_struct.ReleaseMemoryOccupationReqInput(tags=tags)
            self._host.call(self._when_idle(request), _RPC_TIMEOUT)
            self._weights_gone, self._ready = True, False

    async def _when_idle(self, request: Any) -> None:
        while self._live:  # aborted requests are on their way out
            await asyncio.sleep(0.01)
        await self._manager.release_memory_occupation(request, None)

    def wake(self) -> None:
        """Undo `sleep`. Weights that were given back must be loaded again before the next request."""
        if self._asleep and self._sleeps:
            # A load of weights in its sleep has woken these already.
            self._resume(["weights", "kv_cache"] if self._weights_gone else ["kv_cache"])
        self._asleep = self._weights_gone = False

    def _resume(self, tags: list[str]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        self._call(self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags), None))

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
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def stats(self) -> dict[str, float]:
        """See `RolloutEngine.stats`."""
        return {"busy_s": self._busy.take()}

    def close(self) -> None:
        """End SGLang and its processes. May be called twice."""
        if self not in _OPEN:
            return
        _OPEN.discard(self)
        engine, self._engine = self._engine, None
        if engine is not None:
            # SGLang's own `shutdown` ends every child of this process, others' too.
            engine.tokenizer_manager._subprocess_watchdog.stop()
            engine.send_to_rpc.close(linger=0)
        self._host.stop()
        end(self._processes, patience=0.0)


async def _start(arguments: dict[str, Any], version: str, cpu: bool) -> Any:
    """SGLang's engine, tied to the running loop. EnginePackageError where it cannot be imported."""
    if cpu:
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    for name, value in ENGINE.environment.items():
        os.environ.setdefault(name, value)
    try:
        from sglang.srt.entrypoints.engine import Engine
    except (ImportError, OSError) as error:
        raise EnginePackageError(f"SGLang {version} cannot be imported: {error}") from error
    # A process of SGLang that fails sends this signal to its parent, which it would end. Python sets handlers only in
    # the main thread.
    ctypes.CDLL(None).signal(signal.SIGQUIT, ctypes.c_void_p(signal.SIG_IGN))
    mark = started_by(os.getpid())
    os.environ |= mark
    try:
        engine = Engine(**arguments)
    except (ValueError, TypeError) as error:
        raise UserError(f"SGLang refuses its arguments: {str(error)[:1500]}") from error
    finally:
        for name in mark:
            os.environ.pop(name, None)
        with contextlib.suppress(NameError):
            atexit.unregister(engine.shutdown)
    return engine


def build(config: Config, tokenizer: Any, platform: Platform) -> SGLangEngine:
    """The engine of a run, to be filled by a weight transfer. UserError where it cannot be used so."""
    model = config.actor_rollout_ref.model
    settings = engine_settings(config, trainer_dtype(config, platform))
    settings["eos_token_ids"] = end_token_ids(load_config(model.path, model), model.path, tokenizer)
    return SGLangEngine(**settings, device=platform.device().type)


@atexit.register
def _close_all() -> None:
    for engine in list(_OPEN):
        engine.close()
