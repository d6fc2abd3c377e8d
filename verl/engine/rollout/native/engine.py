"""The embedded sampler: continuous batching in this process, on the trainer's own weights.

`generate` queues a request and waits for its future. One asyncio task runs `step` after `step` while there is
work: a packed prefill if anything can be prefilled, else one token for every running response. Steps run inline on
the event loop's thread (one OpenMP pool; the same seed gives the same run); between two of them
every other coroutine has its turn.
"""

from __future__ import annotations

import asyncio
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from verl.engine.rollout.base import (
    Completion,
    OnTokens,
    RecordedRoutes,
    RolloutEngine,
    SamplingParams,
    check_request,
    not_finite,
)
from verl.engine.rollout.grammars import Grammars
from verl.engine.rollout.native.architecture import bytes_to_come, cache_needs, refuse_unfit
from verl.engine.rollout.native.cache import KVBlockPool, KVCacheLayout, cache_room, default_cache_tokens
from verl.engine.rollout.native.device_decode import Drawn, compiles
from verl.engine.rollout.native.runner import Runner
from verl.engine.rollout.native.sampling import Rows, sample
from verl.engine.rollout.native.scheduler import Prefill, Request, Scheduler, Stopper
from verl.engine.rollout.native.states import StatePool
from verl.engine.rollout.native.vision import ImageEncoder
from verl.models import positions, recurrent
from verl.models.adapters import PlainView, exported, is_adapted
from verl.models.checkpoint_names import CheckpointViews
from verl.models.inputs import VisionInputs, special_token_ids
from verl.models.mtp import is_extra
from verl.platform import platform_of
from verl.trajectory import Media
from verl.weight_sync.receiver import WeightReceiver
from verl.weight_sync.verify import FULL, SAMPLED, WeightSyncError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class NativeEngine(RolloutEngine, WeightReceiver):
    """Samples from a Hugging Face causal language model, one that sees images too.

    model: its parameters stay the trainer's; call `weights_updated` after each change of them.
    eos_token_ids: tokens that end a response. max_model_len: most tokens of prompt + response.
    max_num_seqs: most responses at a time. max_num_batched_tokens: most tokens of one prefill pass.
    cache_tokens: capacity of the key/value cache (None: enough for max_num_seqs full sequences, as far as
        gpu_memory_utilization of the device's free memory, less what the trainer will take, or on a CPU of half the
        machine's, has room). When it is full, the newest responses wait and are computed again later.
    dtype: "float32", or "bfloat16" = the products and attention of torch.autocast, master weights untouched.
    tokenizer: only for stop strings and grammars. forbidden_token_ids: never sampled. enforce_eager: no captured graphs
        on a GPU.
    engines: how many samplers share the machine's memory, for the size of the cache where it is not given.
    record_routes: completions say which experts their tokens went to; no captured graphs then.
    owns_weights: nobody else uses the model's tensors: `sleep` takes them to host memory.
    """

    streams = True

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: Sequence[int],
        max_model_len: int,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        cache_tokens: int | None = None,
        gpu_memory_utilization: float = 0.5,
        dtype: str | torch.dtype = "float32",
        tokenizer: Any | None = None,
        forbidden_token_ids: Sequence[int] = (),
        enforce_eager: bool = False,
        engines: int = 1,
        record_routes: bool = False,
        owns_weights: bool = False,
    ):
        dtype = str(dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ValueError(f"dtype={dtype!r}: the embedded sampler computes in {' or '.join(_DTYPES)}")
        refuse_unfit(model)
        recurrent.attach(model)
        compute = _DTYPES[dtype]
        self._eos = frozenset(int(i) for i in eos_token_ids)
        self._max_model_len = max_model_len
        positions.settle(model, max_model_len)
        device = next(model.parameters()).device
        self._platform = platform_of(device)
        # Measured where cache_tokens are given, too: it refuses a model that never asks for attention.
        needs = cache_needs(model, compute)
        room = {"share": gpu_memory_utilization, "taken_later": bytes_to_come(model, compute)}
        states = None
        if needs.state:
            states = StatePool.fit(needs.state, cache_room(device, engines, **room), max_num_seqs, device)
            room["share"] /= 2
        if cache_tokens is None:
            cache_tokens = default_cache_tokens(needs.token, device, max_num_seqs, max_model_len, engines, **room)
        reason = "" if states is None else "layers of linear attention"
        reason = reason or compiles(device, compute, needs.heads)
        paged = not reason
        layout = KVCacheLayout.fit(cache_tokens, max_model_len, max_num_seqs, paged=paged)
        self._pool = KVBlockPool(layout, device, self._platform.key_dtype(compute), compute, paged=paged, states=states)
        self._scheduler = Scheduler(self._pool, max_num_seqs, max_num_batched_tokens)
        vision = VisionInputs.of(model)
        self._images = None if vision is None else ImageEncoder(model, vision)
        forbidden = (*forbidden_token_ids, *special_token_ids(model.config))
        self._runner = Runner(model, self._scheduler, compute, forbidden, self._images)
        self._runner.record_routes = record_routes
        if paged:
            eager = enforce_eager or record_routes
            self._runner.decode_on_device(max_model_len, None if eager else self._platform.graph_recorder())
        elif self._platform.graph_recorder() is not None:
            warnings.warn(f"sampling is slower, by torch's operators and without graphs: {reason}", stacklevel=2)
        self._drawn: Drawn | None = None  # what the device draws while its step before is settled
        self._scheduler.settle = self._settle_drawn
        self._stopper = Stopper(tokenizer)
        self._grammars = Grammars(tokenizer, self._eos)
        self._requests: dict[str, Request] = {}
        self._submitted = 0
        self._version = 0
        self._incomplete = ""
        self._task: asyncio.Task[None] | None = None
        self._asleep, self._owns_weights = False, owns_weights
        self._busy_s = 0.0

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
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """See `RolloutEngine.generate`."""
        prompt = np.asarray(prompt_ids, np.int64)
        self._check(request_id, prompt, sampling, media)
        images = None if self._images is None else self._images.of_prompt(prompt, media)
        written = prompt[len(prompt) - sampling.start :].tolist()
        request = Request(
            id=request_id,
            number=self._submitted,
            group_key=f"request {request_id}" if group is None else f"group {group}",
            prompt=prompt,
            sampling=sampling,
            future=asyncio.get_running_loop().create_future(),
            max_tokens=min(sampling.max_tokens, self._max_model_len - len(prompt)),
            stop_ids=frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else self._eos),
            images=images,
            session=session,
            on_tokens=on_tokens,
            progress=self._grammars.begin(sampling.grammar, written) if sampling.grammar else None,
        )
        self._scheduler.add(request)
        self._requests[request_id] = request
        self._submitted += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            return await request.future
        except asyncio.CancelledError:
            self.abort([request_id])
            raise

    def _check(self, request_id: str, prompt: np.ndarray, sampling: SamplingParams, media: Any) -> None:
        if self._asleep:
            raise RuntimeError("the sampler is asleep: call wake() before generate()")
        if self._incomplete:
            raise RuntimeError(f"the sampler's weights are not whole ({self._incomplete}): load them again")
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} is being sampled already: ids must be unique")
        if media is not None and self._images is None:
            raise ValueError(f"request {request_id!r} has images, and the model sees none")
        check_request(request_id, len(prompt) if prompt.ndim == 1 else 0, sampling, self._max_model_len)
        self._stopper.check(sampling.stop)

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """See `RolloutEngine.abort`. Unknown or finished ids are ignored."""
        self._settle_drawn()
        for name in list(self._requests if request_ids is None else request_ids):
            if name in self._requests:
                self._finish(self._requests[name], "abort")

    def end_session(self, session: str) -> None:
        """See `RolloutEngine.end_session`."""
        self._scheduler.end_session(session)

    def _finish(self, request: Request, reason: str) -> None:
        self._scheduler.finish(request)
        del self._requests[request.id]
        if not request.future.done():
            request.future.set_result(request.completion(reason))

    # ---- the loop

    async def _run(self) -> None:
        await asyncio.sleep(0)  # let everybody who is about to submit do so: the first batch is wider
        try:
            while self._requests:
                self.step()
                await asyncio.sleep(0)
        except Exception as error:
            failed, self._requests, self._drawn = self._requests, {}, None
            for request in failed.values():
                self._scheduler.finish(request)
                if not request.future.done():
                    request.future.set_exception(error)
            self._scheduler.forget_cache()

    def step(self) -> None:
        """One forward pass and what follows from it: on a device from the pass before, while this one runs."""
        begin = time.monotonic()
        with self._runner.ready():
            if self._drawn is not None and (self._drawn.known or any(map(_follows_grammar, self._scheduler.running))):
                self._settle_drawn()  # what follows is drawn from logits here, or was
            work = self._scheduler.prefill()
            rows = self._scheduler.decode() if work is None else [request for request, _ in work.sampled]
            drawn = self._launch(work, rows)
        self._settle_drawn()
        self._drawn = drawn
        if self._runner.device_decode is None:
            self._settle_drawn()
        self._busy_s += time.monotonic() - begin

    def _launch(self, work: Prefill | None, rows: list[Request]) -> Drawn | None:
        """Make a pass and draw the next token of each of `rows`; None if nobody gets one."""
        device, drawn = self._runner.device_decode, None
        here = device is None or any(map(_follows_grammar, rows))
        if work is not None:
            logits = self._runner.prefill(work)
            if rows:
                drawn = self._draw(rows, logits) if here or device is None else device.draw(logits, rows)
        elif not rows:
            return None
        elif device is None:
            drawn = self._draw(rows, self._runner.decode(rows))
        elif here:
            drawn = self._draw(rows, device.logits(rows))
        else:
            before = self._drawn.requests if self._drawn is not None else ()
            drawn = device.decode(rows, {request: row for row, request in enumerate(before)})
        if self._runner.routes is not None:
            record = self._recording(work, rows, self._runner.routes)
            if drawn is None:  # those of the pass before come first
                self._settle_drawn()
                record()
            else:
                drawn = replace(drawn, record=record)
        for request in rows:
            request.in_flight += 1
        return drawn

    def _recording(self, work: Prefill | None, rows: list[Request], routes: Tensor) -> Callable[[], None]:
        """What waits for the routes of a pass, [tokens, layers, k], and keeps them: of a prefill, or of the newest
        token of each row that goes on."""
        pieces: list[tuple[Request | None, RecordedRoutes, int, int]]
        pieces = [(row, row.routes, row.length - 1, 1) for row in rows]
        if work is not None:
            pieces = [(None, span.routes, span.start, len(span.ids)) for span in work.spans]
        host = self._platform.pinned(routes.numel()).copy_(routes.flatten().int(), non_blocking=True)
        wait = self._platform.marker()

        def record() -> None:
            wait()
            experts, at = host.numpy().reshape(routes.shape).astype(np.int16), 0
            for request, recorded, start, count in pieces:
                if request is None or self._requests.get(request.id) is request:
                    recorded.add(start, experts[at : at + count])
                at += count

        return record

    def _draw(self, requests: list[Request], logits: Tensor) -> Drawn:
        """Draw the next token of each request by torch's operators."""
        rows = Rows.of([r.sampling for r in requests], [r.sampling.start + r.written for r in requests])
        penalised = {}
        for i in np.flatnonzero(rows.penalty != 1.0):
            ids = np.concatenate((requests[i].prompt, requests[i].tokens)).astype(np.int64)
            penalised[int(i)] = torch.from_numpy(np.unique(ids)).to(logits.device)
        for row, progress in enumerate(request.progress for request in requests):
            if progress is not None:
                allowed = torch.from_numpy(progress.allowed(logits.shape[1])).to(logits.device)
                logits[row].masked_fill_(~allowed, -torch.inf)
        tokens, log_probs, sets = sample(logits, rows, seen=penalised)
        return Drawn(requests, lambda: (tokens.tolist(), log_probs.tolist(), sets), known=True)

    def _settle_drawn(self) -> bool:
        """Take the tokens that were being drawn and see who is done. False if there were none."""
        drawn, self._drawn = self._drawn, None
        if drawn is None:
            return False
        drawn.record()
        tokens, log_probs, sets = drawn.result()
        sets = sets or [b""] * len(tokens)
        for request, token, log_prob, allowed in zip(drawn.requests, tokens, log_probs, sets, strict=True):
            request.in_flight -= 1
            if self._requests.get(request.id) is not request:
                continue  # over since the token before
            if math.isnan(log_prob):
                raise not_finite(request.written, self._version)
            request.tokens.append(token)
            if request.progress is not None:
                request.progress.take(token)
            request.log_probs.append(log_prob)
            request.sets.append(allowed)
            if request.on_tokens is not None:
                request.on_tokens([token])
            if not request.versions or request.versions[-1] != self._version:
                request.versions.append(self._version)
            if reason := self._stopper.reason(request):
                self._finish(request, reason)
        return True

    # ---- weights and memory

    def weights_updated(self, version: int) -> None:
        """The shared parameters have changed: cached prompts are dropped, running responses recompute their cache."""
        self._settle_drawn()
        self._version = version
        if self._images is not None:
            self._images.forget()
        self._runner.weights_updated()
        self._scheduler.forget_cache()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights this engine samples with, under the names of a Hugging Face checkpoint; views, not copies (but of
        weights with an adapter, which are merged)."""
        return exported(self._runner.model) if self.holds_adapter else self._views.named()

    @property
    def holds_adapter(self) -> bool:
        """True if the model has an adapter: then that is what `load_weights` replaces."""
        return any(is_adapted(part) for part in self._runner.model.modules())

    def checksums(self, verify: str = FULL, dtype: torch.dtype | None = None) -> dict[str, str]:
        """Name → digest of every weight as the trainer sends them (`verl.weight_sync.verify.checksums`); only of the
        adapter's tensors if there is one.

        What is derived from the weights (packed products, copies in another data type) is compared with them.
        Raises WeightSyncError naming those that differ. dtype: hash the weights as converted to it.
        """
        from verl.weight_sync.verify import checksums

        self._runner.linears.check(sampled=verify == SAMPLED)
        adapter = PlainView(self._runner.model).adapter_state().items() if self.holds_adapter else None
        return checksums(adapter or self.named_weights(), verify, dtype=dtype)

    def check_shared(self, module: nn.Module, verify: str) -> None:
        """WeightSyncError unless `module` is this engine's own, and the copies that it computes with equal its weights
        (`SAMPLED`: in two columns of each matrix)."""
        if module is not self._runner.model:
            raise WeightSyncError("weight sync: the sampler does not read the trainer's own module")
        self._runner.linears.check(sampled=verify == SAMPLED)

    @property
    def readers(self) -> list[str]:
        """See `WeightReceiver.readers`."""
        return [self._platform.memory_id(self._runner.device)]

    def load_weights(self, weights: Iterable[tuple[str, Any]], version: int, *, verify: str = "") -> dict[str, str]:
        """See `WeightReceiver.load_weights`: copies into this engine's model, one tensor at a time.

        Names are those of a Hugging Face checkpoint, or of the model's own tensors; tied weights may be left out. For a
        model with an adapter they are the adapter's, as peft's files name them: its base stays. Layers that predict
        further tokens are passed over.
        An error leaves a mixture of old and new: until a load succeeds, `generate` refuses.
        """
        from verl.weight_sync.verify import close_stream

        self._bring_weights(self._runner.device)
        adapter = PlainView(self._runner.model).adapter_state()
        targets = adapter or dict(self._runner.model.state_dict()) | dict(self.named_weights())
        received = set()
        self._incomplete = f"loading version {version} has not finished"
        try:
            with torch.no_grad():
                layers = int(self._runner.model.config.get_text_config().num_hidden_layers)
                for name, tensor in weights:
                    if is_extra(name, layers) and name not in targets:
                        continue
                    if name not in targets or targets[name].shape != tensor.shape:
                        shape = tuple(tensor.shape)
                        raise ValueError(f"load_weights: {name!r} is no weight here, of shape {shape}")
                    targets[name].copy_(tensor)
                    received.add(name)
            if missing := sorted(adapter.keys() - received) if adapter else self._views.missing(received):
                some = f"{len(missing)} weights, among them {missing[:3]}"
                raise ValueError(f"load_weights: no value came for {some}")
        except BaseException as error:
            self._incomplete = f"loading version {version} failed: {type(error).__name__}: {error}"
            raise
        finally:
            close_stream(weights)
            self.weights_updated(version)
        self._incomplete = ""
        return self.checksums(verify) if verify else {}

    @cached_property
    def _views(self) -> CheckpointViews:
        return CheckpointViews(self._runner.model)

    def _bring_weights(self, device: torch.device) -> None:
        if self._owns_weights:
            self._runner.model.to(device)  # type: ignore[arg-type]

    def sleep(self) -> None:
        """Drop the cache and the copies of weights, its own weights too, and return their memory to the device."""
        self._settle_drawn()
        self._scheduler.forget_cache()
        self._pool.drop()
        if self._images is not None:
            self._images.forget()
        self._runner.release()
        self._bring_weights(torch.device("cpu"))
        self._platform.empty_cache()
        self._asleep = True

    def wake(self) -> None:
        """Undo `sleep`; what the trainer has freed meanwhile goes back to the device before the cache grows again."""
        if self._asleep:
            self._platform.empty_cache()
            self._bring_weights(self._runner.device)
        self._asleep = False

    @property
    def version(self) -> int:
        return self._version

    def stats(self) -> dict[str, float]:
        """See `RolloutEngine.stats`."""
        out, self._busy_s = {"busy_s": self._busy_s}, 0.0
        if self._images is not None:
            out["images"], self._images.encoded = float(self._images.encoded), 0
        return out

    def close(self) -> None:
        """Stop everything and free the cache."""
        self.abort()
        self._scheduler.forget_cache()
        self._pool.drop()


def _follows_grammar(request: Request) -> bool:
    """Whether its tokens are drawn by torch's operators, from logits that its grammar masks."""
    return request.progress is not None
