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

from tests.chaos.ray_runs import events, log_of, started
from tests.integration.test_vision_runs import VisionRun
from tests.invariant import test_vision as vision
from tests.runs import TinyRun, main_ppo, records
from tests.sampler_cases import (
    PROMPTS,
    TEMPERATURE,
    assert_agreement,
    assert_only_the_adapter_moves,
    difference,
    rows,
    trainer,
)
from tests.sglang_cases import require_sglang, sglang_engine
from tests.tiny import tiny_tokenizer, tiny_vision_model
from tests.unit.engine.training.engine_cases import simple_loss
from tests.vllm_cases import sample, vllm_model
from verl.engine.rollout.sglang import arguments
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.weight_sync.sender import StreamedSync

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


def test_experts_spread_over_two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device has half of the experts (`tests/sglang` adds what SGLang lacks for that on a CPU); new weights arrive
    at both. Copies of attention (data_parallel_size) need NCCL."""
    monkeypatch.setattr(arguments, "check_cpu_experts", lambda settings: None)
    path = vllm_model(tmp_path / "model", "qwen3_moe")
    actor, sizes = trainer(path), {"tensor_parallel_size": 2, "expert_parallel_size": 2}
    sampler = sglang_engine(path, skip_tokenizer_init=True, load_format="dummy", **sizes)
    try:
        sync, drawn = StreamedSync(actor, sampler), {"temperature": TEMPERATURE, "ignore_eos": True}
        sync.push(0, verify=True)
        before = sample(sampler, PROMPTS, 2, **drawn)
        assert difference(actor, before, 2) <= 1e-4
        actor.step(rows(before, 2), simple_loss(len(before) * 24), temperature=TEMPERATURE)
        sync.push(1, verify=True)
        after = sample(sampler, PROMPTS, 2, **drawn)
        assert difference(actor, after, 2) <= 1e-4 < difference(actor, before, 2)
    finally:
        sampler.close()


def test_programs_start_beside_it(engine: Any) -> None:
    """As those that run agent loops of users."""

    async def run() -> int:
        return await (await asyncio.create_subprocess_exec(sys.executable, "-c", "")).wait()

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        assert runner.run(run()) == 0


def probed(run: TinyRun, server: Any, fault: str, *words: str) -> tuple[Any, list[dict[str, float]]]:
    """A run of two steps with a probe at each push. Its end, and training/sync_proof/* of each step."""
    plugin, out = "from verl.trainer import sync_probe\nsync_probe.SHARE = 1e9\n", run.root / "out"
    (run.root / "probe_plugin.py").write_text(plugin + fault)
    more = ("actor_rollout_ref.model.external_lib=probe_plugin", "actor_rollout_ref.actor.optim.lr=1e-3", *words)
    done = server.run(run.overrides(out, *TWO_STEPS, *more), timeout=500, teardown=True, PYTHONPATH=str(run.root))
    file, prefix = out / "metrics.jsonl", "training/sync_proof/"
    lines = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    return done, [{k.removeprefix(prefix): v for k, v in r.items() if prefix in k} for r in lines if "step" in r]


def test_two_steps_with_a_probe(tmp_path: Path, fork_server: Any) -> None:
    done, steps = probed(TinyRun(tmp_path), fork_server, "")
    assert done.status == 0, done.stderr[-4000:]
    assert_trained(tmp_path / "out")
    assert "Traceback" not in done.stderr, "its end is silent"
    slopes = [step["slope"] for step in steps if "slope" in step]
    assert slopes == pytest.approx([1.0] * len(slopes), abs=0.02) and slopes


LOST = """
from verl.engine.rollout.sglang.engine import SGLangEngine

update, count = SGLangEngine._update, []
SGLangEngine._update = lambda self, bucket: update(self, bucket) if len(count) < 1 else None
load = SGLangEngine.load_weights


def loaded(self, *args, **options):
    result = load(self, *args, **options)
    count.append(1)
    return result


SGLangEngine.load_weights = loaded
"""
KEPT = """
from verl.engine.rollout.sglang.engine import SGLangEngine

SGLangEngine._forget = lambda self, paused: None
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "said"), [(LOST, "the sampler's by 0% of that"), (KEPT, "keys and values of earlier")]
)
def test_a_sampler_that_does_not_follow_ends_the_run(fault: str, said: str, tmp_path: Path, fork_server: Any) -> None:
    awake = ("actor_rollout_ref.rollout.free_cache_engine=False", "trainer.verify_weight_sync=False")
    done, _ = probed(TinyRun(tmp_path), fork_server, fault, *awake, "trainer.logprob_diff_limit=1e9")
    assert done.status == 1 and said in done.stderr, done.stderr[-4000:]


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


@pytest.mark.long
def test_one_engine_over_two_nodes(tmp_path: Path, fork_server: Any, tiny: TinyRun, ray_address: str) -> None:
    """Tensor parallel 2 on nodes of one device each: schedulers on both, weights through the first."""
    out, path = tmp_path / "out", vllm_model(tmp_path / "heads", "qwen2", tied=True)
    words = [f"actor_rollout_ref.model.path={path}", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]
    with started(fork_server, tiny, ray_address, out, *TWO_STEPS, *words) as run:
        assert run.wait(150) == 0, log_of(out)[-4000:]
    assert "1 sampler" in events(out, "plan")[0]["device"]
    assert_trained(out)
