"""Adapters of the Megatron engine against those of the FSDP engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests import ranks
from tests.megatron import cases
from tests.tiny import tiny_model
from tests.unit.engine.training.fsdp_cases import columns

pytest.importorskip("peft")
pytestmark = [cases.NEEDS_MEGATRON, pytest.mark.timeout(240)]

_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# name → family, adapted layers, ranks, parallel sizes
LAYOUTS: dict[str, tuple[str, Any, int, dict[str, Any]]] = {
    "alone": ("qwen3", "all-linear", 1, {}),
    "TP2": ("qwen3", "all-linear", 2, {"tensor_model_parallel_size": 2}),
    "TP2, some layers": ("qwen2", ["q_proj", "v_proj", "down_proj"], 2, {"tensor_model_parallel_size": 2}),
    "PP2": ("qwen3", "all-linear", 2, {"pipeline_model_parallel_size": 2}),
    "EP2": ("qwen3_moe", _ATTENTION, 2, {"expert_model_parallel_size": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_adapters_are_those_of_the_fsdp_engine(tmp_path: Path, name: str) -> None:
    family, targets, size, sizes = LAYOUTS[name]
    path = tiny_model(tmp_path / "model", family, scale=4.0)
    lora = {"lora_rank": 4, "lora_alpha": 8, "target_modules": targets}
    local = cases.adapt(path, "fsdp", {}, lora, tmp_path / "fsdp")
    seen = ranks.run(cases.adapt, size, path, "megatron", sizes, lora, tmp_path / "megatron", timeout=120.0)
    for key in ("outputs", "base"):
        found = [rank[key] | {"rows": rank["rows"]} for rank in seen if rank["holds"]]
        for column, expected in local[key].items():
            np.testing.assert_allclose(columns(found, column), expected, rtol=1e-5, atol=1e-5)
    assert np.abs(local["outputs"]["log_probs"] - local["base"]["log_probs"]).max() > 1e-2
    for rank in seen:
        assert rank["resumed"] and cases.identical(rank["adapter"], local["adapter"])
        assert rank["norms"] == pytest.approx(local["norms"], rel=1e-5)
        assert rank["weights"].keys() == local["weights"].keys()
        for weight, expected in local["weights"].items():
            torch.testing.assert_close(rank["weights"][weight], expected, rtol=0, atol=1e-5, msg=weight)
    ours, theirs = (tmp_path / engine / "actor/lora_adapter" for engine in ("megatron", "fsdp"))
    assert json.loads((ours / "adapter_config.json").read_text()) == json.loads(
        (theirs / "adapter_config.json").read_text()
    )
    saved, expected = (load_file(folder / "adapter_model.safetensors") for folder in (ours, theirs))
    assert saved.keys() == expected.keys()
    assert all(torch.allclose(saved[key], tensor, rtol=0, atol=1e-5) for key, tensor in expected.items())


def test_layers_that_it_does_not_adapt_are_refused(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model", "qwen3_moe")
    with pytest.raises(RuntimeError, match=r"UserError.*experts.*target_modules=\[q_proj"):
        ranks.run(cases.adapt, 1, path, "megatron", {}, {"lora_rank": 4}, tmp_path, timeout=120.0)


def test_more_ranks_than_key_value_heads_are_refused(tmp_path: Path) -> None:
    path, sizes = tiny_model(tmp_path / "model", num_key_value_heads=1), {"tensor_model_parallel_size": 2}
    lora = {"lora_rank": 4, "lora_alpha": 8, "target_modules": _ATTENTION}
    with pytest.raises(
        RuntimeError, match=r"UserError.*tensor_model_parallel_size=2 does not divide.*1 key-value heads"
    ):
        ranks.run(cases.adapt, 2, path, "megatron", sizes, lora, tmp_path, timeout=120.0)
