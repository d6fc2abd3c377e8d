"""The Megatron engine against the FSDP engine, on one rank and two, in every layout that two ranks have."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import ranks
from tests.megatron import cases
from tests.tiny import tiny_model
from tests.unit.engine.training.fsdp_cases import columns
from verl.engine.training.megatron import setting_names

pytestmark = [cases.NEEDS_MEGATRON, pytest.mark.timeout(240)]

_TP, _PP = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
_EP = {"expert_model_parallel_size": 2}
_OVERRIDE = "override_transformer_config"
# name → family, tied embeddings, ranks, parallel sizes
LAYOUTS: dict[str, tuple[str, bool, int, dict[str, Any]]] = {
    "alone": ("qwen3", False, 1, {}),
    "TP2": ("qwen3", False, 2, _TP),
    "TP2 tied": ("qwen2", True, 2, _TP),
    "PP2": ("llama", False, 2, _PP),
    "PP2 tied": ("qwen3", True, 2, _PP),
    "virtual PP2": ("qwen3", False, 2, _PP | {"virtual_pipeline_model_parallel_size": 2}),
    "uneven PP2": ("qwen3", False, 2, _PP | {_OVERRIDE: {"num_layers_in_first_pipeline_stage": 1}}),
    "attention computed again": ("qwen3", False, 1, {_OVERRIDE: {"recompute_granularity": "selective"}}),
    "DP2": ("qwen2", False, 2, {"use_distributed_optimizer": False}),
    "DP2, distributed optimizer": ("qwen3", False, 2, {}),
    "experts": ("qwen3_moe", False, 1, {}),
    "EP2": ("qwen3_moe", False, 2, _EP),
    "DeepSeek PP2": ("deepseek_v3", False, 2, _PP),
    "GLM EP2": ("glm4_moe", False, 2, _EP),
}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
SHAPES: dict[str, dict[str, Any]] = {
    "deepseek_v3": _ROUTED
    | {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "n_group": 2, "topk_group": 1, "head_dim": 8}
    | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    | {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}},
    "glm4_moe": _ROUTED | {"partial_rotary_factor": 0.5, "use_qk_norm": True, "attention_bias": True},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """models(family, tied) → a model's directory, and what the FSDP engine makes of it."""
    made: dict[tuple[str, bool], tuple[Path, dict[str, Any]]] = {}

    def of(family: str, tied: bool) -> tuple[Path, dict[str, Any]]:
        if (family, tied) not in made:
            path = tiny_model(
                tmp_path_factory.mktemp("models") / "m",
                family,
                tied=tied,
                scale=4.0,
                num_hidden_layers=4,
                **SHAPES.get(family, {}),
            )
            made[family, tied] = path, cases.with_fsdp(path)
        return made[family, tied]

    return of


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(
    request: pytest.FixtureRequest, models: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], dict[str, Any], Path]:
    """What all ranks saw, what the FSDP engine saw, the folder of saved states."""
    family, tied, size, sizes = LAYOUTS[request.param]
    path, local = models(family, tied)
    folder = tmp_path_factory.mktemp("state")
    return ranks.run(cases.drive, size, path, sizes, folder, timeout=120.0), local, folder


def test_it_computes_what_the_fsdp_engine_computes(layout: Any) -> None:
    seen, local, _ = layout
    found = [rank["outputs"] | {"rows": rank["rows"]} for rank in seen if rank["holds"]]
    for name, expected in local["outputs"].items():
        np.testing.assert_allclose(columns(found, name), expected, rtol=1e-5, atol=1e-5)
    for rank in seen:
        assert rank["holds"] or rank["outputs"] == {}
        assert rank["tokens"] == seen[0]["tokens"] and rank["metrics"] == seen[0]["metrics"]
        assert rank["norms"] == pytest.approx(local["norms"], rel=1e-5)
        assert rank["derivatives"] == pytest.approx(local["derivatives"], rel=1e-4, abs=1e-5)
        for ours, theirs in zip(rank["metrics"], local["metrics"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
        assert rank["weights"].keys() == local["weights"].keys()
        for name, expected in local["weights"].items():
            # AdamW makes a step of up to lr (0.01) of any gradient: one of 2,048 is 1.09e-5 apart on a Xeon.
            torch.testing.assert_close(rank["weights"][name], expected, rtol=0, atol=2e-5, msg=name)


def test_weights_go_in_and_out_bit_for_bit(layout: Any) -> None:
    seen, local, folder = layout
    assert all(cases.identical(rank["start"], local["start"]) for rank in seen)
    loaded, report = AutoModelForCausalLM.from_pretrained(folder / "start", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    state = loaded.state_dict()
    tensors = {name: tensor for name, tensor in local["start"].items() if ".experts." not in name}
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())


def test_it_goes_on_exactly_and_refuses_what_is_not_finite(layout: Any) -> None:
    for rank in layout[0]:
        refused, unmoved = rank["refused"]
        assert "loss" in refused and "0:" in refused and unmoved and refused == layout[0][0]["refused"][0]
        assert rank["resumed"], "resumed at the same layout"
        assert rank["offloaded"], "with offload of weights, gradients and optimizer"


@pytest.mark.parametrize(
    ("writer", "reader"),
    [("TP2", "virtual PP2"), ("TP2", "alone"), ("DP2, distributed optimizer", "TP2")],
)
def test_another_layout_goes_on_to_rounding(models: Any, tmp_path: Path, writer: str, reader: str) -> None:
    family, tied, size, sizes = LAYOUTS[writer]
    path, local = models(family, tied)
    ranks.run(cases.drive, size, path, sizes, tmp_path, timeout=120.0)
    _, _, size, sizes = LAYOUTS[reader]
    for weights in ranks.run(cases.resume, size, path, sizes, tmp_path, timeout=120.0):
        for name, expected in local["weights"].items():
            torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-5, msg=name)


def test_state_that_this_layout_cannot_read_is_refused(models: Any, tmp_path: Path) -> None:
    """Experts that are split have an optimizer of their own in megatron-core."""
    path, _ = models("qwen3_moe", False)
    ranks.run(cases.drive, 1, path, {}, tmp_path, timeout=120.0)
    with pytest.raises(RuntimeError, match=r"UserError.*expert parallel size"):
        ranks.run(cases.resume, 2, path, _EP, tmp_path, timeout=120.0)


@pytest.mark.parametrize(("writer", "reader"), [("TP2", "virtual PP2"), ("EP2", "experts")])
def test_a_distributed_checkpoint_is_read_at_another_layout(
    models: Any, tmp_path: Path, writer: str, reader: str
) -> None:
    family, tied, size, sizes = LAYOUTS[writer]
    path, local = models(family, tied)
    ranks.run(cases.distributed, size, path, sizes, tmp_path / "dist", timeout=120.0)
    other = tiny_model(tmp_path / "other", family, tied=tied, scale=1.0, num_hidden_layers=4)
    _, _, size, sizes = LAYOUTS[reader]
    for weights in ranks.run(cases.from_distributed, size, other, sizes, tmp_path / "dist", timeout=120.0):
        assert cases.identical(weights, local["start"])
    with pytest.raises(RuntimeError, match=r"UserError.*dist_checkpointing_path"):
        ranks.run(cases.from_distributed, size, other, sizes, tmp_path / "none", timeout=120.0)


def test_truncated_distributions_are_those_of_the_fsdp_engine(tmp_path: Path) -> None:
    """Each rank masks its part of the vocabulary."""
    path = tiny_model(tmp_path / "m", scale=4.0)
    expected, norm = cases.truncated(path, "fsdp", {})
    for outputs, grad_norm in ranks.run(
        cases.truncated, 2, path, "megatron", {"tensor_model_parallel_size": 2}, timeout=120.0
    ):
        assert grad_norm == pytest.approx(norm, rel=1e-5)
        for name, values in expected.items():
            np.testing.assert_allclose(outputs[name], values, rtol=1e-5, atol=1e-5)


def test_context_parallel_without_transformer_engine_is_refused(tmp_path: Path) -> None:
    path, key = tiny_model(tmp_path / "m"), "context_parallel_size"
    with pytest.raises(RuntimeError, match=rf"UserError.*{key}=2.*TransformerEngine"):
        ranks.run(cases.distributed, 2, path, {key: 2}, tmp_path, timeout=120.0)


def test_unknown_settings_of_its_data_parallelism_are_refused(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m")
    with pytest.raises(RuntimeError, match=r"UserError.*override_ddp_config.*overlap_grads"):
        ranks.run(cases.distributed, 1, path, {"override_ddp_config": {"overlap_grads": True}}, tmp_path, timeout=120.0)


def test_the_check_reads_all_names_of_settings_from_the_source() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import MLATransformerConfig

    for key, kind in ((_OVERRIDE, MLATransformerConfig), ("override_ddp_config", DistributedDataParallelConfig)):
        assert {field.name for field in dataclasses.fields(kind)} <= {*setting_names(key)}


@pytest.mark.parametrize(
    ("change", "message"),
    [({"norm_topk_prob": False}, "norm_topk_prob"), ({"num_experts_per_tok": 4}, "must be twice topk_group")],
)
def test_routers_that_compute_something_else_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tiny_model(tmp_path / "m", "deepseek_v3", **SHAPES["deepseek_v3"] | change)
    with pytest.raises(RuntimeError, match=rf"UserError.*{message}"):
        ranks.run(cases.distributed, 1, path, {}, tmp_path, timeout=120.0)


@pytest.mark.parametrize(("dtype", "tokens"), [("bfloat16", None), ("float16", None), ("float16", 10**6)])
def test_half_precision_is_near_float32(models: Any, tmp_path: Path, dtype: str, tokens: int | None) -> None:
    """Unscaled, a loss over a million tokens has gradients that float16 rounds to zero."""
    path, local = models("qwen3", False)
    count = tokens or cases.total()
    ((outputs, norm, resumed),) = ranks.run(cases.in_half, 1, path, dtype, count, tmp_path, timeout=120.0)
    np.testing.assert_allclose(outputs["log_probs"], local["outputs"]["log_probs"], atol=0.1)
    assert resumed and norm == pytest.approx(local["norms"][0] * cases.total() / count, rel=0.05)
