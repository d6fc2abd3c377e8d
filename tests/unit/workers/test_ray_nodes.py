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
from verl.platform import host_resources

pytest.importorskip("ray", reason="Ray is not installed")
from verl.workers import compare_nodes
from verl.workers.compare_nodes import BAD, NOTE, Finding, NodeNeeds, compare, needs_of
from verl.workers.node_facts import collect
from verl.workers.ray import nodes

HUB = "somebody/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a model into a cache of hub models of its own under a revision; the cache of before is gone."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")

    def put(revision: str) -> Path:
        home = tmp_path / f"home-{revision or 'empty'}"
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
        if revision:
            root = home / "hub/models--somebody--tiny"
            tiny_model(root / "snapshots" / revision, "qwen3")
            (root / "refs").mkdir()
            (root / "refs/main").write_text(revision)
        return home

    return put


def findings(needs: NodeNeeds, mine: dict[str, Any], theirs: dict[str, Any]) -> list[Finding]:
    """What is not fine between the driver and one more node."""
    found = compare([theirs | {"name": "10.0.0.2"}], mine, needs)
    return [f for f in found if f.level in (BAD, NOTE)]


def test_another_revision_of_a_hub_model_is_a_difference(hub) -> None:
    needs = NodeNeeds((HUB,))
    hub("a" * 40)
    mine = collect((HUB,))
    assert findings(needs, mine, collect((HUB,))) == []
    hub("b" * 40)
    (found,) = findings(needs, mine, collect((HUB,)))
    assert found.level == BAD
    assert f"the driver has revision {'a' * 40}; 10.0.0.2 has revision {'b' * 40}" in found.found


def test_a_hub_model_that_a_node_has_yet_to_fetch_is_said_to_be_unknown(hub, monkeypatch) -> None:
    needs = NodeNeeds((HUB,))
    hub("a" * 40)
    mine = collect((HUB,))
    hub("")
    theirs = collect((HUB,))
    (found,) = findings(needs, mine, theirs)
    assert (found.name, found.level) == ("10.0.0.2", NOTE) and "cannot be compared" in found.found
    assert [(f.name, f.level) for f in findings(needs, theirs, mine)] == [("the driver", NOTE)]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (found,) = findings(needs, mine, collect((HUB,)))
    assert found.level == BAD and "HF_HUB_OFFLINE is set" in found.found


def test_versions_of_what_the_run_uses_are_compared() -> None:
    base = ["actor_rollout_ref.model.path=none", "actor_rollout_ref.rollout.name=native"]
    plain = needs_of(load(base))
    lora = needs_of(load([*base, "actor_rollout_ref.model.lora_rank=4"]))
    vllm = needs_of(load([*base, "actor_rollout_ref.rollout.name=vllm"]))
    mine = collect() | {"versions": {"vllm": "0.30.0+cpu", "peft": "0.21.2", "torch": "2.13.0, cpu"}}
    theirs = mine | {"versions": {"vllm": "0.29.0", "torch": "2.13.0+cu130, cuda 13.0"}}
    assert findings(plain, mine, theirs) == []
    assert [f.name for f in findings(vllm, mine, theirs)] == ["vllm"]
    (found,) = findings(lora, mine, theirs)
    assert found.name == "peft" and found.found == "the driver has 0.21.2; 10.0.0.2 has missing"


def test_open_files_are_raised_before_anything_is_refused(monkeypatch) -> None:
    now = [256, 2048]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: now.__setitem__(slice(2), pair))
    assert host_resources.raise_open_files(1280) == 1280 and now == [1280, 2048]
    assert host_resources.raise_open_files(4096) == 2048 and host_resources.raise_open_files(100) == 2048, (
        "never lowered"
    )
    now[:] = [256, resource.RLIM_INFINITY]
    assert host_resources.raise_open_files(5000) == 5000
    now[:] = [resource.RLIM_INFINITY] * 2
    assert host_resources.raise_open_files(5000) == math.inf


def test_room_for_a_transfer_of_weights(tmp_path, monkeypatch) -> None:
    model = str(tiny_model(tmp_path / "model", "qwen3"))
    size = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    words = [f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.name=native"]
    bucket = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"

    def room(*more: str) -> int:
        return needs_of(load([*words, *more])).room

    assert room() == size // 2
    assert room("actor_rollout_ref.model.lora_rank=4") == 0
    assert needs_of(load([])).room == 0, "no model is known"
    monkeypatch.setattr(compare_nodes, "model_files", lambda path: {"bytes": 16 << 30})
    apart = ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1"]
    assert room(f"{bucket}=1024") == 32 << 20
    assert room(f"{bucket}=8") == 16 << 20
    assert room(*apart, f"{bucket}=1024") == 2 << 30
    small = collect() | {"shm": {"free": 64 << 20, "total": 1 << 30}}
    (found,) = findings(NodeNeeds(room=2 << 30), collect(), small)
    assert "/dev/shm: 0.1 GiB free of 1.0 GiB" in found.found and "takes 2.0 GiB" in found.found
    assert "--shm-size" in found.todo and bucket in found.todo
    assert findings(NodeNeeds(room=64 << 20), collect(), small) == []


def agents(monkeypatch: pytest.MonkeyPatch, theirs: dict[str, Any] | None, here: bool = True) -> nodes.Agents:
    """Agents of the driver's node, and of one more that has `theirs` instead of the driver's facts."""
    one = object.__new__(nodes.Agents)
    one._own, one._works_here = "own", here
    one._nodes = {"far": SimpleNamespace(address="10.0.0.2")} if theirs is not None else {}
    asked = SimpleNamespace(facts=SimpleNamespace(remote=lambda models: collect(models) | (theirs or {})))
    one._probes = dict.fromkeys(one._nodes, asked)
    monkeypatch.setattr(nodes, "ask_all", lambda refs, timeout: {n: (ref, None) for n, ref in refs.items()})
    return one


def test_everything_that_is_wrong_comes_in_one_message(monkeypatch, hub) -> None:
    hub("")
    (said, *_) = agents(monkeypatch, {}).check(NodeNeeds((HUB,)))
    assert HUB in said and "cannot be compared" in said
    theirs = {"versions": collect()["versions"] | {"torch": "2.0.0"}, "shm": {"free": 1, "total": 1 << 30}}
    with pytest.raises(
        UserError, match=r"do not fit the run: torch: .*10\.0\.0\.2 has 2\.0\.0.*; 10\.0\.0\.2: /dev/shm"
    ):
        agents(monkeypatch, theirs).check(NodeNeeds((HUB,), room=2))


def test_a_machine_of_its_own_is_looked_at_too(monkeypatch) -> None:
    monkeypatch.setattr(nodes.node_facts.probe, "shared_memory", lambda: {"free": 1 << 20, "total": 1 << 30})
    alone = agents(monkeypatch, None)
    assert alone.check(NodeNeeds(("/none",), room=1 << 20)) == []
    with pytest.raises(UserError, match=r"this machine \(driver\): /dev/shm: 0\.0 GiB"):
        alone.check(NodeNeeds(("/none",), room=2 << 20))
    away = agents(monkeypatch, None, here=False)
    assert away.check(NodeNeeds(("/none",), room=2 << 20)) == [], "no worker runs here"
