"""Start Ray on this machine, or join a cluster that runs; what its nodes have."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray._raylet import Config as RayConfig  # type: ignore[attr-defined]

from verl import interrupt
from verl.config import Config
from verl.config.devices import ray_address
from verl.engine.registry import ROLLOUT_ENGINES, records
from verl.errors import UserError
from verl.platform import KINDS, platform_of
from verl.platform.host_resources import DEFAULTS, usable
from verl.platform.network import check_reachable
from verl.platform.processes import sweep_at_exit
from verl.versions import refuse_holes
from verl.workers.cluster_needs import no_cluster, resource_requests
from verl.workers.ray.calls import joined, within

LOOPBACK = "127.0.0.1"
_TIMELINE_S = 60.0
_LONGEST_PLACE = 25  # Ray puts 80 more characters behind it, and sockets have names of at most 107
_CLUSTER_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_AUTH_SWITCH = "RAY_AUTH_MODE"
_TOKEN, _TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_WORKER_ENV = {
    **DEFAULTS,
    "NCCL_DEBUG": "WARN",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "HCCL_CONNECT_TIMEOUT": "600",  # its own 120 s are less than many nodes need to load a model
    "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
    "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
}
_PASSED_ON = ("PYTHONPATH", "OMP_NUM_THREADS", "TASK_QUEUE_ENABLE")
_FAMILIES = ("HF_", "VERL_", "NCCL_", "HCCL_", "GLOO_", "TORCH_", "PYTORCH_", "ASCEND_")


@dataclass(frozen=True, slots=True)
class Node:
    """A living node: `devices` of the run's kind, as many as Ray was told of."""

    id: str
    address: str
    devices: int
    cpus: float

    def __str__(self) -> str:
        return f"{self.address} ({self.devices} devices)"


class Cluster:
    """A connection to Ray. `own` is True where this run started Ray and stops it at the end."""

    def __init__(self, config: Config, kind: str):
        self.kind = kind
        self.own = False
        self._auth_mode = os.environ.get(_AUTH_SWITCH)
        self._own_token = False
        self._sweeper: subprocess.Popen[bytes] | None = None
        self._timeline = config.ray_kwargs.timeline_json_file
        processes = sum(pool.nodes * pool.devices for pool in resource_requests(config))
        self._connect(address_of(config), dict(config.ray_kwargs.ray_init), processes)

    def _connect(self, address: str, settings: dict[str, Any], processes: int) -> None:
        refuse_holes("ray")
        joined()
        if ray.is_initialized():
            return
        options = {key: value for key, value in settings.items() if value is not None}
        self.own = not address
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        defaults: dict[str, Any] = {"namespace": "verl", "logging_level": logging.WARNING}
        if self.own:
            defaults |= {"include_dashboard": False, "_node_ip_address": LOOPBACK, "address": "local"}
            options.pop("address", None)
            folder = self._private_folder()
            defaults["_temp_dir"] = f"{folder}/ray"
            if _TOKEN not in os.environ and _TOKEN_PATH not in os.environ:
                self._own_token = _make_token(folder)
            # Ray counts the cores it may use now; a rank is a process and runs on fewer too.
            defaults["num_cpus"] = max(usable(), processes)
            # It tells how to switch off what this run has asked for.
            token_log = logging.getLogger("ray._private.authentication.authentication_token_setup")
            token_log.setLevel(logging.ERROR)
            _clustered(options.get("_node_ip_address", LOOPBACK) != LOOPBACK)
        try:
            check_reachable(address)
            # Ray's answer to SIGTERM is sys.exit, in the middle of whatever is going on.
            with interrupt.kept():
                ray.init(**(defaults | options))
        except ray.exceptions.AuthenticationError as error:
            raise UserError(f"Ray asks for a token, and none is here: {error}") from error
        except (ConnectionError, TimeoutError) as error:
            if "InvalidAuthToken" in f"{error}{error.__cause__}":
                raise UserError(
                    f"the Ray cluster at {address} asks for its token: export RAY_AUTH_MODE=token, and have the "
                    "token in ~/.ray/auth_token or RAY_AUTH_TOKEN (the head has it, see examples/ray_start.sh)"
                ) from error
            raise no_cluster(address, error) from error
        except Exception as error:  # Ray raises just that for a node that does not come up
            self.own = False
            self._forget_token()
            words = ", ".join(f"{k}={v}" for k, v in options.items()) or "no options"
            raise UserError(f"ray.init failed with ray_kwargs.ray_init ({words}): {error}") from error

    def settle_kind(self) -> str:
        """The kind of device; "auto" is what the nodes have most of: cuda, then npu, then cpu."""
        if self.kind == "auto":
            totals = ray.cluster_resources()
            self.kind = next((k for k in KINDS if totals.get(platform_of(k).ray_resource, 0) >= 1), "cpu")
        return self.kind

    def nodes(self) -> list[Node]:
        """Living nodes, the driver's first, then by address and id."""
        mine = ray.get_runtime_context().get_node_id()
        name = platform_of(self.kind).ray_resource or "CPU"
        nodes = []
        for node in ray.nodes():
            if node["Alive"]:
                devices, cpus = (float(node["Resources"].get(kind, 0)) for kind in (name, "CPU"))
                nodes.append(Node(node["NodeID"], node["NodeManagerAddress"], int(devices), cpus))
        return sorted(nodes, key=lambda node: (node.id != mine, node.address, node.id))

    def addresses(self) -> dict[str, str]:
        """Those of the living nodes, by id."""
        return {node.id: node.address for node in self.nodes()}

    def wait_for_nodes(
        self, count: int, devices: int, what: str, timeout: float, notice: Callable[[str], None]
    ) -> list[Node]:
        """The nodes with `devices` each (processors: cores, a rank needs one), as soon as there are `count`; UserError
        when they do not come. A cluster that was joined may still be starting, a Ray of our own is complete."""
        end, announced = time.monotonic() + timeout, False
        while True:
            nodes = self.nodes()
            fit = [node for node in nodes if node.devices >= devices]
            if len(fit) >= count:
                return fit
            if self.own or time.monotonic() >= end:
                break
            if not announced:
                progress = f"{len(fit)} of {count} with {devices} {self.kind} devices are there"
                notice(f"waiting for nodes: {progress}")
                announced = True
            time.sleep(1.0)
        have = ", ".join(map(str, nodes)) or "none"
        raise UserError(
            f"{what} asks for {count} node{'s' * (count != 1)} of {devices} {self.kind} devices"
            f"{'' if platform_of(self.kind).ray_resource else ', a rank needs a core'}; the cluster has: "
            f"{have}. Lower the numbers, or start Ray on more nodes (examples/ray_start.sh); nodes are waited "
            f"for {timeout:g} s (trainer.ray_wait_register_center_timeout)"
        )

    def close(self) -> None:
        """Write the timeline if asked for, and stop a Ray that this run started."""
        if not ray.is_initialized():
            return
        if self._timeline:
            within(lambda: ray.timeline(self._timeline), _TIMELINE_S)
        if self.own:
            ray.shutdown()
            _clustered(True)
            self._forget_token()
        if self._sweeper is not None:
            self._sweeper.communicate()
            self._sweeper = None

    def _forget_token(self) -> None:
        """Undo what a Ray of our own switched on in this process: a cluster joined next has another token, or none."""
        if self._own_token:
            os.environ.pop(_TOKEN_PATH, None)
            AuthenticationTokenLoader.instance().reset_cache()
        if self._auth_mode is None:
            os.environ.pop(_AUTH_SWITCH, None)
            RayConfig.initialize("")

    def _private_folder(self) -> str:
        """A folder that only this user can enter, for the token and for Ray's logs and sockets, which Ray opens to
        every user. It is swept when this process closes the cluster or ends, however it ends."""
        place = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
        if len(place) > _LONGEST_PLACE and not os.environ.get("RAY_TMPDIR"):
            place = "/tmp"
        os.makedirs(place, exist_ok=True)
        folder = tempfile.mkdtemp(prefix="ray_", dir=place)
        # The agents of a Ray whose driver was killed live on for a minute: they keep trying to report to its dead head.
        self._sweeper = sweep_at_exit("cmdline", f"{folder}/", folder)
        return folder


def address_of(config: Config) -> str:
    """Where the cluster is that is to be joined; "" for a Ray of the run's own."""
    address = ray_address(config)
    return "" if address == "local" else address


def _clustered(allowed: bool) -> None:
    """Whether a Ray that is started here may listen on other addresses than the loopback.

    On Linux Ray replaces a loopback address by the machine's outer one and then listens on every interface; on
    systems that it expects no clusters on, it does not. This is the switch between the two.
    """
    from ray._private import ray_constants

    if allowed:
        os.environ.pop(_CLUSTER_SWITCH, None)
    else:
        os.environ[_CLUSTER_SWITCH] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = allowed


def _make_token(folder: str) -> bool:
    """Have the next Ray use a token of its own: Ray would make ~/.ray/auth_token, which it lets every user read."""
    path = Path(folder, "auth_token")
    path.touch(0o600)
    path.write_text(secrets.token_hex(32))
    os.environ[_TOKEN_PATH] = str(path)
    AuthenticationTokenLoader.instance().reset_cache()
    return True


def worker_environment(threads: int) -> dict[str, str]:
    """Variables of a worker process: what this process has, else the defaults. `threads` for a processor's products.

    Which devices a worker sees is never passed on: that is decided where it is placed.
    """
    defaults = dict(_WORKER_ENV)
    families = _FAMILIES + tuple(f"{name.upper()}_" for name in ROLLOUT_ENGINES)
    for engine in records():
        defaults |= engine.environment
    env = {name: os.environ.get(name, value) for name, value in defaults.items()}
    for name, value in os.environ.items():
        if name in _PASSED_ON or (name.startswith(families) and not name.endswith("VISIBLE_DEVICES")):
            env[name] = value
    env.setdefault("OMP_NUM_THREADS", str(threads))
    return env
