"""The value model: its head, its loss through the engine in any cut and on two ranks, its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification

from tests import ranks
from tests.algorithm_references import share_of
from tests.tiny import tiny_config, tiny_model
from tests.unit.engine.training.engine_cases import assert_close, rows_of
from verl.algorithms.flat_tokens import count_denominators, trajectory_tokens
from verl.algorithms.value_loss import ValueObjective
from verl.config import Map
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.models.pretrained import load_model
from verl.trajectory import segments_of

GROUPS = [(5, [3, 9, 6]), (7, [2, 8]), (1, [1, 0, 4])]
CONFIG = {"fsdp_config": {"dtype": "float32"}, "grad_clip": 0.0, "optim": {"lr": 1e-2, "weight_decay": 0.0}}
CRITIC = Map(cliprange_value=0.5, loss_agg_mode="token-mean")


def rows(seed: int = 0) -> list[Any]:
    found = rows_of(GROUPS, seed)
    rng = np.random.default_rng(seed)
    for row in found:
        row.loss_mask = rng.random(row.length) < 0.8
        row.returns = rng.normal(size=row.length).astype(np.float32)
        row.values = rng.normal(size=row.length).astype(np.float32) / 2
    return segments_of(found)


def engine(path: Any, **options: Any) -> FSDPEngine:
    return FSDPEngine(path, head="value", role="critic", role_cfg=CONFIG | options, device="cpu")


def with_a_head(path: Path, seed: int = 3) -> Path:
    """A token classifier whose head is not 0."""
    module = load_model(tiny_model(path / "lm"), head="value")
    torch.manual_seed(seed)
    for parameter in module.score.parameters():
        torch.nn.init.normal_(parameter)
    module.save_pretrained(path / "value")
    return path / "value"


def plain_values(path: Path, batch: list[Any]) -> torch.Tensor:
    """One row at a time through transformers' own token classifier: the value at the token before each response
    token."""
    module = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for row in batch:
        ids = torch.from_numpy(np.concatenate((row.context_ids, row.response_ids)))[None]
        start = len(row.context_ids) - 1
        found.append(module(input_ids=ids).logits[0, start : start + row.length, 0])
    return torch.cat(found)


def test_a_fresh_head_says_nothing_and_a_saved_one_what_transformers_says(tmp_path: Path) -> None:
    fresh = engine(tiny_model(tmp_path / "m"))
    assert not fresh.forward(rows(), ("values",), temperature=1.0)["values"].any()
    path = with_a_head(tmp_path)
    ours = engine(path).forward(rows(), ("values",), temperature=0.7)["values"]
    np.testing.assert_allclose(ours, plain_values(path, rows()).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arch", ["qwen2", "llama", "gpt2", "phi3", "olmo2", "granite", "cohere2"])
def test_any_decoder_takes_a_value_head(tmp_path: Path, arch: str) -> None:
    """Also architectures for which transformers has no token classifier."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_config(tiny_config(arch), dtype=torch.float32)
    module.save_pretrained(tmp_path / "m")
    critic = engine(tmp_path / "m")
    batch = rows()
    before = critic.forward(batch, ("values",), temperature=1.0)["values"]
    objective = ValueObjective(CRITIC, count_denominators(batch, 12.0))
    result = critic.step(batch, objective, ("values",), temperature=1.0)
    after = critic.forward(batch, ("values",), temperature=1.0)["values"]
    assert not result.refused and not before.any() and after.any()
    critic.save_weights(tmp_path / "saved")
    again = engine(tmp_path / "saved").forward(batch, ("values",), temperature=1.0)["values"]
    np.testing.assert_allclose(again, after, rtol=1e-5, atol=1e-6)


def stepped(path: Any, batch: list[Any], mine: list[Any], mode: str, **options: Any) -> tuple[Any, Any]:
    critic = engine(path, **options)
    counts = trajectory_tokens(batch)
    tokens_of = None if counts is None else dict(zip(map(id, batch), counts, strict=True))
    objective = ValueObjective(Map(CRITIC | {"loss_agg_mode": mode}), count_denominators(batch, 12.0), tokens_of)
    result = critic.step(mine, objective, ("values",), temperature=1.0)
    return result.metrics, {name: tensor.clone() for name, tensor in critic.named_weights()}


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_the_update_is_that_of_plain_torch_in_any_cut(tmp_path: Path, mode: str) -> None:
    path, batch = with_a_head(tmp_path), rows()
    module = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32).eval()
    loss, count = 0.0, count_denominators(batch, 12.0)
    for row in batch:
        if not row.loss_mask.any():
            continue
        ids = torch.from_numpy(np.concatenate((row.context_ids, row.response_ids)))[None]
        start = len(row.context_ids) - 1
        value = module(input_ids=ids).logits[0, start : start + row.length, 0]
        goal, old = torch.from_numpy(row.returns), torch.from_numpy(row.values)
        limited = old + torch.clamp(value - old, -0.5, 0.5)
        terms = torch.maximum((value - goal) ** 2, (limited - goal) ** 2)[torch.from_numpy(row.loss_mask)]
        weight = share_of(mode, count.tokens, count.trajectories, len(terms), 12.0)
        loss = loss + terms.sum() * weight / 2
    loss.backward()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.0)
    norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])
    optimizer.step()
    whole, weights = stepped(path, batch, batch, mode)
    assert whole["critic/vf_loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert whole["critic/grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    cut, _ = stepped(path, batch, batch, mode, ppo_micro_batch_size_per_gpu=2)
    assert cut == pytest.approx(whole, rel=1e-4, abs=1e-6)
    assert {"critic/vf_clipfrac", "critic/vpred_mean"} <= set(whole)
    assert weights["score.weight"].shape == (1, 32)


def ranked(path: str) -> Any:
    batch = rows()
    critic = engine(path)
    mine = [batch[:3], batch[3:]][critic.dp_rank]
    values = critic.forward(mine, ("values",), temperature=1.0)["values"]
    result = critic.step(mine, ValueObjective(CRITIC, count_denominators(batch, 12.0)), ("values",), temperature=1.0)
    metrics, weights = result.metrics, {n: t.clone() for n, t in critic.named_weights()}
    return values, metrics, weights


@pytest.mark.parametrize("fresh", [True, False])
def test_two_ranks_do_what_one_does(tmp_path: Path, fresh: bool) -> None:
    path = str(tiny_model(tmp_path / "m") if fresh else with_a_head(tmp_path))
    metrics, weights = stepped(path, rows(), rows(), "token-mean")
    found = ranks.run(ranked, 2, path)
    one = engine(path).forward(rows(), ("values",), temperature=1.0)["values"]
    np.testing.assert_allclose(np.concatenate([f[0] for f in found]), one, rtol=1e-4, atol=1e-5)
    for _, theirs, moved in found:
        assert theirs == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        assert_close(moved, weights, 2e-2 if fresh else 2e-3)
