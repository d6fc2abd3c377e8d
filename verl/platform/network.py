"""Sockets that listen where they were told to and nowhere else, whether a server listens, and limits of waiting."""

from __future__ import annotations

import socket
import time
from datetime import timedelta

LONGEST_WAIT = 24 * 86400.0
"""Seconds. torch counts waits in milliseconds, in places as 32-bit numbers."""

_reserved: dict[tuple[str, int], int] = {}


def time_limit(seconds: float) -> timedelta:
    """As torch.distributed takes it; infinity and what it could not count are `LONGEST_WAIT`."""
    return timedelta(seconds=min(seconds, LONGEST_WAIT))


def reserve(address: str) -> int:
    """A port of this address that no other process can take until `listen` is called with it."""
    server = _server(address, 0)
    port = int(server.getsockname()[1])
    _reserved[address, port] = server.detach()
    return port


def listen(address: str, port: int) -> int:
    """File descriptor of a socket that listens on this address alone; the caller closes it. Port 0: any free."""
    if (address, port) in _reserved:
        return _reserved.pop((address, port))
    return _server(address, port).detach()


def _server(address: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((address, port), family=family, backlog=1024)


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the way to host:port (nothing is sent)."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def check_reachable(address: str, patience: float = 5.0) -> None:
    """ConnectionError if nothing listens at HOST:PORT within `patience` seconds; anything else is not tried."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    end = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=patience).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise ConnectionError(str(error)) from error
        time.sleep(0.5)
