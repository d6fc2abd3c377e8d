"""vLLM in a sampler host of its own, fed by training ranks through shared memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests import vllm_processes
from tests.chaos import ray_plans
from tests.chaos.ray_runs import events, log_of, nothing_lost, started, steps_logged, until
from tests.runs import TinyRun, main_ppo, records
from tests.vllm_cases import require_vllm, vllm_model

require_vllm()
pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

ROLLOUT = "actor_rollout_ref.rollout"


def test_two_steps_over_ray(tmp_path: Path) -> None:
    """A Ray of the run's own: two ranks, and one vLLM over two devices of the node, in half precision that is made
    where the weights are sent from. Each part is in `make test`: vLLM on a cluster in test_ray_kill.py, two devices in
    test_vllm_weights.py, a Ray of one's own in test_ray_ports.py, the data type in test_weight_sync_buckets.py. Those
    sent are those that arrive; the first step compares the log-probs of both."""
    run, out = TinyRun(tmp_path), tmp_path / "out"
    run.model = vllm_model(tmp_path / "heads", "qwen2", tied=True)
    words = (
        "trainer.n_gpus_per_node=2",
        "+ray_kwargs.ray_init.address=local",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        f"{ROLLOUT}.dtype=bfloat16",
        "trainer.total_training_steps=2",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        "trainer.verify_weight_sync=True",
    )
    done = main_ppo(run.overrides(out, *words), timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = records(out)
    assert sorted(found) == [1, 2]
    assert found[2]["actor/grad_norm"] > 0
    assert found[2]["training/rollout_logprob_abs_diff/mean"] < 0.1


def over_two_nodes(folder: Path) -> list[str]:
    """Tensor parallel 2 on nodes of one device each."""
    path = vllm_model(folder / "heads", "qwen2", tied=True)
    words = [f"actor_rollout_ref.model.path={path}", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=2"]
    return [*words, "trainer.save_freq=-1", "trainer.verify_weight_sync=True"]


def planned(plug: dict[str, str]) -> dict[str, str]:
    """Environment of a run with this plug-in whose vLLM has forked processes."""
    forked = vllm_processes.variables()
    plugins = ",".join(env["VERL_USE_EXTERNAL_MODULES"] for env in (forked, plug))
    return forked | plug | {"VERL_USE_EXTERNAL_MODULES": plugins}


def test_one_engine_over_two_nodes(tmp_path: Path, fork_server: Any, tiny: TinyRun, ray_address: str) -> None:
    out, words = tmp_path / "out", over_two_nodes(tmp_path)
    with started(fork_server, tiny, ray_address, out, *words, **vllm_processes.variables()) as run:
        assert run.wait(300) == 0, log_of(out)[-4000:]
    assert "1 sampler" in events(out, "plan")[0]["device"]
    nothing_lost(out, [1, 2])


def test_one_of_its_nodes_cannot_start(tmp_path: Path, fork_server: Any, tiny: TinyRun, ray_address: str) -> None:
    """vLLM's part on the first node would wait for the other one."""
    out = tmp_path / "out"
    environment = planned(ray_plans.plan(tmp_path, "failing_part", ray_plans.FAILING_PART))
    with started(fork_server, tiny, ray_address, out, *over_two_nodes(tmp_path), **environment) as run:
        assert run.wait(120) == 1, log_of(out)[-4000:]
    assert re.search(r"cannot start on its node 192\.0\.2\.\d: RuntimeError: no memory for this part", log_of(out))
    assert "in starting the samplers" in log_of(out)


def test_one_of_its_nodes_fails(tmp_path: Path, fork_server: Any, tiny: TinyRun, ray_address: str) -> None:
    """Both nodes sample alone, and get the weights by relay."""
    out, mark = tmp_path / "out", tmp_path / "mark"
    words = [*over_two_nodes(tmp_path), "trainer.nnodes=1", f"{ROLLOUT}.nnodes=2", "trainer.total_training_steps=6"]
    environment = planned(ray_plans.plan(tmp_path, "dying_part", ray_plans.DYING_PART, mark=mark))
    with started(fork_server, tiny, ray_address, out, *words, **environment) as run:
        until(lambda: steps_logged(out) >= 1, run, out)
        mark.touch()
        assert run.wait(300) == 0, log_of(out)[-4000:]
    assert not mark.exists() and len(events(out, "sampler_died")) == len(events(out, "sampler_restarted")) == 1
    nothing_lost(out, range(1, 7))
