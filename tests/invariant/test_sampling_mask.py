"""Truncated sampling: the trainer normalises over the tokens that each draw could have given."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from verl.rollout.agent_loop import AgentLoopBase, AgentLoopOutput

from tests.runs import TinyRun, main_ppo, records, weights
from tests.tiny import tiny_config, tiny_tokenizer
from tests.unit.engine.training.engine_cases import gradients
from verl.algorithms.flat_tokens import count_denominators
from verl.algorithms.objective import ActorObjective
from verl.config.schema.actor import ActorConfig
from verl.engine.rollout.base import Completion, SamplingParams
from verl.engine.rollout.native.engine import NativeEngine
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.rollout import agent_loop, loops
from verl.rollout.attempt import RolloutSettings
from verl.rollout.groups import RolloutManager
from verl.rollout.resumable import ResumableGeneration
from verl.trainer.main_ppo import main
from verl.trajectory import Prompt, Segment

BASE = {"fsdp_config": {"dtype": "float32"}, "grad_clip": 0.0, "optim": {"lr": 0.0, "weight_decay": 0.0}}
TEMPERATURE = 0.8
# Of the tiny vocabulary these leave a few tokens (ids), many (a bitmask), and now one and now the other.
LIMITS = [{"top_k": 5}, {"min_p": 0.4}, {"top_p": 0.95}, {"top_p": 0.9, "top_k": 30, "min_p": 0.2}]


def model_of() -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3"), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return model.eval()


class TwoTurns(AgentLoopBase):
    """Two turns, what is said between them the policy's not."""

    async def run(self, sampling_params, **row):
        first = await self.generate(row["prompt_ids"], sampling_params)
        ids = np.concatenate([row["prompt_ids"], first.token_ids, np.arange(5)])
        second = await self.generate(ids, sampling_params)
        parts = [(first.token_ids, first.log_probs, 1), (np.arange(5), np.zeros(5), 0)]
        parts.append((second.token_ids, second.log_probs, 1))
        ids, log_probs = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
        mask = np.concatenate([np.full(len(ids), policy, bool) for ids, _, policy in parts])
        return AgentLoopOutput(row["prompt_ids"], ids, mask, log_probs)


def sampled(model: Any, limits: dict[str, Any], loop: str = "single_turn_agent", **options: Any) -> list[Segment]:
    """Groups of three responses of the native sampler, as the rollout manager makes them."""
    engine = NativeEngine(model, eos_token_ids=[], max_model_len=120, **options)
    sampling = SamplingParams(20, temperature=TEMPERATURE, ignore_eos=True, record_mask=True, **limits)
    settings = RolloutSettings(sampling, n=3, seed=1, default_loop=loop)
    rng = np.random.default_rng(0)
    prompts = [Prompt(f"0:{i}@0", rng.integers(0, 256, size), None) for i, size in enumerate((5, 30, 1))]

    async def scored(_: Any) -> None: ...

    async def run() -> list[Segment]:
        manager = RolloutManager(engine, settings, decode=lambda ids: "", on_finished=scored)
        return (await manager.take(prompts)).segments

    rows = asyncio.run(run())
    for row in rows:
        row.advantages = np.full(row.length, rng.standard_normal(), np.float32)
        row.loss_mask = row.response_mask
    return rows


def engine_of(model: Any, role: dict[str, Any] = BASE, **more: Any) -> FSDPEngine:
    return FSDPEngine(module=model, role_cfg=role, device="cpu", **more)


def off_by(engine: FSDPEngine, rows: list[Segment]) -> float:
    """The largest difference between the engine's log-probs and the sampler's, of the policy's tokens."""
    computed = engine.forward(rows, temperature=TEMPERATURE)["log_probs"]
    mask, sampler = (np.concatenate([getattr(r, n) for r in rows]) for n in ("response_mask", "rollout_log_probs"))
    return float(np.abs(computed - sampler)[mask].max())


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_trainer_and_sampler_agree(limits: dict[str, Any]) -> None:
    model = model_of()
    rows = sampled(model, limits)
    engines = [engine_of(model), engine_of(model, BASE | {"ppo_micro_batch_size_per_gpu": 1})]
    engines.append(engine_of(model, model_cfg={"use_fused_kernels": False}))
    assert all(off_by(engine, rows) <= 1e-5 for engine in engines)
    sets = [row.sampling_mask for row in rows]
    for row in rows:
        row.sampling_mask = None
    assert off_by(engines[0], rows) > 1e-3
    finds = engine_of(
        model, truncation=tuple(limits.get(n, off) for n, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)))
    )
    finds.forward(rows, ("log_probs", "sampling_mask"), temperature=TEMPERATURE)
    assert off_by(finds, rows) <= 1e-5
    assert all((row.sampling_mask == own).all() for row, own in zip(rows, sets, strict=True))


@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9}], ids=str)
def test_they_agree_on_what_a_grammar_left(limits: dict[str, Any]) -> None:
    """A few ids, many, and by top_p fewer of these; in both turns, for preempted responses too."""
    pytest.importorskip("llguidance")
    agent_loop.register("two_turns")(TwoTurns)
    options = {"tokenizer": tiny_tokenizer(), "cache_tokens": 200, "max_num_batched_tokens": 24}
    grammar = 'start: ("a" /[0-9]/ /[b-z]/)+'
    try:
        rows = sampled(model := model_of(), limits | {"grammar": grammar}, "two_turns", **options)
    finally:
        loops._LOOPS.pop("two_turns")
    engine = engine_of(model)
    assert off_by(engine, rows) <= 1e-5
    for row in rows:
        text = options["tokenizer"].decode(row.response_ids[:20]).partition("<|im_end|>")[0]
        assert re.fullmatch("(a[0-9][b-z])+(a[0-9]?)?", text), text
        sizes = {len(s) for s in row.sampling_mask[row.response_mask]}
        assert {5} < sizes and 0 not in sizes
        row.sampling_mask = None
    assert off_by(engine, rows) > 1


def test_later_turns_preempted_responses_and_inserted_tokens() -> None:
    agent_loop.register("two_turns")(TwoTurns)
    try:
        rows = sampled(model := model_of(), {"top_p": 0.95}, "two_turns", cache_tokens=200, max_num_batched_tokens=24)
    finally:
        loops._LOOPS.pop("two_turns")
    assert off_by(engine_of(model), rows) <= 1e-5
    assert all((row.sampling_mask[~row.response_mask] == b"").all() for row in rows)


def nucleus(z: torch.Tensor, top_p: float) -> torch.Tensor:
    """Which tokens have fewer than `top_p` of the mass before them, by sorting."""
    probs, order = z.softmax(-1).sort(descending=True)
    return torch.zeros_like(z, dtype=torch.bool).scatter_(-1, order, probs.cumsum(-1) - probs < top_p)


def test_the_gradient_of_grpo_is_that_of_its_definition() -> None:
    """Token by token, in float64, from the whole logits: clipped ratio, KL to the reference, entropy, all over the same
    tokens."""
    model = model_of()
    rows = sampled(model, {"top_p": 0.95})
    rng = np.random.default_rng(1)
    for row in rows:
        row.old_log_probs = row.rollout_log_probs + 0.2 * rng.standard_normal(row.length).astype(np.float32)
        row.ref_log_probs = row.rollout_log_probs + 0.2 * rng.standard_normal(row.length).astype(np.float32)
    actor = ActorConfig()
    actor.entropy_coeff, actor.use_kl_loss, actor.kl_loss_coef = 0.05, True, 0.1
    engine = engine_of(model)
    objective = ActorObjective(actor, count_denominators(rows, 20.0))
    engine.step(rows, objective, ("log_probs", "entropy"), temperature=TEMPERATURE)
    computed = {name: gradient.clone() for name, gradient in gradients(engine).items()}

    model = model_of().double()
    total, tokens = torch.zeros((), dtype=torch.float64), sum(row.length for row in rows)
    for row in rows:
        ids = torch.from_numpy(np.concatenate([row.context_ids, row.response_ids]))
        logits = model(ids[None]).logits[0, len(row.context_ids) - 1 : -1] / TEMPERATURE
        for t, z in enumerate(logits):
            left = nucleus(z.detach(), 0.95)
            log_pi = z[left] - z[left].logsumexp(0)
            log_p = z[row.response_ids[t]] - z[left].logsumexp(0)
            ratio, advantage = (log_p - float(row.old_log_probs[t])).exp(), float(row.advantages[t])
            loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            if advantage < 0:
                loss = torch.min(loss, torch.tensor(-3.0 * advantage, dtype=torch.float64))
            apart = float(row.ref_log_probs[t]) - log_p
            loss = loss + 0.1 * (apart.exp() - apart - 1) + 0.05 * (log_pi.exp() * log_pi).sum()
            total = total + loss / tokens
    total.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(computed[name].double(), parameter.grad, rtol=1e-4, atol=2e-6)


def test_a_response_that_outlives_new_weights_keeps_its_sets() -> None:
    engine = NativeEngine(model_of(), eos_token_ids=[], max_model_len=120)
    requests = ResumableGeneration(engine)
    sampling = SamplingParams(20, ignore_eos=True, record_mask=True, top_p=0.95, seed=3)

    async def run(interrupted: bool) -> Completion:
        call = asyncio.create_task(requests.generate([1, 2, 3], sampling, request_id=f"r{interrupted}"))
        for _ in range(8 if interrupted else 0):
            await asyncio.sleep(0)
        if interrupted:
            await requests.pause()
            await requests.resume()
        return await call

    whole, parts = asyncio.run(run(False)), asyncio.run(run(True))
    assert parts.parts == 2 and (parts.token_ids == whole.token_ids).all()
    assert (parts.sampling_mask == whole.sampling_mask).all()


@pytest.mark.long
def test_a_run_agrees_and_resumes(tmp_path) -> None:
    tiny = TinyRun(tmp_path / "tiny")
    words = ["actor_rollout_ref.rollout.top_p=0.8", "actor_rollout_ref.actor.ppo_epochs=2", "trainer.save_freq=1"]
    words += ["trainer.test_freq=-1", "trainer.val_before_train=False", "algorithm.rollout_correction.rollout_is=token"]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for out, steps in ((whole, 2), (halves, 1), (halves, 2)):
        assert main(tiny.overrides(out, *words, f"trainer.total_training_steps={steps}")) == 0
    steps = records(whole)
    assert all(step["training/rollout_logprob_abs_diff/max"] < 1e-5 for step in steps.values())
    assert records(halves) == steps and weights(whole, 2) == weights(halves, 2)


@pytest.mark.slow
@pytest.mark.long
def test_two_ranks_over_ray_train_as_one_process(tmp_path) -> None:
    """Each rank with its rows, then with a share of each sequence."""
    pytest.importorskip("ray")
    tiny, runs = TinyRun(tmp_path / "tiny"), []
    words = ["actor_rollout_ref.rollout.top_p=0.8", "trainer.test_freq=-1", "trainer.total_training_steps=2"]
    shared = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    for size, more in ((1, []), (2, []), (2, [shared])):
        out = tmp_path / f"{len(runs)}"
        ray = ["+ray_kwargs.ray_init.address=local"] if size > 1 else []
        done = main_ppo(tiny.overrides(out, *words, *more, *ray, f"trainer.n_gpus_per_node={size}"))
        assert done.returncode == 0, done.stderr[-3000:]
        runs.append(records(out))
    for run in runs:
        assert run[1]["training/rollout_logprob_abs_diff/max"] < 1e-5
        assert run[2]["actor/grad_norm"] == pytest.approx(runs[0][2]["actor/grad_norm"], rel=1e-4)
