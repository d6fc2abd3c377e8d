"""Sampling with SGLang: its tokenizer manager in a thread of this process, its schedulers in processes of their own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from verl.config import Config
from verl.config.model_facts import look
from verl.engine.rollout.base import Completion, EngineDead, SamplingParams
from verl.engine.rollout.hosted import HostedEngine, Live, end, end_token_ids
from verl.engine.rollout.settings import moving_adapter, trainer_dtype
from verl.engine.rollout.sglang import ENGINE
from verl.engine.rollout.sglang.adapter import NAME, Adapter
from verl.engine.rollout.sglang.arguments import EngineSettings, engine_arguments, engine_settings, request_arguments
from verl.engine.rollout.sglang.images import ImageInputs
from verl.engine.rollout.sglang.kwargs import NO_PENALTY, problems, sglang_arguments
from verl.engine.rollout.sglang.launch import start
from verl.engine.rollout.sglang.part import SGLangPart
from verl.engine.rollout.sglang.routes import Routing
from verl.errors import UserError
from verl.models.inputs import sees_images
from verl.models.mtp import is_extra
from verl.models.pretrained import load_config
from verl.models.sampling_mask import encode_set
from verl.platform import Platform
from verl.platform.processes import alive
from verl.trajectory import Media
from verl.weight_sync.verify import WeightSyncError, close_stream, digesting

T = TypeVar("T")
_BUCKET_BYTES = 256 << 20
_HEAD = "lm_head.weight"


class SGLangEngine(HostedEngine):
    """Samples with SGLang.

    model_path: a Hugging Face directory. load_format: "auto" reads its weights, "dummy" makes random ones, to be
        replaced by `load_weights` before anything is sampled.
    device: "cpu" or "cuda". eos_token_ids: tokens that end a response; None: those that the model and its generation
        config name. bucket_bytes: size of one weight transfer.
    free_cache_engine: `sleep` releases memory (not on a CPU).
    lora: the adapter_config.json of an adapter that SGLang adds to the model itself; `load_weights` then brings the
        adapter's tensors (names of peft's files less their prefix) and not the model's.
    record_routes: completions say which experts their tokens went to.
    engine_kwargs: further arguments of SGLang's ServerArgs.
    Seeds decide draws only with engine_kwargs enable_deterministic_inference. Raises UserError (EnginePackageError) if
    SGLang is absent or of a version that is not supported, or an argument cannot be passed.
    """

    package = "SGLang"

    def __init__(
        self,
        model_path: str,
        *,
        device: str = "cpu",
        eos_token_ids: Sequence[int] | None = None,
        bucket_bytes: int = _BUCKET_BYTES,
        **settings: Any,
    ):
        s = EngineSettings(str(model_path), **settings)
        ENGINE.installed()
        cpu = device == "cpu"
        if wrong := problems(s.engine_kwargs, sglang_arguments()):
            raise UserError("; ".join(f"{key}: {message}" for key, message in wrong))
        config = load_config(
            s.model_path, {"override_config": s.override_config, "trust_remote_code": s.trust_remote_code}
        )
        text = config.get_text_config()
        self._vocabulary = int(text.vocab_size)
        tied = bool(getattr(config, "tie_word_embeddings", False))
        names = set(look(s.model_path).weight_names()) - ({_HEAD} if tied else set())
        self._layers = int(text.num_hidden_layers)
        self._names = {name for name in names if not is_extra(name, self._layers)}  # its drafts have others
        self._routing = Routing(text, self._names) if s.record_routes else None
        self._eos = list(end_token_ids(config, s.model_path, None) if eos_token_ids is None else eos_token_ids)
        self._sleeps = s.free_cache_engine and not cpu
        self._bucket_bytes, self._max_model_len = bucket_bytes, s.max_model_len
        self._adapter = Adapter(s.lora, s.payloads) if s.lora is not None else None
        super().__init__(s, ready=s.load_format != "dummy" and s.lora is None)
        try:
            self._images = ImageInputs(ENGINE, config) if sees_images(config) else None
            arguments = engine_arguments(s, vocabulary=self._vocabulary, cpu=cpu)
            self._engine, self._processes = self._host.call(start(arguments, cpu))
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
        """See `RolloutEngine.generate`."""
        return await self.sample(prompt_ids, sampling, request_id=request_id, group=group, media=media)

    def _check(self, request_id: str, prompt_tokens: int, sampling: SamplingParams, media: Media | None) -> None:
        super()._check(request_id, prompt_tokens, sampling, media)
        if sampling.repetition_penalty != 1:
            raise ValueError(f"{sampling.repetition_penalty=}: {NO_PENALTY}")
        if sampling.min_p and self._settings.engine_kwargs.get("enable_deterministic_inference"):
            raise ValueError(f"{sampling.min_p=}: SGLang cannot combine it with enable_deterministic_inference")
        if sampling.ignore_eos and sampling.stop_token_ids:
            raise ValueError("SGLang takes no stop_token_ids with ignore_eos: set one of them")

    async def _response(self, live: Live, sampling: SamplingParams) -> Completion:
        from sglang.srt.managers.io_struct import GenerateReqInput

        room = self._max_model_len - len(live.prompt)
        arguments, cut = request_arguments(sampling, room=room, end_ids=self._eos, vocabulary=self._vocabulary)
        options: dict[str, Any] = {"return_logprob": True, "return_sampling_mask": cut, "rid": live.key}
        options["lora_path"] = NAME if self._adapter is not None else None
        options["return_routed_experts"] = self._routing is not None
        if (copies := self._settings.copies) > 1:
            options["routed_dp_rank"] = live.copy(copies)
        if self._images is not None:
            arguments["logit_bias"] = dict.fromkeys(map(str, self._images.forbidden), -math.inf)
            options |= self._images.options(live)
        if live.aborted:
            return live.completion("SGLang", "abort", [], [])
        request = GenerateReqInput(input_ids=live.prompt, sampling_params=arguments, **options)
        output = await self._unless_dead(anext(self._manager.generate_request(request, None)))
        meta = output["meta_info"]
        if cut:
            log_probs = meta.get("output_token_sampling_logprobs")
            left = [np.unique(np.asarray(ids, np.int32)) for ids in meta.get("output_token_sampling_mask") or []]
            sets = np.array([encode_set(ids, self._vocabulary) for ids in left], object)
        else:
            log_probs = [value for value, *_ in meta.get("output_token_logprobs") or []]
        return live.completion(
            "SGLang",
            (meta["finish_reason"] or {}).get("type"),
            output["output_ids"],
            log_probs,
            num_preempted=int(meta.get("num_retractions") or 0),
            prefilled=len(live.prompt) - int(meta.get("cached_tokens") or 0),
            routed_experts=self._routing.routes(meta) if self._routing is not None else None,
            sampling_mask=sets if cut and sampling.record_mask else None,
        )

    async def _unless_dead(self, work: Any) -> Any:
        """What the coroutine returns. EngineDead when a process of SGLang ends before: nothing answers then."""
        task = asyncio.ensure_future(work)
        while not (await asyncio.wait([task], timeout=1.0))[0]:
            if self.dead:
                task.cancel()
                raise EngineDead("a process of SGLang ended; what it printed before says why")
        return task.result()

    async def _abort_now(self, keys: list[str]) -> None:
        for key in keys:  # SGLang aborts all requests whose names begin so
            self._manager.abort_request(key)

    @property
    def _manager(self) -> Any:
        return self._engine.tokenizer_manager

    # ---- weights

    def load_weights(self, weights: Iterable[tuple[str, Any]], version: int, *, verify: str = "") -> dict[str, str]:
        """See `WeightReceiver.load_weights`. Requests under way go on with the new weights, their cache computed anew.

        Checksums are of what was handed to SGLang, which fuses its weights. Names are compared with those of the
        model's files: SGLang itself passes over what it does not know. The engine is of no use after an error.
        """
        sums: dict[str, str] = {}
        try:
            with self._replacing(version):
                checked = digesting(weights, sums, verify) if verify else weights
                self._send(checked) if self._adapter is None else self._place(self._adapter, checked)
        finally:
            close_stream(weights)
        return sums

    def _allocate_weights(self) -> None:
        self._restore(["weights"])

    def _pause(self) -> bool:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._call(self._manager.pause_generation(PauseGenerationReqInput(mode="retract")))
        return True

    async def _resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._manager.continue_generation(ContinueGenerationReqInput())

    def _forget(self, paused: bool) -> None:
        if not self._call(self._manager.flush_cache()).success:
            raise WeightSyncError("SGLang did not drop its prefix cache, which belongs to the old weights")

    def _send(self, weights: Iterable[tuple[str, Any]]) -> None:
        """WeightSyncError with SGLang's message, ValueError for unknown or missing names."""
        from sglang.srt.managers import io_struct

        received: set[str] = set()
        bucket: list[tuple[str, torch.Tensor]] = []
        size = 0
        self._agreed(self._manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(selector="all")))
        for name, tensor in weights:
            if is_extra(name, self._layers):
                continue
            if self._names and name not in self._names and name != _HEAD:
                raise ValueError(f"load_weights: {name!r} is no weight here")
            bucket.append((name, self._copy(tensor)))
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

    def _place(self, adapter: Adapter, weights: Iterable[tuple[str, Any]]) -> None:
        tensors = {name: self._copy(tensor) for name, tensor in weights}
        self._call(adapter.place(self._manager, tensors))

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """In the type of the transfer, in memory of its own: what a stream yields is overwritten by what it yields
        next."""
        dtype = self.weights_dtype if tensor.is_floating_point() else None
        return tensor.detach().to(dtype=dtype or tensor.dtype, copy=True)

    def _update(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        payloads = self._settings.payloads(bucket)
        request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=payloads, flush_cache=False)
        self._agreed(self._manager.update_weights_from_tensor(request))

    def _agreed(self, work: Coroutine[Any, Any, tuple[bool, str]]) -> None:
        """SGLang reports a failed update by what it returns."""
        success, message = self._call(work)
        if not success:
            raise WeightSyncError(f"SGLang could not load the weights: {message}")

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return super()._call(self._unless_dead(work))

    @property
    def weights_dtype(self) -> Any:
        """The type that floating point weights are converted to for transfer: SGLang's if it is a half one, else
        None."""
        dtype = getattr(torch, self._settings.dtype, None)
        return dtype if dtype in (torch.bfloat16, torch.float16) else None

    @property
    def dead(self) -> bool:
        """See `RolloutEngine.dead`: a process of SGLang is gone, or a load of weights has failed."""
        return bool(self._broken) or self._engine is None or not all(alive(*process) for process in self._processes)

    # ---- memory

    def sleep(self) -> None:
        """Give the cache and the weights back (not on a CPU); running requests end with "abort". Weights that a
        transfer does not bring stay in host memory meanwhile."""
        if self._asleep:
            return
        self.abort()
        self._asleep = True
        if self._sleeps:
            from sglang.srt.managers import io_struct

            tags = ["kv_cache", "weights"]
            request = io_struct.ReleaseMemoryOccupationReqInput(tags=tags)
            super()._call(self._when_idle(request))
            self._weights_gone, self._ready = True, self._ready and self._settings.load_format != "dummy"

    async def _when_idle(self, request: Any) -> None:
        while self._live:  # aborted requests are on their way out
            await asyncio.sleep(0.01)
        await self._manager.release_memory_occupation(request, None)

    def wake(self) -> None:
        """Undo `sleep`. Weights that are not in host memory must be loaded again before the next request."""
        if self._asleep and self._sleeps:
            # A load of weights in its sleep has woken these already.
            self._restore(["weights", "kv_cache"] if self._weights_gone else ["kv_cache"])
        self._asleep = self._weights_gone = False

    def _restore(self, tags: list[str]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        self._call(self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags), None))

    def _shut_down(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            # SGLang's own `shutdown` ends every child of this process, others' too.
            engine.tokenizer_manager._subprocess_watchdog.stop()
            engine.send_to_rpc.close(linger=0)
            self._call(_close_sockets(engine.tokenizer_manager))
            end(self._processes, patience=0.0)


async def _close_sockets(manager: Any) -> None:
    """Close the sockets to SGLang's processes, in the loop that polls them. Messages to a process that is gone would
    otherwise keep the garbage collection of their context waiting for ever; a task that still reads from one would
    print a traceback."""
    for task in manager.asyncio_tasks:
        task.cancel()
    await asyncio.gather(*manager.asyncio_tasks, return_exceptions=True)
    manager.send_to_scheduler.context.destroy(linger=0)


def build(config: Config, tokenizer: Any, platform: Platform) -> SGLangEngine | SGLangPart:
    """The engine of a run, to be filled by a weight transfer, or its part on this node. UserError where it cannot be
    used so."""
    if config.actor_rollout_ref.rollout.engine_kwargs.sglang.get("node_rank"):
        return SGLangPart(config, platform)
    model = config.actor_rollout_ref.model
    settings = engine_settings(config, trainer_dtype(config, platform))
    settings["eos_token_ids"] = end_token_ids(load_config(model.path, model), model.path, tokenizer)
    if lora := moving_adapter(config):
        # The base comes from the model's files: a transfer brings the adapter alone.
        dummy = settings["load_format"] == "dummy"
        settings |= {"lora": lora.described(), "load_format": "auto" if dummy else settings["load_format"]}
    return SGLangEngine(**settings, device=platform.device().type)
