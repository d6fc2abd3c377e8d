"""What the driver asks of other nodes: do they fit the run, where do their workers stand. One probe runs on each node
that is not the driver's own; it needs no device and does no work of the run."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import exceptions as faults
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.engine.registry import packages as engine_packages
from verl.errors import UserError
from verl.platform import host_resources, thread_stacks
from verl.workers import node_facts
from verl.workers.compare_nodes import BAD, NOTE, Finding, NodeNeeds, bad, compare
from verl.workers.node_facts import NodeProbe
from verl.workers.ray.calls import WorkerHandle, kill, reason
from verl.workers.ray.cluster import Node, worker_environment

_FACTS_S, _STACKS_S = 120.0, 15.0


def start_probe(node_id: str, **options: Any) -> Any:
    """A `NodeProbe` on a node, with the environment of its workers: what they would import, the caches they look in."""
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    env = {"env_vars": worker_environment(1)}
    options = {"num_cpus": 0, "scheduling_strategy": where, "runtime_env": env} | options
    return ray.remote(NodeProbe).options(**options).remote()


def ask_all(refs: Mapping[str, Any], timeout: float) -> dict[str, tuple[Any, str | None]]:
    """(result, None) or (None, why there is none) of each of several calls, which together get so long."""
    end, out = time.monotonic() + timeout, dict[str, tuple[Any, str | None]]()
    for name, ref in refs.items():
        try:
            out[name] = ray.get(ref, timeout=max(1.0, end - time.monotonic())), None
        except faults.GetTimeoutError:
            out[name] = None, f"no reply within {timeout:g} s"
        except faults.RayError as error:
            missing = [line.strip() for line in str(error).splitlines() if "ModuleNotFoundError" in line]
            problem = f"this code cannot be imported there: {missing[0]}" if missing else reason(error)
            out[name] = None, problem
    return out


def folder_is_shared(folder: Path, probes: Mapping[str, Any], timeout: float = _FACTS_S) -> Finding:
    """Do the probes see a file that the driver puts where a run folder is or will be?"""
    place = folder.expanduser().absolute()
    while not place.is_dir():
        place = place.parent
    token = place / f".seen-by-all-nodes-{secrets.token_hex(8)}"
    todo = "set trainer.default_local_dir to a folder that all nodes see: ranks write there"
    try:
        token.touch(exist_ok=False)
    except OSError as error:
        return bad("model", "run folder", f"{place} cannot be written ({error.strerror})", todo)
    try:
        replies = ask_all({name: probe.sees.remote(str(token)) for name, probe in probes.items()}, timeout)
    finally:
        token.unlink()
    names = [name for name, (sees, _) in replies.items() if not sees]
    if names:
        return bad("model", "run folder", f"{place} is not seen by {', '.join(names)}", todo)
    return Finding("model", "run folder", "seen by every node")


class Agents:
    """Probes on all of `nodes` but the driver's own."""

    def __init__(self, nodes: Iterable[Node]):
        self._own = ray.get_runtime_context().get_node_id()
        self._nodes = {node.id: node for node in nodes}
        self._works_here = self._nodes.pop(self._own, None) is not None
        self._probes = {node: start_probe(node, max_restarts=-1) for node in self._nodes}

    def check(self, needs: NodeNeeds) -> list[str]:
        """UserError that lists what does not fit the run; returns what could not be compared."""
        if not self._probes:  # nothing to compare, but this machine may be too small
            needs = NodeNeeds(files=needs.files, room=needs.room)
        host_resources.raise_open_files(needs.files)
        mine = node_facts.collect(needs.models)
        nodes = [mine | {"name": "this machine (driver)"}] if self._works_here else []
        probes = {self._nodes[id].address: probe for id, probe in self._probes.items()}
        findings = list[Finding]()
        refs = {name: probe.facts.remote(needs.models, engine_packages()) for name, probe in probes.items()}
        for name, (facts, problem) in ask_all(refs, _FACTS_S).items():
            if problem:
                del probes[name]  # it would not reply a second time either
                findings.append(bad("nodes", name, problem, "install the same code there"))
            else:
                nodes.append(facts | {"name": name})
        findings += compare(nodes, mine, needs)
        if needs.folder is not None and probes:
            findings.append(folder_is_shared(needs.folder, probes))
        if wrong := [f"{f.name}: {f.found} ({f.todo})" for f in findings if f.level == BAD]:
            raise UserError(f"the nodes of the cluster do not fit the run: {'; '.join(wrong)}")
        return [f"{f.name}: {f.found}" for f in findings if f.level == NOTE]

    def stacks(self, workers: Sequence[tuple[str, WorkerHandle]]) -> dict[str, str]:
        """Stacks by the worker's text, for (node id, worker). A node that does not reply is named in the text."""
        out: dict[str, str] = {}
        refs: dict[str, Any] = {}
        for node, worker in workers:
            if not worker.pid:
                out[str(worker)] = "its process is not there yet"
            elif node == self._own:
                out[str(worker)] = thread_stacks.ask(worker.pid)
            else:
                if node not in self._probes:  # a sampler that was started again on a node that came later
                    self._probes[node] = start_probe(node, max_restarts=-1)
                refs[str(worker)] = self._probes[node].stack.remote(worker.pid)
        for name, (text, problem) in ask_all(refs, _STACKS_S).items():
            out[name] = f"its node does not reply: {problem}" if problem else text
        return out

    def release(self) -> None:
        """End the probes."""
        for probe in self._probes.values():
            kill(probe)
