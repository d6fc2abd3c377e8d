"""`verl plan`: from a command to a table, what to change, layouts."""

from __future__ import annotations

import json

import pytest
from plan_models import QWEN3_8B, QWEN3_30B

from verl.cli import main as cli
from verl.config import load
from verl.planning import compare, devices, report
from verl.planning.plan import ACTOR, ROLLOUT, advice, plan
from verl.planning.search import search

H100 = devices.named("H100")
ARR = "actor_rollout_ref"


def command(*words: str, n: int = 8) -> list[str]:
    """A run of 8 devices and vLLM."""
    return [
        "data.train_files=x.parquet",
        f"{ARR}.model.path=x",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=128",
        f"{ARR}.rollout.n=8",
        f"{ACTOR}.ppo_mini_batch_size=64",
        "data.max_prompt_length=1024",
        "data.max_response_length=2048",
        f"{ROLLOUT}.name=vllm",
        "trainer.device=cuda",
        f"trainer.n_gpus_per_node={n}",
        *words,
    ]


def test_the_phases_of_a_step():
    whole = plan(load(command(f"{ACTOR}.use_kl_loss=True")), QWEN3_8B, H100)
    phases = ["gen", "old_log_prob", "ref", "update_actor", "update_weights"]
    assert list(whole.memory) == list(whole.seconds) == phases and whole.fits
    assert whole.memory["gen"]["ref weights"] == whole.memory["ref"]["ref weights"]
    single = plan(load(command(f"{ACTOR}.ppo_mini_batch_size=128")), QWEN3_8B, H100)
    assert list(single.memory) == ["gen", "update_actor", "update_weights"]
    adapter = plan(load(command(f"{ACTOR}.use_kl_loss=True", f"{ARR}.model.lora_rank=32")), QWEN3_8B, H100)
    assert "ref" in adapter.seconds and "ref weights" not in adapter.memory["ref"]
    critic = plan(load(command("algorithm.adv_estimator=gae")), QWEN3_8B, H100)
    assert critic.seconds["update_critic"] > 0 and "critic optimizer" in critic.memory["update_actor"]


def test_layouts_of_the_configuration():
    base = plan(load(command()), QWEN3_8B, H100)
    offload = plan(load(command(f"{ACTOR}.fsdp_config.param_offload=True")), QWEN3_8B, H100)
    assert "actor weights" not in offload.memory["gen"] and offload.seconds["offload"] > 0
    assert "actor weights" in offload.memory["update_actor"]
    apart = plan(load(command(f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=8")), QWEN3_8B, H100)
    assert set(apart.memory["gen"]) == {"sampler weights", "cache"}
    awake = plan(load(command(f"{ROLLOUT}.free_cache_engine=False")), QWEN3_8B, H100)
    assert "cache" in awake.memory["update_actor"]
    megatron = [f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=4"]
    split = plan(load(command(*megatron)), QWEN3_8B, H100)
    assert split.memory["update_actor"]["actor weights"] == pytest.approx(2 * 8.19e9 / 4, rel=0.01)
    kept = plan(load(command(*megatron, f"{ARR}.model.enable_gradient_checkpointing=False")), QWEN3_8B, H100)
    assert kept.seconds["update_actor"] < split.seconds["update_actor"]  # layers are computed again by default
    sequence = plan(load(command(f"{ACTOR}.ulysses_sequence_parallel_size=4")), QWEN3_8B, H100)
    assert sequence.seconds["update_actor"] > base.seconds["update_actor"]  # exchanges are not free


def test_mean_lengths():
    config = load(command())
    short = plan(config, QWEN3_8B, H100, prompt=200, response=500)
    assert short.step < plan(config, QWEN3_8B, H100).step / 2
    assert short.memory["update_actor"] == plan(config, QWEN3_8B, H100).memory["update_actor"]


def test_what_to_change():
    config = load(command(f"{ACTOR}.use_kl_loss=True"))
    current = plan(config, QWEN3_30B, H100)
    keys, changed = advice(config, QWEN3_30B, current)
    assert not current.fits and changed.fits
    assert f"{ARR}.ref.fsdp_config.param_offload=True" in keys
    again = plan(load(command(f"{ACTOR}.use_kl_loss=True", *keys)), QWEN3_30B, H100)
    assert again.fits
    lonely = load(command(n=1))
    keys, changed = advice(lonely, QWEN3_30B, plan(lonely, QWEN3_30B, H100))
    assert not changed.fits and "more devices" in report.text(plan(lonely, QWEN3_30B, H100), keys, changed)


def test_search_ranks_what_fits():
    config = load(command())
    found = search(config, QWEN3_8B, H100)
    steps = [candidate.step for _, candidate in found]
    assert found and all(candidate.fits for _, candidate in found) and steps == sorted(steps)
    assert steps[0] <= plan(config, QWEN3_8B, H100).step
    words = command(f"{ACTOR}.strategy=megatron", "trainer.nnodes=2")
    megatron = search(load(words), QWEN3_30B, H100)
    assert megatron
    for base, model, (keys, candidate) in [(command(), QWEN3_8B, found[0]), (words, QWEN3_30B, megatron[0])]:
        again = load([*base, *(f"{key}={value}" for key, value in keys.items())])
        assert plan(again, model, H100).step == pytest.approx(candidate.step)
    assert not search(load(command(n=1)), QWEN3_30B, H100)


def test_the_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    words = command(f"{ARR}.model.path={tmp_path}")
    assert cli.main(["plan", "--device", "H100", *words]) == 0
    out = capsys.readouterr().out
    assert "8.19 B parameters, on 8 × H100" in out and "update_actor" in out and "fits" in out
    assert cli.main(["plan", "--device", "H100", "--json", *words, "trainer.n_gpus_per_node=1"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert not record["fits"] and record["seconds"]["step"] > 0
    assert cli.main(["plan", "--device", "910B", "--search", *words]) == 0
    assert "forecast" in capsys.readouterr().out
    monkeypatch.setattr(devices, "bench_file", lambda: tmp_path / "none.json")
    cli.main(["plan", "--device", "cpu", *words])
    assert "doctor --bench" in capsys.readouterr().out
    assert cli.main(["plan", f"{ARR}.model.path={tmp_path}/absent"]) == 2
    assert "absent" in capsys.readouterr().err
    for wrong, said in {
        f"{ARR}.rollout.n=-1": "out of range",
        "trainer.n_gpus_per_node=0": "out of range",
        f"{ACTOR}.ulysses_sequence_parallel_size=3": "does not divide the 8 ranks",
        "--response=-5": "a mean from 1 to",
        "--response=99999": "a mean from 1 to",
    }.items():
        assert cli.main(["plan", "--device", "H100", *words, wrong]) == 2
        assert said in capsys.readouterr().err


def test_a_device_has_the_memory_that_its_name_says():
    sizes = [devices.named(f"NVIDIA {name}").memory / 2**30 for name in ("A100-SXM4-40GB", "A100-SXM4-80GB")]
    assert sizes == [40, 79.3]


def test_a_run_is_held_against_its_plan(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    config = load(command(f"{ARR}.model.path={tmp_path}"))
    monkeypatch.setattr(compare, "device_of", lambda config: H100)
    assert compare.compared(config, tmp_path) == {}  # no step was logged
    step = {"timing_s/step": 50.0, "timing_s/gen": 20.0, "timing_s/update_actor": 25.0, "timing_s/reward": 5.0}
    step |= {"prompt_length/mean": 300.0, "response_length/mean": 900.0, "perf/max_memory_allocated_gb": 40.0}
    records = [{"step": 0}, step | {"timing_s/gen": 90.0}, step, step]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    pairs = compare.compared(config, tmp_path)
    assert list(pairs) == ["gen", "update_actor", "step", "memory"]
    assert pairs["gen"] == (plan(config, QWEN3_8B, H100, prompt=300, response=900).seconds["gen"], 20.0)
    assert pairs["memory"][1] == 40.0
    assert len(compare.lines(pairs).splitlines()) == 5
