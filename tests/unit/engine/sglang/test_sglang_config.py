"""rollout.name=sglang in a configuration, and what a request becomes; without importing SGLang."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.runs import TinyRun
from verl.config import load
from verl.engine.registry import EnginePackageError
from verl.engine.rollout.base import SamplingParams
from verl.engine.rollout.sglang import SGLang, kwargs
from verl.engine.rollout.sglang.adapter import adapter_arguments
from verl.engine.rollout.sglang.arguments import EngineSettings, engine_arguments, request_arguments
from verl.errors import UserError
from verl.preflight.check import check

ROLLOUT = "actor_rollout_ref.rollout"
ARGUMENTS = f"+{ROLLOUT}.engine_kwargs.sglang"


@pytest.fixture
def problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Those of a run of sglang with more words, as if SGLang were installed, or not."""

    def run(*words: str, installed: bool = True, argv: Sequence[str] = (), entry: str = "ppo") -> list[str]:
        def version(record: SGLang) -> str:
            if not installed:
                raise EnginePackageError("sglang is not installed; supported are ==0.5.23")
            return "0.5.23"

        monkeypatch.setattr(SGLang, "installed", version)
        monkeypatch.setattr(kwargs, "sglang_arguments", lambda: frozenset({"page_size", "attention_backend"}))
        monkeypatch.setitem(sys.modules, "sglang", None)  # an import would fail
        argv = argv or TinyRun(tmp_path).overrides(tmp_path / "out", f"{ROLLOUT}.name=sglang")
        return [f"{problem.kind}: {problem}" for problem in check(load([*argv, *words], entry)).problems]

    return run


def test_an_installed_sglang_is_fine_and_is_not_imported(problems: Any) -> None:
    assert problems(f"{ARGUMENTS}.page_size=16") == []


def test_generation_has_its_keys_elsewhere(problems: Any, tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    argv = (f"model.path={run.model}", f"data.path={run.train}", f"data.output_path={tmp_path}/o.parquet")
    sampler = ("rollout.name=sglang", "trainer.device=cpu", "model.lora_rank=4")
    found = problems(*sampler, argv=argv, entry="generation")
    assert any("set rollout.engine_kwargs.sglang.enable_lora=False" in problem for problem in found)


def test_without_sglang_the_machine_lacks_it(problems: Any) -> None:
    (problem,) = problems(installed=False)
    assert problem.startswith("machine") and "==0.5.23" in problem


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([f"{ARGUMENTS}.page_sise=16"], "nearest: page_size"),
        ([f"{ARGUMENTS}.tp_size=2"], "tensor_model_parallel_size sets it"),
        ([f"{ARGUMENTS}.attention_backend=fa3"], "attention_backend=fa3: SGLang has no such attention for a CPU"),
        (["actor_rollout_ref.model.lora_rank=4"], "engine_kwargs.sglang.enable_lora=False"),
        ([f"{ROLLOUT}.repetition_penalty=1.2", f"{ROLLOUT}.val_kwargs.repetition_penalty=1"], "set 1"),
        (
            [f"{ROLLOUT}.min_p=0.1", f"{ARGUMENTS}.enable_deterministic_inference=True"],
            "cannot combine min_p",
        ),
    ],
)
def test_what_cannot_be_passed_is_refused(problems: Any, words: list[str], message: str) -> None:
    # min_p and deterministic inference: the second key is not in the fixture's list either.
    assert any(message in problem for problem in problems(*words))


def test_arguments_are_the_fields_of_the_classes_in_the_source() -> None:
    source = (
        "class Device(Struct):\n    device: A[str, 'x'] = None\n    _hidden: int = 0\n    plain = 1\nother: int = 2\n"
    )
    assert kwargs.arguments_in(source) == {"device"}


def test_the_engines_own_arguments_win() -> None:
    settings = EngineSettings("model", 64, engine_kwargs={"attention_backend": "intel_amx"}, free_cache_engine=True)
    arguments = engine_arguments(settings, vocabulary=100, cpu=True)
    assert arguments["attention_backend"] == "intel_amx" and arguments["enable_memory_saver"] is False
    assert engine_arguments(settings, vocabulary=100, cpu=False)["enable_memory_saver"] is True


def test_devices_of_an_engine_and_its_adapter() -> None:
    spread = {"tensor_parallel_size": 2, "data_parallel_size": 4}
    sizes = ("tp_size", "attn_dp_size", "ep_size")
    for more, expected in ((spread | {"expert_parallel_size": 8}, (8, 4, 8)), (spread, (2, 1, 1))):
        arguments = engine_arguments(EngineSettings("model", 64, **more), vocabulary=100, cpu=False)
        assert tuple(arguments[size] for size in sizes) == expected
    with pytest.raises(UserError, match="expert_parallel_size=1"):
        engine_arguments(EngineSettings("model", 64, **spread, expert_parallel_size=8), vocabulary=100, cpu=True)
    described = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "layers.0.v_proj"]}
    arguments = engine_arguments(EngineSettings("model", 64, lora=described), vocabulary=100, cpu=False)
    assert arguments["lora_target_modules"] == ["q_proj", "v_proj"] and arguments["max_lora_rank"] == 4
    with pytest.raises(UserError, match="alpha_pattern"):
        adapter_arguments(described | {"alpha_pattern": {"q_proj": 1}}, cpu=False)


def test_log_probs_of_a_cut_distribution_are_asked_for() -> None:
    def asked(**params: Any) -> tuple[dict[str, Any], bool]:
        return request_arguments(SamplingParams(9, **params), room=5, end_ids=[7], vocabulary=50)

    plain, cut = asked(stop_token_ids=(3,), seed=4)
    assert not cut and plain["max_new_tokens"] == 5 and plain["stop_token_ids"] == [3, 7]
    assert plain["sampling_seed"] == 4 != asked(seed=4, call=1)[0]["sampling_seed"]
    assert asked(top_p=0.5)[1] and asked(top_p=0.5)[0]["top_k"] == 50
    assert asked(top_k=3)[0]["top_k"] == 3
    assert not asked(temperature=0.0, top_p=0.5)[1]
