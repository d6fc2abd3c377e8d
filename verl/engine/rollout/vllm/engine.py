"""Sampling with vLLM: its asynchronous engine in processes of its own, weights brought there through shared memory.

    caller's loop or thread ── generate ──▶ thread with vLLM's loop ── vLLM's sockets ──▶ engine process(es)
              load_weights ── BucketSender ───── shared memory ───────────────────────────▶ worker extension

Two ways to ask, one name: `await generate(token_ids, sampling, request_id=...)` is the request of `RolloutEngine`;
`generate(["text", ...], sampling_params={...})` samples for a list at once and needs no event loop.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import cached_property
from tempfile import TemporaryDirectory
from typing import Any

import torch

from verl.config import Config
from verl.engine.rollout.base import Completion, EngineDead, SamplingParams
from verl.engine.rollout.grammars import Grammars
from verl.engine.rollout.hosted import RPC_TIMEOUT, HostedEngine, Live, end_token_ids
from verl.engine.rollout.settings import moving_adapter, trainer_dtype
from verl.engine.rollout.vllm import launch
from verl.engine.rollout.vllm.arguments import (
    EngineSettings,
    cache_bytes,
    engine_arguments,
    engine_settings,
    request_arguments,
)
from verl.engine.rollout.vllm.batch import BatchCall
from verl.engine.rollout.vllm.images import ImageInputs
from verl.engine.rollout.vllm.kwargs import check_images, vllm_arguments
from verl.engine.rollout.vllm.part import VLLMPart
from verl.engine.rollout.vllm.requests import completion
from verl.engine.rollout.vllm.weights import AdapterFolder, WorkerChannel
from verl.engine.rollout.vllm.worker import remove_shared
from verl.models.pretrained import load_config
from verl.platform import Platform
from verl.platform.host_resources import available_memory
from verl.platform.processes import process_start_time
from verl.trajectory import Media
from verl.weight_sync.verify import close_stream

_BUCKET_BYTES = 256 << 20


class VLLMEngine(HostedEngine):
    """Samples with vLLM.

    model_path: a Hugging Face directory or id. load_format: "auto" reads its weights, "dummy" makes random ones, to be
        replaced by `load_weights` before anything is sampled.
    eos_token_ids: tokens that end a response; None: those that the model, its generation config and its tokenizer name.
    tokenizer_path: where the tokenizer is, if not with the model; needed for texts, and for stop strings, for which
        skip_tokenizer_init must be off.
    free_cache_engine: `sleep` releases memory (on devices where vLLM can). bucket_bytes: size of one weight transfer.
    lora: the adapter_config.json of an adapter that vLLM adds to the model itself; `load_weights` then brings the
        adapter's tensors (names of peft's files less their prefix) and not the model's.
    limit_images: the most per prompt; mm_processor_kwargs: of the model's image processor (finds the largest image).
    engines: how many of these share the machine's memory; on a CPU each takes its part of the share.
    engine_kwargs: further arguments of vLLM, checked against those of the installed version.
    The other names are vLLM's and those of `rollout.*` (docs/vllm.md). Raises UserError (EnginePackageError) if vLLM is
    absent or of a version that is not supported, or an argument cannot be passed.
    """

    package = "vLLM"

    def __init__(
        self,
        model_path: str,
        *,
        eos_token_ids: Sequence[int] | None = None,
        bucket_bytes: int = _BUCKET_BYTES,
        notice: Callable[[str], None] = lambda text: None,
        **settings: Any,
    ):
        s = EngineSettings(str(model_path), **settings)
        cpu, sleeps = launch.platform()
        launch.check_main_script()
        # vLLM's sockets, which it leaves behind however it ends, and the configuration it reads. The name is short:
        # that of a socket has at most 107 characters.
        self._folder = TemporaryDirectory(prefix="verl-")
        model_config = launch.model_config(s, self._folder.name)
        kind = launch.model_kind(model_config)
        arguments = engine_arguments(s, vllm_arguments(), cpu=cpu, sleeps=sleeps, **kind, notice=notice)
        launch.check_router(model_config)
        if kind["vision"]:
            check_images()
        if model_config.model_type == "kimi_vl":
            from verl.engine.rollout.vllm import kimi_vl

            arguments = kimi_vl.arguments(arguments, s, model_config, self._folder.name)
        if s.override_config:
            arguments["hf_config_path"] = self._folder.name
        if cpu:
            launch.check_cpu_model(model_config, s.dtype)
            launch.check_cpu_experts(s)
            launch.check_cpu_drafts(s)
            # vLLM would size its cache by the whole machine.
            arguments.setdefault("kv_cache_memory_bytes", cache_bytes(model_config, s, available_memory()))
        self._sleeps = s.free_cache_engine and sleeps
        # vLLM 0.32 pads such a prompt with drafts of nothing, takes it for one under way, and reads another's state.
        self._shortest = 2 if kind["linear"] and arguments.get("speculative_config") else 1
        self._adapter = AdapterFolder(s.lora) if s.lora is not None else None
        self._adapter_request: Any = None
        self._shared = ""
        self._routed: list[int] = []  # layers whose routes are recorded
        super().__init__(s, ready=s.load_format != "dummy" and s.lora is None)
        try:
            with launch.environment(cpu, s.ranks, self._folder.name, eager=bool(arguments.get("enforce_eager"))):
                self._engine = self._host.call(_in_loop(launch.start, arguments))
            devices = self._host.call(self._begin())
            processor = self._engine.input_processor
            self._images = ImageInputs(model_config, processor) if kind["vision"] else None
            # Without a name of its own here: what this frame names would outlive `close`.
            self._channel = WorkerChannel(self._host, self._rpc, devices, bucket_bytes, notice)
            self._max_model_len = int(s.max_model_len or self._engine.model_config.max_model_len)
            if eos_token_ids is None:
                tokenizer = None if s.skip_tokenizer_init else self.tokenizer
                eos_token_ids = end_token_ids(model_config, s.model_path, tokenizer)
            self._eos = list(eos_token_ids)
        except BaseException:
            self.close()
            raise

    async def _begin(self) -> list[str]:
        """Tell the workers which process to end with; learn what must be cleaned up, and the device of each worker."""
        this = os.getpid(), process_start_time(os.getpid()), self._folder.name
        reports = await self._rpc("verl_begin", args=this)
        self._processes = {(pid, start) for row in reports for pid, start in row["processes"]}
        self._shared = str(reports[0]["shared"])
        self._routed = reports[0]["routed"] if self._settings.record_routes else []
        return [str(row["device"]) for row in reports]

    async def _rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """Call a method of every worker; vLLM's own call returns the results of the first copy alone."""
        if self._settings.copies == 1:
            return list(await self._engine.collective_rpc(method, args=args))
        call = "collective_rpc", method, None, args, None
        results: list[list[Any]] = await self._engine.engine_core.call_utility_all_async(*call)
        return [result for workers in results for result in workers]

    # ---- requests

    def generate(  # type: ignore[override]
        self,
        prompts: Any,
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        *,
        request_id: str | None = None,
        group: str | None = None,
        session: str | None = None,
        media: Media | None = None,
        sampling_params: Mapping[str, Any] | None = None,
    ) -> Coroutine[Any, Any, Completion] | list[dict[str, Any]]:
        """With SamplingParams and a request_id: the awaitable request of `RolloutEngine.generate`.

        With texts (or token ids, or conversations) and a dict: all responses, each {"text", "token_ids", "log_probs",
        "finish_reason", "prompt_index", "index"}, in the order of the prompts, n per prompt. The dict may have
        max_tokens (512), temperature (1.0), top_p, top_k, min_p, repetition_penalty, stop, stop_token_ids, ignore_eos,
        n, seed (None: a new one for each call). ValueError for other names.
        """
        if isinstance(sampling, SamplingParams):
            if request_id is None:
                raise ValueError("generate: a request needs its request_id")
            return self.sample(prompts, sampling, request_id=request_id, group=group, media=media)
        parameters = sampling_params if sampling_params is not None else sampling
        return self._host.call(self._batch.run(self.sample, prompts, parameters))

    @cached_property
    def _batch(self) -> BatchCall:
        return BatchCall(self.tokenizer, self._settings.seed)

    def _check(self, request_id: str, prompt_tokens: int, sampling: SamplingParams, media: Media | None) -> None:
        super()._check(request_id, prompt_tokens, sampling, media)
        if sampling.grammar:
            self._check_grammar(sampling)
        if prompt_tokens < self._shortest:
            raise ValueError(
                f"request {request_id!r}: with linear attention and drafts vLLM needs 2 tokens of a prompt"
            )
        if 0 < sampling.temperature < 0.01:
            raise ValueError(f"{sampling.temperature=}: vLLM samples at 0.01 or above, or at 0 (greedy)")

    def _check_grammar(self, sampling: SamplingParams) -> None:
        """ValueError for a grammar that vLLM cannot follow, or whose sets cannot be told."""
        if self._settings.skip_tokenizer_init:
            raise ValueError("vLLM follows a grammar with its tokenizer: set rollout.skip_tokenizer_init=False")
        if sampling.start:
            raise ValueError("vLLM cannot go on within a grammar after new weights")
        if sampling.truncated:
            raise ValueError("vLLM does not say which tokens top_p, top_k or min_p left of those of a grammar")
        self._grammars.begin(sampling.grammar)

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer)

    async def _response(self, live: Live, sampling: SamplingParams) -> Completion:
        room = self._max_model_len - len(live.prompt)
        forbidden = self._images.forbidden if self._images is not None else ()
        arguments = request_arguments(sampling, room=room, end_ids=self._eos, forbidden=forbidden)
        try:
            output = None if live.aborted else await self._final_output(live, arguments)
            finished = completion(live, output, self._routed)
            if sampling.grammar:
                size = self._engine.model_config.get_vocab_size()
                finished.sampling_mask = self._grammars.sets(sampling.grammar, (), finished.token_ids.tolist(), size)
            return finished
        except Exception as error:
            if not self._engine.errored:
                raise
            raise EngineDead("vLLM's own process ended; what it printed before says why") from error

    async def _final_output(self, live: Live, arguments: dict[str, Any]) -> Any:
        """vLLM's last word on a request, None if it was aborted before the first."""
        output = None
        for _ in range(1 if live.media is None else 2):  # an image that vLLM has forgotten is sent again
            fields = {"request_id": live.key, "lora_request": self._adapter_request}
            if (copies := self._settings.copies) > 1:
                fields["data_parallel_rank"] = live.copy(copies)
            stream = self._engine.generate(self._prompt(live), launch.request_parameters(arguments), **fields)
            async for final in stream:
                output = final
            if output is None or output.outputs[0].finish_reason != "error":
                break
        return output

    def _prompt(self, live: Live) -> dict[str, Any]:
        if self._images is None:
            return {"prompt_token_ids": live.prompt}
        try:
            return self._images.prompt(live.prompt, live.media)
        except ValueError as error:
            raise ValueError(f"request {live.id!r}: {error}") from error

    async def _abort_now(self, keys: list[str]) -> None:
        await self._engine.abort(keys)

    # ---- weights

    def load_weights(self, weights: Iterable[tuple[str, Any]], version: int, *, verify: str = "") -> dict[str, str]:
        """See `WeightReceiver.load_weights`. Requests under way go on with the new weights, their cache computed anew.

        Checksums are of what every worker received: vLLM packs and fuses its weights, so their bytes do not compare.
        Raises WeightSyncError with the worker's words for unknown or missing names; the engine is of no use after that.
        """
        with self._replacing(version):
            if self._adapter is None:
                return self._channel.send(weights, version, self.weights_dtype, verify)
            return self._place_adapter(self._adapter, weights, version, verify)

    @property
    def readers(self) -> list[str]:
        """See `WeightReceiver.readers`: every worker of vLLM reads for itself. An adapter is read here."""
        return self._channel.devices if self._adapter is None else [""]

    def try_channel(self, places: Sequence[tuple[str, int]], timeout: float) -> list[str]:
        """See `WeightReceiver.try_channel`."""
        if self._adapter is not None:
            return super().try_channel(places, timeout)
        return self._channel.try_channel(places, timeout).result(RPC_TIMEOUT)

    def receive_weights(
        self, places: Sequence[tuple[str, int]], version: int, *, timeout: float, verify: str = ""
    ) -> dict[str, str]:
        """See `WeightReceiver.receive_weights`."""
        if self._adapter is not None:
            return super().receive_weights(places, version, timeout=timeout, verify=verify)
        with self._replacing(version):
            return self._channel.receive(places, version, timeout, verify)

    def _allocate_weights(self) -> None:
        self._call(self._engine.wake_up(tags=["weights"]))

    def _pause(self) -> bool:
        paused = bool(self._live)
        if paused:
            self._call(self._engine.pause_generation(mode="keep", clear_cache=True))
        return paused

    async def _resume(self) -> None:
        await self._engine.resume_generation()

    def _forget(self, paused: bool) -> None:
        if not self._call(self._engine.reset_prefix_cache()) and not paused:
            raise RuntimeError("vLLM did not drop its prefix cache, which belongs to the old weights")
        if self._images is not None:
            self._call(self._engine.reset_encoder_cache())

    def _place_adapter(
        self, folder: AdapterFolder, weights: Iterable[tuple[str, Any]], version: int, verify: str
    ) -> dict[str, str]:
        """Have every worker load the adapter anew, in place of the one before."""
        try:
            path = folder.write(weights, version, self.weights_dtype)
        finally:
            close_stream(weights)
        self._adapter_request, replacing = launch.lora_requests(str(path))
        if not self._call(self._engine.add_lora(replacing)):
            raise RuntimeError(f"vLLM did not take the adapter of version {version}")
        return folder.checksums(path, verify) if verify else {}

    @property
    def weights_dtype(self) -> Any:
        """The type that floating point weights are converted to for transfer: vLLM's if it is a half one, else None."""
        dtype = self._engine.model_config.dtype
        return dtype if dtype in (torch.bfloat16, torch.float16) else None

    @property
    def dead(self) -> bool:
        """See `RolloutEngine.dead`: vLLM's own process is gone, or a load of weights has failed."""
        return bool(self._broken) or self._engine is None or bool(self._engine.errored)

    # ---- memory

    def sleep(self) -> None:
        """Give the cache back, and the weights, where vLLM can; running requests end with "abort"."""
        if self._asleep:
            return
        self.abort()
        self._asleep = True
        if self._sleeps:
            level = 2 if self._settings.load_format == "dummy" else 1
            self._call(self._engine.sleep(level=level))
            self._weights_gone = True
            self._ready = self._ready and level == 1

    def wake(self) -> None:
        """Undo `sleep`. Weights that were given back must be loaded again before the next request."""
        if self._asleep and self._sleeps:
            # A load of weights in its sleep has woken these already.
            parts = {} if self._weights_gone else {"tags": ["kv_cache"]}
            self._call(self._engine.wake_up(**parts))
        self._asleep = self._weights_gone = False

    def _shut_down(self) -> None:
        engine, self._engine = self._engine, None
        self.__dict__.pop("_channel", None)  # it holds the engine
        if engine is not None:
            with contextlib.suppress(concurrent.futures.TimeoutError):  # what is left is ended later
                self._host.call(_in_loop(engine.shutdown), 60)
        del engine  # here, and not while the interpreter goes away: vLLM cleans up in __del__

    def _clean_up(self) -> None:
        remove_shared(self._shared)
        self._folder.cleanup()
        if self._adapter is not None:
            self._adapter.remove()


def build(config: Config, tokenizer: Any, platform: Platform) -> VLLMEngine | VLLMPart:
    """The engine of a run, to be filled by a weight transfer, or its part on this node. UserError where it cannot be
    used so."""
    if config.actor_rollout_ref.rollout.engine_kwargs.vllm.get("node_rank"):
        return VLLMPart(config, platform)
    model = config.actor_rollout_ref.model
    settings = engine_settings(config, trainer_dtype(config, platform))
    settings["eos_token_ids"] = end_token_ids(load_config(model.path, model), model.path, tokenizer)
    if lora := moving_adapter(config):
        # The base comes from the model's files: a transfer brings the adapter alone.
        dummy = settings["load_format"] == "dummy"
        settings |= {"lora": lora.described(), "load_format": "auto" if dummy else settings["load_format"]}
    return VLLMEngine(**settings)


async def _in_loop(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in the thread of the loop."""
    return function(*arguments)
