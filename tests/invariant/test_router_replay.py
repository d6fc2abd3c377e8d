"""Router replay: recorded routes are followed to the last one, by however the rows are cut, packed, recomputed or
spread."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from verl.rollout.agent_loop import AgentLoopBase, AgentLoopOutput

from tests import ranks
from tests.runs import TinyRun, from_step, main_ppo, records, weights
from tests.tiny import tiny_config, tiny_model
from tests.unit.engine.training.engine_cases import assert_close, gradients, rows_of, simple_loss
from verl.engine.rollout.base import SamplingParams
from verl.engine.rollout.native.engine import NativeEngine
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.errors import UserError
from verl.models.routing import Routing
from verl.rollout import agent_loop, loops
from verl.rollout.attempt import RolloutSettings
from verl.rollout.groups import RolloutManager
from verl.trainer.main_ppo import main
from verl.trajectory import Prompt, Segment

LAYERS, EXPERTS, K = 2, 16, 4
ROUTER = re.compile(r"\.(gate|router)\.")
BASE = {"fsdp_config": {"dtype": "float32"}, "grad_clip": 0.0, "optim": {"lr": 0.0, "weight_decay": 0.0}}
REPLAY = BASE | {"router_replay": {"mode": "R3"}}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "num_experts_per_tok": K},
    "mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": K},
    "gpt_oss": {"num_local_experts": EXPERTS, "num_experts_per_tok": K},
}


def model_of(arch: str = "qwen3_moe", router: float = 1.0) -> Any:
    """A random model whose router weights are multiplied by `router`: near 0 all experts are nearly tied."""
    torch.manual_seed(0)
    config = tiny_config(arch, **ARCHITECTURES[arch])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
            if ROUTER.search(name):
                parameter.mul_(router)
    return model.eval()


def sampled(model: Any, loop: str = "single_turn_agent", **options: Any) -> list[Segment]:
    """Groups of three responses of the native sampler, as the rollout manager makes them."""
    engine = NativeEngine(model, eos_token_ids=[], max_model_len=120, record_routes=True, **options)
    settings = RolloutSettings(SamplingParams(30, ignore_eos=True), n=3, seed=1, default_loop=loop)
    rng = np.random.default_rng(0)
    prompts = [Prompt(f"0:{i}@0", rng.integers(0, 256, size), None) for i, size in enumerate((5, 40, 1, 17))]

    async def scored(_: Any) -> None: ...

    async def run() -> list[Segment]:
        manager = RolloutManager(engine, settings, decode=lambda ids: "", on_finished=scored)
        return (await manager.take(prompts)).segments

    rows = asyncio.run(run())
    for row in rows:
        row.advantages = rng.standard_normal(row.length).astype(np.float32)
    return rows


def engine_of(model: Any, role: dict[str, Any] = REPLAY, **more: Any) -> FSDPEngine:
    return FSDPEngine(module=model, role_cfg=role, device="cpu", **more)


def off_by(engine: FSDPEngine, rows: list[Segment]) -> float:
    """The largest difference between the engine's log-probs and the sampler's."""
    found = engine.forward(rows, temperature=1.0)["log_probs"]
    return float(np.abs(found - np.concatenate([row.rollout_log_probs for row in rows])).max())


@pytest.mark.parametrize("arch", list(ARCHITECTURES))
def test_trainer_agrees_with_a_sampler_whose_experts_are_nearly_tied(arch: str) -> None:
    """The routers' weights move by a millionth between sampling and training: as noise would, it flips ties. A group's
    context has its routes once."""
    model = model_of(arch, router=1e-6)
    rows = sampled(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ROUTER.search(name):
                parameter.add_(torch.randn_like(parameter) * 1e-6)
    assert off_by(engine_of(model, BASE), rows) > 1e-2
    engine = engine_of(model)
    assert off_by(engine, rows) <= 1e-4
    assert all(
        one.context_columns["routed_experts"] is two.context_columns["routed_experts"]
        for one, two in zip(rows[::3], rows[1::3], strict=True)
    )
    metrics = engine.step(rows, simple_loss(360), temperature=1.0).metrics
    assert 0.5 < metrics["actor/router_replay/changed_frac"] <= 1.0


class TwoTurns(AgentLoopBase):
    """Two turns of one segment, what is said between them the policy's not."""

    async def run(self, sampling_params, **row):
        first = await self.generate(row["prompt_ids"], {"max_tokens": 12})
        between = np.arange(5)
        second = await self.generate(np.concatenate([row["prompt_ids"], first.token_ids, between]), {"max_tokens": 12})
        parts = [
            (first.token_ids, first.log_probs, 1),
            (between, np.zeros(5), 0),
            (second.token_ids, second.log_probs, 1),
        ]
        ids, log_probs = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
        mask = np.concatenate([np.full(len(ids), policy, bool) for ids, _, policy in parts])
        return AgentLoopOutput(row["prompt_ids"], ids, mask, log_probs)


def test_later_turns_bring_their_routes() -> None:
    """The routes of tokens that are in the cache already come with the turn that computed them."""
    agent_loop.register("two_turns")(TwoTurns)
    try:
        rows = sampled(model := model_of(), loop="two_turns")
    finally:
        loops._LOOPS.pop("two_turns")
    engine = engine_of(model)
    assert all((row.columns["routed_experts"][:-1] >= 0).all() for row in rows)
    found = np.split(engine.forward(rows, temperature=1.0)["log_probs"], np.cumsum([row.length for row in rows])[:-1])
    for row, log_probs in zip(rows, found, strict=True):
        mask = row.columns["response_mask"]
        assert np.abs(log_probs - row.rollout_log_probs)[mask].max() <= 1e-4


def test_a_bfloat16_sampler_and_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every recorded route is used, and without replay some would differ."""
    model = model_of()
    rows = sampled(model, dtype="bfloat16", cache_tokens=400, max_num_seqs=16, max_num_batched_tokens=24)
    used, given = follow(monkeypatch)
    engine = engine_of(model)
    engine.forward(rows, temperature=1.0)
    assert given and all(torch.equal(one, other) for one, other in zip(used, given, strict=True))
    assert not any((one < 0).any() for one in given)
    frac = engine.step(rows, simple_loss(360), temperature=1.0).metrics["actor/router_replay/changed_frac"]
    assert 0.0 < frac < 0.5


def follow(monkeypatch: pytest.MonkeyPatch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(routes used, routes given) of every pass from now on."""
    used, given, recorded = [], [], Routing.recorded

    def watched(self: Routing) -> torch.Tensor:
        found = recorded(self)
        if self._given is not None:
            used.append(found.long())
            given.append(self._given)
        return found

    monkeypatch.setattr(Routing, "recorded", watched)
    return used, given


def routed_rows() -> list[Segment]:
    """Rows with random routes, of one row none at all; the contexts' shared by each group."""
    rng = np.random.default_rng(3)
    rows = [row.segments[0] for row in rows_of([(7, [5, 9, 1, 0, 3]), (1, [4]), (12, [6, 6])])]
    contexts: dict[str, np.ndarray] = {}

    def routes(count: int) -> np.ndarray:
        order = np.argsort(rng.random((count, LAYERS, EXPERTS)), -1)
        return order[..., :K].astype(np.int16)

    for row in rows[:-1]:
        row.put("routed_experts", routes(row.length))
        row.context_columns["routed_experts"] = contexts.setdefault(row.uid, routes(len(row.context_ids)))
    return rows


def outcome(engine: FSDPEngine) -> tuple[np.ndarray, dict[str, float], dict[str, torch.Tensor]]:
    rows = routed_rows()
    log_probs = engine.forward(rows, temperature=0.8)["log_probs"]
    result = engine.step(rows, simple_loss(34), temperature=0.8)
    return log_probs, result.metrics, gradients(engine)


@pytest.mark.parametrize(
    ("role", "model_cfg"),
    [
        ({"ppo_micro_batch_size_per_gpu": 1}, {}),
        ({"ppo_max_token_len_per_gpu": 20}, {"enable_gradient_checkpointing": True}),
        ({"use_prefix_grouper": False}, {"enable_gradient_checkpointing": True}),
    ],
)
def test_any_cut_gives_the_same(role: dict[str, Any], model_cfg: dict[str, Any]) -> None:
    whole = outcome(engine_of(model_of(), model_cfg={"enable_gradient_checkpointing": False}))
    other = outcome(engine_of(model_of(), REPLAY | role, model_cfg=model_cfg))
    plain = outcome(engine_of(model_of(), BASE))
    np.testing.assert_allclose(other[0], whole[0], rtol=1e-5, atol=2e-5)
    assert np.abs(plain[0] - whole[0]).max() > 1e-3
    assert other[1] == pytest.approx(whole[1], rel=1e-4)
    assert_close(other[2], whole[2], 2e-5)


def on_rank(path: str, roles: list[dict[str, Any]]) -> list[Any]:
    out = []
    for role in roles:
        engine = FSDPEngine(path, role_cfg=REPLAY | role, device="cpu")
        rows = routed_rows()
        mine = rows if engine.dp_size == 1 else rows[engine.dp_rank :: engine.dp_size]
        metrics = engine.step(mine, simple_loss(34), temperature=0.8).metrics
        engine.forward(mine, ("log_probs", "routed_experts"), temperature=0.8)
        out.append((metrics, [row.routed_experts for row in mine]))
    return out


def test_ranks_give_the_same(tmp_path) -> None:
    path = str(tiny_model(tmp_path / "m", "qwen3_moe", scale=4.0, **ARCHITECTURES["qwen3_moe"]))
    (alone,) = on_rank(path, [{}])
    spread = {"fsdp_config": BASE["fsdp_config"] | {"expert_parallel_size": 2}}
    for rank, found in enumerate(ranks.run(on_rank, 2, path, [{}, spread, {"ulysses_sequence_parallel_size": 2}])):
        mine = alone[1][rank::2]
        for (metrics, routes), expected in zip(found, (mine, mine, alone[1]), strict=True):
            assert metrics == pytest.approx(alone[0], rel=1e-4)
            assert all(np.array_equal(own, theirs) for own, theirs in zip(routes, expected, strict=True))


def test_the_old_pass_records_for_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """R2: the routes of a pass stay on the rows, and the update follows them when its own routers choose others."""
    model = model_of()
    engine, rows = engine_of(model), [row.segments[0] for row in rows_of([(7, [5, 9]), (12, [6, 0])])]
    before = engine.forward(rows, ("log_probs", "routed_experts"), temperature=1.0)
    assert list(before) == ["log_probs"] and rows[0].routed_experts.shape == (5, LAYERS, K)
    assert rows[0].context_columns["routed_experts"] is rows[1].context_columns["routed_experts"]
    used, given = follow(monkeypatch)
    same = engine.step(rows, simple_loss(20), temperature=1.0)
    assert same.metrics["actor/router_replay/changed_frac"] == 0.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ROUTER.search(name):
                parameter.neg_()
    other = engine.step(rows, simple_loss(20), temperature=1.0)
    assert other.metrics["actor/router_replay/changed_frac"] > 0.5
    assert torch.equal(used[1], given[1]) and torch.equal(used[1], used[0])


def test_a_model_that_it_does_not_fit_is_refused_by_name() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3"), dtype=torch.float32).eval()
    with pytest.raises(UserError, match="does not fit Qwen3ForCausalLM: 0 layers choose experts"):
        engine_of(model)


MODES = [
    ["router_replay.mode=R2", "actor.ppo_epochs=2"],
    ["actor.megatron.router_replay.mode=R3", "rollout.enable_rollout_routing_replay=True"],
]


@pytest.mark.parametrize("words", [MODES[0], pytest.param(MODES[1], marks=pytest.mark.long)])
def test_it_trains_and_resumes(tmp_path, words: list[str]) -> None:
    """Three steps from the command line, and the last two of them from the first one's checkpoint: bit for bit the
    same."""
    tiny = TinyRun(tmp_path / "tiny", arch="qwen3_moe")
    words = [f"actor_rollout_ref.{word}" for word in words]
    words += ["trainer.total_training_steps=3", "trainer.test_freq=-1", "trainer.val_before_train=False"]
    whole, later = tmp_path / "whole", tmp_path / "later"
    assert main(tiny.overrides(whole, *words)) == 0
    assert main(tiny.overrides(from_step(whole, 1, later), *words)) == 0
    found = records(whole)
    assert sorted(found) == [1, 2, 3] and records(later) == found
    assert weights(whole, 3) == weights(later, 3)
    fracs = [record["actor/router_replay/changed_frac"] for record in found.values()]
    assert all(0.0 <= one <= 1.0 for one in fracs)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("words", MODES)
def test_two_ranks_over_ray_train_as_one_process(tmp_path, words: list[str]) -> None:
    pytest.importorskip("ray")
    tiny, found = TinyRun(tmp_path / "tiny", arch="qwen3_moe"), []
    words = [f"actor_rollout_ref.{word}" for word in words]
    words += ["trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.total_training_steps=2"]
    for size, more in ((1, []), (2, ["+ray_kwargs.ray_init.address=local"])):
        out = tmp_path / f"{size}"
        done = main_ppo(tiny.overrides(out, *words, f"trainer.n_gpus_per_node={size}", *more))
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(records(out))
    for step in (1, 2):
        one, two = (record[step] for record in found)
        assert one["actor/router_replay/changed_frac"] == two["actor/router_replay/changed_frac"]
        assert two["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-4)
