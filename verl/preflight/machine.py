"""What the machine must have: devices, engines, trackers, the model's weights.

What the machine lacks is reported as such; what this release lacks is refused.
"""

from __future__ import annotations

import importlib.util
import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.config.devices import ray_address
from verl.config.layout import OwnPool, own_pools
from verl.config.model_facts import VISION_MODELS, ModelFacts, flat_overrides, look
from verl.config.problems import counted
from verl.config.report import ACTOR, Report
from verl.config.schema.base import Root
from verl.engine.registry import ROLLOUT_ENGINES, TRAINING_ENGINES, capabilities
from verl.models import overrides
from verl.versions import satisfies, unsupported, version

_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "moe_intermediate_size",
    "depth",
)
"""Entries of config.json that the shapes of a model's weights follow from."""
_CORES = "ray_kwargs.ray_init.num_cpus"


def check(config: Root, report: Report) -> None:
    """Devices, engines, models, versions, trackers, resuming, and what this release does on one machine only."""
    for package, advice in unsupported().items():
        report.lacks(package, advice)
    if report.trainer is not None and report.config.entry != "eval":
        _devices(report)
    _engines(report)
    if report.model is not None:
        _model(report)
        _overrides(report, report.model_key, report.facts)
    if report.ppo and (critic := report.config.critic).enable and critic.model.path and critic.model.override_config:
        key, model = "critic.model", critic.model
        facts = report.look(f"{key}.path", model.path, model.override_config, model.hf_config_path)
        _overrides(report, key, facts)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _devices(report: Report) -> None:
    device, devices = report.trainer.device, report.devices
    cluster = report.config.entry != "sft" and bool(ray_address(report.config))
    kind = devices.best if device == "auto" else device
    here, sizes = (
        devices.count(kind),
        f"{report.at('trainer.nnodes')}, {report.at('trainer.n_gpus_per_node')}",
    )
    if kind == "cuda" and here and not devices.cuda_build:
        report.lacks("trainer.device=cuda", "torch is built without CUDA here; install a CUDA build, or set cpu")
    elif device in ("cuda", "npu") and not here and not cluster:
        report.lacks("trainer.device", f"no {device} device is found here; set trainer.device=cpu or auto")
    if report.config.entry == "sft":
        _processes(report, sizes, kind, here)
        return
    if not cluster:
        _one_machine(report, kind, here)
    if (report.several or cluster) and not _installed("ray"):
        report.lacks(sizes, "more than one device needs Ray, which is not installed: pip install 'verl[ray]'")
    if report.several:
        _open_files(report, sizes)
    folder = Path(report.trainer.default_local_dir).expanduser()
    if not folder.is_absolute() and "working_dir_files" in Path.cwd().parts:
        lost = "is inside Ray's temporary copy of the job's directory, lost with it: give an absolute path"
        report.notice(f"trainer.default_local_dir={folder} {lost}")


def _processes(report: Report, sizes: str, kind: str, here: int) -> None:
    """Supervised training runs in the processes that torchrun started."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if kind != "cpu" and local > here > 0:
        report.lacks("torchrun", f"started {local} processes on a machine with {here} {kind}; start {here}")
    nodes, per_node = report.trainer.nnodes, report.trainer.n_gpus_per_node
    if nodes * per_node != report.world and (
        report.was_set("trainer.nnodes") or report.was_set("trainer.n_gpus_per_node")
    ):
        command = f"torchrun --nnodes={nodes} --nproc_per_node={per_node} starts as many"
        report.notice(f"no effect: {sizes}: torchrun decides how many processes train, here {report.world}; {command}")


def _one_machine(report: Report, kind: str, here: int) -> None:
    """Without a cluster's address everything has to be on this machine."""
    pools = [OwnPool("trainer", report.trainer.nnodes, report.trainer.n_gpus_per_node)]
    if report.rollout.nnodes:
        pools.append(OwnPool(report.rollout_key, report.rollout.nnodes, report.rollout.n_gpus_per_node))
    pools += own_pools(report.config).values() if report.ppo else []
    devices = counted(here, "core" if kind == "cpu" else f"{kind} device")
    if wide := [pool for pool in pools if pool.nodes > 1]:
        requested = f"{sum(pool.devices for pool in pools)} devices on {max(pool.nodes for pool in wide)} nodes"
        report.lacks(
            ", ".join(map(str, wide)),
            f"{requested} need a Ray cluster, and this is one machine with {devices}: start Ray on each node "
            f"(examples/ray_start.sh) and set RAY_ADDRESS, or set {', '.join(f'{p.keys}.nnodes=1' for p in wide)}",
        )
    elif kind != "cpu":
        if here:  # none at all is said elsewhere
            _enough(report, pools, here, f"found {devices}", [])
    else:  # a rank is a process and can share a core: how many Ray counts is for the user to say
        num_cpus, available = report.config.select(_CORES) if report.several else None, f"found {devices}"
        if isinstance(num_cpus, int):
            available, here = f"{_CORES}={num_cpus}", num_cpus
        share = f"let ranks share cores ({_CORES}={sum(pool.devices for pool in pools)})"
        _enough(report, pools, here, f"{available}, a rank needs one", [share])


def _enough(report: Report, pools: list[OwnPool], here: int, available: str, advice: list[str]) -> None:
    """Pools, the trainer's first, are not larger together than what is here, which `available` says in words. advice:
    what else helps."""
    needed = sum(pool.devices for pool in pools)
    if needed <= here:
        return
    steps = []
    if large := [f"{pool.keys}.n_gpus_per_node" for pool in pools if pool.per_node > 1]:
        steps.append(f"lower {' or '.join(large)}{' (1 needs no Ray)' * (len(pools) == 1)}")
    if len(pools) > max(1, here):
        switches = {"reward_model": "enable_resource_pool=False"}
        shared = ", ".join(f"{pool.keys}.{switches.get(pool.keys, 'nnodes=0')}" for pool in pools[1:])
        steps.append(f"share the trainer's devices ({shared})")
    steps += [*advice, "set RAY_ADDRESS to a cluster that has them"]
    report.lacks(", ".join(map(str, pools)), f"{needed} devices asked for, {available}; {', or '.join(steps)}")


def _open_files(report: Report, sizes: str) -> None:
    """Every worker, and Ray's own processes, hold connections and files of the driver and of each other."""
    needed = 1024 + 128 * report.world
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        message = f"a process may open {hard} files here (ulimit -n), {report.world} workers need {needed}"
        report.lacks(sizes, f"{message}; raise it: ulimit -n 65536")


def _engines(report: Report) -> None:
    """The rules of the run's engines."""
    roles = [ACTOR, "engine", *(["critic"] if report.ppo and report.config.critic.enable else [])]
    strategies = [report.config.select(f"{role}.strategy") for role in roles]
    for strategy in filter(TRAINING_ENGINES.__contains__, dict.fromkeys(strategies)):
        TRAINING_ENGINES[strategy].check(report)
    if report.rollout is None:
        return
    name, key = report.rollout.name, f"{report.rollout_key}.name"
    if name in ROLLOUT_ENGINES:
        ROLLOUT_ENGINES[name].check(report)
    elif name in report.keys[key].about["options"]:  # `values` refuses the others
        report.refuse(f"{key}={name}", f"not in this release; set {key}={' or '.join(ROLLOUT_ENGINES)}")
    arguments = report.rollout.engine_kwargs
    others = [engine for engine in arguments if engine != name]
    if any(arguments[engine] for engine in others):
        report.notice(
            f"no effect: {report.rollout_key}.engine_kwargs.* belong to {' and '.join(others)}, this is {name}"
        )


def _model(report: Report) -> None:
    facts, at = report.facts, f"{report.model_key}.path"
    if facts is None:
        return
    if trouble := facts.missing_weights():
        report.refuse(at, trouble)
    if facts.remote_code and not report.model.trust_remote_code:
        why = f"the model ({facts.name}) is built by code shipped with it; set True to run its author's code"
        report.refuse(f"{report.model_key}.trust_remote_code", why)
    if facts.vision and (why := _no_vision(report, facts.name)):
        report.refuse(at, f"vision models ({facts.name}) {why}")
    elif facts.vision and report.rollout is not None:
        ranges, have = capabilities(report.rollout.name).image_transformers, version("transformers")
        if have and not satisfies(have, ranges):
            message = f"transformers {have} is installed; images need one that is {ranges} with {report.rollout.name}"
            report.lacks(at, f"{message}: pip install 'transformers{ranges}'")


def _no_vision(report: Report, name: str) -> str:
    """Why this run cannot have a model of that type, which sees images, "" if it can."""
    if name not in VISION_MODELS:
        supported = ", ".join(VISION_MODELS)
        return f"are not in this release, where its images were not seen to be right; take one of {supported}"
    if report.rollout is not None and name not in capabilities(report.rollout.name).images:
        return f"are not sampled by {report.rollout.name} in this release; set {report.rollout_key}.name=native"
    return ""


def _overrides(report: Report, model_key: str, facts: ModelFacts | None) -> None:
    """What transformers' configuration takes; a model with weights has the shape of its weights."""
    model: Any = report.config.select(model_key)
    key, changes = f"{model_key}.override_config", flat_overrides(model.override_config)
    for name in filter(changes.__contains__, overrides.IGNORED):
        report.notice(f"no effect: {key}.{name}={changes[name]}: attention is computed by verl's own kernels")
    if facts is None or not changes:
        return
    unchanged = look(model.path, None, model.hf_config_path)
    shapes = dict(_contradictions(changes, unchanged.config, unchanged.text)) if unchanged.weight_names() else {}
    for name, size in shapes.items():
        report.refuse(f"{key}.{name}", f"the weights of {model.path} have {name}={size}; remove it")
    if not unchanged.remote_code:
        for name, why in overrides.refused(unchanged.folder, changes).items():
            if name not in shapes:
                report.refuse(f"{key}.{name}", why)


def _contradictions(
    changes: Mapping[str, Any], config: Mapping[str, Any], text: Mapping[str, Any], within: str = ""
) -> Iterator[tuple[str, Any]]:
    """Overrides of shapes that differ from the configuration, in its parts too: (name, the configuration's value)."""
    for name, value in changes.items():
        part = config.get(name)
        if isinstance(value, Mapping) and isinstance(part, Mapping):
            yield from _contradictions(value, part, part, f"{within}{name}.")
        elif name in _SHAPE and value != text.get(name):
            yield within + name, text.get(name)
