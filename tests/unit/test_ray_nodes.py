"""What the driver compares between nodes before a run, without a cluster: versions, models by hub id, limits, room."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiny import tiny_model
from verl.config import load
from verl.errors import UserError
from verl.platform import host

pytest.importorskip("ray", reason="Ray is not installed")
from verl.workers.ray import nodes
from verl.workers.ray.nodes import Wanted

HUB = "somebody/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a model into a cache of hub models of its own under a revision; the cache of before is gone."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def put(revision: str) -> Path:
        home = tmp_path / f"home-{revision or 'empty'}"
        monkeypatch.setenv("HF_HOME", str(home))
        if revision:
            root = home / "hub/models--somebody--tiny"
            tiny_model(root / "snapshots" / revision, "qwen3")
            (root / "refs").mkdir()
            (root / "refs/main").write_text(revision)
        return home

    return put


def test_another_revision_of_a_hub_model_is_a_difference(hub) -> None:
    wanted = Wanted((HUB,))
    hub("a" * 40)
    mine = nodes.facts(wanted)
    assert (
        mine[f"model {HUB}"] == f"revision {'a' * 40}" and nodes.differences(mine, nodes.facts(wanted)) == []
    )
    hub("b" * 40)
    theirs = nodes.facts(wanted)
    assert nodes.differences(mine, theirs) == [
        f"model {HUB}: revision {'b' * 40}, the driver has: revision {'a' * 40}"
    ]


def test_a_hub_model_that_a_node_has_yet_to_fetch_is_said_to_be_unknown(hub, monkeypatch) -> None:
    wanted = Wanted((HUB,))
    hub("a" * 40)
    mine = nodes.facts(wanted)
    hub("")
    theirs = nodes.facts(wanted)
    assert nodes.differences(mine, theirs) == [] == nodes.differences(theirs, mine)
    assert nodes.uncompared(mine, theirs) == [
        f"model {HUB}: not in its cache of models: it would be fetched there, and cannot be compared with the driver's"
    ]
    assert "the driver has yet to fetch it" in nodes.uncompared(theirs, mine)[0]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (said,) = nodes.differences(mine, nodes.facts(wanted))
    assert "not in its cache of models, and HF_HUB_OFFLINE is set there" in said


def test_versions_of_what_the_run_uses_are_compared(monkeypatch) -> None:
    installed = {"vllm": "0.30.0+cpu", "peft": "0.21.2", "torch": "2.13.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise nodes.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(nodes.metadata, "version", version)
    base = ["actor_rollout_ref.model.path=none", "actor_rollout_ref.rollout.name=native"]
    plain, lora = load(base), load([*base, "actor_rollout_ref.model.lora_rank=4"])
    served = load([*base, "actor_rollout_ref.rollout.name=vllm"])
    assert nodes.packages_of(plain) == ()
    assert nodes.packages_of(lora) == ("peft",) and "vllm" in nodes.packages_of(served)
    wanted = Wanted((), packages=(*nodes.packages_of(lora), *nodes.packages_of(served)))
    mine = nodes.facts(wanted)
    assert mine["vllm"] == "0.30.0" and mine["vllm-ascend"] == "not installed"
    installed |= {"vllm": "0.29.0"}
    del installed["peft"]
    assert nodes.differences(mine, nodes.facts(wanted)) == [
        "peft: not installed, the driver has: 0.21.2",
        "vllm: 0.29.0, the driver has: 0.30.0",
    ]
    assert nodes.differences(nodes.facts(Wanted(())), nodes.facts(Wanted(()))) == []


def test_open_files_are_raised_before_anything_is_refused(monkeypatch) -> None:
    now = [256, 2048]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: now.__setitem__(slice(2), pair))
    assert nodes.facts(Wanted((), files=1280))["open files (ulimit -n)"] == "enough" and now == [1280, 2048]
    assert nodes.facts(Wanted((), files=4096))["open files (ulimit -n)"] == "2048, needed: 4096"
    assert host.raise_open_files(100) == 2048, "never lowered"
    now[:] = [256, resource.RLIM_INFINITY]
    assert host.raise_open_files(5000) == 5000
    now[:] = [resource.RLIM_INFINITY] * 2
    assert host.raise_open_files(5000) == math.inf


def test_room_for_a_transfer_of_weights(tmp_path, monkeypatch) -> None:
    model = tiny_model(tmp_path / "model", "qwen3")
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    words = [f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.name=native"]
    bucket = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
    assert nodes.room_of(load(words)) == size // 2
    assert nodes.room_of(load([*words, "actor_rollout_ref.model.lora_rank=4"])) == 0
    assert nodes.room_of(load(["actor_rollout_ref.rollout.name=native"])) == 0, "no model is known"
    monkeypatch.setattr(nodes.node_facts, "model_files", lambda path: {"bytes": 16 << 30})
    apart = ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1"]
    assert nodes.room_of(load([*words, f"{bucket}=1024"])) == 32 << 20
    assert nodes.room_of(load([*words, f"{bucket}=8"])) == 16 << 20
    assert nodes.room_of(load([*words, *apart, f"{bucket}=1024"])) == 2 << 30
    monkeypatch.setattr(nodes.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    text = nodes.facts(Wanted((), room=2 << 30))["shared memory"]
    assert "/dev/shm has 64 MiB free, a transfer of weights takes 2048 MiB" in text
    assert "--shm-size" in text and bucket in text
    assert nodes.facts(Wanted((), room=64 << 20))["shared memory"] == "enough"


def agents(monkeypatch: pytest.MonkeyPatch, theirs: dict[str, Any] | None, here: bool = True) -> nodes.Agents:
    """Agents of the driver's node, and of one more that responses `theirs`."""
    one = object.__new__(nodes.Agents)
    one._own, one._works_here = "own", here
    one._nodes = {"far": SimpleNamespace(address="10.0.0.2")} if theirs is not None else {}
    one._agents = dict(one._nodes)
    monkeypatch.setattr(one, "_ask", lambda wanted: {"far": nodes.facts(wanted) | theirs})
    return one


def test_everything_that_is_wrong_comes_in_one_message(monkeypatch, hub) -> None:
    hub("")
    good = agents(monkeypatch, {})
    (said,) = good.check(HUB, None, 8)
    assert said.startswith(f"10.0.0.2: model {HUB}: not in its cache")
    bad = agents(monkeypatch, {"torch": "2.0.0", "shared memory": "/dev/shm has 1 MiB free"})
    with pytest.raises(
        UserError,
        match=r"not alike: 10\.0\.0\.2: torch: 2\.0\.0, the driver has: 2.*too little: 10\.0\.0\.2: ",
    ):
        bad.check(HUB, None, 8)


def test_a_machine_of_its_own_is_looked_at_too(monkeypatch) -> None:
    monkeypatch.setattr(nodes.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    alone = agents(monkeypatch, None)
    assert alone.check("/none", None, 8, room=1 << 20) == []
    with pytest.raises(
        UserError, match="a node has too little: this machine: shared memory: /dev/shm has 1 MiB"
    ):
        alone.check("/none", None, 8, room=2 << 20)
    assert agents(monkeypatch, None, here=False).check("/none", None, 8, room=2 << 20) == [], (
        "no worker runs here"
    )
