"""Cutting trajectories into segments changes neither loss, gradient nor metrics.

A segment whose context is the whole text before it computes what the uncut trajectory computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_config
from tests.unit.engine.training.engine_cases import assert_close, gradients, rows_of
from tests.unit.engine.training.test_value_engine import engine as critic_engine
from tests.unit.engine.training.test_value_engine import stepped, with_a_head
from verl.algorithms.batch_advantages import compute_advantages
from verl.algorithms.flat_tokens import MODES
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.trajectory import Batch, Segment, Trajectory, flat
from verl.workers.group import DirectCalls, WorkerGroup
from verl.workers.roles import Policy
from verl.workers.training_worker import Worker
from verl.workers.update_plan import UpdatePlan

GROUPS = [(5, [3, 9, 6]), (7, [2, 8, 4])]


def trajectories(cut: bool) -> list[Trajectory]:
    """The same tokens, whole, or every response of 4 tokens or more in two or three segments."""
    rows = rows_of(GROUPS, seed=4)
    rng = np.random.default_rng(1)
    out = []
    for row in rows:
        row.response_mask = rng.random(row.length) < 0.8
        row.response_mask[-1] = True
        row.rollout_log_probs = (rng.normal(size=row.length).astype(np.float32) - 3) * row.response_mask
        ends = [0, *([row.length // 2, row.length - 1] if cut and row.length > 3 else []), row.length]
        segments = []
        for start, end in itertools.pairwise(ends):
            context = row.prompt.ids if not start else np.concatenate([row.prompt.ids, row.response_ids[:start]])
            columns = {name: values[start:end] for name, values in row.segments[0].columns.items()}
            segments.append(Segment(context, **columns))
        out.append(Trajectory(row.prompt, row.index, segments=segments, score=float(rng.integers(0, 3))))
    return out


def actor_config(mode: str, **more: Any) -> Any:
    settings: dict[str, Any] = {
        "data_loader_seed": 1, "clip_ratio": 0.2, "clip_ratio_low": 1e-3, "clip_ratio_high": 1e-3,
        "loss_agg_mode": mode, "entropy_coeff": 0.1, "ppo_mini_batch_size": 1, "ppo_epochs": 1, "shuffle": False,
        "policy_loss": None, "use_kl_loss": False, "fsdp_config": {"dtype": "float32"}, "grad_clip": 0.0,
        "optim": {"lr": 0.0, "weight_decay": 0.0}, "ppo_micro_batch_size_per_gpu": None,
    }  # fmt: skip
    return SimpleNamespace(**(settings | more))


def updated(
    cut: bool, actor: Any, correction: Any = None, change: Callable[[Trajectory], None] | None = None
) -> tuple[Batch, Any, Any]:
    """A step's passes and updates of a tiny model in this process, by the product's own roles."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(tiny_config("qwen3"), dtype=torch.float32)
    engine = FSDPEngine(module=module.eval(), role_cfg=vars(actor), device="cpu")
    algorithm = SimpleNamespace(
        adv_estimator="grpo",
        norm_adv_by_std_in_grpo=True,
        rollout_correction=correction,
        use_kl_in_reward=False,
    )
    arr = SimpleNamespace(actor=actor, rollout=SimpleNamespace(temperature=0.9, nnodes=0))
    worker = Worker(SimpleNamespace(actor_rollout_ref=arr, algorithm=algorithm))
    worker.engines["actor"] = engine
    plan = UpdatePlan(actor, max_response_length=16.0, batch_prompts=2, rollout_correction=correction)
    group = WorkerGroup(DirectCalls(worker), [{"dp_rank": 0, "roles": ["actor"]}], plan=plan)
    policy = Policy("actor", group, plan)
    batch = Batch(trajectories(cut))
    for row in batch if change else ():
        change(row)
    policy.forward(batch, "old_log_prob", {"log_probs": "old_log_probs", "entropy": "entropy"})
    compute_advantages(batch, algorithm, 3)
    seen = []
    step = engine.step

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        seen.append(gradients(engine))
        return result

    engine.step = watched  # type: ignore[method-assign]
    return batch, policy.update(batch, step=1), seen


def test_tokens_that_tools_wrote_carry_no_gradient() -> None:
    """Those at a response's end may be any: nothing that the policy wrote depends on them."""

    def others(token: int) -> Callable[[Trajectory], None]:
        def change(row: Trajectory) -> None:
            ids, mask = row.response_ids.copy(), row.response_mask.copy()
            ids[-2:], mask[-2:] = token, False
            row.response_ids, row.response_mask = ids, mask
            row.rollout_log_probs = row.rollout_log_probs * mask

        return change

    one, other = (updated(False, actor_config("token-mean"), change=others(token)) for token in (3, 77))
    assert one[1].metrics == pytest.approx(other[1].metrics, rel=1e-6)
    for a, b in zip(one[2], other[2], strict=True):
        assert_close(a, b, 1e-7)
        assert any(float(values.abs().max()) > 0 for values in a.values())


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("mode", MODES)
def test_segments_change_nothing(mode: str, size: int | None) -> None:
    whole, cut = (updated(c, actor_config(mode, ppo_micro_batch_size_per_gpu=size)) for c in (False, True))
    for name in ("old_log_probs", "entropy", "advantages", "token_rewards", "loss_mask"):
        a, b = (flat(batch.trajectories, name) for batch, *_ in (whole, cut))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5, err_msg=name)
    assert cut[1].metrics == pytest.approx(whole[1].metrics, rel=2e-4, abs=1e-5)
    assert len(whole[2]) == len(cut[2]) == 2
    for a, b in zip(whole[2], cut[2], strict=True):
        assert_close(a, b, 2e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_critic_and_gae_see_one_trajectory(mode: str, tmp_path: Path) -> None:
    """Values, returns and advantages by gae, and the critic's update."""
    path, found = with_a_head(tmp_path), []
    algorithm = SimpleNamespace(
        adv_estimator="gae", gamma=0.9, lam=0.8, rollout_correction=None, use_kl_in_reward=False
    )
    for cut in (False, True):
        batch = Batch(trajectories(cut))
        rows = [segment for row in batch for segment in row.segments]
        values = critic_engine(path).forward(rows, ("values",), temperature=1.0)["values"]
        values = values + np.random.default_rng(2).normal(size=len(values)).astype(np.float32)
        for row, own in zip(batch, np.split(values, np.cumsum(batch.lengths)[:-1]), strict=True):
            row.values = own
        compute_advantages(batch, algorithm, 3)
        metrics, weights = stepped(path, rows, rows, mode, ppo_micro_batch_size_per_gpu=2 if cut else None)
        found.append(([flat(batch.trajectories, n) for n in ("values", "returns", "advantages")], metrics, weights))
    whole, parts = found
    for a, b in zip(whole[0], parts[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)
    assert parts[1] == pytest.approx(whole[1], rel=2e-4, abs=1e-5) and whole[1]["critic/vf_clipfrac"] > 0
    assert_close(parts[2], whole[2], 2e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout_is": "sequence"},
        {"rollout_rs": "seq_mean_k2", "rollout_rs_threshold": 3.0},
        {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence"},
    ],
)
def test_sequence_weights_and_rejection_count_trajectories(settings: dict[str, Any]) -> None:
    names = ("rollout_is", "rollout_rs", "rollout_rs_threshold", "bypass_mode", "loss_type")
    correction = SimpleNamespace(**(dict.fromkeys(names) | {"rollout_is_threshold": 5.0} | settings))
    whole, cut = (updated(c, actor_config("token-mean"), correction) for c in (False, True))
    for name in ("loss_mask", "is_weights"):
        if whole[0].has(name):
            a, b = (flat(batch.trajectories, name) for batch, *_ in (whole, cut))
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5, err_msg=name)
    common = {k: v for k, v in whole[1].metrics.items() if not k.startswith("rollout_corr")}
    assert {k: cut[1].metrics[k] for k in common} == pytest.approx(common, rel=1e-3, abs=1e-5)
    for a, b in zip(whole[2], cut[2], strict=True):
        assert_close(a, b, 5e-5)


@pytest.mark.parametrize("loss", ["gspo", "geo_mean", "clip_cov", "kl_cov"])
def test_losses_of_whole_responses_and_mini_batches_see_all_segments(loss: str) -> None:
    """Two epochs that move the weights, so that ratios are not 1."""
    constants = {"clip_cov_lb": -10.0, "clip_cov_ub": 10.0, "clip_cov_ratio": 0.3, "kl_cov_ratio": 0.3}
    actor = actor_config(
        "seq-mean-token-mean",
        policy_loss=SimpleNamespace(loss_mode=loss, **constants),
        ppo_epochs=2,
        optim={"lr": 3e-3, "weight_decay": 0.0},
        ppo_micro_batch_size_per_gpu=1,
    )
    whole, cut = (updated(c, actor) for c in (False, True))
    common = {k: v for k, v in whole[1].metrics.items() if k != "actor/grad_norm"}
    assert {k: cut[1].metrics[k] for k in common} == pytest.approx(common, rel=1e-3, abs=2e-5)
    assert whole[1].metrics["actor/ppo_kl"] != 0 and len(whole[2]) == len(cut[2]) == 4
    for a, b in zip(whole[2], cut[2], strict=True):
        assert_close(a, b, 2e-4)
