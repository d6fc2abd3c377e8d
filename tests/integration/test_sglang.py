"""SGLang: what the contract suites show of other engines with seeds; two training steps, as a user starts them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.test_vision_runs import VisionRun
from tests.invariant import test_vision as vision
from tests.runs import TinyRun, main_ppo, records
from tests.sampler_cases import (
    PROMPTS,
    TEMPERATURE,
    assert_agreement,
    assert_only_the_adapter_moves,
    assert_weights_arrive_while_it_samples,
    rows,
)
from tests.sglang_cases import require_sglang, sglang_engine
from tests.tiny import tiny_tokenizer, tiny_vision_model
from tests.vllm_cases import sample, vllm_model
from verl.engine.rollout.sglang import arguments
from verl.engine.training.fsdp.engine import FSDPEngine

require_sglang()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def vision_model(path: Path, arch: str) -> Path:
    """A tiny model with what SGLang expects of a published one: patches of 14 pixels, three deepstack layers, a name in
    config.json."""
    tiny_vision_model(path, arch, patch=14, deepstack=(0, 1, 2))
    config = json.loads((path / "config.json").read_text())
    config["vision_config"]["in_chans"] = 3
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made = sglang_engine(vllm_model(tmp_path_factory.mktemp("sglang") / "model"), eos_token_ids=[])
    yield made
    made.close()


def test_stop_tokens_and_stop_strings_end_a_response_and_stay_in_it(engine: Any) -> None:
    for first in range(3, 60):
        prompt = list(range(first, first + 20))
        free = sample(engine, [prompt], temperature=0.0)[0].token_ids.tolist()
        wanted = next((token for token in free[1:] if 33 <= token < 90), None)
        if wanted is not None:
            break
    cut = free[: free.index(wanted) + 1]
    for stop in ({"stop_token_ids": (wanted,)}, {"stop": (tiny_tokenizer().decode([wanted]),)}):
        done = sample(engine, [prompt], temperature=0.0, **stop)[0]
        assert done.token_ids.tolist() == cut and done.finish_reason == "stop" and len(done.log_probs) == len(cut)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"ignore_eos": True, "stop_token_ids": (5,)}, "no stop_token_ids with ignore_eos"),
        ({"repetition_penalty": 1.5}, "not the one of the other engines"),
    ],
)
def test_requests_that_sglang_cannot_sample_are_refused(engine: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample(engine, [[1]], **params)


@pytest.mark.parametrize(
    "arch",
    ["qwen2_5_vl", *(pytest.param(arch, marks=pytest.mark.long) for arch in ("qwen2_vl", "qwen3_vl_moe", "qwen3_vl"))],
)
def test_images_are_seen_as_the_trainer_sees_them(tmp_path: Path, arch: str) -> None:
    assert_agreement(vision_model(tmp_path / "model", arch), lambda saved: sglang_engine(saved, max_model_len=320))


def test_only_the_adapter_moves(tmp_path: Path) -> None:
    path = vllm_model(tmp_path / "model", "llama", tied=True)
    assert_only_the_adapter_moves(path, lambda described: sglang_engine(path, lora=described))


def test_the_tokens_that_are_left_are_those_of_its_log_probs(tmp_path: Path) -> None:
    path = vllm_model(tmp_path / "model")
    actor, sampler = FSDPEngine(path, role_cfg=vision.trained(), device="cpu"), sglang_engine(path)
    try:
        done = sample(sampler, PROMPTS, 2, temperature=TEMPERATURE, ignore_eos=True, top_p=0.8, record_mask=True)
    finally:
        sampler.close()
    segments = vision.segments(rows(done, 2))
    for segment, response in zip(segments, done, strict=True):
        segment.sampling_mask = response.sampling_mask
    found = actor.forward(segments, temperature=TEMPERATURE)["log_probs"]
    np.testing.assert_allclose(found, np.concatenate([response.log_probs for response in done]), atol=1e-5)


@pytest.mark.parametrize(
    "sizes", [{"data_parallel_size": 2}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.long)], ids=str
)
def test_experts_spread_over_two_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    """Each has half of the experts (`tests/sglang/sgl_kernel.py` adds what SGLang lacks for that on a CPU); new weights
    arrive at both."""
    monkeypatch.setattr(arguments, "check_cpu_experts", lambda settings: None)
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    path = vllm_model(tmp_path / "model", "qwen3_moe")
    sampler = sglang_engine(path, load_format="dummy", skip_tokenizer_init=True, expert_parallel_size=2, **sizes)
    assert_weights_arrive_while_it_samples(path, sampler)


def test_routes_are_those_of_the_trainer(tmp_path: Path) -> None:
    path = vllm_model(tmp_path / "model", "qwen3_moe")
    actor = FSDPEngine(path, role_cfg=vision.trained(), device="cpu")
    sampler = sglang_engine(path, record_routes=True)
    try:
        done = sample(sampler, PROMPTS, 2, temperature=TEMPERATURE, ignore_eos=True)
    finally:
        sampler.close()
    taken = rows(done, 2)
    actor.forward(vision.segments(taken), ("log_probs", "routed_experts"), temperature=1.0)
    for row, response in zip(vision.segments(taken), done, strict=True):
        theirs = np.concatenate((row.context_columns["routed_experts"], row.routed_experts))[:-1]
        assert response.routed_experts is not None
        np.testing.assert_array_equal(response.routed_experts, theirs[: len(response.routed_experts)])
        assert len(response.routed_experts) == len(theirs)


TWO_STEPS = (
    "actor_rollout_ref.rollout.name=sglang",
    "actor_rollout_ref.rollout.dtype=float32",
    "trainer.total_training_steps=2",
    "trainer.verify_weight_sync=True",
    "trainer.logprob_diff_limit=1e-4",
    "trainer.save_freq=-1",
    "trainer.test_freq=0",
)


def assert_trained(out: Path) -> None:
    for step in (1, 2):
        assert records(out)[step]["training/rollout_logprob_abs_diff/max"] < 1e-4
        assert records(out)[step]["actor/grad_norm"] > 0


def test_programs_start_beside_it(engine: Any) -> None:
    """As those that run agent loops of users."""

    async def run() -> int:
        return await (await asyncio.create_subprocess_exec(sys.executable, "-c", "")).wait()

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        assert runner.run(run()) == 0


def test_two_steps(tmp_path: Path, fork_server: Any) -> None:
    run, out = TinyRun(tmp_path), tmp_path / "out"
    done = fork_server.run(run.overrides(out, *TWO_STEPS), timeout=500, teardown=True)
    assert done.status == 0, done.stderr[-4000:]
    assert_trained(out)


@pytest.mark.long
@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
def test_two_steps_of_two_ranks_over_ray(tmp_path: Path, images: bool) -> None:
    """Two replicas of SGLang in hosts of their own, fed by two training ranks."""
    run, out = (VisionRun if images else TinyRun)(tmp_path), tmp_path / "out"
    if images:
        run.model = vision_model(tmp_path / "patches", "qwen2_5_vl")
    words = ("trainer.n_gpus_per_node=2", "+ray_kwargs.ray_init.address=local", "trainer.val_before_train=False")
    done = main_ppo(run.overrides(out, *TWO_STEPS, *words), timeout=550)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert_trained(out)
