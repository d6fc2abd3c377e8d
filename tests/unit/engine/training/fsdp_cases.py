"""What the tests of the sharded engine share: one way to drive an engine, on one rank or on several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests import ranks
from tests.unit.engine.training.engine_cases import BOTH, rows_of, simple_loss
from verl.engine.training.log_prob import CANDIDATE_OUTPUTS
from verl.trajectory import Trajectory

TOPK = ("topk_log_probs", "topk_ids")

ROLE = {
    "fsdp_config": {"dtype": "float32"},
    "optim": {"lr": 0.0, "weight_decay": 0.0},
    "grad_clip": 0.0,
    "ppo_micro_batch_size_per_gpu": 2,
}
GROUPS = [(7, [5, 9, 1, 0, 3]), (1, [4]), (12, [6, 6]), (5, [2, 11, 40])]
ROWS = 11
Cases = dict[str, tuple[dict[str, Any], dict[str, Any], str]]
"""Name → (role, model_cfg, kind of shares)."""


def role(**changes: Any) -> dict[str, Any]:
    """ROLE with changes; `fsdp` and `optim` change those groups."""
    out = dict(ROLE)
    out["fsdp_config"] = ROLE["fsdp_config"] | changes.pop("fsdp", {})
    out["optim"] = ROLE["optim"] | changes.pop("optim", {})
    return out | changes


def shares(kind: str, ranks: int) -> list[list[int]]:
    """Row numbers of each data-parallel rank."""
    everything = list(range(ROWS))
    if kind == "none for the last" and ranks > 1:
        return [everything, *[[] for _ in range(ranks - 1)]]
    if kind == "uneven" and ranks > 1:
        return [everything[:1], *[everything[1 + i :: ranks - 1] for i in range(ranks - 1)]]
    size = -(-ROWS // ranks)
    return [everything[i * size : (i + 1) * size] for i in range(ranks)]


def drive(engine: Any, rows: Sequence[Trajectory], total: int, steps: int = 1) -> dict[str, Any]:
    """Log-probs of the rows, then steps; everything that must not depend on the number of ranks."""
    from verl.engine.training.process_group import whole

    found = engine.forward(rows, (*BOTH, "sum_pi_squared", *TOPK), temperature=0.8)
    asked = (*BOTH, *CANDIDATE_OUTPUTS)
    results = [engine.step(rows, simple_loss(total, 0.1), asked, temperature=0.8) for _ in range(steps)]
    return {
        "log_probs": found["log_probs"],
        "entropy": found["entropy"],
        "squares": found["sum_pi_squared"],
        "topk": found["topk_log_probs"],
        "topk_ids": found["topk_ids"],
        "metrics": [r.metrics for r in results],
        "refused": [r.refused for r in results],
        "tokens": [r.tokens for r in results],
        "norm": [r.grad_norm for r in results],
        "derivative": [r.scale_derivative for r in results],
        "gradients": {n: whole(p.grad).clone() for n, p in engine.module.named_parameters() if p.grad is not None},
        "weights": {n: t.clone() for n, t in engine.named_weights()},
    }


def rows() -> list[Trajectory]:
    """With other tokens in the place of each, whose log-probs are a part of the loss."""
    found, rng = rows_of(GROUPS), np.random.default_rng(7)
    for row in found:
        row.teacher_topk_ids = rng.integers(0, 250, (row.length, 3)).astype(np.int32)
    return found


def total() -> int:
    return sum(row.length for row in rows())


def on_ranks(path: str, cases: Cases, steps: int = 1) -> dict[str, Any]:
    """On one rank: name of a case → what `drive` saw of this rank's rows."""
    from verl.engine.training.fsdp.engine import FSDPEngine

    out = {}
    for name, (role_cfg, model_cfg, kind) in cases.items():
        engine = FSDPEngine(path, role_cfg=role_cfg, model_cfg=model_cfg, device="cpu", topk=4)
        mine = shares(kind, engine.dp_size)[engine.dp_rank]
        chosen = [rows()[i] for i in mine]
        out[name] = drive(engine, chosen, total(), steps) | {
            "rows": mine,
            "fused": len(engine._model.fused.forwards),
            "head": engine._model.head.layer is not None,
            "held": sum(p.to_local().numel() for p in engine.module.parameters()),  # type: ignore[attr-defined]
        }
    return out


def check_on_ranks(size: int, path: str, cases: Cases, tolerance: float = 2e-6) -> list[dict[str, Any]]:
    """`on_ranks`, all of whose results must be those of one device."""
    local, results = locally(path, role()), ranks.run(on_ranks, size, path, cases)
    for name in cases:
        assert_same([result[name] for result in results], local, tolerance)
    return results


def locally(path: str, role_cfg: dict[str, Any], model_cfg: dict[str, Any] | None = None, steps: int = 1) -> Any:
    """The same on `FSDPEngine` with all rows."""
    from verl.engine.training.fsdp.engine import FSDPEngine

    engine = FSDPEngine(path, role_cfg=role_cfg, model_cfg=model_cfg, device="cpu", topk=4)
    return drive(engine, rows(), total(), steps)


def columns(found: list[dict[str, Any]], column: str) -> np.ndarray:
    """A per-token column of all ranks in the order of the rows; ranks with the same rows must agree."""
    lengths = [row.length for row in rows()]
    parts: dict[int, np.ndarray] = {}
    for one in found:
        sizes = [lengths[i] for i in one["rows"]]
        pieces = np.split(one[column], np.cumsum(sizes)[:-1]) if sizes else []
        for i, piece in zip(one["rows"], pieces, strict=True):
            assert i not in parts or np.array_equal(parts[i], piece)
            parts[i] = piece
    assert sorted(parts) == list(range(ROWS))
    return np.concatenate([parts[i] for i in range(ROWS)])


def assert_same(found: list[dict[str, Any]], local: dict[str, Any], tolerance: float = 1e-6) -> None:
    """Every rank's results against those of one device: tokens' columns, metrics, norm, gradients."""
    for column in ("log_probs", "entropy", "squares", "topk", "topk_ids"):
        np.testing.assert_allclose(columns(found, column), local[column], rtol=1e-6, atol=4 * tolerance)
    for one in found:
        assert one["refused"] == local["refused"]
        for ours, theirs in zip(one["derivative"], local["derivative"], strict=True):
            # Full logits have no such derivative.
            assert ours is None or abs(ours - theirs) <= 1e-4 * max(1.0, abs(theirs)), (ours, theirs)
        for ours, theirs in zip(one["metrics"], local["metrics"], strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                assert abs(ours[name] - value) <= 4 * tolerance * max(1.0, abs(value)), name
        assert one["metrics"] == found[0]["metrics"] and one["tokens"] == found[0]["tokens"]
        assert one["gradients"].keys() == local["gradients"].keys()
        for name, theirs in local["gradients"].items():
            difference = torch.linalg.vector_norm(one["gradients"][name] - theirs)
            scale = torch.linalg.vector_norm(theirs)
            assert float(difference) <= max(4 * tolerance * float(scale), 1e-9), name
