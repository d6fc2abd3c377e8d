"""Prompts with images in vLLM: what it samples is what the trainer computes, after transfers and from a checkpoint's
files.

vLLM reads such models with torchvision, which on a machine without a GPU wants its operators declared (docs/vllm.md).
`make test` keeps it in a folder beside the environment, so that everything else is tested without it: where that is so,
a process that has the folder on its path runs this file. There vLLM starts its processes as it does for a user.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.integration import test_vllm_drafts as drafts
from tests.integration import test_vllm_weights as weights
from tests.invariant import test_vision as vision
from tests.runs import environment
from tests.sampler_cases import assert_agreement
from tests.tiny import HAS_KIMI_VL, tiny_vision_model
from tests.vllm_cases import allow_float32_linear_attention, require_vllm, vllm_engine
from verl.engine.training.fsdp.engine import FSDPEngine

require_vllm()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HERE = importlib.util.find_spec("torchvision") is not None
BESIDE = Path(sys.prefix) / "torchvision"
VIDEOS = Path(__file__).parents[1] / "unit" / "data" / "test_media.py"


@pytest.mark.skipif(HERE or not BESIDE.is_dir(), reason=f"no torchvision in {BESIDE}, or it is installed")
@pytest.mark.parametrize(
    "words",
    [
        (__file__, "-k", "qwen2_5_vl and syncs"),
        pytest.param((__file__, str(VIDEOS), "-k", "agree or video"), marks=pytest.mark.long),
    ],
    ids=["one", "all"],
)
def test_with_torchvision_on_the_path(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", *words]
    path = environment(PYTHONPATH=f"{BESIDE}:{Path(__file__).parents[2]}")
    done = subprocess.run(command, env=path, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.skipif(not HERE, reason="vLLM reads models that see images with torchvision")
@pytest.mark.parametrize("arch", ["qwen2_5_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe", *vision.LINEAR, *vision.KIMI])
def test_sampler_and_trainer_agree_from_a_checkpoint_and_after_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    if arch in vision.LINEAR:
        allow_float32_linear_attention(monkeypatch)
    path = tiny_vision_model(tmp_path / "model", arch, head=32)
    if arch == "kimi_vl":  # published ones name code of their own, which nothing runs
        for name, kind in (("config", "AutoConfig"), ("preprocessor_config", "AutoImageProcessor")):
            file = path / f"{name}.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": {kind: f"{name}_kimi.Own"}}))
    # What stands in for linear attention is in the processes that the tests fork.
    limits = {"forked": arch in vision.LINEAR, "max_model_len": 320, "skip_tokenizer_init": True}
    assert_agreement(path, lambda saved: vllm_engine(saved, **limits))


@pytest.mark.skipif(not HERE, reason="vLLM reads models that see images with torchvision")
@pytest.mark.parametrize("arch", [f"{arch}_text" for arch in vision.LINEAR])
def test_sampler_and_trainer_agree_on_the_text_models_of_qwen3_5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    weights.test_sampler_and_trainer_agree(tmp_path, monkeypatch, arch, tied=False)


@pytest.mark.skipif(not HERE, reason="vLLM reads models that see images with torchvision")
def test_sampler_and_trainer_agree_with_drafts_of_qwen3_5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts.test_drafts_change_no_log_prob(tmp_path, monkeypatch, "qwen3_5_text")


@pytest.mark.skipif(not HERE, reason="vLLM reads models that see images with torchvision")
@pytest.mark.parametrize("arch", ["qwen2_5_vl", "qwen3_vl", "qwen2_vl"])
def test_sampler_and_trainer_agree_on_a_video(tmp_path: Path, arch: str) -> None:
    """Its rows of time are six positions apart, more than its height: what follows begins after the last."""
    path = tiny_vision_model(tmp_path / "model", arch, head=32)
    prompts = [vision.prompt_with_video(arch, 1.5)[1]]
    sampler = vllm_engine(path, max_model_len=320, skip_tokenizer_init=True, load_format="auto")
    try:
        found = vision.sample(sampler, prompts)
    finally:
        sampler.close()
    actor = FSDPEngine(path, role_cfg=vision.trained(), device="cpu")
    rows = vision.rows_of(prompts, found)
    ours = actor.forward(vision.segments(rows), temperature=1.0)["log_probs"]
    assert np.abs(ours - vision.sampled(found)).max() <= 1e-4


@pytest.mark.skipif(not HERE or not HAS_KIMI_VL, reason="vLLM reads models that see images with torchvision")
def test_the_tower_of_kimi_vl_computes_as_vllms(tmp_path: Path) -> None:
    """From the same file, whose names vLLM's module has: the published ones."""
    import torch
    from safetensors.torch import load_file
    from vllm import distributed
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.models.moonvit import MoonVitPretrainedModel
    from vllm.transformers_utils.configs.moonvit import MoonViTConfig

    from verl.models.pretrained import load_model

    path = tiny_vision_model(tmp_path / "model", "kimi_vl")
    ours = load_model(path)
    settings = ours.config.vision_config.to_dict()
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        distributed.init_distributed_environment(1, 0, f"file://{tmp_path / 'meeting'}", 0, backend="gloo")
        distributed.initialize_model_parallel(1)
        try:
            others = ("model_type", "rope_parameters", "dtype")
            tower = MoonVitPretrainedModel(MoonViTConfig(**{k: v for k, v in settings.items() if k not in others}))
            stored = load_file(path / "model.safetensors")
            prefix = "vision_tower."
            tower.load_state_dict({k.removeprefix(prefix): v for k, v in stored.items() if k.startswith(prefix)})
            for module in tower.modules():
                if (method := getattr(module, "quant_method", None)) is not None:
                    method.process_weights_after_loading(module)
            grids = torch.tensor([[1, 4, 8], [1, 6, 6], [1, 2, 10]])
            pixels = torch.randn(int(grids.prod(-1).sum()), 3, 4, 4, generator=torch.Generator().manual_seed(0))
            theirs = torch.cat(tower(pixels, grids[:, 1:]))
            mine = ours.model.vision_tower(pixels, grid_thw=grids).pooler_output
        finally:
            distributed.cleanup_dist_env_and_memory()
    assert (mine - theirs).abs().max() <= 1e-4 < 1 < theirs.abs().max()
