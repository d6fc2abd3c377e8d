"""Models that see images with the Megatron engine, against the FSDP engine, and from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests import ranks
from tests.integration.test_vision_runs import VisionRun
from tests.megatron import cases
from tests.megatron.test_megatron_runs import ACTOR, train
from tests.tiny import tiny_vision_model

pytestmark = [cases.NEEDS_MEGATRON, pytest.mark.timeout(240)]

_TP, _PP = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
# name → family, layers of the image encoder whose outputs the text layers get, ranks, parallel sizes
LAYOUTS: dict[str, tuple[str, tuple[int, ...], int, dict[str, Any]]] = {
    "Qwen2.5-VL": ("qwen2_5_vl", (0,), 1, {}),
    "Qwen2.5-VL TP2": ("qwen2_5_vl", (0,), 2, _TP),
    "Qwen2.5-VL DP2": ("qwen2_5_vl", (0,), 2, {"override_ddp_config": {"overlap_grad_reduce": True}}),
    "Qwen2-VL PP2": ("qwen2_vl", (0,), 2, _PP),
    "Qwen3-VL": ("qwen3_vl", (0, 1), 1, {}),
    "Qwen3-VL PP2": ("qwen3_vl", (0,), 2, _PP),
    "Qwen3-VL-MoE EP2": ("qwen3_vl_moe", (0,), 2, {"expert_model_parallel_size": 2}),
}


_EACH_RUN = ("Qwen2.5-VL TP2", "Qwen3-VL PP2", "Qwen3-VL-MoE EP2")


@pytest.mark.parametrize(
    "name", [name if name in _EACH_RUN else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]
)
def test_it_sees_what_the_fsdp_engine_sees(tmp_path: Path, name: str) -> None:
    family, deep, size, sizes = LAYOUTS[name]
    path = tiny_vision_model(tmp_path / "model", family, deepstack=deep)
    local = cases.see(path, "fsdp", {}, tmp_path / "fsdp")
    seen = ranks.run(cases.see, size, path, "megatron", sizes, tmp_path / "megatron", timeout=120.0)
    for rank in seen:
        assert cases.identical(rank["start"], local["start"]) and rank["resumed"]
        for column, expected in local["outputs"].items() if rank["holds"] else ():
            parts = np.split(expected, np.cumsum(local["lengths"])[:-1])
            mine = np.concatenate([parts[number] for number in rank["rows"]])
            np.testing.assert_allclose(rank["outputs"][column], mine, rtol=1e-5, atol=1e-5)
        assert rank["norms"] == pytest.approx(local["norms"], rel=1e-5)
        assert rank["weights"].keys() == local["weights"].keys()
        for weight, expected in local["weights"].items():
            torch.testing.assert_close(rank["weights"][weight], expected, rtol=0, atol=1e-5, msg=weight)
    moved = [n for n, t in local["weights"].items() if "visual" in n and not torch.equal(t, local["start"][n])]
    assert moved, "the tower learns"
    loaded, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "megatron/start", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    expected = AutoModelForImageTextToText.from_pretrained(path)
    assert cases.identical(loaded.state_dict(), expected.state_dict())


@pytest.mark.parametrize(
    ("family", "sizes"), [("qwen2_5_vl", _TP), pytest.param("qwen3_vl", _PP, marks=pytest.mark.long)], ids=str
)
def test_adapters_of_the_language_model(tmp_path: Path, family: str, sizes: dict[str, int]) -> None:
    path = tiny_vision_model(tmp_path / "model", family)
    lora = {"lora_rank": 4, "lora_alpha": 64, "target_modules": "all-linear", "exclude_modules": ".*visual.*"}
    local = cases.see(path, "fsdp", {}, tmp_path / "fsdp", lora)
    for rank in ranks.run(cases.see, 2, path, "megatron", sizes, tmp_path / "megatron", lora, timeout=120.0):
        assert rank["resumed"] and rank["norms"] == pytest.approx(local["norms"], rel=1e-5)
        assert rank["weights"].keys() == local["weights"].keys()
        for weight, expected in local["weights"].items():
            torch.testing.assert_close(rank["weights"][weight], expected, rtol=0, atol=1e-5, msg=weight)
    moved = {n for n, t in local["weights"].items() if (t - local["start"][n]).abs().max() > 1e-3}
    assert moved and not any("visual" in name for name in moved)


@pytest.mark.long
def test_a_frozen_tower_stays(tmp_path: Path) -> None:
    path = tiny_vision_model(tmp_path / "model", "qwen3_vl")
    (seen,) = ranks.run(see_frozen, 1, path, tmp_path / "state", timeout=120.0)
    changed = {name for name, tensor in seen["weights"].items() if not torch.equal(tensor, seen["start"][name])}
    assert changed and not any("visual" in name for name in changed)


def see_frozen(path: Path, folder: Path) -> dict[str, Any]:
    return cases.see(path, "megatron", {}, folder, freeze_vision_tower=True)


def test_deep_features_for_layers_of_another_stage_are_refused(tmp_path: Path) -> None:
    path = tiny_vision_model(tmp_path / "model", "qwen3_vl", deepstack=(0, 1))
    with pytest.raises(RuntimeError, match=r"UserError.*pipeline_model_parallel_size: the first 2 layers"):
        ranks.run(cases.see, 2, path, "megatron", _PP, tmp_path, timeout=120.0)


_LORA = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.exclude_modules='.*visual.*'"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes", "more"),
    [
        ("qwen2_5_vl", {}, []),
        pytest.param("qwen2_5_vl", {"tensor": 2}, [], marks=pytest.mark.long),
        pytest.param("qwen2_5_vl", {"tensor": 2}, _LORA, marks=pytest.mark.long),
        pytest.param("qwen3_vl_moe", {"expert": 2}, [], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_run_sees_its_images(tmp_path: Path, family: str, sizes: dict[str, int], more: list[str]) -> None:
    tiny, out = VisionRun(tmp_path / "tiny", family), tmp_path / "out"
    words = more + [f"{ACTOR}.{name}_model_parallel_size={size}" for name, size in sizes.items()]
    words += [f"trainer.n_gpus_per_node={2 if sizes else 1}", "trainer.verify_weight_sync=True"]
    seen = train(tiny, out, *words)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "perf/images/count" in line]
    assert len(steps) == 2 and all(step["perf/images/encoded_per_image/trainer"] == 1 for step in steps)
    assert all(seen[step]["training/rollout_logprob_abs_diff/max"] < 1e-4 for step in (1, 2))
    assert all(seen[step]["actor/grad_norm"] > 0 for step in (1, 2))
    assert "images_seen" in (out / "events.jsonl").read_text()
    AutoModelForImageTextToText.from_pretrained(out / "global_step_2/actor")
