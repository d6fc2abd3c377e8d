"""What the Tinker API is asked for: sessions, training runs, sampling clients, and the request behind each call.

Ids are the SDK's: `SESSION:train:N` of a training run, `SESSION:sample:N` of a sampling client. Checkpoints,
`tinker://RUN/weights/NAME` and `tinker://RUN/sampler_weights/NAME`, lie in the folder of the run, which is laid out as
every run's.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from verl.checkpoint import open_checkpoint
from verl.checkpoint.read import newest_sealed
from verl.data.files import notice
from verl.engine.rollout.base import SamplingParams
from verl.rollout.http_sessions import NotFound
from verl.serving.models import Adapter, Base, LoraShape, Sampler, shape_of
from verl.serving.wire import LossRequest, loss_response, sample_response
from verl.serving.work import Job, Lane, Result, Work
from verl.tracking.run_folder import RunFolder

_SILENT_S = 3600.0
"""A session that nobody has been heard of for so long ends: its adapters leave memory. The SDK calls every 10 s."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_PATH = re.compile(r"tinker://([A-Za-z0-9][A-Za-z0-9:_-]*)/(weights|sampler_weights)/([^/]+)")
_EPHEMERAL = "ephemeral"  # snapshots without a name, in the folder of a run: they go with its session
_ADAM = {"learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"}


@dataclass(slots=True)
class Session:
    """One client program; seen: when it was heard of."""

    metadata: dict[str, Any] | None
    seen: float = field(default_factory=time.monotonic)
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Model:
    """A training run. adapter: there when the run's first request is done. last: when it was asked for something.
    sums: [loss, tokens] since the last step by metric."""

    folder: RunFolder
    metadata: dict[str, Any] | None
    shape: LoraShape
    lane: Lane = field(default_factory=Lane)
    adapter: Adapter | None = None
    last: float = field(default_factory=time.time)
    sums: dict[str, list[float]] = field(default_factory=dict)

    def trained(self) -> Adapter:
        """The adapter. ValueError where it could not be made."""
        if self.adapter is None:
            raise ValueError("this training run could not be created: see the error of create_model or load_weights")
        return self.adapter


@dataclass(frozen=True, slots=True)
class Sampling:
    """A sampling client: the checkpoint whose adapter it samples with, None for the base."""

    path: str | None
    place: Path | None
    shape: LoraShape | None


class Service:
    """The state of a server, which belongs to its event loop; the models belong to the worker's thread."""

    def __init__(self, base: Base, root: Path, *, most_adapters: int = 16):
        self.base, self.root, self.most_adapters = base, root, most_adapters
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplings: dict[str, Sampling] = {}
        self.work = Work()
        self._samplers: dict[LoraShape | None, Sampler] = {}
        self._awake: Sampler | None = None

    # -- sessions

    def open_session(self, metadata: dict[str, Any] | None) -> str:
        """A new session's id."""
        name = secrets.token_hex(8)
        self.sessions[name] = Session(metadata)
        return name

    def session(self, name: str) -> Session:
        """A session, which was heard of just now. NotFound if there is none."""
        if name not in self.sessions:
            raise NotFound(f"no session {name}: it has ended, or the server was started anew since")
        self.sessions[name].seen = time.monotonic()
        return self.sessions[name]

    def end_session(self, name: str) -> None:
        """Its adapters, sampling clients and results are dropped; checkpoints with names stay."""
        session = self.sessions.pop(name, None)
        for run in session.models if session else ():
            model = self.models.pop(run)
            model.folder.close()
            shutil.rmtree(model.folder.root / _EPHEMERAL, ignore_errors=True)
        for sampler in session.samplers if session else ():
            self.samplings.pop(sampler, None)
        self.work.forget(f"{name}:")

    async def tidy(self) -> None:
        """End sessions that nobody is heard of, for ever."""
        while True:
            await asyncio.sleep(60)
            for name, session in list(self.sessions.items()):
                if time.monotonic() - session.seen > _SILENT_S:
                    notice(f"session {name} has been silent for {_SILENT_S / 60:g} minutes: it has ended")
                    self.end_session(name)

    def close(self) -> None:
        """End everything."""
        self.work.close()
        for name in list(self.sessions):
            self.end_session(name)

    # -- training

    def create(self, session: str, number: int, shape: LoraShape | None, body: dict[str, Any]) -> tuple[str, Job]:
        """A new training run and the request that makes its adapter: a new one of this shape, or with None that of the
        checkpoint `body["path"]`."""
        owner, run = self.session(session), f"{session}:train:{number}"
        kind = (body.get("optimizer_config") or {}).get("type", "adamw")
        if body.get("base_model") not in (None, self.base.name, self.base.path):
            raise ValueError(f"base_model {body['base_model']!r} is not served here; {self.base.name!r} is")
        if kind != "adamw":
            raise ValueError(f"optimizer {kind!r} is not here; adamw is")
        place = None if shape else self.place(body["path"])
        if run not in self.models:
            if len(self.models) >= self.most_adapters:
                raise ValueError(f"{self.most_adapters} adapters are in memory, the limit of --max-adapters")
            shape = shape or shape_at(place)
            folder = RunFolder(self.root / run, notice)
            about = {"model": self.base.path, "lora": asdict(shape), "user_metadata": body.get("user_metadata")}
            folder.write_static(about | {"from": body.get("path")})
            self.models[run] = Model(folder, body.get("user_metadata"), shape)
            owner.models.append(run)
        model = self.models[run]
        seed = (body.get("lora_config") or {}).get("seed")
        seed = secrets.randbits(31) if seed is None else int(seed)

        def make() -> Result:
            self._rest()
            if place is None:
                model.adapter = Adapter(self.base, model.shape, seed)
            else:
                model.adapter = Adapter.load(self.base, place, optimizer=bool(body.get("optimizer")))
            kind = "create_model" if place is None else "load_weights"
            return {"type": kind, "model_id": run} | ({"path": body["path"]} if place else {})

        return run, self.work.submit(Job(f"{run}:0", _async(make)))

    def model(self, run: str) -> Model:
        """A training run in memory. NotFound if there is none."""
        if run not in self.models:
            raise NotFound(f"no training run {run} in memory: its session has ended, or the server was started anew")
        self.models[run].last = time.time()
        return self.models[run]

    def train(self, run: str, number: int | None, work: Callable[[Model], Result]) -> Job:
        """A numbered request of a training run."""
        model = self.model(run)

        def make() -> Result:
            self._rest()
            return work(model)

        number = model.lane.next if number is None else number
        return self.work.submit(Job(f"{run}:{number}", _async(make)), model.lane, number)

    def passes(self, request: LossRequest) -> Job:
        """`forward_backward`, and `forward`."""

        def work(model: Model) -> Result:
            data = request.data()
            if not data:
                raise ValueError("there is no data")
            config, backward = request.config, not request.forward_only
            outputs, metrics = model.trained().passes(data, request.loss, config, backward=backward)
            if backward:
                key = "train/loss" if request.loss == "cross_entropy" else "actor/pg_loss"
                sums = model.sums.setdefault(key, [0.0, 0.0])
                sums[0] += metrics["loss:sum"]
                weights = (datum.inputs.get("weights", datum.inputs["target_tokens"]) for datum in data)
                sums[1] += float(sum(np.count_nonzero(array) for array in weights))
            return loss_response(outputs, metrics)

        return self.train(request.model_id, request.seq_id, work)

    def optim_step(self, body: dict[str, Any]) -> Job:
        """One step of AdamW."""

        def work(model: Model) -> Result:
            params = body.get("adam_params")
            if params is None or (odd := params.keys() - _ADAM):
                raise ValueError(
                    f"optim_step takes adam_params with {sorted(_ADAM)}" + (f", not {odd}" if params else "")
                )
            adapter, rate = model.trained(), float(params.get("learning_rate", 1e-4))
            norm = adapter.step(
                float(params.get("grad_clip_norm", 0.0)),
                lr=rate,
                betas=(float(params.get("beta1", 0.9)), float(params.get("beta2", 0.95))),
                eps=float(params.get("eps", 1e-12)),
                weight_decay=float(params.get("weight_decay", 0.0)),
            )
            losses = {name: total / (count or 1.0) for name, (total, count) in model.sums.items()}
            model.sums.clear()
            model.folder.metrics(adapter.steps, losses | {"train/grad_norm": norm, "train/lr": rate})
            return {"metrics": {"grad_norm": norm}}

        return self.train(body["model_id"], body.get("seq_id"), work)

    def save(self, body: dict[str, Any]) -> Job:
        """`save_weights`: adapter and optimizer."""
        run = body["model_id"]

        def work(model: Model) -> Result:
            name = body.get("path") or f"{model.trained().steps:06d}"
            self._save(run, model, "weights", name, overwrite=bool(body.get("overwrite")))
            return {"type": "save_weights", "path": f"tinker://{run}/weights/{name}"}

        return self.train(run, body.get("seq_id"), work)

    def load(self, body: dict[str, Any]) -> Job:
        """`load_weights` into a training run that is there: a new adapter takes the place of its own."""

        def work(model: Model) -> Result:
            place, optimizer = self.place(body["path"]), bool(body.get("optimizer"))
            model.adapter = None  # its memory goes first
            model.adapter = Adapter.load(self.base, place, optimizer=optimizer)
            model.shape = model.adapter.shape
            return {"type": "load_weights", "path": body["path"], "model_id": body["model_id"]}

        return self.train(body["model_id"], body.get("seq_id"), work)

    def save_for_sampler(self, body: dict[str, Any]) -> Job:
        """`save_weights_for_sampler`: the adapter under a name, or a sampling client of a snapshot without one."""
        run, name, number = body["model_id"], body.get("path"), body.get("sampling_session_seq_id")
        session, sampler = run.split(":")[0], f"{run.split(':')[0]}:sample:{number}"

        def work(model: Model) -> Result:
            if body.get("kind", "snapshot") != "snapshot":
                raise ValueError(f"kind {body['kind']!r} is not here; snapshot is")
            if name is not None:
                self._save(run, model, "sampler_weights", name)
                return {"type": "save_weights_for_sampler", "path": f"tinker://{run}/sampler_weights/{name}"}
            place = self._save(run, model, _EPHEMERAL, str(number), overwrite=True)
            self.samplings[sampler] = Sampling(None, place, model.shape)
            self.sessions[session].samplers.append(sampler)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler}

        return self.train(run, body.get("seq_id"), work)

    def _save(self, run: str, model: Model, kind: str, name: str, *, overwrite: bool = False) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a checkpoint: letters, digits, '.', '_', '-', at most 128")
        place = model.folder.root / kind / name
        if newest_sealed(place) is not None and not overwrite:
            raise FileExistsError(f"tinker://{run}/{kind}/{name} is there already: another name, or overwrite=True")
        about = {"model": self.base.path, "name": self.base.name, "user_metadata": model.metadata}
        model.trained().save(place, about, optimizer=kind == "weights")
        return place

    def place(self, path: str) -> Path:
        """The folder of a checkpoint. NotFound where there is none."""
        match = _PATH.fullmatch(path)
        if match is None or not _NAME.fullmatch(match[3]):
            raise ValueError(f"{path!r} is no path like tinker://RUN/weights/NAME")
        place = self.root / match[1] / match[2] / match[3]
        if newest_sealed(place) is None:
            raise NotFound(f"{path} is not here")
        return place

    # -- sampling

    def open_sampler(self, session: str, number: int, path: str | None, base: str | None) -> str:
        """A sampling client for a checkpoint or, without a path, for the base; its id."""
        owner, name = self.session(session), f"{session}:sample:{number}"
        if path is None and base not in (self.base.name, self.base.path):
            raise ValueError(f"base_model {base!r} is not served here; {self.base.name!r} is")
        place = None if path is None else self.place(path)
        self.samplings[name] = Sampling(path, place, None if place is None else shape_at(place))
        owner.samplers.append(name)
        return name

    def sample(self, body: dict[str, Any]) -> Job:
        """`asample`."""
        name = body.get("sampling_session_id") or ""
        if name not in self.samplings:
            raise NotFound(f"no sampling client {name!r}: its session has ended, or the server was started anew")
        source, number = self.samplings[name], body.get("seq_id")
        number = secrets.token_hex(8) if number is None else number
        if odd := [
            key for key in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info") if body.get(key)
        ]:
            raise ValueError(f"{', '.join(odd)}: not here")

        async def work() -> Result:
            sampler, prompt = self._samplers[source.shape], _prompt(body["prompt"])
            params = sampling_params(body["sampling_params"], self.base.max_length - len(prompt))
            likely = int(body.get("topk_prompt_logprobs") or 0)
            log_probs = top = None
            if body.get("prompt_logprobs") or likely:
                log_probs, top = _of_prompt(sampler, prompt, body.get("prompt_logprobs_last_n"), likely)
            count, among = int(body.get("num_samples", 1)), int(body.get("topk_sample_logprobs") or 0)
            sequences = await sampler.sample(prompt, params, count, among)
            return sample_response(sequences, log_probs if body.get("prompt_logprobs") else None, top)

        shares = (source.shape, source.place)
        return self.work.submit(Job(f"{name}:{number}", work, shares, lambda: self._use(source)))

    # -- on the worker's thread

    def _use(self, source: Sampling) -> None:
        if (sampler := self._samplers.get(source.shape)) is None:
            self._rest(always=True)
            sampler = self._samplers[source.shape] = self.base.sampler(source.shape)
        if self._awake is not sampler:
            self._rest(always=True)
            self._awake = sampler
        sampler.use(source.place)

    def _rest(self, *, always: bool = False) -> None:
        """The sampler's memory is wanted by others; where it is the host's it keeps it, new pages cost more."""
        if self._awake is not None and (always or not self.base.platform.on_host):
            self._awake.rest()
            self._awake = None


def shape_at(place: Path | None) -> LoraShape:
    """The shape of the adapter in a checkpoint's folder."""
    path = None if place is None else newest_sealed(place)
    assert path is not None
    return shape_of(open_checkpoint(path, hashes=False))


def described(folder: Path) -> dict[str, Any]:
    """What the config.yaml of a training run says. NotFound without one."""
    with suppress(OSError):
        return dict(yaml.safe_load((folder / "config.yaml").read_text("utf-8")))
    raise NotFound(f"no training run {folder.name}")


def _async(make: Callable[[], Result]) -> Callable[[], Any]:
    async def work() -> Result:
        return make()

    return work


def _prompt(body: dict[str, Any]) -> np.ndarray:
    chunks = body["chunks"]
    if odd := {chunk.get("type") for chunk in chunks} - {"encoded_text"}:
        raise ValueError(f"the prompt has {odd}; this server takes text alone")
    return np.array([token for chunk in chunks for token in chunk["tokens"]], np.int64)


def sampling_params(body: dict[str, Any], room: int) -> SamplingParams:
    """The SDK's sampling_params. stop: None ends at end tokens alone, [] never; strings or ids end beside end tokens.
    room: tokens that a response may have where `max_tokens` is not set."""
    stop, limit = body.get("stop"), body.get("max_tokens")
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    seed, top_k = body.get("seed"), body.get("top_k")
    return SamplingParams(
        max_tokens=max(1, room) if limit is None else int(limit),
        temperature=float(body.get("temperature", 1.0)),
        top_p=float(body.get("top_p", 1.0)),
        top_k=-1 if top_k is None else int(top_k),
        stop=tuple(text for text in stops if isinstance(text, str)),
        stop_token_ids=tuple(int(token) for token in stops if not isinstance(token, str)),
        ignore_eos=stop is not None and not stops,
        seed=secrets.randbits(63) if seed is None else int(seed),
    )


def _of_prompt(sampler: Sampler, prompt: np.ndarray, last: int | None, likely: int) -> tuple[np.ndarray, Any]:
    """float32 [prompt] log-probs, NaN before the last ones; ids and log-probs of the most likely tokens in their
    places, with the SDK's mark of none (0, -99999) before."""
    known = len(prompt) - 1 if last is None else min(int(last), len(prompt) - 1)
    log_probs = np.full(len(prompt), np.nan, np.float32)
    ids, values = np.zeros((len(prompt), likely), np.int64), np.full((len(prompt), likely), -99999.0, np.float32)
    if known:
        log_probs[-known:], top = sampler.log_probs(prompt, known, likely)
        if top is not None:
            ids[-known:], values[-known:] = top
    return log_probs, (ids, values) if likely else None
