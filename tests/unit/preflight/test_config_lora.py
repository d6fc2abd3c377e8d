"""LoRA in the check: what is refused, what is said, what counts as missing on this machine."""

from __future__ import annotations

import json

import pytest

from tests.unit.preflight.cases import ARR, notices, problems, write_model

MODEL = f"{ARR}.model"


@pytest.fixture
def named(tmp_path, base):
    """Arguments of a run whose model's weights have names."""
    modules = [f"model.layers.0.{m}" for m in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")]
    at = {m: [4 * i, 4 * i + 4] for i, m in enumerate(modules)}
    header = json.dumps(
        {f"{m}.weight": {"dtype": "F32", "shape": [1, 1], "data_offsets": place} for m, place in at.items()}
    )
    (write_model(tmp_path / "model") / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header.encode() + bytes(12)
    )
    return base


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "ckpt" / "actor" / "lora_adapter"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    return folder


@pytest.mark.parametrize(
    "given",
    [["q_proj"], ["self_attn.q_proj", "down_proj"], "all-linear", [".*q_proj"], ["layers.0.mlp.down_proj"]],
)
def test_patterns_that_match(named, given):
    assert problems(*named, f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules={given}") == []


def test_patterns_that_match_nothing(named):
    wrong = problems(*named, f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[qproj,fc1]")
    assert len(wrong) == 1 and wrong[0].startswith("configuration")
    assert "nearest: q_proj; its modules are down_proj, k_proj, q_proj" in wrong[0]
    typo = problems(*named, f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[q_proj,k_prj]")
    assert len(typo) == 1 and "k_prj matches no module of the model; nearest: k_proj" in typo[0]
    half = [f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[q_proj,Wqkv_fused]"]
    assert problems(*named, *half) == []
    assert "Wqkv_fused matches no module of the model" in notices(*named, *half)
    nothing = [
        f"{MODEL}.lora_rank=8",
        f"{MODEL}.target_modules=[q_proj]",
        f"{MODEL}.exclude_modules=[q_proj]",
    ]
    assert "leaves nothing of" in problems(*named, *nothing)[0]
    assert problems(*named, *nothing, f"{MODEL}.target_modules=[q_proj,k_proj]") == []
    critic = (
        "algorithm.adv_estimator=gae",
        "critic.model.lora_rank=8",
        "critic.model.target_modules=[qproj]",
    )
    assert "critic.model.target_modules" in problems(*named, *critic)[0]
    assert "LoRA needs modules" in problems(*named, f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[]")[0]


def test_a_model_whose_names_are_not_known_is_not_judged(base):
    assert problems(*base, f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[nothing]") == []


def test_an_adapter_to_go_on_with(named, adapter, tmp_path):
    for place in (adapter, tmp_path / "ckpt"):
        given = f"{MODEL}.lora_adapter_path={place}"
        assert problems(*named, given) == problems(*named, given, f"{MODEL}.lora_rank=4") == []
        assert "rank 4; set 4" in problems(*named, given, f"{MODEL}.lora_rank=8")[0]
        assert "has its own" in notices(*named, given, f"{MODEL}.lora_alpha=2")
    assert "no such directory" in problems(*named, f"{MODEL}.lora_adapter_path={tmp_path / 'gone'}")[0]
    (tmp_path / "empty").mkdir()
    assert "no adapter_config.json" in problems(*named, f"{MODEL}.lora_adapter_path={tmp_path / 'empty'}")[0]
    (adapter / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    assert "not that of a LoRA adapter" in problems(*named, f"{MODEL}.lora_adapter_path={adapter}")[0]
    (adapter / "adapter_config.json").write_text("{")
    assert "cannot be read" in problems(*named, f"{MODEL}.lora_adapter_path={adapter}")[0]


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "score"], ".*proj", ".*proj|score", "all-linear"])
def test_a_critics_adapter_without_the_new_layer_of_values_is_refused(named, adapter, targets):
    """That layer is 0 and would stay so: no gradient would reach the adapter either."""
    found = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(found | {"target_modules": targets}))
    given = ("algorithm.adv_estimator=gae", f"critic.model.lora_adapter_path={adapter}")
    refused = [text for text in problems(*named, *given) if "layer of values" in text]
    assert len(refused) == (targets in (["q_proj"], ".*proj"))


def test_peft_is_missing(named, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "peft" else find(name, *a))
    found = [p for p in problems(*named, f"{MODEL}.lora_rank=8") if "peft" in p]
    assert len(found) == 1 and found[0].startswith("machine") and "pip install 'verl[lora]'" in found[0]
    assert problems(*named) == []


def test_what_vllm_makes_of_it(named, tmp_path):
    vllm = [*named, f"{ARR}.rollout.name=vllm"]
    assert "room aside for rank 16" in notices(*vllm, f"{MODEL}.lora_rank=12")
    assert "room aside" not in notices(*vllm, f"{MODEL}.lora_rank=16")
    assert "room aside" not in notices(*named, f"{MODEL}.lora_rank=12")
    merged = "+actor_rollout_ref.rollout.engine_kwargs.vllm.enable_lora=False"
    assert "room aside" not in notices(*vllm, f"{MODEL}.lora_rank=12", merged)
    assert any("at most 512" in p for p in problems(*vllm, f"{MODEL}.lora_rank=513"))
    write_model(tmp_path / "model", num_experts=4)
    assert "sends the merged weights" in notices(*vllm, f"{MODEL}.lora_rank=12")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (f"{MODEL}.exclude_modules=[x]", "counts with LoRA only"),
        (f"{MODEL}.lora_alpha=32", "counts with LoRA only"),
        (f"{MODEL}.lora_alpha=0", "counts with LoRA only"),
        (f"{MODEL}.target_modules=[q_proj]", "counts with LoRA only"),
        (f"{ARR}.actor.checkpoint.save_lora_only=True", "this run trains all weights"),
    ],
)
def test_keys_of_lora_without_lora(named, given, words):
    assert words in notices(*named, given)
    assert words not in notices(*named, given, f"{MODEL}.lora_rank=8")


def test_the_references_own_settings_have_no_effect(named):
    given = [f"{ARR}.actor.use_kl_loss=True", f"{ARR}.ref.log_prob_micro_batch_size_per_gpu=2"]
    assert "reference is the policy's own base" in notices(*named, *given, f"{MODEL}.lora_rank=8")
    assert "reference is the policy's own base" not in notices(*named, *given)


def test_tensor_parallel_training_is_refused(named):
    key = f"{ARR}.actor.fsdp_config.tensor_parallel_size=2"
    assert any("adapters are not cut so" in p for p in problems(*named, key, f"{MODEL}.lora_rank=8"))
    assert not any("adapters are not cut so" in p for p in problems(*named, key))


def test_megatron_cuts_adapters_but_has_none_of_experts_and_critics(named, tmp_path):
    write_model(tmp_path / "model", num_experts=4)
    words = [*named, *(f"{role}.strategy=megatron" for role in (f"{ARR}.actor", "critic")), f"{MODEL}.lora_rank=8"]
    words += ["critic.model.lora_rank=8", f"{ARR}.actor.megatron.tensor_model_parallel_size=2"]
    found = "\n".join(problems(*words))
    assert "adapters are not cut so" not in found
    assert "experts are not adapted" in found and "trains no adapters of critics" in found
