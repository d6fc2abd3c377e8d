"""Prompts with images in vLLM: what it samples is what the trainer computes, after transfers and from a checkpoint's
files.

vLLM reads such models with torchvision, which on a machine without a GPU wants its operators declared (docs/vllm.md).
`make test` keeps it in a folder beside the environment, so that everything else is tested without it: where that is so,
a process that has the folder on its path runs this file.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.invariant.test_vision import make_prompts, marks_of, rows_of, sample, sampled, segments, trained
from tests.runs import environment
from tests.tiny import tiny_vision_model
from tests.unit.engine.training.engine_cases import simple_loss
from tests.vllm_cases import require_vllm, vllm_engine
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.trajectory import Prompt
from verl.weight_sync.sender import StreamedSync

require_vllm()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HERE = importlib.util.find_spec("torchvision") is not None
BESIDE = Path(sys.prefix) / "torchvision"
VIDEOS = Path(__file__).parents[1] / "unit" / "data" / "test_media.py"


@pytest.mark.skipif(HERE or not BESIDE.is_dir(), reason=f"no torchvision in {BESIDE}, or it is installed")
@pytest.mark.parametrize(
    "words",
    [
        (__file__, "-k", "qwen2_5_vl"),
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
@pytest.mark.parametrize("arch", ["qwen2_5_vl", "qwen3_vl_moe"])
def test_sampler_and_trainer_agree_from_a_checkpoint_and_after_syncs(tmp_path: Path, arch: str) -> None:
    """One image, none, several, and one of 64 tokens; first as vLLM loads what the trainer saved."""
    path, saved = tiny_vision_model(tmp_path / "model", arch, head=32), tmp_path / "saved"
    actor, prompts = FSDPEngine(path, role_cfg=trained(), device="cpu"), make_prompts(path)
    actor.save_weights(saved)
    for file in path.glob("*.json*"):
        if not (saved / file.name).exists():
            (saved / file.name).write_bytes(file.read_bytes())
    sampler = vllm_engine(saved, max_model_len=320, skip_tokenizer_init=True)
    try:
        for version in range(3):
            if version:
                assert StreamedSync(actor, sampler).push(version, verify=True).verified
            found = sample(sampler, prompts)
            rows = rows_of(prompts, found)
            ours = actor.forward(segments(rows), temperature=1.0)["log_probs"]
            assert np.abs(ours - sampled(found)).max() <= 1e-4
            assert not set(marks_of(path)) & {int(t) for row in rows for t in row.response_ids}
            loss = simple_loss(sum(row.length for row in rows))
            assert not actor.step(segments(rows), loss, temperature=1.0).refused
        swapped = Prompt("0:0@0", prompts[0].ids, None, media=prompts[2].media)
        for wrong, why in (
            (swapped, "image tokens for images"),
            (Prompt("0:0@0", prompts[0].ids, None), "holds"),
        ):
            with pytest.raises(ValueError, match=why):
                sample(sampler, [wrong], 1)
    finally:
        sampler.close()
