"""What the Tinker API is asked for: sessions, training runs, sampling clients, and the work behind each call.

Methods take the JSON body of a call and return that of the answer, or the `Job` whose result the client fetches.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from verl.checkpoint import Checkpoint, open_checkpoint
from verl.checkpoint.manifest import NAME as MANIFEST
from verl.checkpoint.read import newest_sealed
from verl.data.files import notice
from verl.engine.rollout.base import SamplingParams
from verl.rollout.http_sessions import PROTOBUF, NotFound
from verl.serving.models import Adapter, Base, LoraShape, Sampler, shape_of
from verl.serving.wire import LossRequest, loss_response, sample_response
from verl.serving.work import Job, Lane, Result, Work
from verl.tracking.run_folder import RunFolder

_SILENT_S = 3600.0
"""A session that nobody has been heard of for so long ends: its adapters leave memory. The SDK calls every 10 s."""
_GONE_S = 120.0
"""After so long it ends where a new adapter needs the room: the SDK does not say that its program has ended."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_RUN = re.compile(r"[A-Za-z0-9]+:train:[0-9]+")
_EPHEMERAL = "ephemeral"  # snapshots without a name, in the folder of a run: they go with its session
_SNAPSHOTS = 16
"""The newest ones of a run stay; of older ones those that nobody has sampled from for `_SILENT_S`."""
_ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
_LATER = "its session has ended, or the server was started anew"
Body = dict[str, Any]


@dataclass(slots=True)
class Session:
    """One client program; seen: when it was heard of."""

    seen: float = field(default_factory=time.monotonic)
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Model:
    """A training run. adapter: there when the run's first request is done. sums: [loss, tokens] since the last step by
    metric."""

    run: str
    folder: RunFolder
    metadata: Body | None
    shape: LoraShape
    lane: Lane = field(default_factory=Lane)
    adapter: Adapter | None = None
    sums: dict[str, list[float]] = field(default_factory=dict)

    def trained(self) -> Adapter:
        """The adapter. ValueError where it could not be made."""
        if self.adapter is None:
            raise ValueError("this training run has no adapter: see the error of create_model or load_weights")
        return self.adapter


@dataclass(slots=True)
class Sampling:
    """A sampling client: the checkpoint whose adapter it samples with, None for the base. used: when it was asked last;
    removed: its snapshot is no more."""

    path: str | None
    place: Path | None
    shape: LoraShape | None
    used: float = field(default_factory=time.monotonic)
    removed: bool = False


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

    def capabilities(self, body: Body) -> Result:
        """The one model that is served."""
        limits = {"model_name": self.base.name, "max_context_length": self.base.max_length}
        return {"supported_models": [limits | {"trainable": True, "sampleable": True}]}

    def cancel(self, body: Body) -> Result:
        """Nobody waits for a request any more."""
        self.work.cancel(body["request_id"])
        return {}

    # -- sessions

    def create_session(self, body: Body) -> Result:
        """A new session."""
        name = secrets.token_hex(8)
        self.sessions[name] = Session()
        return {"type": "create_session", "session_id": name}

    def session(self, name: str) -> Session:
        """A session, which was heard of just now. NotFound if there is none."""
        if name not in self.sessions:
            raise NotFound(f"no session {name}: {_LATER}")
        self.sessions[name].seen = time.monotonic()
        return self.sessions[name]

    def heartbeat(self, body: Body) -> Result:
        """The session's program lives."""
        self.session(body["session_id"])
        return {"type": "session_heartbeat"}

    def finish(self, body: Body) -> Result:
        """The session's program says that it is done."""
        self.session(body["id"])
        self.end_session(body["id"])
        return {}

    def end_session(self, name: str) -> None:
        """Its adapters, sampling clients and results are dropped; checkpoints with names stay."""
        session = self.sessions.pop(name)
        for model in [self.models.pop(run) for run in session.models]:
            model.folder.close()
            shutil.rmtree(model.folder.root / _EPHEMERAL, ignore_errors=True)
        for sampler in session.samplers:
            self.samplings.pop(sampler, None)
        self.work.forget(f"{name}:")

    async def tidy(self) -> None:
        """End sessions that nobody is heard of, and remove snapshots that nobody uses, for ever."""
        while True:
            await asyncio.sleep(60)
            self._end_silent(_SILENT_S, self.sessions)
            self.remove_snapshots()

    def remove_snapshots(self) -> None:
        """A loop that makes a sampling client in each step does not fill the disk: those of long ago go."""
        samplings = list(self.samplings.items())  # the worker's thread adds some
        for model in self.models.values():
            folder = model.folder.root / _EPHEMERAL
            snapshots = [(n, s) for n, s in samplings if s.place and s.place.parent == folder and not s.removed]
            for name, snapshot in snapshots[:-_SNAPSHOTS]:
                idle = time.monotonic() - snapshot.used > _SILENT_S
                if idle and snapshot.place and not self.work.pending(f"{name}:"):
                    snapshot.removed = True
                    shutil.rmtree(snapshot.place, ignore_errors=True)

    def _end_silent(self, seconds: float, names: Iterable[str]) -> None:
        for name in list(names):
            if time.monotonic() - self.sessions[name].seen > seconds:
                notice(f"session {name} has been silent for {seconds / 60:g} minutes: it has ended")
                self.end_session(name)

    def _make_room(self) -> None:
        """End sessions that are silent, longest first, until another adapter may come. ValueError if none may."""
        for name in sorted(self.sessions, key=lambda name: self.sessions[name].seen):
            if len(self.models) >= self.most_adapters and self.sessions[name].models:
                self._end_silent(_GONE_S, [name])
        if len(self.models) >= self.most_adapters:
            raise ValueError(
                f"{self.most_adapters} adapters are in memory, the limit of --max-adapters; those of a program that "
                f"has ended go {_GONE_S / 60:g} minutes after its end, when others need the room"
            )

    def close(self) -> None:
        """End everything."""
        self.work.close()
        for name in list(self.sessions):
            self.end_session(name)

    # -- training

    def create_model(self, body: Body) -> Job:
        """A new training run."""
        lora = dict(body.get("lora_config") or {})
        seed = lora.pop("seed", None)
        if not lora:
            raise ValueError("create_model without lora_config: adapters alone are trained here")
        seed = secrets.randbits(31) if seed is None else int(seed)

        def make(model: Model) -> Result:
            model.adapter = Adapter(self.base, model.shape, seed)
            return {"type": "create_model", "model_id": model.run}

        return self._create(body, LoraShape(**lora), make)

    def load_weights(self, body: Body) -> Job:
        """A checkpoint into a training run that is there, whose own adapter it replaces, or into a new one."""

        def load(model: Model) -> Result:
            place = self.place(body["path"])  # here, since a numbered request that is refused would hold up later ones
            self._shape(place)
            if body.get("optimizer") and place.parent.name != "weights":
                raise ValueError(f"{body['path']} has no optimizer: save_state writes one")
            model.adapter = None  # its memory goes first
            model.adapter = Adapter.load(self.base, place, optimizer=bool(body.get("optimizer")))
            model.shape = model.adapter.shape
            return {"type": "load_weights", "path": body["path"], "model_id": model.run}

        if body.get("session_id") is None:
            return self._train(body, load)
        return self._create(body, self._shape(self.place(body["path"])), load)

    def _create(self, body: Body, shape: LoraShape, make: Callable[[Model], Result]) -> Job:
        owner, run = self.session(body["session_id"]), f"{body['session_id']}:train:{int(body['model_seq_id'])}"
        kind = (body.get("optimizer_config") or {}).get("type", "adamw")
        if body.get("base_model") not in (None, self.base.name, self.base.path):
            raise ValueError(f"base_model {body['base_model']!r} is not served here; {self.base.name!r} is")
        if kind != "adamw":
            raise ValueError(f"optimizer {kind!r} is not here; adamw is")
        if run not in self.models:
            self._make_room()
            metadata, folder = body.get("user_metadata"), RunFolder(self.root / run, notice)
            about = {"model": self.base.path, "lora": asdict(shape), "user_metadata": metadata}
            folder.write_static(about | {"from": body.get("path")})
            self.models[run] = Model(run, folder, metadata, shape)
            owner.models.append(run)
        model = self.models[run]
        return self.work.submit(Job(f"{run}:0", self._alone(lambda: make(model))))

    def model(self, run: str) -> Model:
        """A training run in memory. NotFound if there is none."""
        if run not in self.models:
            raise NotFound(f"no training run {run} in memory: {_LATER}")
        self.session(run.partition(":")[0])
        return self.models[run]

    def get_info(self, body: Body) -> Result:
        """What a training run trains."""
        base, model = self.base, self.model(body["model_id"])
        data = {"arch": base.module.config.model_type, "model_name": base.name, "tokenizer_id": base.path}
        about = {"model_id": model.run, "is_lora": True, "lora_rank": model.shape.rank, "model_name": base.name}
        return {"type": "get_info", "model_data": data} | about

    def _train(self, body: Body, work: Callable[[Model], Result]) -> Job:
        """A numbered request of a training run."""
        model = self.model(body["model_id"])
        number = body.get("seq_id")
        number = model.lane.next if number is None else int(number)
        job = Job(f"{model.run}:{number}", self._alone(lambda: work(model)))
        return self.work.submit(job, model.lane, number)

    def _alone(self, make: Callable[[], Result]) -> Callable[[], Any]:
        async def work() -> Result:
            self._rest()
            return make()

        return work

    def forward_backward(self, body: Body) -> Job:
        """Passes over data, with their gradient unless the request is for the forward pass alone."""
        if not isinstance(body.get("data"), bytes):
            raise ValueError(f"forward_backward takes a body of {PROTOBUF}")
        request = LossRequest(body["data"])
        loss, backward = request.loss, not request.forward_only

        def work(model: Model) -> Result:
            data = request.data()
            outputs, metrics = model.trained().passes(data, loss, request.config, backward=backward)
            if backward:
                sums = model.sums.setdefault("train/loss" if loss == "cross_entropy" else "actor/pg_loss", [0.0, 0.0])
                counted = (datum.inputs.get("weights", datum.inputs["target_tokens"]) for datum in data)
                sums[0] += metrics["loss:sum"]
                sums[1] += float(sum(np.count_nonzero(array) for array in counted))
            return loss_response(outputs, metrics)

        return self._train({"model_id": request.model_id, "seq_id": request.seq_id}, work)

    def optim_step(self, body: Body) -> Job:
        """One step of AdamW."""

        def work(model: Model) -> Result:
            params = body.get("adam_params")
            if params is None or params.keys() - _ADAM.keys():
                raise ValueError(f"optim_step takes adam_params with {', '.join(_ADAM)}; got {params}")
            rate, beta1, beta2, eps, decay, clip = (float(value) for value in (_ADAM | params).values())
            adapter = model.trained()
            norm = adapter.step(clip, lr=rate, betas=(beta1, beta2), eps=eps, weight_decay=decay)
            losses = {name: total / (count or 1.0) for name, (total, count) in model.sums.items()}
            model.sums.clear()
            model.folder.metrics(adapter.steps, losses | {"train/grad_norm": norm, "train/lr": rate})
            return {"metrics": {"grad_norm": norm}}

        return self._train(body, work)

    def save_weights(self, body: Body) -> Job:
        """Adapter and optimizer, under a name."""

        def work(model: Model) -> Result:
            name = body.get("path") or f"{model.trained().steps:06d}"
            self._save(model, "weights", name, overwrite=bool(body.get("overwrite")))
            return {"type": "save_weights", "path": f"tinker://{model.run}/weights/{name}"}

        return self._train(body, work)

    def save_weights_for_sampler(self, body: Body) -> Job:
        """The adapter under a name, or without one a sampling client of a snapshot."""
        session, _, _ = body["model_id"].partition(":")

        def work(model: Model) -> Result:
            if body.get("kind", "snapshot") != "snapshot":
                raise ValueError(f"kind {body['kind']!r} is not here; snapshot is")
            if (name := body.get("path")) is not None:
                self._save(model, "sampler_weights", name)
                return {"type": "save_weights_for_sampler", "path": f"tinker://{model.run}/sampler_weights/{name}"}
            number = int(body["sampling_session_seq_id"])
            place = self._save(model, _EPHEMERAL, str(number), overwrite=True)
            sampler = f"{session}:sample:{number}"
            self.samplings[sampler] = Sampling(None, place, model.shape)
            self.sessions[session].samplers.append(sampler)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler}

        return self._train(body, work)

    def _save(self, model: Model, kind: str, name: str, *, overwrite: bool = False) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a checkpoint: letters, digits, '.', '_', '-', at most 128")
        place = model.folder.root / kind / name
        if newest_sealed(place) is not None and not overwrite:
            raise FileExistsError(
                f"tinker://{model.run}/{kind}/{name} is there already: another name, or overwrite=True"
            )
        about = {"model": self.base.path, "name": self.base.name, "user_metadata": model.metadata}
        model.trained().save(place, about, optimizer=kind == "weights")
        return place

    # -- what is on disk

    def folder(self, run: str) -> Path:
        """The folder of a training run. NotFound where there is none."""
        if not _RUN.fullmatch(run) or not (self.root / run).is_dir():
            raise NotFound(f"no training run {run!r}")
        return self.root / run

    def place(self, path: str) -> Path:
        """The folder of a checkpoint. NotFound where there is none."""
        run, kind, name = [*path.removeprefix("tinker://").split("/"), "", ""][:3]
        if kind not in ("weights", "sampler_weights") or not _NAME.fullmatch(name):
            raise NotFound(f"{path!r} is no path like tinker://RUN/weights/NAME")
        return _sealed(self.folder(run) / kind / name).parent

    def weights_info(self, body: Body) -> Result:
        """What a checkpoint is of."""
        saved = _opened(self.place(body["tinker_path"]))
        shape, name = asdict(shape_of(saved)), self.base.name if self._is_ours(saved) else saved.loop_state["name"]
        return {"base_model": name, "is_lora": True, "lora_rank": shape.pop("rank")} | shape

    def _is_ours(self, saved: Checkpoint) -> bool:
        return bool(saved.loop_state["model"] == self.base.path or saved.loop_state["name"] == self.base.name)

    def _shape(self, place: Path) -> LoraShape:
        """The shape of the adapter in a checkpoint's folder. ValueError where it was trained on another model."""
        if not self._is_ours(saved := _opened(place)):
            name, model = saved.loop_state["name"], saved.loop_state["model"]
            raise ValueError(
                f"the checkpoint is of the model {name!r} ({model}), and {self.base.name!r} is served here; "
                f"where they are the same, start the server with --name {name}"
            )
        return shape_of(saved)

    def training_runs(self, body: Body) -> Result:
        """The training runs, those of earlier servers too, what changed last first."""
        folders = sorted(self._folders(), key=lambda folder: folder.stat().st_mtime, reverse=True)
        page, cursor = _page(folders, body, 20)
        return {"training_runs": [self.training_run({"id": folder.name}) for folder in page], "cursor": cursor}

    def _folders(self) -> list[Path]:
        return [about.parent for about in self.root.glob("*/config.yaml") if _RUN.fullmatch(about.parent.name)]

    def training_run(self, body: Body) -> Result:
        """A training run, also one of an earlier server."""
        folder = self.folder(body["id"])
        about = yaml.safe_load((folder / "config.yaml").read_text("utf-8"))
        fields = {"training_run_id": folder.name, "base_model": self.base.name, "model_owner": "local", "is_lora": True}
        more = {"lora_rank": about["lora"]["rank"], "user_metadata": about["user_metadata"]}
        return fields | more | {"last_request_time": _time(folder.stat().st_mtime)}

    def checkpoints(self, body: Body) -> Result:
        """The checkpoints of a training run."""
        return {"checkpoints": self._entries(body["id"])}

    def _entries(self, run: str) -> list[Body]:
        entries = []
        for kind, public in (("weights", "training"), ("sampler_weights", "sampler")):
            for place in sorted((self.folder(run) / kind).glob("*")):
                if (path := newest_sealed(place)) is not None:
                    seal, name = open_checkpoint(path, hashes=False).manifest, f"{kind}/{place.name}"
                    entry = {
                        "checkpoint_id": name,
                        "checkpoint_type": public,
                        "tinker_path": f"tinker://{run}/{name}",
                    }
                    entries.append(entry | {"time": _time(seal.time), "size_bytes": seal.size})
        return entries

    def all_checkpoints(self, body: Body) -> Result:
        """The checkpoints of all training runs, newest first."""
        entries = [entry for folder in self._folders() for entry in self._entries(folder.name)]
        page, cursor = _page(sorted(entries, key=lambda entry: str(entry["time"]), reverse=True), body, 100)
        return {"checkpoints": page, "cursor": cursor}

    def delete_checkpoint(self, body: Body) -> Result:
        """Remove a checkpoint."""
        shutil.rmtree(self.place(f"tinker://{body['id']}/{body['name']}"))
        return {}

    # -- sampling

    def create_sampling_session(self, body: Body) -> Result:
        """A sampling client for a checkpoint or, without a path, for the base."""
        path, name = body.get("model_path"), f"{body['session_id']}:sample:{int(body['sampling_session_seq_id'])}"
        owner = self.session(body["session_id"])
        if path is None and body.get("base_model") not in (self.base.name, self.base.path):
            raise ValueError(f"base_model {body.get('base_model')!r} is not served here; {self.base.name!r} is")
        place = None if path is None else self.place(path)
        self.samplings[name] = Sampling(path, place, None if place is None else self._shape(place))
        owner.samplers.append(name)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def sampling(self, name: str) -> Sampling:
        """A sampling client. NotFound if there is none."""
        if name not in self.samplings:
            raise NotFound(f"no sampling client {name!r}: {_LATER}")
        self.session(name.partition(":")[0])
        sampling = self.samplings[name]
        if sampling.removed:
            raise NotFound(
                f"the snapshot of {name!r} is gone: nobody sampled from it for {_SILENT_S / 60:g} minutes, and "
                f"{_SNAPSHOTS} newer ones were made; save_weights_for_sampler with a name keeps one"
            )
        sampling.used = time.monotonic()
        return sampling

    def get_sampler(self, body: Body) -> Result:
        """What a sampling client samples with."""
        path = self.sampling(body["id"]).path
        return {"sampler_id": body["id"], "base_model": self.base.name, "model_path": path}

    def asample(self, body: Body) -> Job:
        """Responses to a prompt, and log-probs of its own tokens."""
        name, number = body["sampling_session_id"], int(body["seq_id"])
        source, count = self.sampling(name), int(body.get("num_samples", 1))
        for key in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
            if body.get(key):
                raise ValueError(f"{key} is not here")

        async def work() -> Result:
            sampler, prompt = self._samplers[source.shape], _prompt(body["prompt"])
            params = sampling_params(body["sampling_params"], self.base.max_length - len(prompt))
            likely, with_prompt = int(body.get("topk_prompt_logprobs") or 0), bool(body.get("prompt_logprobs"))
            log_probs = top = None
            if with_prompt or likely:
                log_probs, top = _of_prompt(sampler, prompt, body.get("prompt_logprobs_last_n"), likely)
            sequences = await sampler.sample(prompt, params, count, int(body.get("topk_sample_logprobs") or 0))
            return sample_response(sequences, log_probs if with_prompt else None, top)

        # A checkpoint may be saved anew under its name: requests from then on sample with that.
        stamp = (_sealed(source.place) / MANIFEST).stat().st_mtime_ns if source.place else None
        shares = (source.shape, source.place, stamp)
        job = Job(f"{name}:{number}", work, shares, lambda: self._use(*shares))
        job.about["sample_sequence_ids"] = [f"{job.id}:{n}" for n in range(count)]
        return self.work.submit(job)

    # -- on the worker's thread

    def _use(self, shape: LoraShape | None, place: Path | None, stamp: int | None) -> None:
        if self._awake is None or self._awake is not self._samplers.get(shape):
            self._rest(always=True)
            self._awake = self._samplers.get(shape) or self.base.sampler(shape)
            self._samplers[shape] = self._awake
        self._awake.use(place, stamp)

    def _rest(self, *, always: bool = False) -> None:
        """Others want the sampler's memory; where it is the host's it is kept, for new pages cost more."""
        if self._awake is not None and (always or not self.base.platform.on_host):
            self._awake.rest()
            self._awake = None


def _page(rows: Sequence[Any], body: Body, most: int) -> tuple[Sequence[Any], Body]:
    """The part of a list that is asked for, `most` of it unless more are, and its place in the whole."""
    offset, limit = int(body.get("offset", 0)), int(body.get("limit", most))
    if min(offset, limit) < 0:
        raise ValueError(f"offset and limit are at least 0, not {offset} and {limit}")
    return rows[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(rows)}


def _sealed(place: Path) -> Path:
    """The sealed checkpoint in a folder. NotFound where there is none."""
    if (path := newest_sealed(place)) is None:
        raise NotFound(f"no checkpoint in {place}")
    return path


def _opened(place: Path) -> Checkpoint:
    return open_checkpoint(_sealed(place), hashes=False)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _prompt(body: Body) -> np.ndarray:
    chunks = body["chunks"]
    if odd := {chunk.get("type") for chunk in chunks} - {"encoded_text"}:
        raise ValueError(f"the prompt has {odd}; this server takes text alone")
    return np.array([token for chunk in chunks for token in chunk["tokens"]], np.int64)


def sampling_params(body: Body, room: int) -> SamplingParams:
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
    count = len(prompt) - 1 if last is None else min(int(last), len(prompt) - 1)
    log_probs = np.full(len(prompt), np.nan, np.float32)
    ids, values = np.zeros((len(prompt), likely), np.int64), np.full((len(prompt), likely), -99999.0, np.float32)
    if count > 0:
        log_probs[-count:], top = sampler.log_probs(prompt, count, likely)
        if top is not None:
            ids[-count:], values[-count:] = top
    return log_probs, (ids, values) if likely else None
