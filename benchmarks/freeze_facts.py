"""From what a command left behind to facts: a flat dict of name → JSON value, equal when the behaviour is equal."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

Facts = dict[str, Any]
# Clocks, memory, and what is computed from them.
UNSTABLE = ("time", "timing_*", "perf/*", "reward/latency_s/*", "train/time", "train/mfu", "*_per_s")
_KEY = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")


def run_facts(run: Path, texts: dict[str, str]) -> Facts:
    """Metrics, trajectories, checksums of the newest weights and names of files of a run folder.

    `texts`: what stands for a path (path → name), so that facts do not depend on where a run was.
    """
    facts = metric_facts(run / "metrics.jsonl")
    for folder in ("trajectories", "rollouts", "validations"):
        for file in sorted((run / folder).glob("*.jsonl"), key=lambda f: int(f.stem)):
            for number, row in enumerate(read_lines(file)):
                facts |= {f"{folder}/{file.stem}/{number}/{name}": value for name, value in row.items()}
    steps = sorted(run.glob("global_step_*"), key=lambda f: int(f.name.rpartition("_")[2]))
    if steps:
        facts |= weight_facts(steps[-1])
    facts["files"] = sorted(str(file.relative_to(run)) for file in run.rglob("*") if file.is_file())
    return normalised(facts, texts)


def metric_facts(path: Path) -> Facts:
    """Every metric of every step except clocks and memory; the last record of a step counts."""
    facts: Facts = {}
    for record in read_lines(path):
        if "step" in record and "event" not in record:
            for name, value in record.items():
                if not any(fnmatch(name, pattern) for pattern in UNSTABLE):
                    facts[f"step {record['step']}/{name}"] = value
    return facts


def weight_facts(checkpoint: Path) -> Facts:
    """SHA-256 of every tensor in the safetensors files of a checkpoint: dtype, shape and bytes."""
    facts: Facts = {}
    for file in sorted(checkpoint.rglob("*.safetensors")):
        if "rng" in file.parts:
            continue
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name == "__metadata__":
                continue
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            head = f"{entry['dtype']} {entry['shape']} ".encode()
            folder = file.parent.relative_to(checkpoint)
            facts[f"weights/{folder}/{name}"] = hashlib.sha256(head + data[start:end]).hexdigest()
    return facts


def check_facts(status: int, out: str, err: str, given: Iterable[str]) -> Facts:
    """Exit status, refused and noticed keys, and the numbers of the plan, without the wording.

    A line is known by the keys of the command line that it names (`given`: the words of the command line), and by
    the first key in it where it names none of them.
    """
    keys = {word.lstrip("+~").partition("=")[0].partition("@")[0] for word in given if not word.startswith("-")}
    facts: Facts = {"status": status}
    found: dict[str, set[str]] = {"refused": set(), "lacking": set(), "noticed": set()}
    kind = "refused"
    for line in err.splitlines():
        if line.startswith("note: "):
            found["noticed"].update(named(line.removeprefix("note: "), keys))
        elif line.startswith("verl: "):
            kind = "lacking" if "this machine lacks" in line else "refused"
        elif line.startswith("this machine lacks"):
            kind = "lacking"
        elif line.startswith("  - "):
            subject, _, rest = line[4:].partition(": ")
            found[kind].update(named(subject, keys) or named(rest, keys, first=False))
    facts |= {name: sorted(values) for name, values in found.items()}
    plan = [line for line in out.splitlines() if line.startswith("  ")]
    facts["plan"] = [[int(number) for number in re.findall(r"\d+", line)] for line in plan]
    return facts


def named(text: str, keys: set[str], first: bool = True) -> list[str]:
    """The keys of `keys` that stand in a text (also without the front of their path), else the `first` key in it."""
    words = [word.rstrip(".") for word in re.findall(r"[\w./-]+", text)]
    mine = {
        key for key in keys for word in words if word and (key == word or (key.endswith("." + word) and "." in word))
    }
    return sorted(mine) or _KEY.findall(text)[: int(first)]


def config_facts(text: str, texts: dict[str, str]) -> Facts:
    """The resolved configuration as `--cfg job` prints it: one fact for every key."""
    return normalised(dict(_flat(yaml.safe_load(text), "config/")), texts)


def _flat(tree: Any, path: str) -> Iterable[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from _flat(value, f"{path}{'' if path.endswith('/') else '.'}{name}")
    else:
        yield path, tree


def normalised(facts: Facts, texts: dict[str, str]) -> Facts:
    """The facts with every path of `texts` replaced by the name that stands for it."""
    text = json.dumps(facts)
    for path, name in texts.items():
        text = text.replace(json.dumps(path)[1:-1], name)
    return json.loads(text)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
