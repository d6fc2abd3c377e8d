"""Profiling: which process profiles which steps, files that can be opened, tools that are not here."""

from __future__ import annotations

import gzip
import json
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl.config import Map
from verl.errors import UserError
from verl.platform import platform_of
from verl.tracking.check import check_options
from verl.tracking.profiler import ProfilePlan, StepProfiler, nsight_options, open_profiler, plan_for
from verl.tracking.timer import Phases


def config(tool: str | None = "torch", steps: Any = (2,), **changes: Any) -> Any:
    """Only the groups that profiling reads. `changes`: role → its profiler group; other names: global_profiler."""

    def role(name: str) -> dict[str, Any]:
        base = {"enable": False, "all_ranks": False, "ranks": [], "tool_config": {}}
        return {"profiler": base | changes.pop(name, {})}

    actor, ref, rollout, critic = (role(name) for name in ("actor", "ref", "rollout", "critic"))
    memory = {"trace_alloc_max_entries": 10, "stack_depth": 4}
    profiler = {
        "tool": tool,
        "steps": steps and list(steps),
        "profile_continuous_steps": False,
        "save_path": "out",
        "finish_hook_cmd": None,
        "finish_hook_all_ranks": False,
        "finish_hook_ranks": [],
        "global_tool_config": {"torch_memory": memory, "nsys": changes.pop("nsys", {})},
    } | changes
    roles = {"actor": actor, "ref": ref, "rollout": rollout}
    return Map.of({"actor_rollout_ref": roles, "critic": critic, "global_profiler": profiler})


ON = {"enable": True}


@pytest.mark.parametrize(
    ("changes", "roles", "ranks"),
    [
        ({}, ("actor", "ref"), [0]),
        ({"actor": ON}, ("actor", "ref"), [0]),
        ({"actor": ON | {"ranks": [1, 3]}}, ("actor", "ref"), [1, 3]),
        ({"actor": ON | {"all_ranks": True}}, ("actor",), [0, 1, 2, 3]),
        ({"rollout": ON}, ("actor", "ref"), []),
        ({"ref": ON | {"ranks": [2]}, "actor": ON}, ("actor", "ref"), [0, 2]),
        ({"tool": None}, ("actor",), []),
        ({"steps": None}, ("actor",), []),
    ],
)
def test_which_ranks_profile(changes: dict[str, Any], roles: tuple[str, ...], ranks: list[int]) -> None:
    cfg = config(**changes)
    assert [rank for rank in range(4) if plan_for(cfg, roles, rank)] == ranks


def test_a_command_runs_once_after_the_last_profiled_step(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    hook = 'echo "$VERL_PROFILE_SAVE_PATH $VERL_PROFILE_TOOL $VERL_PROFILE_RANK $VERL_PROFILE_ROLE" >> ran; false'
    for rank, more in ((0, {}), (1, {"finish_hook_ranks": [0]})):
        cfg = config(steps=(2, 3), actor=ON | {"all_ranks": True}, finish_hook_cmd=hook, **more)
        plan = plan_for(cfg, ("actor",), rank)
        assert plan is not None
        tool = SimpleNamespace(start=lambda: None, stop=lambda base: [])
        profiler = StepProfiler(plan, tool)
        for step in (1, 2, 3, 4):
            profiler.start(step)
            profiler.stop(step)
            assert (tmp_path / "ran").exists() == (rank == 1 or step >= 3)
    assert (tmp_path / "ran").read_text() == "out torch 0 actor\n"
    assert "finish_hook_cmd ended with status 1" in capsys.readouterr().err


def test_a_plan_names_its_roles_joins_their_contents_and_takes_the_tools_arguments() -> None:
    both = {
        "actor": ON | {"tool_config": {"torch": {"contents": ["cpu", "stack"]}}},
        "ref": ON | {"tool_config": {"torch": {"contents": ["cpu", "memory"]}}},
    }
    plan = plan_for(config(**both), ("actor", "ref"), 0)
    assert plan is not None and plan.options == {"contents": ["cpu", "stack", "memory"]}
    assert str(plan.file(3, 5)) == "out/actor-ref.rank0.step3-5.torch"
    memory = plan_for(config("torch_memory"), ("rollout",), 0)
    assert memory is not None and memory.options == {"trace_alloc_max_entries": 10, "stack_depth": 4}


class Noted:
    """A tool that writes down what it is asked."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def start(self) -> None:
        self.seen.append("start")

    def stop(self, base: Path) -> list[Path]:
        self.seen.append(base.name)
        return [base]

    def span(self, name: str) -> Any:
        self.seen.append(f"({name})")
        return nullcontext()


@pytest.mark.parametrize(
    ("continuous", "expected"),
    [
        (False, ["start", "a.step2.x", "start", "a.step3.x", "start", "a.step6.x"]),
        (True, ["start", "a.step2-3.x", "start", "a.step6.x"]),
    ],
)
def test_steps_and_neighbouring_steps(continuous: bool, expected: list[str], tmp_path: Path) -> None:
    tool = Noted()
    profiler = StepProfiler(ProfilePlan("x", (2, 3, 6), continuous, tmp_path / "new", "a"), tool)
    written = []
    for step in range(1, 8):
        profiler.start(step)
        written += profiler.stop(step)
    assert tool.seen == expected and len(written) == tool.seen.count("start")
    assert profiler.close() == [] and (tmp_path / "new").is_dir()


def test_a_run_that_ends_inside_a_profile_keeps_what_there_is_and_marks_its_phases(tmp_path: Path) -> None:
    tool, phases = Noted(), Phases()
    profiler = StepProfiler(ProfilePlan("x", (2, 3), True, tmp_path, "a"), tool)
    phases.mark = profiler.span
    for step in (1, 2):
        profiler.start(step)
        with phases("gen"):
            phases.beat()
        profiler.stop(step)
    profiler.start(3)
    assert profiler.close() == [str(tmp_path / "a.step2-3.x")] and profiler.close() == []
    assert tool.seen == ["start", "(gen)", "a.step2-3.x"]


def opened(path: str) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def profiled(tmp_path: Path, work: Any, tool: str = "torch", **changes: Any) -> list[str]:
    settings = config(tool, save_path=str(tmp_path), **changes)
    profiler = open_profiler(settings, roles=("actor",), rank=0, platform=platform_of("cpu"))
    assert profiler is not None
    profiler.start(2)
    work(profiler)
    return profiler.stop(2)


def test_a_trace_can_be_opened_and_has_operators_phases_shapes_and_other_threads(tmp_path: Path) -> None:
    def work(profiler: StepProfiler) -> None:
        with profiler.span("update_actor"):
            torch.ones(17, 5) @ torch.ones(5, 3)
        thread = threading.Thread(target=lambda: torch.ones(2, 3, 4).cumsum(-1))
        thread.start()
        thread.join()

    contents = {"tool_config": {"torch": {"contents": ["cpu", "shapes"]}}}
    trace, table = profiled(tmp_path, work, actor=ON | contents)
    assert Path(trace).name == "actor.rank0.step2.torch.json.gz"
    events = opened(trace)
    by_name = {event["name"]: event for event in events if "name" in event}
    assert {"update_actor", "aten::mm", "aten::cumsum"} <= by_name.keys()
    assert [17, 5] in by_name["aten::mm"]["args"]["Input Dims"]
    span, product = by_name["update_actor"], by_name["aten::mm"]
    assert span["ts"] <= product["ts"] and product["ts"] + product["dur"] <= span["ts"] + span["dur"]
    assert by_name["aten::cumsum"]["tid"] != product["tid"]
    assert "aten::mm" in Path(table).read_text()


def test_memory_on_a_processor_names_what_was_allocated(tmp_path: Path) -> None:
    kept: list[torch.Tensor] = []
    trace, _ = profiled(tmp_path, lambda profiler: kept.append(torch.zeros(123, 1000)), "torch_memory")
    allocated = [e for e in opened(trace) if e.get("name") == "[memory]"]
    assert any(e["args"]["Bytes"] == 492_000 for e in allocated)


def test_what_cannot_work_here_says_what_to_do_or_does_nothing() -> None:
    with pytest.raises(UserError, match="records CUDA devices; this process works on cpu"):
        open_profiler(config("nsys"), roles=("actor",), rank=0, platform=platform_of("cpu"))
    assert open_profiler(config("npu"), roles=("actor",), rank=0, platform=platform_of("cpu")) is None


def test_nsys_must_have_started_the_process() -> None:
    with pytest.raises(UserError, match=r"does not run under nsys\. Start the command as `nsys profile"):
        platform_of("cuda").require_nsys()


def test_options_for_workers_under_nsys() -> None:
    assert nsight_options(config("torch")) == {}
    asked = config("nsys", steps=(2, 5), nsys={"worker_nsight_options": {"t": "cuda"}})
    found = nsight_options(asked)["nsight"]
    assert found["t"] == "cuda" and found["capture-range-end"] == "repeat-shutdown:2"
    assert nsight_options(config("nsys", nsys={"t": "nvtx"}))["nsight"]["t"] == "nvtx"


def test_arguments_of_tools() -> None:
    assert check_options("nsys", {"anything": 1}) == "" == check_options("torch", {"contents": ["cpu"]})
    assert "depth is not known" in check_options("torch_memory", {"depth": 1})
    assert "torch.content is not known" in check_options("torch", {"content": ["cpu"]})
    assert check_options("torch", {"discrete": True}) == ""


@pytest.mark.long
def test_a_run_profiles_the_steps_it_was_asked_for(tmp_path: Path, fork_server: Any) -> None:
    from tests.runs import TinyRun

    keys = ["tool=torch", "steps=[2,3,9]", "profile_continuous_steps=True", f"save_path={tmp_path}/profiles"]
    words = [
        "trainer.total_training_steps=3",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "data.max_response_length=3",
        *(f"global_profiler.{k}" for k in keys),
    ]
    run = fork_server.run(TinyRun(tmp_path / "run").overrides(tmp_path / "out", *words))
    assert run.status == 0, run.stderr[-3000:]
    assert "global_profiler.steps=[9]: the run ends with step 3" in run.stderr + run.stdout
    name = "actor-rollout.rank0.step2-3.torch"
    assert sorted(p.name for p in (tmp_path / "profiles").iterdir()) == [f"{name}.json.gz", f"{name}.txt"]
    names = [event.get("name") for event in opened(str(tmp_path / "profiles" / f"{name}.json.gz"))]
    assert names.count("gen") == names.count("update_actor") == names.count("update_weights") == 2
    assert "aten::linear" in names or "aten::addmm" in names
    events = [json.loads(line) for line in (tmp_path / "out/events.jsonl").read_text().splitlines()]
    assert next(e["files"] for e in events if e["event"] == "profile")[0].endswith(f"{name}.json.gz")
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    timed = {line["step"]: line for line in lines if "training/global_step" in line}
    assert timed[3]["timing_s/stop_profile"] > 0 and timed[2]["timing_s/start_profile"] > 0
    assert timed[1]["timing_s/reshard"] == timed[1]["timing_s/update_weights"] > 0
    assert "perf/weight_sync_gb_per_s" in timed[1]


def test_supervised_training_profiles_too(tmp_path: Path) -> None:
    from tests.tiny import tiny_model
    from tests.unit.trainer.test_sft_trainer import arguments
    from verl.trainer.sft_trainer import main

    rows = [{"q": "a" * i, "a": "b" * (5 - i)} for i in range(1, 5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    keys = ["data.prompt_key=q", "data.response_key=a", "trainer.total_training_steps=2"]
    words = ["tool=torch_memory", "steps=[2]", f"save_path={tmp_path / 'profiles'}"]
    words = arguments(tiny_model(tmp_path / "m"), tmp_path / "rows.jsonl", tmp_path / "out", *keys) + [
        f"global_profiler.{word}" for word in words
    ]
    assert main(words) == 0
    name = "sft.rank0.step2.torch_memory"
    assert {"update", "[memory]"} <= {event.get("name") for event in opened(str(tmp_path / f"profiles/{name}.json.gz"))}
