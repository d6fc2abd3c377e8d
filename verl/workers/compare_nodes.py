"""Do the nodes of a cluster fit a run? Facts of `node_facts` in, findings out; the same ones refuse a run at its start
and are shown by `verl doctor --cluster`. Imports no torch and no ray."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.reward_weights import scores_by_model
from verl.config.schema.fields import for_elsewhere
from verl.engine.registry import ROLLOUT_ENGINES, holes
from verl.platform import platform_of
from verl.versions import satisfies
from verl.workers.node_facts import CODE, model_files

if TYPE_CHECKING:
    from verl.config import Config


GIB = 1 << 30
OK, NOTE, WARN, BAD = "ok", "note", "warn", "bad"
Facts = dict[str, Any]
_MISSING = "missing"
_SAME_CODE = "copy the same files to every node, or let Ray ship them (ray job submit --working-dir)"
_MORE_SHM = "give the container more (docker run --shm-size, an emptyDir of medium Memory)"
_BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `level`: ok, note, warn, bad. `base`: if bad, training does not work at all."""

    area: str
    name: str
    found: str
    level: str = OK
    todo: str = ""
    base: bool = False


def bad(area: str, name: str, text: str, todo: str) -> Finding:
    """A finding that stops a run."""
    return Finding(area, name, text, BAD, todo, base=True)


def graded(area: str, name: str, text: str, *faults: tuple[bool, str, str]) -> Finding:
    """A finding with the level and the advice of the first of `faults` (holds, level, what to do) that holds."""
    for holds, level, todo in faults:
        if holds:
            return Finding(area, name, text, level, todo, base=level == BAD)
    return Finding(area, name, text)


def verdict(findings: Collection[Finding], broken: str, fine: str) -> tuple[int, str]:
    """(exit status, one sentence): 1 and `broken` until … if a finding says that nothing works at all; else `fine`."""
    stops = dict.fromkeys(f.name for f in findings if f.level == BAD and f.base)
    if stops:
        return 1, f"{broken} until this is put right: {', '.join(stops)}."
    remarks = dict.fromkeys(f.name for f in findings if f.level in (BAD, WARN))
    return 0, f"{fine} Worth a look: {', '.join(remarks)}." if remarks else fine


@dataclass(frozen=True, slots=True)
class NodeNeeds:
    """What a run needs of every node.

    models    directories, or hub ids: the same everywhere
    packages  distributions that must have the driver's release
    files     how many a process must be able to open
    room      bytes of shared memory that a transfer of weights takes
    folder    the run folder, if checkpoints are written: all nodes must see it
    """

    models: tuple[str, ...] = ()
    packages: frozenset[str] = frozenset(("torch", "transformers", "ray"))
    files: int = 0
    room: int = 0
    folder: Path | None = None


def needs_of(config: Config) -> NodeNeeds:
    """Of a run with this configuration."""
    arr, trainer, packages = config.actor_rollout_ref, config.trainer, set(NodeNeeds().packages)
    lora = arr.model.lora_rank > 0 or arr.model.lora_adapter_path
    packages |= set(ROLLOUT_ENGINES.named(arr.rollout.name).packages)
    if lora:
        packages.add("peft")
    packages |= set(platform_of(trainer.device).packages)
    files, models = 1024 + 128 * trainer.nnodes * trainer.n_gpus_per_node, _models(config)
    # An adapter is small.
    room = 0 if lora or not arr.model.path else _transfer_room(arr.rollout, models[0])
    folder = Path(trainer.default_local_dir).expanduser().absolute() if trainer.save_freq > 0 else None
    return NodeNeeds(models, frozenset(packages), files, room, folder)


def _models(config: Config) -> tuple[str, ...]:
    """Those of all roles, the policy's first, by paths that mean the same in another folder."""
    from verl.algorithms.needs import needed_columns, teacher_roles

    plain = for_elsewhere(config)
    paths = [plain["actor_rollout_ref"]["model"]["path"]]
    if "ref_log_probs" in needed_columns(config):
        paths.append(plain["actor_rollout_ref"]["ref"]["model"].get("path"))
    if teacher_roles(config):
        models = plain["distillation"]["teacher_models"].values()
        paths += [teacher["model_path"] for teacher in models if teacher.get("model_path")]
    if "values" in needed_columns(config):
        paths.append(plain["critic"]["model"].get("path"))
    if scores_by_model(config):
        paths.append(plain["reward_model"]["model"]["path"])
    return tuple(dict.fromkeys(path for path in paths if path))


def _transfer_room(rollout: Any, model: str) -> int:
    """Bytes of shared memory without which a transfer of weights fails on a node that samples: two buckets, or a model
    of two bytes a weight if that is less; 0 where its size is not known. A transfer that needs more says so itself."""
    from verl.weight_sync.channel import host_bucket

    bucket = int(rollout.checkpoint_engine.update_weights_bucket_megabytes) << 20
    if not rollout.nnodes:  # no broadcast, whose buckets are as large as asked for
        bucket = host_bucket(bucket)
    return min(2 * bucket, int(model_files(model).get("bytes", 0)) // 2)


def compare(nodes: Sequence[Facts], driver: Facts, needs: NodeNeeds) -> Iterator[Finding]:
    """What must equal the driver's on every node, and what each must have for itself. A node is a dict of facts with a
    "name"; the driver's own node may be among them."""
    if not nodes:
        return
    by_name = {node["name"]: node for node in nodes}
    every, refused = {"the driver": driver} | by_name, holes()
    for name in dict.fromkeys(name for node in every.values() for name in node["versions"]):
        have = {who: node["versions"].get(name, _MISSING) for who, node in every.items()}
        todo = _SAME_CODE if name == CODE else f"install one {name} on every node and for the driver"
        yield _alike("versions", name, have, todo, partial(_decisive, name, packages=needs.packages))
        for who, text in have.items() if name in refused and name in needs.packages else ():
            if text != _MISSING and satisfies(text, refused[name]):
                problem = f"{text} on {who} has a known security hole; it is refused"
                yield bad("versions", name, problem, f"pip install -U {name} there")
    if any(name.endswith("(driver)") for name in by_name):
        every = by_name  # one of them sees the driver's disk
    for path in needs.models:
        yield from _model(path, {who: node["models"][path] for who, node in every.items()})
    for node in nodes:
        yield from _own(node, needs)


def _alike(area: str, name: str, have: Mapping[str, str], todo: str, decisive: Callable[[str], str]) -> Finding:
    """One line: every node has what the first one has, or which has which. `have`: by node. `decisive`: what must not
    differ of a text. Builds of one release may meet ("2.13.0+cpu" on a driver without a device)."""
    first, mine = next(iter(have.items()))
    other = {who: text for who, text in have.items() if _same(text) != _same(mine)}
    if not other:
        return Finding(area, name, f"{mine} everywhere")
    text = "; ".join(f"{who} has {text}" for who, text in ({first: mine} | other).items())
    differ = {decisive(text) for text in other.values()} != {decisive(mine)}
    return graded(area, name, text, (True, BAD if differ else WARN, todo))


def _same(text: str) -> str:
    """What is compared of a fact's text: not where it lies."""
    return text.partition(" in ")[0]


def _decisive(name: str, version: str, packages: Collection[str]) -> str:
    """What must not differ of a version."""
    if name == "python":
        return ".".join(version.split(".")[:2])
    if name == CODE:
        return _same(version)
    return re.split("[+,]", version)[0] if name in packages else ""


def _model(path: str, models: Mapping[str, Facts]) -> Iterator[Finding]:
    """Every node's model against the driver's; one that has yet to be fetched from a hub is no difference."""
    for name, model in models.items():
        if model.get("to_fetch"):
            text = f"{path} is not in its cache of models: the run fetches it, and it cannot be compared"
            yield Finding("model", name, text, NOTE)
        elif "problem" in model:
            todo = "put the model at the same path on every node, or on a file system that all nodes see"
            yield bad("model", name, model["problem"], todo)
    if have := {name: model["text"] for name, model in models.items() if "text" in model}:
        todo = "copy the same model to every node (a hub's: fetch the same revision)"
        yield _alike("model", path, have, todo, str)


def _own(node: Facts, needs: NodeNeeds) -> Iterator[Finding]:
    """What a node must have for itself."""
    name, files, shm = node["name"], node["open_files"], node["shm"]
    few = files is not None and files < needs.files
    todo = "ulimit -n 65536 before `ray start` on that node (limits.conf for good)"
    yield graded("limits", name, f"open files {count(files)}; the run needs {needs.files}", (few, BAD, todo))
    if shm is None:
        yield Finding("room", name, "no /dev/shm: weights and batches go through the disk", WARN)
        return
    text = f"/dev/shm: {gib(shm['free'])} free of {gib(shm['total'])}, a transfer of weights takes {gib(needs.room)}"
    little = shm["total"] < max(256 << 20, node.get("object_store") or 0)
    short = (shm["free"] < needs.room, BAD, f"{_MORE_SHM}, or lower {_BUCKET}")
    yield graded("room", name, text, short, (little, WARN, _MORE_SHM))


def count(value: int | None) -> str:
    """A limit in words."""
    return "unlimited" if value is None else str(value)


def gib(size: float) -> str:
    """Bytes in GiB."""
    return f"{size / GIB:.1f} GiB"
