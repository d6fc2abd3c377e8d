"""What the driver asks of other nodes: is the same code there, the same model, the run folder, room enough;
where do workers stand.

One agent runs on each node that is not the driver's own. It needs no device and does no work of the run.
"""

from __future__ import annotations

import math
import os
import platform
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import ray
from ray import exceptions as faults
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.config.rollout_engines import CAPABILITIES
from verl.errors import UserError
from verl.platform import limits, stacks
from verl.weight_sync.shared_memory import host_bucket
from verl.workers import node_facts
from verl.workers.ray.cluster import Node, worker_environment
from verl.workers.ray.worker_group import WorkerHandle, kill, reason

_PACKAGES = ("verl", "torch", "transformers", "ray")
_FILES, _ROOM, _ENOUGH = "open files (ulimit -n)", "shared memory", "enough"
_TO_FETCH = "not in its cache of models: it would be fetched there"
_SHARED = "/dev/shm"
_ANSWER_S = 120.0
_STACKS_S = 15.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is looked at on every node.

    models    directories, or hub ids
    folder    a file that the driver wrote into the run folder, or ""
    files     how many a process must be able to open
    packages  distributions besides those of every run
    room      bytes that a transfer of weights takes of the node's shared memory
    """

    models: tuple[str, ...]
    folder: str = ""
    files: int = 0
    packages: tuple[str, ...] = ()
    room: int = 0


def packages_of(config: Any) -> tuple[str, ...]:
    """Distributions that this run loads on the nodes, besides those of every run."""
    arr = config.actor_rollout_ref
    found = list(CAPABILITIES[arr.rollout.name].packages)
    if arr.model.lora_rank > 0 or arr.model.lora_adapter_path:
        found.append("peft")
    if config.trainer.device == "npu":
        found.append("torch_npu")
    return tuple(found)


def room_of(config: Any, model: str | None = None) -> int:
    """Bytes of shared memory without which a transfer of weights fails on a node that samples.

    Two buckets, or a model of two bytes a weight if that is less; 0 where that is not known, and with LoRA, whose
    adapters are small. Never too much: a transfer that needs more says so itself. `model`: another than the run's.
    """
    arr = config.actor_rollout_ref
    if arr.model.lora_rank > 0 or arr.model.lora_adapter_path:
        return 0
    bucket = int(arr.rollout.checkpoint_engine.update_weights_bucket_megabytes) << 20
    if not arr.rollout.nnodes:  # no broadcast, whose buckets are as large as asked for
        bucket = host_bucket(bucket)
    path = model or arr.model.path
    if not path:
        return 0
    weights = int(node_facts.model_files(path).get("bytes", 0))
    return min(2 * bucket, weights // 2)


def facts(wanted: Wanted) -> dict[str, str]:
    """What has to be the same on every node, as name → text. Runs on the driver and on every node."""
    found = {"python": ".".join(platform.python_version_tuple()[:2]), "code of verl": node_facts.code_hash()}
    for name in (*_PACKAGES, *wanted.packages):
        try:
            found[name] = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    for model in wanted.models:
        if "://" not in model:
            found[f"model {model}"] = _model_text(model)
    if wanted.folder:
        there = Path(wanted.folder).exists()
        found[f"run folder {Path(wanted.folder).parent}"] = "shared" if there else "not there"
    may = limits.raise_open_files(wanted.files)
    found[_FILES] = _ENOUGH if may >= wanted.files else f"{may}, needed: {wanted.files}"
    # Without it transfers go through the temporary folder.
    free = shutil.disk_usage(_SHARED).free if os.path.isdir(_SHARED) else math.inf
    found[_ROOM] = _ENOUGH if free >= wanted.room else _room_text(int(free), wanted.room)
    return found


def _room_text(free: int, room: int) -> str:
    return (
        f"{_SHARED} has {free >> 20} MiB free, a transfer of weights takes {-(-room >> 20)} MiB; give the container more "
        "(docker run --shm-size, an emptyDir of medium Memory), or lower "
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
    )


def _model_text(model: str) -> str:
    """What tells one model from another: the revision in the cache of hub models, else hashes of config and weights' sizes."""
    found = node_facts.model_files(model)
    if "problem" in found:
        if os.path.isabs(model):
            return "not there"
        offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
        return "not in its cache of models, and HF_HUB_OFFLINE is set there" if offline else _TO_FETCH
    folder = Path(found["path"])
    if folder.parent.name == "snapshots":
        return f"revision {folder.name}"
    return f"{found['config']} {found['weights']}"


class Agent:
    """Runs on a node."""

    def facts(self, wanted: Mapping[str, Any]) -> dict[str, str]:
        """See `facts`; plain data, because the code here may be another."""
        return facts(Wanted(**wanted))

    def stacks(self, pids: Sequence[int]) -> dict[int, str]:
        """Stacks of processes of this node."""
        return {pid: stacks.ask(pid) for pid in pids}


class Agents:
    """Agents on all of `nodes` but the driver's own."""

    def __init__(self, nodes: Iterable[Node]):
        self._own = ray.get_runtime_context().get_node_id()
        everybody = {node.id: node for node in nodes}
        self._works_here = self._own in everybody
        self._nodes = {node.id: node for node in everybody.values() if node.id != self._own}
        self._agents = {node: _agent(node) for node in self._nodes}

    def check(
        self,
        model: str,
        run_folder: Path | None,
        files: int,
        *,
        others: Sequence[str] = (),
        packages: Sequence[str] = (),
        room: int = 0,
    ) -> list[str]:
        """UserError that lists every difference between a node and the driver; returns what could not be compared.

        `others`: more models. For the rest see `Wanted`.
        """
        models = tuple(dict.fromkeys((model, *others)))
        wanted = Wanted(models, "", files, tuple(packages), room)
        if not self._agents:
            self._refuse([], _lacks("this machine", facts(wanted)) if self._works_here else [])
            return []
        token = _leave_token(run_folder) if run_folder is not None else None
        try:
            wanted = replace(wanted, folder=str(token or ""))
            mine = facts(wanted)
            theirs = self._ask(wanted)
        finally:
            if token is not None:
                token.unlink(missing_ok=True)
        lacking = _lacks("the driver's node", mine) if self._works_here else []
        unlike, unsaid = [], []
        for node, found in theirs.items():
            name = self._nodes[node].address
            lacking += _lacks(name, found)
            unlike += [f"{name}: {text}" for text in differences(mine, found)]
            unsaid += [f"{name}: {text}" for text in uncompared(mine, found)]
        self._refuse(unlike, lacking)
        return unsaid

    def _refuse(self, unlike: Sequence[str], lacking: Sequence[str]) -> None:
        parts = []
        if unlike:
            parts.append(
                f"the nodes of the cluster are not alike: {'; '.join(unlike)}. Install the same versions, and put code, model "
                "and run folder on a disk that all nodes share (or send the code along: ray job submit --working-dir .; "
                "or fetch the same revision of a hub model on every node)"
            )
        if lacking:
            parts.append(f"a node has too little: {'; '.join(lacking)}")
        if parts:
            raise UserError(". ".join(parts))

    def _ask(self, wanted: Wanted) -> dict[str, Mapping[str, str]]:
        refs = {node: agent.facts.remote(asdict(wanted)) for node, agent in self._agents.items()}
        found: dict[str, Mapping[str, str]] = {}
        for node, ref in refs.items():
            try:
                found[node] = ray.get(ref, timeout=_ANSWER_S)
            except faults.GetTimeoutError:
                found[node] = {"answers": f"not within {_ANSWER_S:g} s"}
            except faults.RayError as error:
                text = reason(error)
                found[node] = (
                    {"verl": "not installed"}
                    if "No module named 'verl" in str(error)
                    else {"responses": text}
                )
        return found

    def stacks(self, workers: Sequence[tuple[str, WorkerHandle]]) -> dict[str, str]:
        """Stacks by the worker's text, for (node id, worker). A node that does not answer is named in the text."""
        out: dict[str, str] = {}
        away: dict[str, list[WorkerHandle]] = {}
        for node, worker in workers:
            if not worker.pid:
                out[str(worker)] = "its process is not there yet"
                continue
            if node == self._own:
                out[str(worker)] = stacks.ask(worker.pid)
                continue
            if node not in self._agents:  # a sampler that was started again on a node that came later
                self._agents[node] = _agent(node)
            away.setdefault(node, []).append(worker)
        refs = {n: self._agents[n].stacks.remote([w.pid for w in members]) for n, members in away.items()}
        for node, members in away.items():
            try:
                found = ray.get(refs[node], timeout=_STACKS_S)
            except faults.RayError as error:
                found = {w.pid: f"its node does not answer: {reason(error)}" for w in members}
            out |= {str(w): found[w.pid] for w in members}
        return out

    def release(self) -> None:
        """End the agents."""
        for agent in self._agents.values():
            kill(agent)


def differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """What is not the same, in words; a name that only the other side reports is a difference too.

    Not what each node must have for itself, nor a model that either side has yet to fetch.
    """
    out = []
    for name in mine.keys() | theirs.keys():
        here, there = mine.get(name), theirs.get(name)
        if there is None or here == there or name in (_FILES, _ROOM) or _TO_FETCH in (here, there):
            continue
        out.append(f"{name}: {there}" + (f", the driver has: {here}" if here is not None else ""))
    return sorted(out)


def uncompared(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Models that one side has yet to fetch, so that nobody knows whether they are the same."""
    found = []
    for name, there in theirs.items():
        if _TO_FETCH in (mine.get(name), there):
            whose = f"{there}, and" if there == _TO_FETCH else "the driver has yet to fetch it, and it"
            found.append(f"{name}: {whose} cannot be compared with the driver's")
    return sorted(found)


def _lacks(node: str, found: Mapping[str, str]) -> list[str]:
    """What a node has too little of, in words."""
    return [
        f"{node}: {name}: {found[name]}" for name in (_FILES, _ROOM) if found.get(name, _ENOUGH) != _ENOUGH
    ]


def _agent(node: str) -> Any:
    """With the environment of the node's workers: what they would import, and the caches they would look in."""
    options = {
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        "runtime_env": {"env_vars": worker_environment(1)},
    }
    return ray.remote(num_cpus=0, max_restarts=-1)(Agent).options(**options).remote()


def _leave_token(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    token = folder / f".seen-by-all-nodes-{secrets.token_hex(4)}"
    token.touch()
    return token
