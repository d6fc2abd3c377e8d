"""Task folders of Harbor and of terminal-bench as environments: `environment.name=harbor`, `path` a folder of tasks.

    reset ─→ instruction, the tool `bash`     in a container of the task's image, or in a sandbox on this machine
    step  ─→ the command of each call         what it printed, and its status
    final ─→ tests                            run there; Harbor: /logs/verifier/reward.txt or .json, terminal-bench:
                                              pytest's summary

    Harbor           instruction.md, task.toml, environment/Dockerfile, tests/test.sh
    terminal-bench   task.yaml, Dockerfile, tests/, run-tests.sh

The sandbox has this machine's programs (read-only), no network, a file system and processes of its own, and no
privileges; it takes tasks whose Dockerfile only copies files. Processes do not outlive their command there.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Protocol
from uuid import uuid4

import yaml

from verl.data.files import tasks_of
from verl.errors import UserError
from verl.rollout.environments import Messages, Observation, StepResult
from verl.rollout.programs import run_program
from verl.rollout.record import EnvironmentFailed

CONTAINERS = ("docker", "podman")
SANDBOX = "sandbox"
_BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command in a shell, in the working directory, and returns what it prints.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
_PASSED, _FAILED = re.compile(r"^(PASSED|XFAIL|SKIPPED)\b", re.M), re.compile(r"^(FAILED|ERROR|XPASS)\b", re.M)


class TaskFolder:
    """What a folder says. UserError for one that is no task, or that asks for what is not supported.

    instruction; test: how the tests run; seconds: of the tests; workdir, variables: of the commands; dockerfile: folder
    and steps of the image; image: one that is ready, in place of it; network: whether the task has one (None: not
    told).
    """

    def __init__(self, folder: Path):
        self.folder, self.harbor = folder, (folder / "task.toml").is_file()
        if not self.harbor and not (folder / "task.yaml").is_file():
            raise UserError(f"{folder} is no task: it has neither task.toml (Harbor) nor task.yaml (terminal-bench)")
        try:
            self._read_harbor() if self.harbor else self._read_terminal_bench()
        except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
            raise UserError(f"{folder}: the task cannot be read ({type(error).__name__}: {error})") from error

    def _read_harbor(self) -> None:
        config = tomllib.loads((self.folder / "task.toml").read_text())
        about, verifier = config.get("environment", {}), config.get("verifier", {})
        unsupported = {
            "steps": config.get("steps"),
            "environment.os": about.get("os", "linux") != "linux",
            "environment.mcp_servers": about.get("mcp_servers"),
            "environment.healthcheck": about.get("healthcheck"),
            "verifier.environment_mode": verifier.get("environment_mode", "shared") != "shared",
        }
        if keys := [name for name, value in unsupported.items() if value]:
            raise UserError(f"{self.folder}: {keys[0]} of task.toml is not supported")
        self.instruction = (self.folder / "instruction.md").read_text()
        self.seconds = float(verifier.get("timeout_sec", 900.0))
        self.image, self.build = about.get("docker_image"), self.folder / "environment"
        self.variables = {name: str(value) for name, value in about.get("env", {}).items()}
        self.test_variables = {name: str(value) for name, value in verifier.get("env", {}).items()}
        mode, allowed = about.get("network_mode"), about.get("allow_internet")
        self.network = allowed if mode is None else mode != "no-network"
        if mode == "allowlist":
            raise UserError(f"{self.folder}: network_mode allowlist of task.toml is not supported")
        self.test = "bash /tests/test.sh"
        self._read_image(about.get("workdir"))

    def _read_terminal_bench(self) -> None:
        config = yaml.safe_load((self.folder / "task.yaml").read_text())
        if config.get("parser_name", "pytest") != "pytest":
            raise UserError(f"{self.folder}: parser_name {config['parser_name']} is not supported, pytest is")
        self.instruction = str(config["instruction"])
        self.seconds = float(config.get("max_test_timeout_sec", 60.0))
        self.image, self.build, self.network = None, self.folder, None
        self.variables, self.test_variables = {}, {"TEST_DIR": "/tests"}
        self.test = "bash /tests/run-tests.sh"
        self._read_image(None)

    def _read_image(self, workdir: str | None) -> None:
        """The working directory, and the steps of the Dockerfile, (word, rest)."""
        compose = [self.build / name for name in ("docker-compose.yaml", "docker-compose.yml")]
        services = [len(yaml.safe_load(file.read_text()).get("services", {})) for file in compose if file.is_file()]
        if any(count > 1 for count in services):
            raise UserError(f"{self.folder}: an environment of several containers is not supported")
        file = self.build / "Dockerfile"
        text = file.read_text().replace("\\\n", " ") if file.is_file() and not self.image else ""
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
        self.dockerfile = [(line.split()[0].upper(), line.partition(" ")[2].strip()) for line in lines]
        if not self.dockerfile and not self.image:
            raise UserError(f"{self.folder}: it has neither {file.relative_to(self.folder)} nor docker_image")
        moved = [arguments for word, arguments in self.dockerfile if word == "WORKDIR"]
        self.workdir = workdir or (moved[-1] if moved else "")

    def refused_by_sandbox(self) -> str:
        """Why the sandbox does not take the task; "" if it does."""
        if self.image:
            return f"it needs the image {self.image}"
        if self.network:
            return "it asks for the network"
        steps = [word for word, _ in self.dockerfile if word not in ("FROM", "WORKDIR", "COPY", "ENV", "CMD")]
        return f"its Dockerfile has {steps[0]}" if steps else ""


class Box(Protocol):
    """Where the commands of a task run."""

    async def start(self) -> None: ...
    async def run(self, command: str, variables: Mapping[str, str], seconds: float) -> tuple[int, str]: ...
    async def put(self, folder: Path, place: str) -> None: ...
    async def close(self) -> None: ...


async def _program(*words: str, seconds: float | None = None) -> tuple[int, str, str]:
    async with asyncio.timeout(seconds):
        return await run_program(shlex.join(words), {})


class Container:
    """A container of the task's image. program: docker or podman."""

    def __init__(self, task: TaskFolder, program: str):
        self._task, self._program, self._name = task, program, f"verl-{uuid4().hex}"

    async def _call(self, *words: str) -> str:
        status, output, errors = await _program(self._program, *words)
        if status:
            raise EnvironmentFailed(f"{self._program} {words[0]} of {self._task.folder}: status {status}{errors}")
        return output

    async def start(self) -> None:
        """Build the image (what is built is found again), and start a container that waits."""
        image = self._task.image or (await self._call("build", "--quiet", str(self._task.build))).strip()
        network = ["--network", "none"] if self._task.network is False else []
        await self._call(
            "run", "--detach", "--rm", "--init", "--name", self._name, *network, image, "sleep", "infinity"
        )

    async def run(self, command: str, variables: Mapping[str, str], seconds: float) -> tuple[int, str]:
        """(status, output) of a command. TimeoutError past its seconds."""
        options = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
        place = ["--workdir", self._task.workdir] if self._task.workdir else []
        words = (self._program, "exec", *options, *place, self._name, "bash", "-c", f"exec 2>&1\n{command}")
        status, output, _ = await _program(*words, seconds=seconds)
        return status, output

    async def put(self, folder: Path, place: str) -> None:
        """Copy what is in a folder."""
        await self._call("exec", self._name, "mkdir", "-p", place)
        await self._call("cp", f"{folder}/.", f"{self._name}:{place}")

    async def close(self) -> None:
        """End it, and all that runs in it."""
        await _program(self._program, "rm", "--force", self._name)


_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64")
_ETC = ("passwd", "group", "ld.so.cache", "nsswitch.conf", "localtime", "alternatives", "ssl", "ca-certificates.conf")
_ENTER = """set -e
root=$1; shift
mount --make-rprivate /
mount --bind "$root" "$root"
for name in usr bin sbin lib lib32 lib64; do
  [ -d "/$name" ] && [ ! -L "/$name" ] && mount --rbind "/$name" "$root/$name" && mount -o remount,ro,bind "$root/$name"
done
for name in null zero random urandom; do mount --bind "/dev/$name" "$root/dev/$name"; done
mount -t proc proc "$root/proc"
exec chroot "$root" setpriv --no-new-privs --bounding-set=-all --inh-caps=-all env -i "$@"
"""
_MEMORY, _FILE, _FILES = 4 << 30, 1 << 30, 1024


class Sandbox:
    """Namespaces of this machine, with a folder as the file system that a task may write to."""

    def __init__(self, task: TaskFolder):
        self._task = task
        self._root = Path()

    async def start(self) -> None:
        """Make the file system, with what the Dockerfile copies."""
        self._root = root = Path(tempfile.mkdtemp(prefix="verl-harbor-"))
        for name in ("etc", "dev", "proc", "tmp", "root", "app", "tests", "logs/verifier", "var/tmp", "run"):
            (root / name).mkdir(parents=True)
        for name in _SYSTEM:
            host = Path("/", name)
            if host.is_symlink():
                (root / name).symlink_to(os.readlink(host))
            elif host.is_dir():
                (root / name).mkdir()
        for name in ("null", "zero", "random", "urandom"):
            (root / "dev" / name).touch()
        for host in [Path("/etc", name) for name in _ETC]:
            with suppress(OSError, shutil.Error):
                copy = shutil.copytree if host.is_dir() else shutil.copy
                copy(host, root / "etc" / host.name)
        workdir = PurePosixPath("/")
        for word, arguments in self._task.dockerfile:
            if word == "WORKDIR":
                workdir = workdir / arguments
                self._inside(workdir).mkdir(parents=True, exist_ok=True)
            elif word == "COPY":
                self._copy([part for part in shlex.split(arguments) if not part.startswith("--")], workdir)
            elif word == "ENV":
                pairs = shlex.split(arguments) if "=" in arguments.split()[0] else [arguments.replace(" ", "=", 1)]
                self._task.variables = dict(pair.split("=", 1) for pair in pairs) | self._task.variables

    def _inside(self, place: PurePosixPath) -> Path:
        path = (self._root / str(place).lstrip("/")).resolve()
        if not path.is_relative_to(self._root.resolve()):
            raise EnvironmentFailed(f"{self._task.folder}: {place} of the Dockerfile is outside of its file system")
        return path

    def _copy(self, parts: Sequence[str], workdir: PurePosixPath) -> None:
        *sources, target = parts
        for source in sources:
            paths = [self._task.build] if source in (".", "./") else sorted(self._task.build.glob(source))
            for path in paths:
                place = self._inside(workdir / target)
                if path.is_dir():
                    shutil.copytree(path, place, dirs_exist_ok=True)
                else:
                    place = place / path.name if target.endswith("/") or place.is_dir() else place
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, place)

    async def run(self, command: str, variables: Mapping[str, str], seconds: float) -> tuple[int, str]:
        """(status, output) of a command. TimeoutError past its seconds."""
        values = {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": "/root",
            "LANG": "C.UTF-8",
            **variables,
        }
        workdir = self._task.workdir or "/app"
        limits = f"ulimit -v {_MEMORY >> 10} -f {_FILE >> 10} -n {_FILES}"
        inside = f"exec 2>&1\n{limits}\ncd {shlex.quote(workdir)} || exit 1\n{command}"
        namespaces = [
            "--user",
            "--map-root-user",
            "--mount",
            "--pid",
            "--net",
            "--ipc",
            "--uts",
            "--fork",
            "--kill-child",
        ]
        pairs = [f"{name}={value}" for name, value in values.items()]
        words = ("unshare", *namespaces, "bash", "-c", _ENTER, "enter", str(self._root), *pairs, "bash", "-c", inside)
        status, output, errors = await _program(*words, seconds=seconds)
        return status, output or errors

    async def put(self, folder: Path, place: str) -> None:
        """Copy what is in a folder, in place of what the policy may have put there: a link would lead out."""
        path = self._root / place.lstrip("/")
        path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(folder, path)

    async def close(self) -> None:
        """Remove the file system."""
        if self._root != Path():
            shutil.rmtree(self._root, ignore_errors=True)


@cache
def container_here() -> str:
    """The container tool that answers on this machine, "" if none does."""
    for program in CONTAINERS:
        with suppress(OSError, subprocess.SubprocessError):
            if (
                shutil.which(program)
                and not subprocess.run([program, "info"], capture_output=True, timeout=20).returncode
            ):
                return program
    return ""


def box_of(task: TaskFolder, container: str = "") -> Box:
    """What the commands of a task run in. container: docker, podman or sandbox; "": a container tool, where there is
    one. UserError where the task cannot run here."""
    if container not in ("", SANDBOX, *CONTAINERS):
        raise UserError(f"environment.kwargs.container={container!r}: use {', '.join(CONTAINERS)} or {SANDBOX}")
    if program := container if container in CONTAINERS else "" if container else container_here():
        if shutil.which(program) is None:
            raise UserError(f"environment.kwargs.container={program}: there is no such program here")
        return Container(task, program)
    if why := task.refused_by_sandbox():
        raise UserError(
            f"{task.folder}: the sandbox does not take the task: {why}; it needs a container tool ({CONTAINERS[0]})"
        )
    if missing := [name for name in ("unshare", "setpriv", "bash") if shutil.which(name) is None]:
        raise UserError(f"the sandbox for tasks needs {missing[0]} (util-linux)")
    return Sandbox(task)


def check(path: str, container: str = "", **_: Any) -> None:
    """UserError for a folder without tasks, and for tasks that cannot run here."""
    folders = tasks_of(Path(path).expanduser())
    if not folders:
        raise UserError(
            f"environment.path={path}: no folder of tasks (task.toml of Harbor, task.yaml of terminal-bench)"
        )
    for folder in folders:
        box = box_of(TaskFolder(folder), container)
    if isinstance(box, Sandbox):
        status, output = asyncio.run(_tried(box))
        if status:
            raise UserError(f"the sandbox for tasks does not work here: {output.strip()[-300:]}")


async def _tried(box: Box) -> tuple[int, str]:
    try:
        await box.start()
        return await box.run("true", {}, 60.0)
    finally:
        await box.close()


class Task:
    """A task of a folder. folder: of tasks, or of one; the row's `extra_info.task` names it. container: docker, podman
    or sandbox; not given: a container tool where one answers, else the sandbox. seconds: of a command. characters: what
    the policy sees of an output at most."""

    def __init__(self, folder: str, container: str = "", seconds: float = 30.0, characters: int = 8000):
        self._folder, self._wanted = Path(folder).expanduser(), container
        self._seconds, self._characters = float(seconds), int(characters)
        self._task: TaskFolder
        self._box: Box | None = None

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        """Start the environment; the instruction, and the tool."""
        self._task = TaskFolder(self._folder / str((row["extra_info"] or {}).get("task", "")))
        self._box = box_of(self._task, self._wanted)
        await self._box.start()
        return Observation([{"role": "user", "content": self._task.instruction}], [_BASH])

    async def step(self, message: Mapping[str, Any]) -> StepResult:
        """Run the commands of a turn; a turn without one is the last."""
        answers: Messages = []
        for call in message.get("tool_calls") or ():
            command = call["function"]["arguments"].get("command")
            text = "Error: bash takes a command, a text"
            if call["function"]["name"] == "bash" and isinstance(command, str):
                text = await self._shown(command)
            answers.append({"role": "tool", "content": text, "name": "bash", "tool_call_id": call["id"]})
        return StepResult(answers, done=not answers)

    async def _shown(self, command: str) -> str:
        assert self._box is not None
        try:
            status, output = await self._box.run(command, self._task.variables, self._seconds)
        except TimeoutError:
            return f"Error: no end within {self._seconds:g} s"
        if len(output) > self._characters:
            half = self._characters // 2
            output = f"{output[:half]}\n… {len(output) - 2 * half} characters …\n{output[-half:]}"
        return output + (f"\n(status {status})" if status else "")

    async def final(self) -> StepResult:
        """Run the tests. Tests that give no reward are a failure of the environment."""
        assert self._box is not None
        with tempfile.TemporaryDirectory() as name:
            folder = Path(shutil.copytree(self._task.folder / "tests", Path(name, "tests")))
            if not self._task.harbor:
                shutil.copy(self._task.folder / "run-tests.sh", folder)
            await self._box.put(folder, "/tests")
        variables = self._task.variables | self._task.test_variables
        command = f"rm -rf /logs/verifier\nmkdir -p /logs/verifier\n{self._task.test}"
        _, output = await self._box.run(command, variables, self._task.seconds)
        if not self._task.harbor:
            return StepResult(reward=float(bool(_PASSED.search(output)) and not _FAILED.search(output)), done=True)
        reads = "cat /logs/verifier/reward.json 2>/dev/null || cat /logs/verifier/reward.txt"
        status, text = await self._box.run(reads, {}, self._seconds)
        try:
            rewards = json.loads(text)
            rewards = (
                {k: float(v) for k, v in rewards.items()} if isinstance(rewards, dict) else {"reward": float(rewards)}
            )
            reward = rewards.get("reward", sum(rewards.values()) / len(rewards))
        except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
            problem = f"{self._task.folder}: the tests wrote no reward (status {status})"
            raise EnvironmentFailed(f"{problem}; they printed: {output[-500:]}") from error
        return StepResult(reward=reward, done=True, metrics=rewards if len(rewards) > 1 else {})

    async def close(self) -> None:
        """End the environment."""
        if self._box is not None:
            await self._box.close()
