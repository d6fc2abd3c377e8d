"""Models that bring code of their own, and changed configurations: loaded, saved, resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_model
from tests.unit.engine.training.engine_cases import rows_of
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.errors import UserError

FP32 = {"fsdp_config": {"dtype": "float32"}}
CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM


class OwnConfig(Qwen3Config):
    model_type = "own_kind"


class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_model(tmp_path, monkeypatch) -> Path:
    """A directory whose config.json names classes of a file beside it."""
    from transformers import dynamic_module_utils

    cache = tmp_path / "modules"
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(cache))
    monkeypatch.syspath_prepend(str(cache))
    path = tiny_model(tmp_path / "own")
    (path / "modeling_own.py").write_text(CODE)
    file = path / "config.json"
    config = json.loads(file.read_text())
    config |= {
        "model_type": "own_kind",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }
    file.write_text(json.dumps(config))
    return path


def test_a_model_with_its_own_code_is_resumed(own_model, tmp_path) -> None:
    trusting = {"trust_remote_code": True}
    engine = FSDPEngine(own_model, model_cfg=trusting, role_cfg=FP32, device="cpu")
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.add_(0.01)
    engine.save_weights(tmp_path / "saved")
    rows = rows_of([(7, [5, 9]), (1, [4])])
    expected = engine.forward(rows, temperature=1.0)["log_probs"]

    again = FSDPEngine(own_model, model_cfg=trusting, role_cfg=FP32, device="cpu")
    assert again.forward(rows, temperature=1.0)["log_probs"].tolist() != expected.tolist()
    again.load_weights(tmp_path / "saved")
    assert again.forward(rows, temperature=1.0)["log_probs"].tolist() == expected.tolist()


def test_a_saved_model_with_its_own_code_stands_alone(own_model, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    engine = FSDPEngine(own_model, model_cfg={"trust_remote_code": True}, role_cfg=FP32, device="cpu")
    engine.save_weights(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert type(loaded).__name__ == "OwnForCausalLM"
    for name, tensor in engine.module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def _rotations(path: Path, **override) -> torch.Tensor:
    engine = FSDPEngine(path, model_cfg={"override_config": override}, role_cfg=FP32, device="cpu")
    (buffer,) = (b for n, b in engine.module.named_buffers() if n.endswith("rotary_emb.inv_freq"))
    return buffer.double()


def test_rope_theta_is_the_one_that_was_given(tmp_path) -> None:
    path = tiny_model(tmp_path / "m")  # head_dim 16
    powers = torch.arange(0, 16, 2, dtype=torch.float64) / 16
    torch.testing.assert_close(_rotations(path), 10_000.0**-powers)
    torch.testing.assert_close(_rotations(path, rope_theta=500_000), 500_000.0**-powers)
    torch.testing.assert_close(
        _rotations(path, model_config={"rope_theta": 500_000}), 500_000.0**-powers, msg="the nested form"
    )


def test_rope_scaling_keeps_theta_and_lasts(tmp_path) -> None:
    path = tiny_model(tmp_path / "m", rope_theta=20_000.0)
    powers = torch.arange(0, 16, 2, dtype=torch.float64) / 16
    scaling = {"type": "linear", "factor": 4.0}
    torch.testing.assert_close(_rotations(path, rope_scaling=scaling), 20_000.0**-powers / 4)
    engine = FSDPEngine(path, model_cfg={"override_config": {"rope_scaling": scaling}}, role_cfg=FP32, device="cpu")
    engine.save_weights(tmp_path / "saved")
    torch.testing.assert_close(_rotations(tmp_path / "saved"), 20_000.0**-powers / 4)


def test_overrides_that_cannot_take_effect_are_refused(tmp_path) -> None:
    path = tiny_model(tmp_path / "m")
    for name in ("rope_thetaa", "to_dict"):
        with pytest.raises(UserError, match="Qwen3Config has no such field"):
            _rotations(path, **{name: 1.0})
    with pytest.raises(UserError, match=r"rope_scaling: give a mapping"):
        _rotations(path, rope_scaling="yarn")
    with pytest.raises(UserError, match=r"rope_scaling.*factor"):
        _rotations(path, rope_scaling={"rope_type": "linear"})
    mixed = tiny_model(tmp_path / "g", "gemma3_text", sliding_window=8)
    with pytest.raises(UserError, match=r"rope_parameters\.\w+_attention\.rope_theta"):
        _rotations(mixed, rope_theta=5.0)


def test_parts_of_a_configuration_are_checked_as_the_whole(tmp_path) -> None:
    from transformers import Qwen2_5_VLConfig

    from verl.models.overrides import refused

    Qwen2_5_VLConfig().save_pretrained(tmp_path)
    right = {"text_config": {"rms_norm_eps": 1e-5}, "vision_config": {"depth": 2}, "use_cache": False}
    assert refused(tmp_path, right) == {}
    wrong = {"text_config": {"hiden_size": 3, "hidden_size": "x"}, "vision_config": 4, "use_cach": True}
    found = refused(tmp_path, wrong)
    assert {name: why[:30] for name, why in found.items()} == {
        "text_config.hiden_size": "a Qwen2_5_VLTextConfig has no ",
        "text_config.hidden_size": "Validation error for field 'hi",
        "vision_config": "give a mapping of the fields o",
        "use_cach": "a Qwen2_5_VLConfig has no such",
    }


def test_layers_of_two_kinds_are_set_by_kind(tmp_path) -> None:
    from verl.models.pretrained import load_config

    path = tiny_model(tmp_path / "g", "gemma3_text", sliding_window=8)
    plain = load_config(path).rope_parameters
    override = {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}
    changed = load_config(path, {"override_config": override}).rope_parameters
    assert changed["full_attention"]["rope_theta"] == 5.0
    assert changed["sliding_attention"] == plain["sliding_attention"]


def test_a_run_with_overrides_resumes_with_them(tmp_path) -> None:
    path = tiny_model(tmp_path / "m")
    model = {"override_config": {"rope_theta": 77.0}}
    first = FSDPEngine(path, model_cfg=model, role_cfg=FP32, device="cpu")
    first.save_weights(tmp_path / "saved")
    second = FSDPEngine(path, model_cfg=model, role_cfg=FP32, device="cpu")
    second.load_weights(tmp_path / "saved")
    rows = rows_of([(7, [5, 9]), (1, [4])])
    assert (
        first.forward(rows, temperature=1.0)["log_probs"].tolist()
        == second.forward(rows, temperature=1.0)["log_probs"].tolist()
    )
