"""`verl doctor`: what is here, what fits together, what is missing for which feature, and what to do about it."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from verl.engine.registry import ROLLOUT_ENGINES, TRAINING_ENGINES, holes
from verl.engine.registry import packages as engine_packages
from verl.errors import UserError
from verl.planning import devices
from verl.platform import probe
from verl.platform.host_resources import cores
from verl.plugins import import_modules
from verl.reward.sandbox import local as sandbox
from verl.versions import SUPPORTED, satisfies
from verl.workers import compare_nodes
from verl.workers.compare_nodes import BAD, GIB, NOTE, OK, WARN, Finding, bad, count, gib, graded

PYTHON = (3, 11)


@dataclass(frozen=True, slots=True)
class Feature:
    """Something optional. `packages`: any one of them is enough."""

    what: str
    packages: tuple[str, ...]
    versions: str
    install: str


TRACKERS = ("clearml", "mlflow", "swanlab", "tensorboard", "trackio")
FEATURES: tuple[Feature, ...] = (
    Feature("tracker wandb", ("wandb",), ">=0.19", "pip install 'wandb>=0.19'"),
    Feature("data on s3://", ("s3fs",), "", "pip install s3fs"),
    Feature("several devices", ("ray",), ">=2.54,<3", "pip install 'verl[ray]'"),
    Feature("LoRA", ("peft",), ">=0.21", "pip install 'verl[lora]'"),
    *(Feature(f"tracker {name}", (name,), "", f"pip install {name}") for name in TRACKERS),
)

QUICKSTART = {"bfloat16": 3400, "float32": 3900}
"""Tokens a second of a `make quickstart` step by the dtype of its products (a test compares the committed figures)."""
MEASURED = "as measured with one thread of a busy AMD EPYC (benchmarks/results/quickstart.json)"

BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""Packages that transformers imports when they are there: a build that does not fit torch breaks the import."""


def check(bench: bool = False) -> list[Finding]:
    """All findings, in the order in which they are shown."""
    parts = (_base, _together, _features, _devices, _machine, *([_bench] if bench else []))
    return [finding for part in parts for finding in part()]


def _base() -> Iterator[Finding]:
    text = f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    yield graded("packages", "python", text, (sys.version_info[:2] < PYTHON, BAD, "use Python 3.11 or newer"))
    needs = probe.requirements("verl")
    if not needs:
        yield Finding("packages", "verl", "not installed: its needs are not known", WARN, "pip install -e .")
    for need in needs:
        name, ranges = need.name, SUPPORTED.get(need.name, str(need.specifier))
        requirement = str(need).replace(str(need.specifier), ranges)
        version, install = probe.version(name), f"pip install '{requirement}'"
        if version is None:
            yield bad("packages", name, "missing", install)
        elif not satisfies(version, ranges):
            yield bad("packages", name, f"{version}: needs {ranges}", install)
        else:
            build = f", {probe.torch_build()} build" if name == "torch" else ""
            yield Finding("packages", name, version + build)


def _together() -> Iterator[Finding]:
    """Packages that are fine alone and break each other."""
    yield from _beside_torch()
    antlr = probe.version("antlr4-python3-runtime")
    if antlr is not None and probe.version("omegaconf") and not satisfies(antlr, "==4.9.*"):
        todo = "pip install 'antlr4-python3-runtime==4.9.3' 'math-verify[antlr4-9-3]'"
        yield bad("together", "antlr4 runtime", f"{antlr}: omegaconf cannot parse overrides with it", todo)
    for name in (*engine_packages(), "torch_npu", "peft", "trl"):
        for other in ("torch", "transformers"):
            yield from _pin(name, other)
    for name, ranges in holes().items():
        version = probe.version(name)
        if version and satisfies(version, ranges):
            text = f"{version}: has a known security hole; it is refused"
            yield Finding("together", name, text, BAD, f"pip install -U {name}")


def _beside_torch() -> Iterator[Finding]:
    torch, build = probe.version("torch"), probe.torch_build()
    for name in BESIDE_TORCH:
        version, ranges = probe.version(name), probe.wants(name, "torch")
        if torch is None or version is None:
            continue
        problem = ""
        if build == "cpu" and probe.needs_cuda(name):
            problem = f"{version} is a CUDA build beside a CPU torch"
        elif ranges and not satisfies(torch, ranges):
            problem = f"{version} was built for torch{ranges}, here is {torch}"
        if problem:
            text = f"{problem}: transformers fails to import with it"
            yield bad("together", name, text, f"pip uninstall {name}")
        else:
            yield Finding("together", name, f"{version}, fits torch {torch}")


def _pin(name: str, other: str) -> Iterator[Finding]:
    version, have, ranges = probe.version(name), probe.version(other), probe.wants(name, other)
    if version and have and ranges and not satisfies(have, ranges):
        text = f"{version} wants {other}{ranges}, here is {have}"
        todo = f"give {name} an environment of its own, or pip install '{other}{ranges}'"
        yield Finding("together", name, text, WARN, todo)


def _features() -> Iterator[Finding]:
    for feature in (*FEATURES, *_engines()):
        have = [(name, version) for name in feature.packages if (version := probe.version(name))]
        text = ", ".join(map(" ".join, have)) or f"{', '.join(feature.packages[:1])} is not installed"
        level, todo = OK, ""
        if not feature.packages:
            text = "needs no package of its own"
        elif not have:
            level, todo = NOTE, feature.install
        elif feature.versions and not satisfies(have[0][1], feature.versions):
            level, todo, text = WARN, feature.install, f"{text}: needs {feature.versions}"
        yield Finding("features", feature.what, text, level, todo)


def _engines() -> Iterator[Feature]:
    """Of the engines that are here, registered ones too."""
    for key, engines in (("rollout.name", ROLLOUT_ENGINES), ("strategy", TRAINING_ENGINES)):
        for name, engine in engines.items():
            yield Feature(f"{key}={name}", engine.packages, engine.versions, engine.install)


def _devices() -> Iterator[Finding]:
    gpus, npus, build = probe.nvidia_gpus(), probe.npus(), probe.torch_build()
    for index, gpu in enumerate(gpus):
        yield Finding("devices", f"cuda:{index}", gpu)
    if gpus and build == "cpu":
        todo = "install the CUDA build of torch, then trainer.device=cuda"
        yield Finding("devices", "torch", "the CPU build: it cannot use the GPUs", WARN, todo)
    if npus:
        version = probe.version("torch_npu")
        todo = "" if version else f"install the torch_npu that fits torch {probe.version('torch') or ''}"
        text = f"{npus} Ascend devices, torch_npu {version or 'missing'}"
        yield Finding("devices", "npu", text, OK if version else WARN, todo)
        for name, found in probe.ascend().items():
            missing = (not found, WARN, f"install Ascend's {name}, and source its set_env.sh (docs/npu.md)")
            yield graded("devices", name, found or "not found", missing)
    if not gpus and not npus:
        yield Finding("devices", "accelerators", "none: training runs on the CPU (trainer.device=cpu)", NOTE)
    name, flags = probe.cpu()
    usable, quota = cores()
    limited = f", of which the container may use {quota:g}" if quota is not None and quota < usable else ""
    yield Finding("devices", "cpu", f"{name}, {usable} cores{limited}")
    products, *uses = probe.cpu_products() or ("unknown: torch does not start",)
    kernels, *uses = uses or ("unknown: torch does not start",)
    yield Finding("devices", "bf16", f"{products} ({', '.join(flags) or 'no known flags'})")
    missing = (kernels.startswith("no "), NOTE, "apt-get install g++: norms, attention and sampling are faster with it")
    yield graded("devices", "compiled kernels", kernels, missing)
    for used in uses:
        fast = "bfloat16" in used
        dtype = "bfloat16 products, float32 master weights" if fast else "float32"
        yield Finding("devices", "a run on the cpu", f"{used}; default: {dtype}")
        rate = QUICKSTART["bfloat16" if fast else "float32"]
        yield Finding("devices", "quickstart", f"about {rate} tokens/s, {MEASURED}", NOTE)


def _machine() -> Iterator[Finding]:
    yield from _memory()
    for name, place in (("disk here", Path.cwd()), ("disk of the cache", Path("~/.cache/huggingface"))):
        free = probe.disk(place)["free"]
        level = BAD if free < GIB // 4 else WARN if free < 5 * GIB else OK
        todo = "free some space: checkpoints and models go here" if level != OK else ""
        yield Finding("machine", name, f"{gib(free)} free", level, todo)
    if shm := probe.shared_memory():
        small = (shm["free"] < 256 << 20, WARN, "give the container more (docker run --shm-size=2g)")
        yield graded("machine", "/dev/shm", f"{gib(shm['free'])} free", small)
    yield from _limits()
    problem = probe.loopback()
    closed = (problem is not None, WARN, "allow connections on 127.0.0.1: several processes need them")
    yield graded("machine", "loopback ports", problem or "can be opened and reached", closed)
    yield _sandbox()


def _sandbox() -> Finding:
    problem, without = sandbox.state()
    text, todo = problem or "works", ""
    if problem:
        todo = "only for rewards that run code: reward_model.sandbox_fusion.url names a service that runs it"
    elif without:
        text = f"works; programs cannot write files, as namespaces are not allowed here ({without})"
    return Finding("machine", "code sandbox", text, NOTE if problem or without else OK, todo)


def _memory() -> Iterator[Finding]:
    total, available = probe.memory()
    if total is None or available is None:
        yield Finding("machine", "memory", "unknown", NOTE)
        return
    text = f"{gib(available)} of {gib(total)} available"
    short = (available < 3 * GIB, WARN, "close other programs: the quickstart needs about 3 GiB")
    yield graded("machine", "memory", text, short)


def _limits() -> Iterator[Finding]:
    flags = {"open files": "-n", "processes": "-u"}
    for name, (soft, _) in probe.limits().items():
        text, todo = count(soft), ""
        if name in flags:
            if soft is not None and soft < 4096:
                todo = f"ulimit {flags[name]} 4096 before several workers are started"
        elif soft is not None:
            text = f"{soft >> 10} KiB (matters only for fast transfers between GPUs)"
        yield Finding("machine", f"limit: {name}", text, WARN if todo else OK, todo)


_BENCH = """
import json
import torch
from transformers import AutoModelForCausalLM
from torch.utils.benchmark import Timer
def rate(dtype, n=1024):
    a, b = torch.randn(2, n, n).to(dtype)
    timer = Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())
    return 2 * n**3 / timer.blocked_autorange(min_run_time=0.7).mean / 1e9
out = {"threads": torch.get_num_threads(), "fp32": rate(torch.float32), "bf16": rate(torch.bfloat16)}
x, y = torch.ones(2, 1 << 26)
timer = Timer("y.copy_(x)", globals={"x": x, "y": y}, num_threads=torch.get_num_threads())
out["bandwidth"] = 2 * x.nbytes / timer.blocked_autorange(min_run_time=0.7).mean / 1e9
out["devices"] = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
print(json.dumps(out))
"""


def _bench() -> Iterator[Finding]:
    """Import torch and transformers in a process of their own and time matrix products on the CPU."""
    problem = "no result within 180 s"
    try:
        process = subprocess.run([sys.executable, "-c", _BENCH], capture_output=True, text=True, timeout=180)
        problem = (process.stderr.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        got = json.loads(process.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        yield bad("self-test", "torch", problem, "see `python -c 'import torch, transformers'`")
        return
    text = f"torch and transformers; {got['devices']} accelerators seen by torch"
    yield Finding("self-test", "import", text)
    rates = f"fp32 {got['fp32']:.0f}, bf16 {got['bf16']:.0f} GFLOP/s with {got['threads']} threads"
    text = f"{rates}: bf16 is {got['bf16'] / got['fp32']:.1f}× as fast"
    yield Finding("self-test", "matrix products", text)
    with contextlib.suppress(OSError):  # no home to keep it in: the rates are shown all the same
        devices.keep(got["bf16"] * 1e9, got["fp32"] * 1e9, got["bandwidth"] * 1e9, float(probe.memory()[0] or 0))
    text = f"{got['bandwidth']:.0f} GB/s; `verl plan` uses these rates ({devices.bench_file()})"
    yield Finding("self-test", "memory", text)


def show(findings: Iterable[Finding]) -> None:
    """A table per area; plain lines where rich is missing."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError:
        for f in findings:
            print(f"{f.level:<5}{f.area:<10}{f.name:<22}{f.found}" + (f"  -> {f.todo}" if f.todo else ""))
        return
    marks = {OK: ("✓", "green"), NOTE: ("·", "dim"), WARN: ("!", "yellow"), BAD: ("✗", "bold red")}
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    area = ""
    for f in findings:
        if f.area != area:
            table.add_row("")
            table.add_row("", Text(f.area, style="bold"))
            area = f.area
        mark, style = marks[f.level]
        text = Text(f.found, style="dim" if f.level == NOTE else "")
        if f.todo:
            text.append(f"\n→ {f.todo}", style="cyan" if f.level != NOTE else "dim")
        table.add_row(Text(mark, style=style), Text(f.name), text)
    console.print(table)


def verdict(findings: list[Finding]) -> tuple[int, str]:
    """(exit status, one sentence): 1 only if training on this machine cannot work."""
    return compare_nodes.verdict(findings, "Training cannot work here", "Training works here.")


def _cluster(args: argparse.Namespace) -> list[Finding]:
    """`verl doctor --cluster`. UserError where there is no cluster."""
    from verl.compat.spellings import load

    if importlib.util.find_spec("ray") is None:
        raise UserError("Ray is not installed here: pip install 'verl[ray]'")
    from verl.preflight.cluster import examine

    config = load(args.overrides)
    config.actor_rollout_ref.model.path = args.model or config.actor_rollout_ref.model.path
    import_modules(config.actor_rollout_ref.model.external_lib)  # may register what the run needs
    say = partial(print, file=sys.stderr, flush=True)
    return examine(config, max(1, args.megabytes), args.timeout, say)


def main(argv: list[str]) -> int:
    """Print the findings; 1 if something is broken that training on one machine needs, or on the cluster with
    --cluster."""
    about = "What is installed here, what works together, what is missing, and what to do about it."
    parser = argparse.ArgumentParser(prog="verl doctor", description=about)
    add = parser.add_argument
    add("--json", action="store_true", help="print the findings as JSON")
    add("--external-lib", help="a module that registers engines, as model.external_lib names it")
    add("--bench", action="store_true", help="also import torch and time matrix products (10 s), for `verl plan` too")
    add = parser.add_argument_group("many nodes").add_argument
    join = "join the Ray cluster that a run would, and compare its nodes"
    add("--cluster", action="store_true", help=join)
    add("--model", help="a model's path: is it the same on every node?")
    add("--megabytes", type=int, default=64, help="size of the all-reduce (default: 64)")
    add("--timeout", type=float, default=120.0, help="seconds for each step (default: 120)")
    keys = "with --cluster: keys of the run, as in its command"
    add("overrides", nargs="*", metavar="key=value", help=keys)
    args = parser.parse_args(argv)
    if not args.cluster and (args.overrides or args.model):
        parser.error("--model and key=value belong to --cluster")
    import_modules(args.external_lib)
    if args.cluster:
        findings = _cluster(args)
        words = "A run on this cluster would stop", "A run can start on this cluster."
        status, sentence = compare_nodes.verdict(findings, *words)
    else:
        findings = check(bench=args.bench)
        status, sentence = verdict(findings)
    if args.json:
        result = {"ok": status == 0, "verdict": sentence, "findings": [asdict(f) for f in findings]}
        print(json.dumps(result, indent=1))
    else:
        show(findings)
        print(f"\n{sentence}")
    return status
