"""Packages with known security holes are refused where engines start."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from tests.tiny import tiny_model
from verl import versions
from verl.errors import UserError


def pretend(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: installed.get(name.replace("-", "_")) or real(name))


@pytest.mark.parametrize(
    ("package", "refused", "taken"),
    [
        ("ray", "2.53.9", "2.54.0"),
        ("transformers", "5.2.0", "5.3.0"),
    ],
)
def test_holes(monkeypatch: pytest.MonkeyPatch, package: str, refused: str, taken: str) -> None:
    pretend(monkeypatch, **{package.replace("-", "_"): refused})
    with pytest.raises(UserError, match=rf"{package} {refused} .* pip install -U '{package}>="):
        versions.refuse_holes(package)
    pretend(monkeypatch, **{package.replace("-", "_"): taken})
    versions.refuse_holes(package)


@pytest.mark.parametrize(
    ("package", "refused", "taken"),
    [
        ("torch", ["2.10.1", "2.15.0+cu130"], ["2.11.0", "2.14.1+cu130", "2.13.0+cpu"]),
        ("transformers", ["5.15.9", "5.24.0"], ["5.16.0", "5.23.4"]),
    ],
)
def test_no_run_starts_with_versions_that_were_not_tested(monkeypatch, package, refused, taken) -> None:
    from verl.config import load
    from verl.preflight.check import check

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert package + versions.SUPPORTED[package] in project["dependencies"]
    for version in [*refused, *taken]:
        pretend(monkeypatch, **{package: version})
        found = [p for p in check(load([])).problems if p.key == f"{package} {version}"]
        assert [p.kind for p in found] == ["machine"] * (version in refused)
        assert all(f"pip install '{package}>=" in p.message for p in found)


def test_a_package_that_is_not_there_has_no_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(versions.HOLES, "no-such-package", "<1")
    versions.refuse_holes("no-such-package")


def test_no_model_is_loaded_with_a_transformers_that_has_one(tmp_path, monkeypatch) -> None:
    from verl.models.pretrained import build_model, load_config, load_model

    model = tiny_model(tmp_path / "model", "qwen3")
    pretend(monkeypatch, transformers="5.2.4")
    for start in (load_config, load_model, build_model):
        with pytest.raises(UserError, match=r"transformers 5\.2\.4 .*security hole"):
            start(model)


def test_no_cluster_with_a_ray_that_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    from verl.config import load
    from verl.workers.ray.cluster import Cluster

    pretend(monkeypatch, ray="2.53.1")
    with pytest.raises(UserError, match=r"ray 2\.53\.1 .*security"):
        Cluster(load([]), "cpu")


def test_no_vllm_that_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.engine.rollout.vllm import ENGINE

    pretend(monkeypatch, vllm="0.13.0")
    with pytest.raises(UserError, match=r"vllm 0\.13\.0 is installed; supported are >=0\.32,<0\.34"):
        ENGINE.installed()
