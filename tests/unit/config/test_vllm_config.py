"""rollout.name=vllm in a configuration: checked by version and argument names, without importing vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runs import TinyRun
from verl.config import load
from verl.engine.registry import EnginePackageError
from verl.engine.rollout.vllm import VLLM, kwargs
from verl.preflight.check import check

ROLLOUT = "actor_rollout_ref.rollout"
KNOWN = frozenset({"attention_backend", "block_size", "max_num_seqs", "model"})


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Checks a run of vllm with more words, as if vLLM were installed; `version` "" is as if it were not."""
    tiny = TinyRun(tmp_path)

    def run(*words: str, installed: bool = True) -> Any:
        def version(record: VLLM) -> str:
            if not installed:
                raise EnginePackageError("vllm is not installed; supported are >=0.32,<0.34: pip install …")
            return "0.32.0"

        monkeypatch.setattr(VLLM, "installed", version)
        monkeypatch.setattr(kwargs, "vllm_arguments", lambda: KNOWN)
        argv = tiny.overrides(tmp_path / "out", f"{ROLLOUT}.name=vllm", *words)
        return check(load(argv))

    return run


def test_an_installed_vllm_is_fine_and_is_not_imported(report, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import would fail
    found = report(f"{ROLLOUT}.load_format=auto", f"+{ROLLOUT}.engine_kwargs.vllm.block_size=64")
    assert found.problems == []
    assert not [text for text in found.notices if "load_format" in text], "the engine reads it"


def test_without_vllm_the_machine_lacks_it(report) -> None:
    (problem,) = report(installed=False).problems
    assert problem.kind == "machine" and ">=0.32,<0.34: pip install" in problem.message


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (f"+{ROLLOUT}.engine_kwargs.vllm.blok_size=64", "nearest: block_size"),
        (f"{ROLLOUT}.pipeline_model_parallel_size=2", "not run in pipeline"),
        (f"{ROLLOUT}.tensor_model_parallel_size=3", "does not divide the model's 4 attention heads"),
    ],
)
def test_what_cannot_be_is_refused(report, word, said) -> None:
    problems = report(word).problems
    assert any(p.kind == "configuration" and said in p.message for p in problems), problems


def test_dropped_keys_are_said(report) -> None:
    found = report(f"+{ROLLOUT}.engine_kwargs.vllm.swap_space=4", f"{ROLLOUT}.multi_stage_wake_up=True")
    text = "\n".join(found.notices)
    assert found.problems == [] and "dropped: rollout.engine_kwargs.vllm.swap_space" in text
    assert "multi_stage_wake_up=True: the vllm engine" in text


def test_on_a_cpu_the_attention_of_a_gpu_has_no_effect(report) -> None:
    key = f"{ROLLOUT}.engine_kwargs.vllm.attention_backend"
    assert f"no effect: {key}=FLASH_ATTN" in "\n".join(report(f"+{key}=FLASH_ATTN").notices)
    assert key not in "\n".join(report(f"+{key}=CPU_MLA").notices)
