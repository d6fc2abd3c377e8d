"""What the driver asks of other nodes: is the same code there, the same model, the run folder; where do workers stand.

One agent runs on each node that is not the driver's own. It needs no device and does no work of the run.
"""

from __future__ import annotations

import os
import platform
import resource
import secrets
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import ray
from ray import exceptions as faults
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.controller import node_facts
from verl.controller.ray.cluster import Node
from verl.controller.ray.workers import Worker, kill, reason
from verl.errors import UserError
from verl.platform import stacks

_PACKAGES = ("verl", "torch", "transformers", "ray")
_FILES, _ENOUGH = "open files (ulimit -n)", "enough"
_ANSWER_S = 120.0
_STACKS_S = 15.0


def facts(model: str, folder: str, files: int) -> dict[str, str]:
    """What has to be the same on every node, as name → text. Runs on the driver and on every node.

    model: a directory, or a hub id, which is not looked at. folder: a file that the driver wrote into the run folder,
    or "". files: how many a process must be able to open.
    """
    found = {"python": ".".join(platform.python_version_tuple()[:2]), "code of verl": node_facts.code_hash()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    if os.path.isabs(model):
        found[f"model {model}"] = _model_text(model)
    if folder:
        found[f"run folder {Path(folder).parent}"] = "shared" if Path(folder).exists() else "not there"
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    enough = hard == resource.RLIM_INFINITY or hard >= files
    found[_FILES] = _ENOUGH if enough else f"{hard}, needed: {files}"
    return found


def _model_text(path: str) -> str:
    """Hashes of the configuration and of the weights' names and sizes: another revision differs in one of them."""
    found = node_facts.model_files(path)
    return "not there" if "problem" in found else f"{found['config']} {found['weights']}"


class Agent:
    """Runs on a node."""

    def facts(self, model: str, folder: str, files: int) -> dict[str, str]:
        """See `facts`."""
        return facts(model, folder, files)

    def stacks(self, pids: Sequence[int]) -> dict[int, str]:
        """Stacks of processes of this node."""
        return {pid: stacks.ask(pid) for pid in pids}


class Agents:
    """Agents on all of `nodes` but the driver's own."""

    def __init__(self, nodes: Iterable[Node]):
        self._own = ray.get_runtime_context().get_node_id()
        self._nodes = {node.id: node for node in nodes if node.id != self._own}
        self._agents = {node: _agent(node) for node in self._nodes}

    def check(self, model: str, run_folder: Path | None, files: int) -> None:
        """UserError that lists every difference between a node and the driver."""
        if not self._agents:
            return
        token = _leave_token(run_folder) if run_folder is not None else None
        try:
            mine = facts(model, str(token or ""), files) | {_FILES: _ENOUGH}
            theirs = self._ask(model, str(token or ""), files)
        finally:
            if token is not None:
                token.unlink(missing_ok=True)
        problems = [
            f"{self._nodes[node].address}: {text}"
            for node, found in theirs.items()
            for text in differences(mine, found)
        ]
        if problems:
            raise UserError(
                "the nodes of the cluster are not alike: "
                + "; ".join(problems)
                + ". Install the same versions, and put "
                "code, model and run folder on a disk that all nodes share (or send the code along: ray job submit "
                "--working-dir .)"
            )

    def _ask(self, *args: Any) -> dict[str, Mapping[str, str]]:
        refs = {node: agent.facts.remote(*args) for node, agent in self._agents.items()}
        found: dict[str, Mapping[str, str]] = {}
        for node, ref in refs.items():
            try:
                found[node] = ray.get(ref, timeout=_ANSWER_S)
            except faults.GetTimeoutError:
                found[node] = {"answers": f"not within {_ANSWER_S:g} s"}
            except faults.RayError as error:
                text = reason(error)
                found[node] = (
                    {"verl": "not installed"} if "No module named 'verl" in str(error) else {"answers": text}
                )
        return found

    def stacks(self, workers: Sequence[tuple[str, Worker]]) -> dict[str, str]:
        """Stacks by the worker's text, for (node id, worker). A node that does not answer is named in the text."""
        out: dict[str, str] = {}
        away: dict[str, list[Worker]] = {}
        for node, worker in workers:
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
    """What is not the same, in words; a name that only the other side reports is a difference too."""
    out = []
    for name in mine.keys() | theirs.keys():
        here, there = mine.get(name), theirs.get(name)
        if there is not None and here != there:
            out.append(f"{name}: {there}" + (f", the driver has: {here}" if here is not None else ""))
    return sorted(out)


def _agent(node: str) -> Any:
    where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return ray.remote(num_cpus=0, max_restarts=-1)(Agent).options(scheduling_strategy=where).remote()


def _leave_token(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    token = folder / f".seen-by-all-nodes-{secrets.token_hex(4)}"
    token.touch()
    return token
