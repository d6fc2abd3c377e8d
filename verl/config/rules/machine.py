"""What the machine must have: devices, engines, trackers, the model's weights.

What the machine lacks is reported as such; what this release lacks is refused.
"""

from __future__ import annotations

import importlib.util
import os
import resource
from pathlib import Path

from verl.config.devices import ray_address
from verl.config.layout import OwnPool, own_pools, policy_placement
from verl.config.model_facts import VISION_MODELS
from verl.config.names import LOGGERS
from verl.config.rules.context import ACTOR, Check
from verl.engine.registry import ROLLOUT_ENGINES, TRAINING_ENGINES, capabilities
from verl.versions import satisfies, unsupported, version


def check(c: Check) -> None:
    """Devices, engines, models, versions, trackers, resuming, and what this release does on one machine only."""
    for package, advice in unsupported().items():
        c.lacks(package, advice)
    if c.trainer is not None and c.cfg.entry != "eval":
        _devices(c)
    _engines(c)
    if c.model is not None:
        _model(c)
    _trackers(c)
    if c.ppo or c.cfg.entry == "sft":
        _resume(c)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _devices(c: Check) -> None:
    device, devices = c.trainer.device, c.devices
    cluster = c.cfg.entry != "sft" and bool(ray_address(c.cfg))
    kind = devices.best if device == "auto" else device
    here, sizes = devices.count(kind), f"{c.at('trainer.nnodes')}, {c.at('trainer.n_gpus_per_node')}"
    if kind == "cuda" and here and not devices.cuda_build:
        c.lacks("trainer.device=cuda", "torch is built without CUDA here; install a CUDA build, or set cpu")
    elif device in ("cuda", "npu") and not here and not cluster:
        c.lacks("trainer.device", f"no {device} device is found here; set trainer.device=cpu or auto")
    if c.cfg.entry == "sft":
        _processes(c, sizes, kind, here)
        return
    if not cluster:
        _one_machine(c, sizes, kind, here)
    if (c.several or cluster) and not _installed("ray"):
        c.lacks(sizes, "more than one device needs Ray, which is not installed: pip install 'verl[ray]'")
    if c.several:
        _open_files(c, sizes)
    folder = Path(c.trainer.default_local_dir).expanduser()
    if not folder.is_absolute() and "working_dir_files" in Path.cwd().parts:
        lost = "is inside Ray's temporary copy of the job's directory, lost with it: give an absolute path"
        c.notice(f"trainer.default_local_dir={folder} {lost}")


def _processes(c: Check, sizes: str, kind: str, here: int) -> None:
    """Supervised training runs in the processes that torchrun started."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if kind != "cpu" and local > here > 0:
        c.lacks("torchrun", f"started {local} processes on a machine with {here} {kind}; start {here}")
    nodes, per_node = c.trainer.nnodes, c.trainer.n_gpus_per_node
    if nodes * per_node != c.world and (c.was_set("trainer.nnodes") or c.was_set("trainer.n_gpus_per_node")):
        command = f"torchrun --nnodes={nodes} --nproc_per_node={per_node} starts as many"
        c.notice(f"no effect: {sizes}: torchrun decides how many processes train, here {c.world}; {command}")


def _one_machine(c: Check, sizes: str, kind: str, here: int) -> None:
    """Without a cluster's address everything has to be on this machine."""
    pools = [*own_pools(c.cfg).values()] if c.ppo else []
    if c.rollout.nnodes:
        pools.insert(0, OwnPool(c.rollout_key, c.rollout.nnodes, c.rollout.n_gpus_per_node))
    sizes = ", ".join([sizes, *map(str, pools)])
    needed = c.world + sum(pool.devices for pool in pools)
    nodes = c.trainer.nnodes + sum(pool.nodes for pool in pools)
    if nodes > 1 + len(pools):
        c.lacks(
            sizes,
            f"{needed} devices on {nodes} nodes need a Ray cluster, and here is {here} {kind}: start Ray on each node "
            "(examples/ray_start.sh) and set RAY_ADDRESS, or set trainer.nnodes=1",
        )
    elif needed > here > 0:
        noun = "cores, a rank needs one" if kind == "cpu" else f"{kind} device{'s' * (here != 1)}"
        c.lacks(
            sizes,
            f"{needed} devices asked for, found {here} {noun}; lower trainer.n_gpus_per_node (1 needs no Ray), or set "
            "RAY_ADDRESS to a cluster that has them",
        )


def _open_files(c: Check, sizes: str) -> None:
    """Every worker, and Ray's own processes, hold connections and files of the driver and of each other."""
    needed = 1024 + 128 * c.world
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        message = f"a process may open {hard} files here (ulimit -n), {c.world} workers need {needed}"
        c.lacks(sizes, f"{message}; raise it: ulimit -n 65536")


def _engines(c: Check) -> None:
    """The rules of the run's engines."""
    strategies = [c.cfg.select(f"{key}.strategy") for key in (ACTOR, "engine")]
    for strategy in filter(TRAINING_ENGINES.__contains__, strategies):
        TRAINING_ENGINES[strategy].check(c)
    if c.rollout is None:
        return
    name, key = c.rollout.name, f"{c.rollout_key}.name"
    if name in ROLLOUT_ENGINES:
        ROLLOUT_ENGINES[name].check(c)
    elif name in c.keys[key].about["options"]:  # `rules.values` refuses the others
        c.refuse(f"{key}={name}", f"not in this release; set {key}={' or '.join(ROLLOUT_ENGINES)}")
    arguments = c.rollout.engine_kwargs
    others = [engine for engine in arguments if engine != name]
    if any(arguments[engine] for engine in others):
        c.notice(
            f"no effect: {c.rollout_key}.engine_kwargs.* belong to {' and '.join(others)}, this is {name}"
        )


def _model(c: Check) -> None:
    facts, at = c.facts, f"{c.model_key}.path"
    if facts is None:
        return
    if trouble := facts.missing_weights():
        c.refuse(at, trouble)
    if facts.remote_code and not c.model.trust_remote_code:
        why = f"the model ({facts.name}) is built by code shipped with it; set True to run its author's code"
        c.refuse(f"{c.model_key}.trust_remote_code", why)
    if facts.vision and (why := _no_vision(c, facts.name)):
        c.refuse(at, f"vision models ({facts.name}) {why}")
    elif facts.vision and c.rollout is not None:
        ranges, have = capabilities(c.rollout.name).image_transformers, version("transformers")
        if have and not satisfies(have, ranges):
            message = (
                f"transformers {have} is installed; images need one that is {ranges} with {c.rollout.name}"
            )
            c.lacks(at, f"{message}: pip install 'transformers{ranges}'")


def _no_vision(c: Check, name: str) -> str:
    """Why this run cannot have a model of that type, which sees images, "" if it can."""
    if (split := policy_placement(c.cfg)).tensor > 1:
        return f"are not split so in this release; set {split.keys['tensor']}=1"
    if name not in VISION_MODELS:
        supported = ", ".join(VISION_MODELS)
        return f"are not in this release, where its images were not seen to be right; take one of {supported}"
    if c.rollout is not None and name not in capabilities(c.rollout.name).images:
        return f"are not sampled by {c.rollout.name} in this release; set {c.rollout_key}.name=native"
    return ""


def _trackers(c: Check) -> None:
    for name in c.trainer.logger:
        if name not in LOGGERS:
            trouble = "not in this release, left out; metrics.jsonl has everything"
        elif name in ("wandb", "tensorboard") and not _installed(name):
            trouble = f"{name} is not installed; left out (pip install {name})"
        else:
            continue
        c.notice(f"trainer.logger={name}: {trouble}", run_says=True)
    offline = not os.environ.get("WANDB_API_KEY") and not Path("~/.netrc").expanduser().exists()
    if "wandb" in c.trainer.logger and _installed("wandb") and offline and "WANDB_MODE" not in os.environ:
        text = "trainer.logger=wandb: not logged in here; left out (wandb login, WANDB_API_KEY or WANDB_MODE=offline)"
        c.notice(text, run_says=True)


def _resume(c: Check) -> None:
    """The checkpoint of resume_path is there."""
    if c.trainer.resume_mode != "resume_path":
        if c.trainer.resume_from_path:
            c.notice(f"no effect: {c.at('trainer.resume_from_path')} without trainer.resume_mode=resume_path")
        return
    at, folder = c.at("trainer.resume_from_path"), Path(c.trainer.resume_from_path or "")
    complete = ("manifest.json", "latest_checkpointed_iteration.txt", "data.pt", "global_step_*")
    if not c.trainer.resume_from_path:
        c.refuse("trainer.resume_mode=resume_path", "needs trainer.resume_from_path=…/global_step_N")
    elif not folder.is_dir():
        c.refuse(at, "no such directory; to start afresh set trainer.resume_mode=auto")
    elif not any(any(folder.glob(name)) for name in complete):
        c.refuse(at, "holds no checkpoint (no manifest.json, no global_step_N)")
