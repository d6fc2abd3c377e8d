"""Whole runs with LoRA through the command line: records, files, exact resume, going on from an adapter."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.killing import Kill, newest_step, run_and_kill, state_files
from tests.runs import TinyRun, records, weights

pytest.importorskip("peft")

LORA = ["actor_rollout_ref.model.lora_rank=8", "trainer.verify_weight_sync=True"]
KL = ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.01"]
SHORT = ["trainer.total_training_steps=2", "trainer.test_freq=-1"]


def adapter_of(out: Path, step: int) -> Path:
    return out / f"global_step_{step}/actor/lora_adapter"


@pytest.mark.parametrize(
    "arch", [*(pytest.param(one, marks=pytest.mark.long) for one in ("qwen3", "llama")), "qwen3_moe"]
)
def test_two_steps(fork_server: Any, tmp_path: Path, arch: str) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    tiny, out = TinyRun(tmp_path / "tiny", arch), tmp_path / "run"
    done = fork_server.run(tiny.overrides(out, *LORA, *KL, *SHORT))
    assert done.status == 0, done.stderr[-3000:]
    found = records(out)
    for step in (1, 2):
        assert found[step]["training/rollout_logprob_abs_diff/max"] < 1e-4
        assert found[step]["actor/grad_norm"] > 0
    # ppo_mini_batch_size halves the batch: the first step's second update sees an adapter that has moved.
    assert found[2]["actor/kl_loss"] > found[1]["actor/kl_loss"] > 0
    base = AutoModelForCausalLM.from_pretrained(tiny.model, dtype="float32")
    names = {name for name, _ in base.named_parameters()}
    loaded = peft.PeftModel.from_pretrained(base, adapter_of(out, 2)).merge_and_unload()
    actor = dict(AutoModelForCausalLM.from_pretrained(out / "global_step_2/actor", dtype="float32").named_parameters())
    assert actor.keys() == names
    for name, tensor in loaded.named_parameters():
        assert float((tensor - actor[name]).detach().abs().max()) <= 1e-6, name
    assert weights(out, 2) != weights(out, 1)


@pytest.mark.slow
@pytest.mark.long
def test_resume_after_kills_is_exact(tiny: TinyRun, fork_server: Any, tmp_path: Path) -> None:
    more = [*LORA, *KL, "actor_rollout_ref.actor.fsdp_config.dtype=null"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = fork_server.run(tiny.overrides(whole, *more))
    assert done.status == 0, done.stderr[-3000:]
    for number, kill in enumerate((Kill("half written", 2), Kill("update_actor", 1, 0.02), Kill("sealed", 1))):
        before = newest_step(parts)
        run, mark = run_and_kill(fork_server, tiny.overrides(parts, *more), kill, tmp_path / "marks")
        assert run.status == -signal.SIGKILL, (number, mark, run.stderr[-2000:])
        assert newest_step(parts) >= before
    done = fork_server.run(tiny.overrides(parts, *more))
    assert done.status == 0 and "resuming from" in done.stderr, done.stderr[-3000:]
    assert records(parts) == records(whole)
    ours, theirs = state_files(parts, 4), state_files(whole, 4)
    assert ours.keys() == theirs.keys() and [n for n in ours if ours[n] != theirs[n]] == []


def test_the_adapter_alone_is_saved_and_gone_on_with(tiny: TinyRun, fork_server: Any, tmp_path: Path) -> None:
    alone = [*LORA, *SHORT, "actor_rollout_ref.actor.checkpoint.save_lora_only=True"]
    first = tmp_path / "first"
    done = fork_server.run(tiny.overrides(first, *alone))
    assert done.status == 0, done.stderr[-3000:]
    assert weights(first, 2) == {}
    assert {p.name for p in adapter_of(first, 2).iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }

    resumed = fork_server.run(tiny.overrides(first, *alone, "trainer.total_training_steps=3"))
    assert resumed.status == 0 and "resuming from" in resumed.stderr, resumed.stderr[-3000:]
    whole = tmp_path / "whole"
    assert fork_server.run(tiny.overrides(whole, *LORA, *SHORT, "trainer.total_training_steps=3")).status == 0
    assert records(whole)[3] == records(first)[3]
    assert read(adapter_of(first, 3)) == read(adapter_of(whole, 3))

    on = [
        *SHORT,
        *KL,
        f"actor_rollout_ref.model.lora_adapter_path={first}/global_step_2",
        "trainer.test_freq=-1",
    ]
    second = tmp_path / "second"
    done = fork_server.run(tiny.overrides(second, *on, "trainer.total_training_steps=1"))
    assert done.status == 0, done.stderr[-3000:]
    assert records(second)[1]["actor/kl_loss"] > 1e-4, "the reference is the base, which the adapter has left"
    assert json.loads((adapter_of(second, 1) / "adapter_config.json").read_text())["r"] == 8


def read(folder: Path) -> dict[str, bytes]:
    from safetensors.numpy import load_file

    return {n: t.tobytes() for n, t in load_file(folder / "adapter_model.safetensors").items()}


@pytest.mark.long
def test_a_resume_without_lora_or_on_another_base_is_explained(tiny: TinyRun, fork_server: Any, tmp_path: Path) -> None:
    from tests.tiny import tiny_model

    out = tmp_path / "run"
    assert fork_server.run(tiny.overrides(out, *LORA, *SHORT, "trainer.total_training_steps=1")).status == 0
    for more, said in (
        ([], "set actor_rollout_ref.model.lora_rank=8 (sft: model.lora_rank) to go on"),
        (
            [*LORA, f"actor_rollout_ref.model.path={tiny_model(tmp_path / 'other', seed=9)}"],
            "is not the model that",
        ),
        (["actor_rollout_ref.model.lora_rank=4"], "another rank or model"),
    ):
        done = fork_server.run(tiny.overrides(out, *SHORT, *more))
        assert done.status == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr[-2000:]
