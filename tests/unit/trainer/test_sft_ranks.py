"""Supervised training on two ranks: the same run as on one, its checkpoints go on at any number of ranks."""

from __future__ import annotations

import json
import os
import resource
import shutil
from pathlib import Path

import pytest

from tests import ranks
from tests.chaos.fork_server import ForkServer
from tests.tiny import tiny_model
from tests.unit.trainer.test_sft_trainer import arguments, data, model, records  # noqa: F401
from verl.trainer.sft_trainer import main

FOUR = ("trainer.total_training_steps=4", "trainer.test_freq=2", "trainer.save_freq=2")


def weights(run: Path, step: int) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in sorted((run / f"global_step_{step}/actor").glob("*.safetensors"))}


def close(ours: Path, theirs: Path) -> None:
    a, b = records(ours), records(theirs)
    assert len(a) == len(b)
    for mine, other in zip(a, b, strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-7)


def test_two_ranks_train_like_one_and_resume_at_any_number(model: Path, data: Path, tmp_path: Path) -> None:  # noqa: F811
    one, two, mixed = (tmp_path / name for name in ("one", "two", "mixed"))
    assert main(arguments(model, data, one, *FOUR)) == 0
    assert ranks.run(main, 2, arguments(model, data, two, *FOUR), join=False) == [0, 0]
    close(two, one)
    assert len(weights(two, 4)) == 2 and len(weights(one, 4)) == 1

    # Killed after step 2 and started again: on as many ranks bit for bit, on another number to rounding.
    again = tmp_path / "again"
    for copy in (again, mixed):
        shutil.copytree(two, copy)
        shutil.rmtree(copy / "global_step_4")
    assert ranks.run(main, 2, arguments(model, data, again, *FOUR), join=False) == [0, 0]
    assert weights(again, 4) == weights(two, 4) and records(again) == records(two)
    assert main(arguments(model, data, mixed, *FOUR)) == 0
    close(mixed, one)


def test_a_split_sequence_trains_the_same(model: Path, data: Path, tmp_path: Path) -> None:  # noqa: F811
    one, two = tmp_path / "one", tmp_path / "two"
    short = ("trainer.total_training_steps=2", "trainer.test_freq=2")
    assert main(arguments(model, data, one, *short)) == 0
    more = ("engine.ulysses_sequence_parallel_size=2",)
    os.environ["WORLD_SIZE"] = "2"
    try:
        assert ranks.run(main, 2, arguments(model, data, two, *short, *more), join=False) == [0, 0]
    finally:
        del os.environ["WORLD_SIZE"]
    close(two, one)


def test_a_mistake_ends_all_ranks_with_one_message(data: Path, tmp_path: Path) -> None:  # noqa: F811
    small = tiny_model(tmp_path / "m", num_hidden_layers=1)
    argv = arguments(small, data, tmp_path / "run", "data.train_batch_size=15")
    assert ranks.run(main, 2, argv, join=False) == [2, 2]
    wrong = ("engine.fsdp_size=2", "engine.mixed_precision.reduce_dtype=int8")
    assert ranks.run(main, 2, arguments(small, data, tmp_path / "run", *wrong), join=False) == [2, 2]


def test_started_by_torchrun(fork_server: ForkServer, model: Path, data: Path, tmp_path: Path) -> None:  # noqa: F811
    run, python = tmp_path / "run", tmp_path / "python3"
    fork_server.make_python(python)
    words = ["--standalone", "--nproc_per_node=2", "--no-python", str(python), "-m", "verl.trainer.sft_trainer"]
    words += arguments(model, data, run, *FOUR, "trainer.logger=[console]")
    done = fork_server.run(words, module="torch.distributed.run", timeout=240)
    assert done.status == 0, done.stderr[-3000:]
    assert len(records(run)) == 5 and (run / "global_step_4/actor/config.json").is_file()
    assert done.stdout.count("Total training steps: 4") == 1


def test_torchrun_decides_how_many_processes_train(
    model,  # noqa: F811
    data,  # noqa: F811
    tmp_path,
    monkeypatch,
    capsys,
) -> None:
    argv = arguments(model, data, tmp_path / "run", "trainer.n_gpus_per_node=4", "--check")
    assert main(argv) == 0
    assert "here 1; torchrun --nnodes=1 --nproc_per_node=4" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(argv) == 0
    assert "torchrun" not in capsys.readouterr().err
    assert main([*argv, "engine.ulysses_sequence_parallel_size=3"]) == 2
    assert "does not divide the 4 ranks" in capsys.readouterr().err


def on_a_full_disk(words: list[str]) -> int:
    """A run that cannot write a file of more than 20 kB; its model has some of 50."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return main(words)


def test_a_full_disk_fails_the_save_and_no_rank_leaves(model: Path, data: Path, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "out"
    assert ranks.run(on_a_full_disk, 2, arguments(model, data, out, *FOUR), join=False) == [4, 0]
    kinds = [json.loads(line)["event"] for line in (out / "events.jsonl").read_text().splitlines()]
    assert kinds.count("checkpoint_failed") == 2 and "checkpoint_saved" not in kinds
    assert records(out)[-1]["step"] == 4 and not list(out.glob("global_step_*"))
