"""Adapters in the engine of one process: what is trained, what is exported, what is written and read again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import tiny_model
from tests.unit.engine.training.engine_cases import BOTH, reference, rows_of, simple_loss
from tests.unit.engine.training.lora_cases import RANK, disturb, engine, lora, trained
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.errors import UserError

pytest.importorskip("peft")

ROWS = [(7, [5, 9]), (12, [6, 6])]
TOKENS = 26
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"tied": True},
    "qwen2": {},
    "qwen3_moe": {},
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {a: str(tiny_model(root / a, a, scale=4.0, **more)) for a, more in ARCHITECTURES.items()}


def log_probs(one: Any) -> np.ndarray:
    return one.forward(rows_of(ROWS), temperature=1.0)["log_probs"]


def step(one: Any, **more: Any) -> Any:
    result = one.step(rows_of(ROWS), simple_loss(TOKENS), temperature=1.0, **more)
    assert not result.refused
    return result


def copies(one: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in one.module.named_parameters()}


def full(path: str | Path, **options: Any) -> FSDPEngine:
    return FSDPEngine(str(path), role_cfg=trained(), device="cpu", **options)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_only_adapters_are_trained(models: dict[str, str], arch: str) -> None:
    one = engine(models[arch])
    np.testing.assert_array_equal(log_probs(one), log_probs(full(models[arch])))
    disturb(one)
    before = copies(one)
    step(one)
    for name, parameter in one.module.named_parameters():
        if ".lora_" in name:
            assert parameter.requires_grad and parameter.grad is not None
            assert parameter in one._optimizer.state and not torch.equal(parameter, before[name]), name
        else:
            # The last normalisation's gradient tells what became of the loss (`TrainStepResult.scale_derivative`).
            assert (parameter.grad is not None) is parameter.requires_grad is (name == "model.norm.weight")
            assert parameter not in one._optimizer.state and torch.equal(parameter, before[name]), name
    base = dict(full(models[arch]).named_weights())
    assert dict(one.named_weights()).keys() == base.keys()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_adapters_reach_every_linear_layer_and_experts_where_peft_can(models: dict[str, str], arch: str) -> None:
    names = {n.rpartition(".lora_A.")[0] for n in engine(models[arch])._names}
    attention = {f"model.layers.{i}.self_attn.{x}_proj" for i in (0, 1) for x in "qkvo"}
    assert attention <= names and "lm_head" not in names
    rest = {n.removeprefix("model.layers.0.") for n in names - attention if ".0." in n and n}
    expected = {
        "qwen3_moe": {"mlp.experts", "mlp.experts.base_layer", "mlp.gate"},
        "gpt_oss": set(),  # peft knows no conversion for it: attention alone
    }
    assert rest - {""} == expected.get(arch, {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"})


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_files_are_what_was_trained(models: dict[str, str], arch: str, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    one = engine(models[arch])
    disturb(one)
    step(one)
    now = log_probs(one)
    one.save_weights(tmp_path / "actor")
    merged = full(tmp_path / "actor")
    np.testing.assert_allclose(log_probs(merged), now, atol=1e-5)
    for name, tensor in one.named_weights():
        assert torch.equal(tensor, dict(merged.named_weights())[name]), name
    base = AutoModelForCausalLM.from_pretrained(models[arch], dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "actor/lora_adapter").eval()
    with torch.no_grad():
        np.testing.assert_allclose(reference(loaded, rows_of(ROWS))[0].numpy(), now, atol=1e-5)
    said = json.loads((tmp_path / "actor/lora_adapter/adapter_config.json").read_text())
    assert said["r"] == RANK and said["base_model_name_or_path"] == models[arch] and said["inference_mode"]
    assert said["target_modules"] == sorted(said["target_modules"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_is_the_base_whatever_was_learned(models: dict[str, str], dtype: str) -> None:
    role = trained(fsdp={"dtype": dtype})
    one = engine(models["qwen3"], role)
    base = FSDPEngine(models["qwen3"], role_cfg=role, device="cpu")
    tolerance = 1e-6 if dtype == "float32" else 2e-2
    expected = log_probs(base)
    for _ in range(3):
        step(one)
        with one.without_adapter():
            np.testing.assert_allclose(log_probs(one), expected, atol=tolerance)
        assert np.abs(log_probs(one) - expected).max() > 10 * tolerance
    with pytest.raises(RuntimeError, match="no adapter"):
        base.without_adapter()
    assert not base.adapted and list(base.adapter_weights()) == []


def test_batching_does_not_change_the_response(models: dict[str, str]) -> None:
    found = []
    for role in (
        trained(ppo_micro_batch_size_per_gpu=4, use_prefix_grouper=True),
        trained(ppo_micro_batch_size_per_gpu=1, use_prefix_grouper=False),
        trained(ppo_micro_batch_size_per_gpu=None, ppo_max_token_len_per_gpu=24),
    ):
        for checkpointing in (False, True):
            one = engine(models["qwen3"], role, enable_gradient_checkpointing=checkpointing)
            disturb(one)
            result = step(one, outputs=BOTH)
            grads = {n: p.grad.clone() for n, p in one._names.items()}
            found.append((result, grads))
    first, gradients = found[0]
    for result, grads in found[1:]:
        assert result.metrics == pytest.approx(first.metrics, rel=1e-5)
        for name, gradient in gradients.items():
            assert float((grads[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()), name


def test_start_values_depend_on_seed_and_name_alone(models: dict[str, str]) -> None:
    one, other = engine(models["qwen3"]), engine(models["qwen3"], target_modules=["q_proj"])
    a, b = dict(one.adapter_weights()), dict(other.adapter_weights())
    assert len(b) == 4 < len(a) and all(torch.equal(a[name], tensor) for name, tensor in b.items())
    tensor = a["model.layers.0.self_attn.q_proj.lora_A.weight"]
    assert 0.9 / 32**0.5 < float(tensor.abs().max()) <= 1 / 32**0.5 and abs(float(tensor.mean())) < 0.05
    assert all(not t.any() for name, t in a.items() if ".lora_B." in name)
    seeded = FSDPEngine(models["qwen3"], role_cfg=trained(), model_cfg=lora(), device="cpu", seed=1)
    assert not torch.equal(dict(seeded.adapter_weights())["model.layers.0.self_attn.q_proj.lora_A.weight"], tensor)


# -- going on ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alone", [False, True])
def test_a_resume_is_exact(models: dict[str, str], alone: bool, tmp_path: Path) -> None:
    role = trained(checkpoint={"save_lora_only": alone})
    whole, first = engine(models["qwen3_moe"], role), engine(models["qwen3_moe"], role)
    for _ in range(2):
        step(whole)
        step(first)
    first.save_weights(tmp_path / "actor")
    first.save_optimizer(tmp_path / "optim")
    assert (tmp_path / "actor/model.safetensors").exists() is not alone
    second = engine(models["qwen3_moe"], role)
    second.load_weights(tmp_path / "actor")
    second.load_optimizer(tmp_path / "optim")
    step(whole)
    step(second)
    ours, theirs = copies(second), copies(whole)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_checkpoint_of_another_base_or_kind_is_refused(models: dict[str, str], tmp_path: Path) -> None:
    one = engine(models["qwen3"])
    disturb(one)
    one.save_weights(tmp_path / "lora")
    moved = tiny_model(tmp_path / "moved", "qwen3", scale=4.0, seed=5)
    with pytest.raises(UserError, match="is not the model that the checkpoint was trained on"):
        engine(str(moved)).load_weights(tmp_path / "lora")
    with pytest.raises(UserError, match=rf"set actor_rollout_ref.model.lora_rank={RANK} .* to go on, or start anew"):
        full(models["qwen3"]).load_weights(tmp_path / "lora")
    with pytest.raises(UserError, match="another rank or model"):
        engine(models["qwen3"], lora_rank=RANK * 2).load_weights(tmp_path / "lora")
    with pytest.raises(UserError, match=r"down_proj.* in this run it is absent: an adapter of other layers"):
        engine(models["qwen3"], target_modules=["q_proj"]).load_weights(tmp_path / "lora")
    full(models["qwen3"]).save_weights(tmp_path / "full")
    with pytest.raises(UserError, match=r"no adapter_model\.safetensors"):
        one.load_weights(tmp_path / "full")
    file = tmp_path / "lora/lora_adapter/adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(UserError, match="damaged or cut short"):
        one.load_weights(tmp_path / "lora")


def test_an_adapter_of_peft_is_gone_on_with(models: dict[str, str], tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(models["qwen3"], dtype=torch.float32)
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], use_rslora=True, rank_pattern={"down_proj": 2},
        alpha_pattern={"down_proj": 7}, init_lora_weights=False, task_type="CAUSAL_LM", lora_dropout=0.3,
    )  # fmt: skip
    theirs = peft.get_peft_model(base, config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    one = engine(models["qwen3"], lora_rank=0, lora_adapter_path=str(tmp_path / "theirs"))
    with torch.no_grad():
        np.testing.assert_allclose(log_probs(one), reference(theirs, rows_of(ROWS))[0].numpy(), atol=1e-5)
    with one.without_adapter():
        np.testing.assert_allclose(log_probs(one), log_probs(full(models["qwen3"])), atol=1e-6)
    step(one)
    one.save_weights(tmp_path / "actor")
    again = engine(models["qwen3"], lora_rank=3, lora_adapter_path=str(tmp_path))
    np.testing.assert_array_equal(log_probs(again), log_probs(one))
    merged = full(tmp_path / "actor")
    np.testing.assert_allclose(log_probs(merged), log_probs(one), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa"}, "changes the base weights"),
        ({"peft_type": "LOHA"}, "LORA is what can be trained"),
        ({"r": 8}, "set model.lora_rank=8"),
    ],
)
def test_adapters_of_other_kinds_are_refused(models: dict[str, str], tmp_path: Path, change: Any, said: str) -> None:
    engine(models["qwen3"]).save_weights(tmp_path / "actor")
    file = tmp_path / "actor/lora_adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=said):
        engine(models["qwen3"], lora_adapter_path=str(tmp_path / "actor"))


# -- which modules -----------------------------------------------------------------------------------------


def adapted(one: Any) -> set[str]:
    return {n.rpartition(".lora_A.")[0].rpartition(".")[2] for n in one._names if ".lora_A." in n}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, {"q_proj", "v_proj"}),
        ({"target_modules": [r".*layers\.1\..*(up|down)_proj"]}, {"up_proj", "down_proj"}),
        ({"target_modules": "all-linear", "exclude_modules": ["down_proj", "gate_proj"]},
         {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj"}),
        ({"exclude_modules": [r".*self_attn.*"]}, {"gate_proj", "up_proj", "down_proj"}),
    ],
)  # fmt: skip
def test_patterns(models: dict[str, str], given: dict[str, Any], found: set[str]) -> None:
    assert adapted(engine(models["qwen3"], **given)) == found


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"target_modules": ["qproj"]},
            r"model\.target_modules=\[qproj\].*the model's modules are .*up_proj",
        ),
        ({"target_modules": ["nothing.*"]}, "model.target_modules"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens: an? .* cannot have an adapter here"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, "model.target_modules"),
    ],
)
def test_patterns_that_cannot_be(models: dict[str, str], given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        engine(models["qwen3"], **given)


def test_the_output_layer(models: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="shares its weight with the embedding"):
        engine(models["llama"], target_modules=["lm_head", "q_proj"])
    one = engine(models["qwen3"], target_modules=["lm_head"])
    assert one._model.head.layer is None, "the formula would leave the adapter out"
    disturb(one)
    step(one)
    one.save_weights(tmp_path / "actor")
    np.testing.assert_allclose(log_probs(full(tmp_path / "actor")), log_probs(one), atol=1e-5)


def test_without_peft_the_message_says_what_to_install(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"pip install 'verl\[lora\]'"):
        engine(models["qwen3"])


def test_large_models_are_written_in_parts(models: dict[str, str], tmp_path: Path, monkeypatch: Any) -> None:
    from verl.engine.training import weight_files

    monkeypatch.setattr(weight_files.plan_files, "__defaults__", (30_000,))
    one = engine(models["qwen3_moe"])
    disturb(one)
    one.save_weights(tmp_path / "actor")
    assert len(list((tmp_path / "actor").glob("model-*.safetensors"))) > 3
    np.testing.assert_allclose(log_probs(full(tmp_path / "actor")), log_probs(one), atol=1e-5)
    engine(models["qwen3_moe"]).load_weights(tmp_path / "actor")
    shutil.rmtree(tmp_path / "actor")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["qwen2", "qwen3_moe"])
def test_the_single_operation_computes_what_pefts_layer_does(models: dict[str, str], arch: str, dtype: str) -> None:
    role, tolerance = trained(fsdp={"dtype": dtype}), 1e-5 if dtype == "float32" else 4e-2
    ours, theirs = engine(models[arch], role), engine(models[arch], role)
    assert len(ours._model.fused.forwards) > 8
    theirs._model.fused.forwards.clear()
    for one in (ours, theirs):
        disturb(one)
    np.testing.assert_allclose(log_probs(ours), log_probs(theirs), atol=tolerance)
    with ours.without_adapter(), theirs.without_adapter():
        np.testing.assert_allclose(log_probs(ours), log_probs(theirs), atol=tolerance)
    for one in (ours, theirs):
        step(one)
    for name, parameter in theirs._names.items():
        gradient = ours._names[name].grad
        assert float((gradient - parameter.grad).norm()) <= tolerance * float(parameter.grad.norm()), name
