"""What the machine must have: devices, engines, trackers, the model's weights. Most of it is "this machine lacks"."""

from __future__ import annotations

import importlib.util
import os
import resource
from pathlib import Path

from verl.config import release
from verl.config.devices import ray_address
from verl.config.engine_kwargs import OURS, translate
from verl.config.engine_packages import EnginePackageError, check_vllm, vllm_arguments
from verl.config.rollout_engines import CAPABILITIES, RELEASED
from verl.config.rules.context import Check


def check(c: Check) -> None:
    """Rules 17, 21 to 24, and what this release does on one machine only."""
    if c.trainer is not None:
        _devices(c)
    if c.rollout is not None:
        _engine(c)
    if c.model is not None:
        _model(c)
    if c.ppo or c.cfg.entry == "sft":
        _trackers(c)
        _resume(c)


def _devices(c: Check) -> None:
    wanted, found = c.trainer.device, c.devices
    cluster = c.ppo and bool(ray_address(c.cfg))
    kind = found.best if wanted == "auto" else wanted
    here = found.count(kind)
    if kind == "cuda" and here and not found.cuda_build:
        c.lacks("trainer.device=cuda", "torch is built without CUDA here; install a CUDA build, or set cpu")
    elif wanted in ("cuda", "npu") and not here and not cluster:
        c.lacks(
            f"trainer.device={wanted}", f"no {wanted} device is found here; set trainer.device=cpu or auto"
        )
    if c.cfg.entry == "sft":
        _processes(c, kind, here)
        return
    if not c.ppo:
        if c.world > 1:
            c.lacks(
                _sizes(c),
                f"{c.world} devices; this command runs on 1, and here is {here} {kind}; set both to 1",
            )
        return
    if not cluster:
        _one_machine(c, kind, here)
    if (c.world > 1 or c.rollout.nnodes > 0 or cluster) and importlib.util.find_spec("ray") is None:
        c.lacks(_sizes(c), "more than one device needs Ray, which is not installed: pip install 'verl[ray]'")
    _open_files(c)
    _run_folder(c)


def _run_folder(c: Check) -> None:
    """A submitted job works in a copy of its directory that Ray makes and removes."""
    folder, here = Path(c.trainer.default_local_dir).expanduser(), Path.cwd()
    if not folder.is_absolute() and "working_dir_files" in here.parts:
        c.notice(
            f"trainer.default_local_dir={folder} is inside Ray's temporary copy of the job's directory and is lost with it: give "
            "an absolute path on a disk that stays"
        )


def _processes(c: Check, kind: str, here: int) -> None:
    """Supervised training runs in the processes that torchrun started."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if kind != "cpu" and local > here > 0:
        c.lacks(
            "torchrun", f"started {local} processes on this machine, which has {here} {kind}; start {here}"
        )
    asked = c.trainer.nnodes * c.trainer.n_gpus_per_node
    if asked != c.world and (c.was_set("trainer.nnodes") or c.was_set("trainer.n_gpus_per_node")):
        c.notice(
            f"no effect: {_sizes(c)}: torchrun decides how many processes train, here {c.world}; "
            f"torchrun --nnodes={c.trainer.nnodes} --nproc_per_node={c.trainer.n_gpus_per_node} -m "
            "verl.trainer.sft_trainer … starts as many"
        )


def _sizes(c: Check) -> str:
    return f"trainer.nnodes={c.trainer.nnodes}, trainer.n_gpus_per_node={c.trainer.n_gpus_per_node}"


def _one_machine(c: Check, kind: str, here: int) -> None:
    """Without a cluster's address everything has to be on this machine."""
    key = c.rollout_key
    own = c.rollout.nnodes * c.rollout.n_gpus_per_node
    wanted, sizes = c.world + own, _sizes(c)
    if own:
        sizes += f", {key}.nnodes={c.rollout.nnodes}, {key}.n_gpus_per_node={c.rollout.n_gpus_per_node}"
    if c.trainer.nnodes + c.rollout.nnodes > 1 + (own > 0):
        nodes = c.trainer.nnodes + c.rollout.nnodes
        c.lacks(
            sizes,
            f"{wanted} devices on {nodes} nodes need a Ray cluster, and here is {here} {kind}: start Ray on each node "
            "(examples/ray_start.sh) and set RAY_ADDRESS, or set trainer.nnodes=1",
        )
    elif wanted > here > 0:
        what = "cores, a rank needs one" if kind == "cpu" else f"{kind} device{'s' * (here != 1)}"
        c.lacks(
            sizes,
            f"{wanted} devices asked for, found {here} {what}; lower trainer.n_gpus_per_node (1 needs no Ray), or set "
            "RAY_ADDRESS to a cluster that has them",
        )


def _open_files(c: Check) -> None:
    """Every worker, and Ray's own processes, hold connections and files of the driver and of each other."""
    if c.world == 1 and c.rollout.nnodes == 0:
        return
    needed = 1024 + 128 * c.world
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        c.lacks(
            _sizes(c),
            f"a process may open {hard} files here (ulimit -n), {c.world} workers need {needed}; raise it: "
            "ulimit -n 65536",
        )


def _engine(c: Check) -> None:
    name, key = c.rollout.name, f"{c.rollout_key}.name"
    engine, others = CAPABILITIES[name], c.rollout.engine_kwargs
    if not engine.released:
        installed = importlib.util.find_spec(name) is not None
        where = "installed here, but " if installed else "not installed here, and "
        c.lacks(f"{key}={name}", f"{where}not in this release; set {key}={' or '.join(RELEASED)}")
    elif name in _ARGUMENT_CHECKS:
        _ARGUMENT_CHECKS[name](c)
    elif others.vllm or others.sglang:
        c.notice(
            f"no effect: {c.rollout_key}.engine_kwargs.* belong to vllm and sglang, the engine is {name}"
        )


def _vllm(c: Check) -> None:
    """Its version, and its arguments, both looked up without importing it."""
    key = c.rollout_key
    known: frozenset[str] = frozenset()
    try:
        check_vllm()
        known = vllm_arguments()
    except EnginePackageError as error:
        c.lacks(f"{key}.name=vllm", str(error))
    values = {name: c.rollout.get(name) for name in OURS.values()}
    values["tensor_model_parallel_size"] = values["tensor_model_parallel_size"] or 1
    text_only = c.facts is None or not c.facts.vision
    translated = translate(c.rollout.engine_kwargs.vllm, known, values, text_only=text_only)
    for where, message in translated.problems:
        c.refuse(where.replace("rollout.", f"{key}.", 1), message)
    for text in translated.notices:
        c.notice(text)
    if c.rollout.data_parallel_size > 1:
        c.refuse(
            f"{key}.data_parallel_size={c.rollout.data_parallel_size}",
            "one vllm engine is one copy of the model here; set 1: more devices make more engines",
        )


def _model(c: Check) -> None:
    facts, key = c.facts, f"{c.model_key}.path"
    if facts is None:
        return
    if trouble := facts.missing_weights():
        c.refuse(f"{key}={c.model.path}", trouble)
    if facts.remote_code and not c.model.trust_remote_code:
        c.refuse(
            f"{c.model_key}.trust_remote_code=False",
            f"the model ({facts.name}) is built by code shipped with it; set True to run its author's code",
        )
    if facts.vision and not release.VISION:
        c.lacks(
            f"{key}={c.model.path}", f"vision models ({facts.name}) are not in this release; use a text model"
        )
    if c.ppo and c.cfg.reward_model.enable and not c.cfg.reward_model.model.path:
        c.refuse("reward_model.model.path", "reward_model.enable=True needs it")


def _trackers(c: Check) -> None:
    packages = {"wandb": "wandb", "tensorboard": "tensorboard"}
    for name in c.trainer.logger:
        package = packages.get(name)
        if package and importlib.util.find_spec(package) is None:
            text = f"trainer.logger={name}: {package} is not installed; left out (pip install {package})"
            c.notice(text, run_says=True)
        elif package is None and name not in release.LOGGERS:
            text = f"trainer.logger={name}: not in this release, left out; metrics.jsonl has everything"
            c.notice(text, run_says=True)
    offline = not os.environ.get("WANDB_API_KEY") and not Path("~/.netrc").expanduser().exists()
    if "wandb" in c.trainer.logger and offline and "WANDB_MODE" not in os.environ:
        text = "trainer.logger=wandb: not logged in here; left out (wandb login, WANDB_API_KEY or WANDB_MODE=offline)"
        c.notice(text, run_says=True)


def _resume(c: Check) -> None:
    """Rule 21: the checkpoint of resume_path is there."""
    if c.trainer.resume_mode != "resume_path":
        return
    given = c.trainer.resume_from_path
    if not given:
        c.refuse("trainer.resume_mode=resume_path", "needs trainer.resume_from_path=…/global_step_N")
        return
    folder = Path(given)
    complete = ("manifest.json", "latest_checkpointed_iteration.txt", "data.pt")
    if not folder.is_dir():
        c.refuse(
            f"trainer.resume_from_path={given}",
            "no such directory; to start afresh set trainer.resume_mode=auto",
        )
    elif not any((folder / name).exists() for name in complete) and not any(folder.glob("global_step_*")):
        c.refuse(
            f"trainer.resume_from_path={given}", "holds no checkpoint (no manifest.json, no global_step_N)"
        )


_ARGUMENT_CHECKS = {"vllm": _vllm}
