"""What the pages say is there: every command, flag, key, file and link they name, and every message they explain."""

from __future__ import annotations

import ast
import functools
import importlib.util
import pydoc
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from verl.cli.main import COMMANDS
from verl.compat.spellings import PUBLIC
from verl.config.command_line import build, split_arguments
from verl.config.schema.entries import PROGRAMS, ROOTS
from verl.config.schema.fields import locate

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += sorted(p for p in (ROOT / "docs").glob("*.md") if p.name != "config.md")
IDS = [p.relative_to(ROOT).as_posix() for p in PAGES]
ENTRIES = {program: entry for entry, program in PROGRAMS.items()}
GROUPS = {
    "data",
    "actor_rollout_ref",
    "algorithm",
    "custom_reward_function",
    "reward_model",
    "reward_manager",
}
GROUPS |= {"trainer", "critic", "model", "optim", "engine", "checkpoint", "metrics"}
COLUMNS = {"reward_model.ground_truth"}
SUFFIXES = {
    "md",
    "parquet",
    "py",
    "json",
    "jsonl",
    "html",
    "safetensors",
    "yaml",
    "sh",
    "pt",
    "bin",
    "test",
    "png",
}


def blocks(page: Path) -> list[str]:
    """Fenced code of a page, dedented, with continued lines joined."""
    found = re.findall(r"^( *)```\w*\n(.*?)^ *```", page.read_text("utf-8"), re.M | re.S)
    return [re.sub(r"\\\n\s*", "", re.sub(rf"^{indent}", "", text, flags=re.M)) for indent, text in found]


def commands(page: Path) -> list[list[str]]:
    """Command lines of the fenced code, split into words, without prompt sign, comment and variables in front."""
    out = []
    for line in "\n".join(blocks(page)).splitlines():
        text = line.removeprefix("$ ").split("  #")[0].strip()
        text = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", text)
        if re.match(r"(python3?|verl(?= [a-z]+(?!\S*:))|make|bash|pytest|ruff|mypy|\.venv/bin/\S+) ", text):
            out.append(shlex.split(text, comments=True))
    return out


def code(page: Path) -> str:
    """Everything in backticks and fences."""
    text = page.read_text("utf-8")
    return "\n".join(blocks(page) + re.findall(r"`([^`\n]+)`", text))


@functools.cache
def help_of(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "verl.cli.main", *words, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_module_and_command_exists(page) -> None:
    targets = re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.M)
    for words in commands(page):
        if words[0] == "make":
            assert words[1] in targets, words
        elif words[0].startswith("python") and words[1] == "-m":
            assert importlib.util.find_spec(words[2]), words
        elif words[0].startswith(("python", "bash")):
            assert (ROOT / words[1]).is_file(), words
        elif words[0].endswith("verl") and len(words) > 1:
            assert words[1] in COMMANDS or words[1] == "COMMAND", words
    for name in re.findall(r"`verl ([a-z]+)", page.read_text("utf-8")):
        assert name in COMMANDS, name


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_flag_exists(page) -> None:
    for words in commands(page):
        flags = [w.split("=")[0] for w in words if w.startswith("--")]
        if words[0] == "verl" and len(words) > 1 and flags:
            deep = words[1:3] if words[1] in ("prepare", "reward") and len(words) > 2 else words[1:2]
            for flag in flags:
                assert flag == "--help" or flag in help_of(*deep), words
        elif words[0].startswith("python") and words[1].startswith(("benchmarks", "examples/quickstart")):
            source = (ROOT / words[1]).read_text()
            for flag in flags:
                assert f'"{flag}"' in source, words


def keys_in(text: str) -> set[str]:
    """Dotted names that start with a group of the configuration; names of files are left out."""
    found = set()
    for name in re.findall(r"(?<![\w./~-])([a-z_]+(?:\.[a-z_][a-z_0-9]*)+)(?![\w/(])", text):
        parts = name.split(".")
        if parts[0] in GROUPS and parts[-1] not in SUFFIXES and name not in COLUMNS:
            found.add(name)
    return found


def known(key: str) -> bool:
    """True for a key, or a group, of one of the entry points."""
    return any(locate(kind, key) is not None for kind in ROOTS.values())


def test_unknown_keys_are_found() -> None:
    assert keys_in("set `data.no_such_key=1` in data.md") == {"data.no_such_key"}
    assert not known("data.no_such_key") and known("data.seed") and known("model.path")


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_key_exists(page) -> None:
    assert not {key for key in keys_in(code(page)) if not known(key)}


def resolve(words: list[str], entry: str) -> None:
    """Types, names and spelling of overrides (no files, no model). Raises ConfigError."""
    build(split_arguments(words), entry, PUBLIC)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_override_resolves(page) -> None:
    """Whole commands, and blocks that hold nothing but overrides."""
    for words in commands(page):
        if words[0].startswith("python") and words[1] == "-m" and words[2] in ENTRIES:
            resolve([w for w in words[3:] if w not in ("…", "[options]")], ENTRIES[words[2]])
    for block in blocks(page):
        words = block.split()
        if words and all(re.fullmatch(r"[a-z_]+(\.[a-z_]+)+=\S+", w) for w in words):
            resolve(words, "sft" if "data.response_key=" in block else "ppo")


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_link_leads_somewhere(page) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.M)
            slugs = [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles]
            assert anchor in slugs, (target, slugs[:20])


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_file_of_ours_exists(page) -> None:
    for name in re.findall(r"(?<![\w/.…])((?:examples|docs|benchmarks|tests|verl)/[\w./-]*\w)(?![\w<*])", code(page)):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "api").glob("*.md")), ids=lambda page: page.name)
def test_every_object_of_the_api_pages_exists(page) -> None:
    names = re.findall(r"^::: (\S+)$", page.read_text("utf-8"), re.M)
    assert names and not [name for name in names if pydoc.locate(name) is None]


# ------------------------------------------------------------------------------------- code shown in the pages


def bodies(text: str) -> dict[str, str]:
    """Function name → its code without docstring."""
    out = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            if ast.get_docstring(node):
                node.body = node.body[1:]
            out[node.name] = ast.dump(node)
    return out


@pytest.mark.parametrize(
    ("page", "example", "name"),
    [
        ("rewards.md", "reward/custom_reward.py", "compute_score"),
        ("algorithms.md", "plugin/my_algorithms.py", "median_baseline"),
    ],
)
def test_code_that_is_shown_is_the_example(page, example, name) -> None:
    shown = next(b for b in blocks(ROOT / "docs" / page) if f"def {name}(" in b)
    assert bodies(shown)[name] == bodies((ROOT / "examples" / example).read_text())[name]


# ------------------------------------------------------------------------------------------------- messages


@functools.cache
def strings() -> str:
    """Every text constant of the sources; pieces of f-strings on lines of their own."""
    found = []
    for file in (ROOT / "verl").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def messages() -> list[str]:
    """The messages that troubleshooting.md explains: bold code at the start of a line."""
    lines = (ROOT / "docs/troubleshooting.md").read_text("utf-8").splitlines()
    return [m for line in lines if line.startswith("**`") for m in re.findall(r"\*\*`(.+?)`\*\*", line)]


def test_the_page_explains_many_messages() -> None:
    assert len(messages()) > 40


@pytest.mark.parametrize("message", messages())
def test_a_message_is_one_that_the_sources_print(message) -> None:
    pieces = [p.strip(" ;:,.()") for p in message.split("…")]
    pieces = [p for p in pieces if len(p) > 5]
    assert pieces, "nothing of this message can be recognised"
    for piece in pieces:
        clauses = [c.strip() for c in re.split("[,;]", piece) if len(c.strip()) > 5]
        assert piece in strings() or all(c in strings() for c in clauses), piece
