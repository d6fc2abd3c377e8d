"""Two training steps with rollout.name=vllm; and what is said when they cannot be."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import vllm_processes
from tests.chaos.fork_server import until
from tests.integration.test_agent_runs import WORDS as DIALOGUE
from tests.runs import TinyRun, records
from tests.tiny import tiny_tokenizer
from tests.unit.rollout.test_session import _QWEN
from tests.vllm_cases import require_vllm, vllm_model

require_vllm()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    tiny = TinyRun(tmp_path)
    tiny.model = vllm_model(tmp_path / "heads", "qwen2", tied=True)
    return tiny


def test_two_steps(run: TinyRun, fork_server, tmp_path: Path) -> None:
    """Every other row is a dialogue with a tool; sampler and trainer agree on every turn."""
    out = tmp_path / "out"
    tiny_tokenizer(template=_QWEN.replace("%THINK%", "")).save_pretrained(run.model)
    rows = pq.read_table(run.train)
    loops = pa.array(["tool_agent", "single_turn_agent"] * (len(rows) // 2))
    pq.write_table(rows.append_column("agent_name", loops), run.train)
    words = (
        *DIALOGUE,
        "trainer.val_before_train=True",
        "actor_rollout_ref.rollout.name=vllm",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
        "trainer.verify_weight_sync=True",
        "trainer.logprob_diff_limit=1e-4",
        "actor_rollout_ref.rollout.top_p=0.9",  # the trainer finds which tokens are left
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4",
        'actor_rollout_ref.rollout.stop=["zq"]',
    )
    argv = run.overrides(out, *words)
    done = fork_server.run(argv, timeout=400, teardown=True, **vllm_processes.variables())
    assert done.status == 0, done.stderr[-4000:]
    assert "Exception ignored" not in done.stderr, "vLLM is let go of before the interpreter ends"
    found = records(out)
    assert sorted(found) == [0, 1, 2]
    for step in (1, 2):
        assert found[step]["training/rollout_logprob_abs_diff/max"] < 1e-4
        assert found[step]["actor/grad_norm"] > 0
        assert found[step]["agent/status/max_turns"] > 0 and found[step]["num_turns/max"] == 6
        assert found[step]["agent/prefix_reuse_ratio"] < 2, "vLLM finds whole blocks of the turns before"
    assert any(name.startswith("val-core/") for name in found[2])
    assert (out / "global_step_2/actor/model.safetensors").is_file()


@pytest.mark.long
def test_a_driver_killed_while_vllm_starts_leaves_none_of_its_processes(
    run: TinyRun, fork_server, tmp_path: Path
) -> None:
    def of_vllm() -> list[psutil.Process]:
        family, found = psutil.Process(started.pid).children(recursive=True), []
        for process in family:
            with suppress(psutil.Error):  # it ended meanwhile
                found += [process] if "multiprocessing.spawn" in " ".join(process.cmdline()) else []
        return found

    started = fork_server.start(run.overrides(tmp_path / "out", "actor_rollout_ref.rollout.name=vllm"))
    until(lambda: started.pid)
    found = until(of_vllm, timeout=200)
    started.kill()
    started.wait()
    until(lambda: not any(process.is_running() for process in found), timeout=30)


def test_bad_settings_are_said_before_anything_is_loaded(run: TinyRun, fork_server, tmp_path: Path) -> None:
    words = run.overrides(
        tmp_path / "out",
        "actor_rollout_ref.rollout.name=vllm",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_seq=4",
        "--check",
    )
    done = fork_server.run(words)
    assert done.status == 2
    assert "the installed vLLM has no such argument; nearest: max_num_seqs" in done.stdout + done.stderr
