"""The Tinker API over HTTP: which path asks for what, who may ask, and the process that answers.

A client shows its key in the header X-API-Key. Without a key of the server's any will do, but a web page cannot send
one unasked, and the server listens on the loopback alone.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

from verl.checkpoint import open_checkpoint
from verl.checkpoint.read import newest_sealed
from verl.rollout.http_sessions import PROTOBUF, Handler, Head, Refused, Reply, Result, Server
from verl.serving.models import Base, LoraShape
from verl.serving.service import Service, described, shape_at
from verl.serving.wire import LossRequest
from verl.serving.work import Job

_POLL_S = 20.0
"""A request for a result waits so long for it; the SDK then asks again, and gives up a connection after 45 s."""
_RUN, _ANY = "([A-Za-z0-9:_-]+)", "(.+)"
_ROUTES: list[tuple[str, re.Pattern[str], Handler]] = []


def _route(method: str, path: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        _ROUTES.append((method, re.compile(f"/api/v1/{path}"), handler))
        return handler

    return register


def _future(job: Job, **more: Any) -> dict[str, Any]:
    return {"request_id": job.id} | more


# -- the server and its sessions


@_route("GET", "healthz")
async def _health(service: Service, body: dict[str, Any]) -> Result:
    return {"status": "ok"}


@_route("POST", "client/config")
async def _client_config(service: Service, body: dict[str, Any]) -> Result:
    # No exchange of keys, plain bodies, no more waiting connections than the server takes.
    return {"pjwt_auth_enabled": False, "proto_compress_fwdbwd": False, "sample_max_concurrent_requests": 512}


@_route("POST", "client/dynamic_config")
async def _dynamic_config(service: Service, body: dict[str, Any]) -> Result:
    return {"sample_cancel_enabled": True}


@_route("GET", "get_server_capabilities")
async def _capabilities(service: Service, body: dict[str, Any]) -> Result:
    base = service.base
    model = {"model_name": base.name, "max_context_length": base.max_length, "trainable": True, "sampleable": True}
    return {"supported_models": [model]}


@_route("POST", "telemetry")
async def _telemetry(service: Service, body: dict[str, Any]) -> Result:
    return {"status": "accepted"}  # and forgotten


@_route("POST", "create_session")
async def _create_session(service: Service, body: dict[str, Any]) -> Result:
    return {"type": "create_session", "session_id": service.open_session(body.get("user_metadata"))}


@_route("POST", "session_heartbeat")
async def _heartbeat(service: Service, body: dict[str, Any]) -> Result:
    service.session(body["session_id"])
    return {"type": "session_heartbeat"}


@_route("GET", f"sessions/{_RUN}")
async def _session(service: Service, body: dict[str, Any]) -> Result:
    session = service.session(body["id"])
    lists = {"training_run_ids": session.models, "sampler_ids": session.samplers}
    return lists | {"user_metadata": session.metadata}


@_route("POST", f"sessions/{_RUN}/finish")
async def _finish(service: Service, body: dict[str, Any]) -> Result:
    service.session(body["id"])
    service.end_session(body["id"])
    return {}


# -- futures


@_route("POST", "retrieve_future")
async def _retrieve(service: Service, body: dict[str, Any]) -> Result:
    name = body["request_id"]
    try:
        result = await service.work.fetch(name, _POLL_S)
    except KeyError:
        why = "its session has ended, its result was fetched long ago, or the server was started anew"
        gone = {"error": f"no request {name}: {why}"}
        return Reply(HTTPStatus.GONE, json.dumps(gone).encode())
    if result is None:
        pending = {"type": "try_again", "request_id": name, "queue_state": "active"}
        return Reply(HTTPStatus.REQUEST_TIMEOUT, json.dumps(pending).encode())
    return Reply(HTTPStatus.OK, result, PROTOBUF) if isinstance(result, bytes) else result


@_route("POST", "cancel_future")
async def _cancel(service: Service, body: dict[str, Any]) -> Result:
    service.work.cancel(body["request_id"])
    return {}


# -- training


@_route("POST", "create_model")
async def _create_model(service: Service, body: dict[str, Any]) -> Result:
    lora = dict(body.get("lora_config") or {})
    lora.pop("seed", None)
    if not lora:
        raise ValueError("create_model without lora_config: adapters alone are trained here")
    run, job = service.create(body["session_id"], int(body["model_seq_id"]), LoraShape(**lora), body)
    return _future(job, model_id=run)


@_route("POST", "get_info")
async def _info(service: Service, body: dict[str, Any]) -> Result:
    base, model = service.base, service.model(body["model_id"])
    data = {"arch": base.module.config.model_type, "model_name": base.name, "tokenizer_id": base.path}
    about = {"model_id": body["model_id"], "is_lora": True, "lora_rank": model.shape.rank, "model_name": base.name}
    return {"type": "get_info", "model_data": data} | about


@_route("POST", "forward_backward")
async def _forward_backward(service: Service, body: dict[str, Any]) -> Result:
    if "data" not in body or not isinstance(body["data"], bytes):
        raise ValueError(f"forward_backward takes a body of {PROTOBUF}")
    request = LossRequest(body["data"])
    return _future(service.passes(request), model_id=request.model_id)


@_route("POST", "optim_step")
async def _optim_step(service: Service, body: dict[str, Any]) -> Result:
    return _future(service.optim_step(body), model_id=body["model_id"])


@_route("POST", "save_weights")
async def _save(service: Service, body: dict[str, Any]) -> Result:
    return _future(service.save(body), model_id=body["model_id"])


@_route("POST", "save_weights_for_sampler")
async def _save_for_sampler(service: Service, body: dict[str, Any]) -> Result:
    return _future(service.save_for_sampler(body), model_id=body["model_id"])


@_route("POST", "load_weights")
async def _load(service: Service, body: dict[str, Any]) -> Result:
    if body.get("session_id") is None:
        return _future(service.load(body), model_id=body["model_id"])
    run, job = service.create(body["session_id"], int(body["model_seq_id"]), None, body)
    return _future(job, model_id=run)


# -- sampling


@_route("POST", "create_sampling_session")
async def _create_sampler(service: Service, body: dict[str, Any]) -> Result:
    number = int(body["sampling_session_seq_id"])
    name = service.open_sampler(body["session_id"], number, body.get("model_path"), body.get("base_model"))
    return {"type": "create_sampling_session", "sampling_session_id": name}


@_route("GET", f"samplers/{_RUN}")
async def _sampler(service: Service, body: dict[str, Any]) -> Result:
    source = service.samplings[body["id"]]
    return {"sampler_id": body["id"], "base_model": service.base.name, "model_path": source.path}


@_route("POST", "asample")
async def _sample(service: Service, body: dict[str, Any]) -> Result:
    job = service.sample(body)
    return _future(job, sample_sequence_ids=[f"{job.id}:{n}" for n in range(int(body.get("num_samples", 1)))])


# -- training runs and checkpoints on disk


@_route("POST", "weights_info")
async def _weights_info(service: Service, body: dict[str, Any]) -> Result:
    shape = shape_at(service.place(body["tinker_path"]))
    parts = {"train_unembed": shape.train_unembed, "train_mlp": shape.train_mlp, "train_attn": shape.train_attn}
    return {"base_model": service.base.name, "is_lora": True, "lora_rank": shape.rank} | parts


@_route("GET", f"training_runs/{_RUN}")
async def _training_run(service: Service, body: dict[str, Any]) -> Result:
    folder = service.root / body["id"]
    about = described(folder)
    model = service.models.get(body["id"])
    last = model.last if model else folder.stat().st_mtime
    fields = {"training_run_id": body["id"], "base_model": service.base.name, "model_owner": "local", "is_lora": True}
    more = {"lora_rank": about["lora"]["rank"], "last_request_time": _time(last)}
    return fields | more | {"user_metadata": about.get("user_metadata")}


@_route("GET", f"training_runs/{_RUN}/checkpoints")
async def _checkpoints(service: Service, body: dict[str, Any]) -> Result:
    found = []
    for kind, public in (("weights", "training"), ("sampler_weights", "sampler")):
        for place in sorted((service.root / body["id"] / kind).glob("*")):
            if (path := newest_sealed(place)) is not None:
                seal = open_checkpoint(path, hashes=False).manifest
                name = f"{kind}/{place.name}"
                entry = {"checkpoint_id": name, "checkpoint_type": public, "time": _time(seal.time)}
                found.append(entry | {"tinker_path": f"tinker://{body['id']}/{name}", "size_bytes": seal.size})
    return {"checkpoints": found}


@_route("DELETE", f"training_runs/{_RUN}/checkpoints/{_ANY}")
async def _delete(service: Service, body: dict[str, Any]) -> Result:
    shutil.rmtree(service.place(f"tinker://{body['id']}/{body['rest']}"))
    return {}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


# -- the process


class TinkerServer(Server):
    """HTTP for one `Service`. key: what clients must show, "" for anything."""

    def __init__(self, address: tuple[str, int], service: Service, key: str):
        super().__init__(address)
        self._service, self._key = service, key

    def find(self, head: Head) -> tuple[str, Any, Handler, str]:
        """See `Server.find`."""
        shown = head.headers.get("x-api-key", "")
        if not shown or (self._key and not hmac.compare_digest(shown.encode(), self._key.encode())):
            raise Refused(HTTPStatus.UNAUTHORIZED, "the header X-API-Key has no key that this server knows")
        path, methods = head.path.partition("?")[0].rstrip("/"), []
        for method, pattern, handler in _ROUTES:
            if match := pattern.fullmatch(path):
                methods.append(method)
                if method == head.method:
                    return "tinker", self._service, _with_ids(handler, match.groups()), ""
        if methods:
            problem = f"{path} takes {methods[0]}, not {head.method}"
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, problem, f"Allow: {methods[0]}\r\n")
        raise Refused(HTTPStatus.NOT_FOUND, f"no such path: {path}")


def _with_ids(handler: Handler, ids: tuple[str, ...]) -> Handler:
    names = dict(zip(("id", "rest"), ids, strict=False))

    def answer(service: Any, body: dict[str, Any]) -> Awaitable[Result]:
        return handler(service, body | names)

    return answer


async def serve(base: Base, root: Path, address: tuple[str, int], key: str, most_adapters: int) -> None:
    """Answer until SIGINT or SIGTERM."""
    service = Service(base, root, most_adapters=most_adapters)
    server = TinkerServer(address, service, key)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    tidying = asyncio.create_task(service.tidy())
    print(
        f"verl serve: {base.name} at {server.base}, checkpoints in {root} (since {time.strftime('%H:%M:%S')})",
        flush=True,
    )
    await stop.wait()
    tidying.cancel()
    service.close()
