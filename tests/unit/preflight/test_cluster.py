"""`verl doctor --cluster`: what is said about the nodes' facts; and the facts themselves, from clusters."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.fork_server import ForkServer
from tests.ray_cluster import cluster_of
from tests.runs import environment
from tests.tiny import tiny_model
from verl.config import load
from verl.errors import UserError
from verl.preflight import doctor as command
from verl.preflight.doctor import BAD, NOTE, OK, WARN, Finding
from verl.preflight.doctor import main as doctor
from verl.preflight.nodes import judge
from verl.workers import node_facts
from verl.workers.cluster_needs import ResourceRequest, placeable, resource_requests
from verl.workers.compare_nodes import NodeNeeds, needs_of, verdict

GIB = 1 << 30
ROOT = Path(__file__).parents[3]
Nodes = list[dict[str, Any]]


FACTS: dict[str, Any] = {
    "hostname": "one",
    "address": "10.0.0.1",
    "versions": {
        "python": "3.11.7",
        "torch": "2.13.0, cpu",
        "ray": "2.60.0",
        "numpy": "2.4.0",
        "this code": "aa in /a/verl",
    },
    "accelerators": {"cuda": [], "npu": []},
    "cores": 8,
    "memory": [64 * GIB, 60 * GIB],
    "open_files": 65536,
    "processes": None,
    "disk": {"path": "/tmp/ray", "free": 90 * GIB, "total": 100 * GIB},
    "shm": {"free": 30 * GIB, "total": 32 * GIB},
    "object_store": 8 * GIB,
    "models": {},
    "name": "10.0.0.1 (driver)",
    "devices": 8,
    "clock": 0.001,
    "clock_error": 0.0005,
}


def two(**changes: Any) -> Nodes:
    """Two nodes that are alike but for what the second has changed."""
    second = {"name": "10.0.0.2", "address": "10.0.0.2", "hostname": "two"} | changes
    return [copy.deepcopy(FACTS), copy.deepcopy(FACTS) | second]


def judged(found: Nodes, *pools: tuple[int, int], kind: str = "cpu", **asked: Any) -> list[Finding]:
    """Findings for pools of (nodes, devices a node): of the trainer, of the sampler."""
    keys = ("trainer", "actor_rollout_ref.rollout")
    demand = [ResourceRequest(key, *pool) for key, pool in zip(keys, pools, strict=False)]
    driver = copy.deepcopy(FACTS) | {"models": found[-1].get("models", {})}
    needs = NodeNeeds(tuple(driver["models"]), **{"files": 2048} | asked)
    return list(judge(found, driver, kind, demand, needs))


def worst(found: Nodes, *pools: tuple[int, int], **asked: Any) -> Finding:
    """The one finding that is not fine."""
    notable = [f for f in judged(found, *pools, **asked) if f.level in (BAD, WARN)]
    assert len(notable) == 1, notable
    return notable[0]


def test_nodes_that_are_alike_are_fine() -> None:
    findings = judged(two(), (2, 8))
    assert {f.level for f in findings} == {OK}
    unsure = judged(two(clock=3.0, clock_error=2.5))
    assert {f.level for f in unsure} == {OK}, "a clock that cannot be measured so well is not blamed"
    assert verdict(findings, "It stops", "It runs.") == (0, "It runs.")


def test_holes_are_refused_where_they_are() -> None:
    found = two(**version("ray", "2.50.0"))
    assert [f.name for f in judged(found) if "10.0.0.2 has a known security hole" in f.found] == ["ray"]


def version(name: str, text: str) -> dict[str, Any]:
    """Facts of a node with another version of one thing."""
    return {"versions": FACTS["versions"] | {name: text}}


def disk(free: int) -> dict[str, Any]:
    """Facts of a node whose disk has 100 GiB."""
    return {"disk": {"path": "/t", "free": free, "total": 100 * GIB}}


@pytest.mark.parametrize(
    ("changes", "level", "text", "todo"),
    [
        (version("python", "3.12.1"), BAD, "10.0.0.2 has 3.12.1", "one python"),
        (version("python", "3.11.9"), WARN, "10.0.0.2 has 3.11.9", "one python"),
        (version("torch", "2.12.0, cpu"), BAD, "2.12.0", "one torch"),
        (version("numpy", "2.3.0"), WARN, "has 2.3.0", "one numpy"),
        (
            version("vllm", "0.32.0"),
            WARN,
            "the driver has missing",
            "one vllm on every node and for the driver",
        ),
        (version("this code", "bb in /b/verl"), BAD, "bb in /b/verl", "copy the same files"),
        (version("torch", "2.13.0, cuda 13.0"), WARN, "cuda 13.0", "one torch"),
        ({"open_files": 1024}, BAD, "needs 2048", "ulimit -n"),
        ({"processes": 512}, WARN, "processes 512", "-u"),
        (disk(1), BAD, "0.0 GiB free", "free some"),
        (disk(GIB), WARN, "1.0 GiB", "95 %"),
        ({"shm": {"free": 64 << 20, "total": 64 << 20}}, WARN, "0.1 GiB free", "--shm-size"),
        ({"object_store": 40 * GIB}, WARN, "30.0 GiB free of 32.0 GiB", "--shm-size"),
        ({"memory": [64 * GIB, GIB]}, WARN, "1.0 GiB of 64.0 GiB", "leave the node out"),
        ({"clock": -3.0}, WARN, "3.000 s behind", "chrony"),
        ({"devices": 4}, BAD, "asks for 2 nodes of 8", "trainer.n_gpus_per_node"),
        ({"problem": "no module"}, BAD, "no worker runs there: no module", "install the same code"),
    ],
)
def test_what_differs_is_named_with_advice(changes: dict[str, Any], level: str, text: str, todo: str) -> None:
    finding = worst(two(**changes), (2, 8))
    assert finding.level == level and text in finding.found and todo in finding.todo
    assert ("10.0.0.2" in finding.found + finding.name) and finding.base == (level == BAD)
    status, sentence = verdict([finding], "It stops", "It runs.")
    assert status == (1 if level == BAD else 0) and finding.name in sentence


def test_shared_memory_that_is_too_small_for_the_weights_stops_a_run() -> None:
    found = two(shm={"free": 3 * GIB, "total": 32 * GIB})
    assert {f.level for f in judged(found, room=3 * GIB)} == {OK}
    finding = worst(found, room=4 * GIB)
    assert finding.level == BAD and finding.name == "10.0.0.2" and "takes 4.0 GiB" in finding.found
    assert "--shm-size" in finding.todo and "update_weights_bucket_megabytes" in finding.todo


GPU = "NVIDIA H100, 81559 MiB, 580.1"


def of_gpus(*counts: int) -> Nodes:
    """Nodes with so many GPUs; the driver is on the first."""
    entries = []
    for number, count in enumerate(counts):
        name = f"10.0.0.{number + 1}"
        entries.append(copy.deepcopy(FACTS) | {"address": name, "accelerators": {"cuda": [GPU] * count}})
        entries[-1] |= {"name": name + " (driver)" * (number == 0), "devices": count}
    return entries


def test_a_head_without_devices_is_left_alone() -> None:
    """A run asks for as many nodes that are large enough, and compares no others."""
    found = of_gpus(0, 8, 8)
    found[0] |= {"open_files": 64, "shm": None, "models": {"/m": {"problem": "not there"}}}
    for node in found[1:]:
        node["versions"]["torch"] = "2.13.0+cu130, cuda 13.0"
        node["models"] = {"/m": GOOD}
    findings = judged(found, (2, 8), kind="cuda")
    assert not [f for f in findings if f.level == BAD], findings
    assert [f.name for f in findings if f.level == WARN] == ["torch"], "builds of one release"
    assert "leaves it alone: too few devices" in next(f for f in findings if f.level == NOTE).found
    assert "asks for 3 nodes of 8" in next(f for f in judged(found, (3, 8), kind="cuda") if f.level == BAD).found
    found[0] = {"name": "10.0.0.1 (driver)", "devices": 0, "problem": "no module"}
    assert not [f for f in judged(found, (2, 8), kind="cuda") if f.level == BAD]


def test_two_pools_may_share_a_node() -> None:
    assert {f.level for f in judged(of_gpus(8), (1, 4), (1, 4), kind="cuda")} == {OK}
    finding = worst(of_gpus(8), (1, 8), (1, 4), kind="cuda")
    asked = "asks for 1 node of 8 (trainer) and 1 node of 4 (actor_rollout_ref.rollout); 10.0.0.1 (driver) has 8"
    assert finding.level == BAD and finding.found.endswith(asked)


@pytest.mark.parametrize(
    ("devices", "pools", "fits"),
    [
        ([8], [(1, 4), (1, 4)], True),
        ([8], [(1, 4), (1, 5)], False),
        ([8, 4], [(1, 8), (1, 4)], True),
        ([8, 4], [(2, 4), (2, 4)], False),
        ([8, 12, 4], [(2, 4), (1, 8)], True),
        ([8, 8, 8], [(2, 4), (2, 8)], False),
        ([16], [(2, 8)], False),
    ],
)
def test_whether_pools_can_be_placed(devices: list[int], pools: list[tuple[int, int]], fits: bool) -> None:
    assert placeable(devices, [ResourceRequest("", *pool) for pool in pools]) == fits


def test_what_a_run_asks_for() -> None:
    def asked(*words: str) -> list[tuple[int, int]]:
        return [(pool.nodes, pool.devices) for pool in resource_requests(load(list(words)))]

    rollout = "actor_rollout_ref.rollout"
    assert asked() == [(1, 1)] and asked("trainer.nnodes=2") == [(2, 1)]
    assert asked("trainer.nnodes=2", "trainer.n_gpus_per_node=8", f"{rollout}.nnodes=1") == [(2, 8), (1, 8)]
    assert asked(f"{rollout}.nnodes=1", f"{rollout}.n_gpus_per_node=4") == [(1, 1), (1, 4)]
    assert asked("critic.nnodes=2", "critic.n_gpus_per_node=3") == [(1, 1), (2, 3)]


def of_models(*models: dict[str, Any]) -> Nodes:
    """Two nodes, each with what it has of the model /m."""
    found = two()
    for node, model in zip(found, models, strict=True):
        node["models"] = {"/m": model}
    return found


def test_a_hub_model_that_a_node_has_yet_to_fetch_is_only_mentioned() -> None:
    good = {"bytes": GIB, "text": "revision aa"}
    away = {"problem": "not on this disk", "to_fetch": True}
    findings = judged(of_models(good, away))
    assert not [f for f in findings if f.level in (BAD, WARN)]
    assert next(f for f in findings if f.level == NOTE).name == "10.0.0.2"
    assert {f.level for f in judged(of_models(good, dict(good, bytes=1)))} == {OK}, "the rest is fetched"


def test_versions_that_matter_are_those_that_the_run_uses() -> None:
    def level(name: str, *words: str) -> str:
        packages = needs_of(load(list(words))).packages
        return next(f.level for f in judged(two(**version(name, "0.1")), packages=packages) if f.name == name)

    assert level("peft") == WARN
    assert level("peft", "actor_rollout_ref.model.lora_rank=8") == BAD
    assert level("peft", "actor_rollout_ref.model.lora_adapter_path=/a") == BAD
    assert level("vllm", "actor_rollout_ref.rollout.name=vllm") == BAD
    assert level("vllm", "actor_rollout_ref.rollout.name=native") == WARN


def test_devices_that_ray_was_not_told_of() -> None:
    finding = worst([*of_gpus(8), of_gpus(8)[0] | {"name": "10.0.0.2", "devices": 4}], kind="cuda")
    assert finding.level == WARN and "4 cuda devices for Ray" in finding.found and "H100" in finding.found


GOOD = {"bytes": GIB, "text": "config.json c1, weight files w1"}


def test_models_of_the_nodes_are_compared() -> None:
    finding = worst(of_models(GOOD, GOOD | {"text": "config.json c1, weight files w2"}))
    assert "10.0.0.2 has config.json c1, weight files w2" in finding.found and finding.level == BAD
    finding = worst(of_models(GOOD, {"problem": "/m: no such directory on this disk"}))
    assert finding.level == BAD and finding.name == "10.0.0.2" and "same path on every node" in finding.todo
    assert {f.level for f in judged(of_models(GOOD, GOOD))} == {OK}


def test_facts_of_this_node(tmp_path: Path) -> None:
    model = str(tiny_model(tmp_path / "model", "qwen3"))
    facts = node_facts.NodeProbe().everything([model], str(tmp_path / "not/yet"))
    got = json.loads(json.dumps(facts))
    assert got["versions"]["torch"] and got["disk"]["free"] > 0 and got["open_files"] != 0
    assert got["models"][model]["bytes"] > 1000
    for path in (str(tmp_path), "/no/such"):
        assert "problem" in node_facts.model_files(path)


def test_code_hash_sees_names_and_bytes(tmp_path: Path) -> None:
    hashes = []
    for files in ({"x.py": "1"}, {"x.py": "2"}, {"y.py": "1"}, {"x.py": "1", "notes.txt": "no code"}):
        folder = tmp_path / str(len(hashes))
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        hashes.append(node_facts.code_hash(folder))
    assert len(set(hashes)) == 3 and hashes[0] == hashes[3]


def test_options_of_the_cluster_belong_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        doctor(["--model", "x"])
    assert "belong to --cluster" in capsys.readouterr().err


def test_the_plain_command_needs_no_model_and_waits_no_longer_than_a_run(monkeypatch, capsys) -> None:
    report = pytest.importorskip("verl.preflight.cluster", reason="Ray is not installed")
    asked: list[Any] = []
    monkeypatch.setattr(report, "examine", lambda *args: asked.append(args) or [])
    assert doctor(["--cluster", "--timeout", "7", "--model", "/m", "trainer.nnodes=2"]) == 0
    config, megabytes, timeout, _ = asked[0]
    assert (config.actor_rollout_ref.model.path, config.trainer.nnodes) == ("/m", 2)
    assert (megabytes, timeout) == (64, 7.0)
    assert "A run can start on this cluster." in capsys.readouterr().out
    assert needs_of(load([])).models == ()


def test_a_name_that_nobody_registered_is_the_users_mistake() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    with pytest.raises(UserError, match="Unknown advantage estimator simply: mine"):
        doctor(["--cluster", "algorithm.adv_estimator=mine"])


def wanted(folder: Path, address: str) -> list[str]:
    """The command for a run of two ranks."""
    words = ["doctor", "--cluster", "--json", "--megabytes", "1", "--model", str(folder / "model")]
    words += [f"ray_kwargs.ray_init.address={address}", "trainer.device=cpu", "trainer.nnodes=2"]
    return [*words, f"trainer.default_local_dir={folder}/run", "trainer.save_freq=1"]


@pytest.mark.slow
def test_nodes_on_which_a_run_can_start(ray_address: str, fork_server: ForkServer, tmp_path: Path) -> None:
    tiny_model(tmp_path / "model", "qwen3")
    done = fork_server.run(wanted(tmp_path, ray_address), module="verl.cli.main", cwd=tmp_path)
    good = json.loads(done.stdout)
    by_name = {f["name"]: f for f in good["findings"]}
    assert done.status == 0 and good["ok"], good
    assert "4 nodes" in by_name["nodes"]["found"] and "everywhere" in by_name["this code"]["found"]
    assert "over 4 ranks" in by_name["all-reduce (gloo)"]["found"]
    assert by_name[str(tmp_path / "model")]["found"].endswith("everywhere")
    assert by_name["ports"]["found"].startswith("every node reaches every other")
    assert by_name["run folder"]["found"] == "seen by every node"
    assert not list(tmp_path.glob(".seen-by*"))


@pytest.mark.slow
@pytest.mark.long
def test_a_node_with_other_code_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cluster is its own, and nothing is forked: the nodes differ in what their processes import."""
    pytest.importorskip("ray", reason="Ray is not installed")
    for name in ("PYTHONPATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    tiny_model(tmp_path / "model", "qwen3")
    other = tmp_path / "other"
    shutil.copytree(ROOT / "verl", other / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "verl/errors.py").open("a") as file:
        file.write("\n# another version\n")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from verl.cli.main import main; sys.exit(main())"
    with cluster_of(1, env_vars={"PYTHONPATH": str(ROOT)}) as cluster:
        cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": str(other)})
        # Ray gives a driver's working folder to all workers: not that of this code.
        command = [sys.executable, "-c", code, *wanted(tmp_path, cluster.address)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment(), timeout=240)
    bad = json.loads(done.stdout)
    found = next(f for f in bad["findings"] if f["name"] == "this code")
    assert done.returncode == 1 and not bad["ok"] and found["level"] == BAD and str(other) in found["found"]


def test_without_ray_it_says_how_to_get_it(monkeypatch, capsys) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install 'verl\\[ray\\]'"):
        doctor(["--cluster"])


def test_a_cluster_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UserError, match=r"no Ray cluster answers at 127\.0\.0\.1:1"):
        doctor(["--cluster"])
