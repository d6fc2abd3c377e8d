"""The Tinker API over HTTP: which path asks for what, who may ask, and the process that answers.

A client shows its key in the header X-API-Key. Where the server has none any will do, but a web page cannot send one
unasked, and the server listens on the loopback alone.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import signal
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from verl.errors import UserError
from verl.rollout.http_sessions import PROTOBUF, Handler, Head, Refused, Reply, Result, Server
from verl.serving.models import Base
from verl.serving.service import Service
from verl.serving.work import Job

_POLL_S = 20.0
"""A request for a result waits so long for it; the SDK then asks again, and gives up a connection after 45 s."""
# No exchange of keys, no compression, no more waiting connections than the server takes.
_CONFIG = {"pjwt_auth_enabled": False, "proto_compress_fwdbwd": False, "sample_max_concurrent_requests": 512}


async def _retrieve(service: Service, body: dict[str, Any]) -> Result:
    """A result; status 408 where it is not there yet, 410 where it never will be."""
    name = body["request_id"]
    try:
        result = await service.work.fetch(name, _POLL_S)
    except KeyError:
        why = "its session has ended, its result was fetched long ago, or the server was started anew"
        return Reply(HTTPStatus.GONE, json.dumps({"error": f"no request {name}: {why}"}).encode())
    if result is None:
        pending = {"type": "try_again", "request_id": name, "queue_state": "active"}
        return Reply(HTTPStatus.REQUEST_TIMEOUT, json.dumps(pending).encode())
    return Reply(HTTPStatus.OK, result, PROTOBUF) if isinstance(result, bytes) else result


_ROUTES: dict[str, Callable[[Service, dict[str, Any]], Any]] = {
    "GET healthz": lambda service, body: {"status": "ok"},
    "POST client/config": lambda service, body: _CONFIG,
    "POST client/dynamic_config": lambda service, body: {"sample_cancel_enabled": True},
    "GET get_server_capabilities": Service.capabilities,
    "POST telemetry": lambda service, body: {"status": "accepted"},  # and forgotten
    "POST create_session": Service.create_session,
    "POST session_heartbeat": Service.heartbeat,
    "POST sessions/ID/finish": Service.finish,
    "POST retrieve_future": _retrieve,
    "POST cancel_future": Service.cancel,
    "POST create_model": Service.create_model,
    "POST get_info": Service.get_info,
    "POST forward_backward": Service.forward_backward,
    "POST optim_step": Service.optim_step,
    "POST save_weights": Service.save_weights,
    "POST save_weights_for_sampler": Service.save_weights_for_sampler,
    "POST load_weights": Service.load_weights,
    "POST create_sampling_session": Service.create_sampling_session,
    "GET samplers/ID": Service.get_sampler,
    "POST asample": Service.asample,
    "POST weights_info": Service.weights_info,
    "GET training_runs": Service.training_runs,
    "GET training_runs/ID": Service.training_run,
    "GET training_runs/ID/checkpoints": Service.checkpoints,
    "GET checkpoints": Service.all_checkpoints,
    "DELETE training_runs/ID/checkpoints/NAME": Service.delete_checkpoint,
}
_PATTERNS = {
    route: re.compile("/api/v1/" + route.split()[1].replace("ID", "(?P<id>[^/]+)").replace("NAME", "(?P<name>.+)"))
    for route in _ROUTES
}


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
        path, _, query = head.path.partition("?")
        path = path.rstrip("/")
        matches = {route: match for route, pattern in _PATTERNS.items() if (match := pattern.fullmatch(path))}
        if not matches:
            raise Refused(HTTPStatus.NOT_FOUND, f"no such path: {path}")
        for route, match in matches.items():
            if route.split()[0] == head.method:
                return "", self._service, _handler(_ROUTES[route], match.groupdict(), dict(parse_qsl(query))), ""
        allowed = next(iter(matches)).split()[0]
        raise Refused(
            HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes {allowed}, not {head.method}", f"Allow: {allowed}\r\n"
        )


def _handler(answer: Callable[[Service, dict[str, Any]], Any], ids: dict[str, str], query: dict[str, str]) -> Handler:
    async def handler(service: Service, body: dict[str, Any]) -> Result:
        result = answer(service, query | body | ids)
        if isinstance(result, Job):
            return {"request_id": result.id} | result.about
        return await result if asyncio.iscoroutine(result) else result

    return handler


async def serve(base: Base, root: Path, address: tuple[str, int], key: str, most_adapters: int) -> None:
    """Answer until SIGINT or SIGTERM."""
    service = Service(base, root, most_adapters=most_adapters)
    try:
        server = TinkerServer(address, service, key)
    except (OSError, OverflowError) as error:
        service.close()
        raise UserError(f"--host {address[0]} --port {address[1]}: {error}") from error
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    tidying = asyncio.create_task(service.tidy())
    print(f"verl serve: {base.name} at {server.base}, runs in {root}", flush=True)
    await stop.wait()
    tidying.cancel()
    service.close()
