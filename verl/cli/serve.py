"""`verl serve --model M`: the Tinker API on this machine, for the unmodified SDK and what is built on it."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
from pathlib import Path

from verl.errors import UserError

KEY = "VERL_SERVE_API_KEY"
_ABOUT = f"""Serve one model behind the Tinker API: LoRA training and sampling for clients of the SDK `tinker`, with
tinker.ServiceClient(base_url="http://127.0.0.1:8000", api_key="tml-any"). The environment variable {KEY} names the key
that clients must show (it begins with tml-); without it any key will do, and only the loopback may be listened on."""


def _address(host: str, port: int, key: str) -> tuple[str, int]:
    """UserError for an address that others reach, without a key."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise UserError(f"--host {host}: give an address of this machine, such as 127.0.0.1") from None
    if key and not key.startswith("tml-"):
        raise UserError(f"{KEY} must begin with tml-: the SDK sends no other")
    if not loopback and not key:
        raise UserError(f"--host {host} is reached from other machines: set {KEY} to a key that clients must show")
    return host, port


def main(argv: list[str]) -> int:
    """Serve until SIGINT or SIGTERM; 0."""
    parser = argparse.ArgumentParser(prog="verl serve", description=_ABOUT)
    parser.add_argument("--model", required=True, help="model directory or hub id")
    parser.add_argument("--name", default="", help="what clients call it (default: as --model says)")
    parser.add_argument(
        "--dir", type=Path, default=Path("verl_serve"), help="folder of runs and checkpoints (default: verl_serve)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one (default: 8000)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of the matrix products (default: the device's)"
    )
    parser.add_argument("--max-length", type=int, help="most tokens of a sequence (default: the model's, at most 8192)")
    parser.add_argument("--max-samples", type=int, default=64, help="most responses sampled at a time (default: 64)")
    parser.add_argument("--max-adapters", type=int, default=16, help="most training runs in memory (default: 16)")
    args = parser.parse_args(argv)
    key = os.environ.get(KEY, "")
    address = _address(args.host, args.port, key)
    from verl.serving.models import Base
    from verl.serving.server import serve

    for name in ("max_length", "max_samples", "max_adapters"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: at least 1")
    root = args.dir.expanduser().absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--dir {args.dir}: {error.strerror}") from error
    limits = {"max_length": args.max_length, "max_samples": args.max_samples}
    base = Base(args.model, name=args.name, dtype=args.dtype, **limits)
    asyncio.run(serve(base, root, address, key, args.max_adapters))
    return 0
