"""Router replay of the Megatron engine against that of the FSDP engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import ranks
from tests.invariant.test_router_replay import ARCHITECTURES
from tests.megatron import cases
from tests.tiny import tiny_model

pytestmark = [cases.NEEDS_MEGATRON, pytest.mark.timeout(240)]

# name → ranks, parallel sizes, layers computed again in the backward pass
LAYOUTS: dict[str, tuple[int, dict[str, Any], bool]] = {
    "alone": (1, {}, False),
    "PP2": (2, {"pipeline_model_parallel_size": 2}, True),
    "EP2": (2, {"expert_model_parallel_size": 2}, True),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("model") / "m"
    tiny_model(path, "qwen3_moe", scale=4.0, **ARCHITECTURES["qwen3_moe"])
    return path, cases.replay(path, "fsdp", {}, False)


@pytest.mark.parametrize("name", LAYOUTS)
def test_replayed_routes_are_followed_as_by_the_fsdp_engine(model: tuple[Path, dict[str, Any]], name: str) -> None:
    path, local = model
    size, sizes, recompute = LAYOUTS[name]
    seen = ranks.run(cases.replay, size, path, "megatron", sizes, recompute, timeout=120.0)
    rows = local["recorded"][1]
    lengths = [len(routes) for routes, _ in rows]
    for rank, found in enumerate(seen):
        mine = range(len(rows)) if name != "EP2" else range(rank, len(rows), 2)
        for column in ("outputs", "recorded") if found["holds"] else ():
            ours, theirs = (x[column] if column == "outputs" else x[column][0] for x in (found, local))
            parts = np.split(theirs["log_probs"], np.cumsum(lengths)[:-1])
            expected = np.concatenate([parts[number] for number in mine])
            np.testing.assert_allclose(ours["log_probs"], expected, rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(found["metrics"], local["metrics"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
            assert 0.5 < ours["actor/router_replay/changed_frac"] <= 1.0
        for weight, expected in local["weights"].items():
            torch.testing.assert_close(found["weights"][weight], expected, rtol=0, atol=1e-5, msg=weight)
        for number, ours in zip(mine, found["recorded"][1], strict=True):
            assert all(np.array_equal(np.sort(a, -1), np.sort(b, -1)) for a, b in zip(ours, rows[number], strict=True))


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"UserError.*does not fit Qwen3ForCausalLM: 0 layers"):
        ranks.run(cases.replay, 1, tiny_model(tmp_path / "m"), "megatron", {}, False, timeout=120.0)
