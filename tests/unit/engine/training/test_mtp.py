"""Multi-token prediction: the layer beside the model's own ones is saved, computed as transformers does, and
trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests import ranks
from tests.tiny import tiny_model
from tests.unit.engine.training.engine_cases import rows_of, simple_loss
from tests.vllm_cases import vllm_model
from verl.engine.training import process_group
from verl.engine.training.base import FURTHER
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.errors import UserError
from verl.trajectory import Batch, Segment

ROLE = {"fsdp_config": {"dtype": "float32"}, "optim": {"lr": 1e-2, "weight_decay": 0.0}, "grad_clip": 0.0}
TRAINED = {"enable": True, "enable_train": True}


QWEN = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm", "eh_proj": "fc"}
"""Of what is beside the block: its name in DeepSeek V3's and GLM-4 MoE's files, and in Qwen's."""
ARCHITECTURES = ("glm4_moe", "deepseek_v3", "qwen3_next", "qwen3_5_text")


def model_with_mtp(folder: Path, arch: str = "glm4_moe") -> Path:
    """A tiny model, with files as published ones are: a further layer; beside DeepSeek's and GLM's copies of embedding
    and head."""
    if arch == "glm4_moe":
        shape = {"hidden_size": 64, "head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2}
        shape |= {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
        path = tiny_model(folder, arch, scale=3.0, n_group=1, topk_group=1, n_shared_experts=1, **shape)
    else:
        path = vllm_model(folder, arch)
    if arch == "qwen3_5_text":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    weights, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(5)

    def like(tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=generator)
        return noise * tensor.std() if tensor.ndim > 1 else tensor + 0.1 * noise

    qwen = arch.startswith("qwen")
    last, layer, start = "model.layers.1.", *(("mtp.layers.0.", "mtp.") if qwen else ("model.layers.2.",) * 2)
    further = {n.replace(last, layer): like(t) for n, t in weights.items() if n.startswith(last)}
    one = torch.zeros(64) if qwen else torch.ones(64)  # Qwen's norms add one to their weights
    beside = {name: like(one) for name in ("enorm", "hnorm", "shared_head.norm")}
    beside["eh_proj"] = torch.randn(64, 128, generator=generator) * 0.1
    further |= {f"{start}{QWEN[name] if qwen else name}.weight": tensor for name, tensor in beside.items()}
    if not qwen:
        further[f"{layer}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        further[f"{layer}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights | further, path / "model.safetensors", metadata={"format": "pt"})
    return path


def engine_of(path: Path, **mtp: Any) -> FSDPEngine:
    return FSDPEngine(str(path), role_cfg=ROLE, model_cfg={"mtp": mtp}, device="cpu")


def rows() -> list[Segment]:
    return Batch(rows_of([(8, [5, 7, 3]), (1, [4])])).segments


def files(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("mtp", [{}, {"enable": True}], ids=str)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_saved_models_keep_the_layer(tmp_path: Path, arch: str, mtp: Any) -> None:
    path = model_with_mtp(tmp_path / "model", arch)
    engine = engine_of(path, **mtp)
    engine.step(rows(), simple_loss(19), temperature=1.0)
    engine.save_weights(tmp_path / "saved")
    before, after = files(path), files(tmp_path / "saved")
    assert before.keys() == after.keys()
    layer, again = "model.layers.2.", ("embed_tokens.weight", "shared_head.head.weight")
    further = [name for name in before if name.startswith((layer, "mtp.")) and not name.endswith(again)]
    assert len(further) > 10 and all(torch.equal(before[name], after[name]) for name in further)
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    for copy, main in zip(again, ("model.embed_tokens.weight", "lm_head.weight"), strict=True):
        assert arch.startswith("qwen") or torch.equal(after[layer + copy], after[main])
    report = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)[1]
    assert not report["missing_keys"] and all(layer in name for name in report["unexpected_keys"])
    engine_of(tmp_path / "saved", **TRAINED).load_weights(tmp_path / "saved")


@pytest.mark.parametrize("arch", ["glm4_moe", "deepseek_v3"])
def test_log_probs_are_those_of_transformers(tmp_path: Path, arch: str) -> None:
    """Its layer sees one sequence at a time. It has none for Qwen's, for which vLLM's is the measure
    (test_vllm_drafts.py)."""
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this transformers has no MtpModel")
    path = model_with_mtp(tmp_path / "model", arch)
    segments, engine = rows(), engine_of(path, **TRAINED)
    computed = engine.forward(segments, ("log_probs", FURTHER), temperature=0.7)[FURTHER]
    main = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2.*"]  # where it looks for such layers
    further, at = layers.MtpModel.from_pretrained(main), 0
    for row in segments:
        ids = torch.from_numpy(np.concatenate([row.context_ids, row.response_ids]))[None]
        with torch.no_grad():
            states = main.model(ids).last_hidden_state[:, :-1]
            positions = torch.arange(1, ids.shape[1])[None]
            out = further.forward_layer(0, states, positions, None, input_ids=ids[:, 1:])
            log_probs = main.lm_head(out)[0].log_softmax(-1)
        for t in range(len(row.context_ids), ids.shape[1]):
            expected = float(log_probs[t - 2, ids[0, t]]) if t > 1 else 0.0
            assert computed[at] == pytest.approx(expected, abs=1e-4)
            at += 1


@pytest.mark.parametrize("detach", [True, False])
def test_the_layer_is_trained(tmp_path: Path, detach: bool) -> None:
    """It learns the rows; what is below it moves with its loss only where that is asked for."""
    path, segments = model_with_mtp(tmp_path / "model"), rows()
    plain, engine = engine_of(path), engine_of(path, **TRAINED, detach_encoder=detach, mtp_loss_scaling_factor=1.0)
    plain.step(segments, simple_loss(19), temperature=1.0)
    losses = [engine.step(segments, simple_loss(19), temperature=1.0).metrics["actor/mtp_loss"]]
    same = [
        float(((p - q).abs() > 1e-5).float().mean()) < 0.01
        for p, q in zip(plain.module.model.parameters(), engine.module.model.parameters(), strict=True)
    ]
    assert all(same) == detach
    losses += [engine.step(segments, simple_loss(19), temperature=1.0).metrics["actor/mtp_loss"] for _ in range(8)]
    assert losses[-1] < 0.5 * losses[0]
    sent = {name for name, _ in engine.named_weights()}
    assert {
        name for name in files(path) if ".layers.2." in name and "embed" not in name and "head.head" not in name
    } <= sent


def stepped(path: str, folder: str, size: int) -> tuple[list[float], list[str]]:
    """The loss and the gradient's norm of one rank's step over its share of the rows, and the weights that are
    there."""
    engine, rank = engine_of(Path(path), **TRAINED, detach_encoder=False), process_group.this_rank()
    metrics = engine.step(rows()[rank::size], simple_loss(19), temperature=1.0).metrics
    engine.save_weights(Path(folder))
    return [metrics[f"actor/{name}"] for name in ("mtp_loss", "grad_norm")], sorted(files(Path(folder)))


def test_two_ranks_train_it_as_one(tmp_path: Path) -> None:
    path = str(model_with_mtp(tmp_path / "model"))
    numbers, names = stepped(path, str(tmp_path / "one"), 1)
    for others, same in ranks.run(stepped, 2, path, str(tmp_path / "two"), 2):
        assert others == pytest.approx(numbers, rel=1e-4) and same == names


def test_what_has_no_such_layer_is_refused(tmp_path: Path) -> None:
    bare = tiny_model(tmp_path / "bare", "glm4_moe")
    with pytest.raises(UserError, match=r"lack model\.layers\.2\.enorm\.weight"):
        engine_of(bare, enable=True)
    with pytest.raises(UserError, match="has no layers of multi-token prediction"):
        engine_of(tiny_model(tmp_path, "qwen3"), enable=True)
    with pytest.raises(UserError, match=r"with model\.lora_rank is not here"):
        FSDPEngine(
            str(model_with_mtp(tmp_path / "glm")),
            role_cfg=ROLE,
            model_cfg={"mtp": TRAINED, "lora_rank": 4},
            device="cpu",
        )
