"""The image recipes: pinned, with extras that exist, of versions that this package accepts. Nothing is built here."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from verl.engine.rollout.sglang import ENGINE as SGLANG

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "docker").glob("Dockerfile.*"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def instructions(recipe: Path) -> list[tuple[str, str]]:
    """(INSTRUCTION, rest) of a recipe, comments out and continued lines joined."""
    text = "\n".join(line for line in recipe.read_text().splitlines() if not line.lstrip().startswith("#"))
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(word.upper(), rest.strip()) for line in lines if line.strip() for word, _, rest in [line.partition(" ")]]


def arguments(recipe: Path) -> dict[str, str]:
    return dict(rest.split("=", 1) for word, rest in instructions(recipe) if word == "ARG" and "=" in rest)


def bases(recipe: Path) -> list[str]:
    given = arguments(recipe)
    found = [rest.split()[0] for word, rest in instructions(recipe) if word == "FROM"]
    return [re.sub(r"\$\{(\w+)\}", lambda m: given[m[1]], base) for base in found]


def installed(recipe: Path) -> list[str]:
    """Words of all `pip install` commands that are no options."""
    words: list[str] = []
    for word, rest in instructions(recipe):
        if word != "RUN":
            continue
        for command in re.split(r"&&|;", rest):
            if match := re.search(r"pip install (.*)", command):
                plain = re.sub(r"\$\{[^}]*\}|(?:-r|--index-url) \S+|--no-deps|--no-build-isolation", "", match[1])
                words += [w.strip("\"'") for w in plain.split()]
    return words


def test_there_are_five() -> None:
    assert [r.suffix for r in RECIPES] == [".cpu", ".cuda", ".cuda-megatron", ".cuda-sglang", ".npu"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.suffix[1:])
class TestRecipe:
    def test_the_base_is_pinned(self, recipe: Path) -> None:
        assert bases(recipe)
        for base in bases(recipe):
            name, _, tag = base.partition(":")
            assert re.search(r"\d+\.\d+\.\d+", tag) and "latest" not in tag, base
            assert "." not in name.split("/")[0], f"{base}: names a registry's host"

    def test_packages_are_pinned_and_accepted(self, recipe: Path) -> None:
        required = {r.name: r.specifier for r in map(Requirement, PROJECT["dependencies"])}
        for lines in EXTRAS.values():
            required |= {r.name: r.specifier for r in map(Requirement, lines)}
        named = [w for w in installed(recipe) if not w.startswith("/")]
        assert named
        for word in named:
            requirement = Requirement(word)
            (pin,) = requirement.specifier
            assert pin.operator == "==" and "*" not in pin.version, word
            assert required.get(requirement.name, SpecifierSet()).contains(pin.version), word

    def test_one_version_of_each(self, recipe: Path) -> None:
        pins: dict[str, set[str]] = {}
        for other in RECIPES:
            of_sglang = other.suffix == ".cuda-sglang"  # which asks for a torch of its own
            for word in installed(other):
                if not word.startswith("/") and not (of_sglang and word.startswith("torch==")):
                    pins.setdefault(Requirement(word).name, set()).add(str(Requirement(word).specifier))
        assert all(len(found) == 1 for found in pins.values()), pins
        wheel = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.M)
        assert wheel and wheel[1] == f"torch{next(iter(pins['torch']))}"

    def test_every_extra_exists(self, recipe: Path) -> None:
        (ours,) = {w for w in installed(recipe) if w.startswith("/opt/verl")}
        extras = set(re.search(r"\[(.*)\]", ours)[1].split(","))
        assert extras <= EXTRAS.keys() and "test" not in extras

    def test_files_that_are_named_exist(self, recipe: Path) -> None:
        for name in re.findall(r"/opt/verl/([\w./-]*\w)", recipe.read_text()):
            assert (ROOT / name).exists(), name

    def test_it_does_not_run_as_root_and_is_looked_at(self, recipe: Path) -> None:
        words = [(word, rest) for word, rest in instructions(recipe) if word in ("USER", "RUN")]
        assert ("USER", "verl") in words and words[-1][1].endswith("verl doctor")

    def test_the_page_says_what_is_in_it(self, recipe: Path) -> None:
        page = (ROOT / "docs/images.md").read_text()
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `docker/{recipe.name}`")]
        for word in installed(recipe):
            if word.startswith(
                ("torch==", "torch-npu==", "ray==", "peft==", "transformers==", "vllm==", "sglang==", "megatron-core==")
            ):
                assert word.split("==")[1] in row, (word, row)


def test_the_cuda_pins_are_those_of_vllm() -> None:
    """What vllm 0.32.0 says of itself (read from its metadata; not installed here)."""
    assert {"torch==2.13.0", "torchvision==0.28.0", "torchaudio==2.11.0", "vllm==0.32.0"} <= set(
        installed(ROOT / "docker/Dockerfile.cuda")
    )


def test_the_pins_of_sglang_s_image_are_those_of_sglang() -> None:
    """What the version that the engine supports says of itself (read from its metadata)."""
    pins = set(installed(ROOT / "docker/Dockerfile.cuda-sglang"))
    assert {f"sglang{SGLANG.versions}", "torch==2.14.1", "transformers==5.19.0"} <= pins


def test_what_must_not_go_into_an_image_is_left_out() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv*", "checkpoints", "wandb"} <= set(ignored)


def test_files_in_an_image_are_where_the_page_says() -> None:
    page = (ROOT / "docs/images.md").read_text()
    named = re.findall(r"/opt/verl/([\w./-]*\w)", page)
    assert named and all((ROOT / name).is_file() for name in named), named
    assert page.count("ray_start.sh") == page.count("/opt/verl/examples/ray_start.sh")


@pytest.mark.parametrize("folder", ["ascend-toolkit", "cann", "cann-9.0.0", None])
def test_the_npu_entry_finds_canns_variables(tmp_path: Path, folder: str | None) -> None:
    if folder:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "set_env.sh").write_text('export FROM_CANN="$# yes"\n')
    command = [
        "bash",
        str(ROOT / "docker/entrypoint.npu.sh"),
        "bash",
        "-c",
        'echo "$FROM_CANN|$1"',
        "x",
        "a b",
    ]
    environment = {k: v for k, v in os.environ.items() if k != "FROM_CANN"} | {"ASCEND_ROOT": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0 and done.stdout == ("0 yes|a b\n" if folder else "|a b\n")
    assert ("no set_env.sh" in done.stderr) == (folder is None)
