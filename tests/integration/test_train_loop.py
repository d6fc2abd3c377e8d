"""Whole runs of a tiny model through the command line: training, validation, records, checkpoints, same seed."""

import math

import pytest

from tests.runs import main_ppo, records, weights


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "first"
    done = main_ppo(tiny.overrides(out))
    assert done.returncode == 0, done.stderr[-3000:]
    return out, done


def test_a_run_writes_all_it_promises(finished) -> None:
    out, done = finished
    assert "Total training steps: 4" in done.stdout and "Final validation metrics:" in done.stdout
    assert "plan of the run" in done.stderr  # the peak at least, beside its prediction
    lines = [line for line in done.stdout.splitlines() if line.startswith("step:")]
    assert [line.split(" - ")[0] for line in lines] == [f"step:{i}" for i in range(5)]
    found = records(out)
    assert sorted(found) == [0, 1, 2, 3, 4]
    last = found[4]
    for name in (
        "actor/pg_loss",
        "actor/grad_norm",
        "actor/entropy",
        "critic/score/mean",
        "training/global_step",
    ):
        assert math.isfinite(last[name]), name
    assert last["critic/score/max"] > last["critic/score/min"]
    assert last["training/rollout_logprob_abs_diff/max"] < 1e-4, "sampler and trainer agree in float32"
    assert any(name.startswith("val-core/test/letters/") for name in last)
    for name in (
        "config.yaml",
        "versions.json",
        "events.jsonl",
        "data_report.jsonl",
        "report.html",
        "trajectories/4.jsonl",
    ):
        assert (out / name).is_file(), name
    assert (out / "latest_checkpointed_iteration.txt").read_text().strip() == "4"


def test_the_actor_loads_with_from_pretrained(finished) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, _ = finished
    actor = out / "global_step_4/actor"
    model = AutoModelForCausalLM.from_pretrained(actor)
    assert AutoTokenizer.from_pretrained(actor).chat_template
    assert sum(p.numel() for p in model.parameters()) > 0
    assert weights(out, 4) != weights(out, 1), "training changed the weights"


def test_same_seed_same_run_whatever_the_reward_processes(fork_server, tiny, finished, tmp_path) -> None:
    out, _ = finished
    again = tmp_path / "again"
    done = fork_server.run(tiny.overrides(again, "reward_model.num_workers=3"))
    assert done.status == 0, done.stderr[-3000:]
    assert records(again) == records(out)
    assert weights(again, 4) == weights(out, 4)
    other = tmp_path / "other"
    fork_server.run(tiny.overrides(other, "trainer.seed=7", "trainer.total_training_steps=1", "trainer.test_freq=-1"))
    assert weights(other, 1) != weights(out, 1), "another seed is another run"


def test_recorded_steps_are_used_instead_of_sampling(fork_server, tiny, tmp_path) -> None:
    words = ["skip.rollout.enable=True", f"skip.rollout.dump_dir={tmp_path}/kept", "trainer.total_training_steps=2"]
    done = fork_server.run(tiny.overrides(tmp_path / "first", *words))
    assert done.status == 0, done.stderr[-3000:]
    assert [path.name for path in sorted((tmp_path / "kept/verl_examples/gsm8k").iterdir())] == [
        "1.parquet",
        "2.parquet",
    ]
    other = "actor_rollout_ref.rollout.top_p=0.2"  # another sampler, whose responses nobody asks for
    for action in ("cache", "repeat"):
        again = tmp_path / action
        done = fork_server.run(tiny.overrides(again, *words, other, f"skip.rollout.action={action}"))
        assert done.status == 0, done.stderr[-3000:]
        assert weights(again, 2) == weights(tmp_path / "first", 2)
        names = ("critic/score/mean", "actor/pg_loss", "response_length/mean")
        assert all(records(again)[2][name] == records(tmp_path / "first")[2][name] for name in names)


def test_val_only_with_shorter_responses(fork_server, tiny, tmp_path) -> None:
    out = tmp_path / "out"
    done = fork_server.run(tiny.overrides(out, "trainer.val_only=True", "actor_rollout_ref.rollout.response_length=5"))
    assert done.status == 0, done.stderr[-3000:]
    assert list(records(out)) == [0] and (out / "report.html").is_file()
    assert records(out)[0]["val-aux/test/letters/length/mean@1"] <= 5


def test_val_only_and_a_run_that_saves_nothing_say_so(fork_server, tiny, finished, tmp_path) -> None:
    none = fork_server.run(tiny.overrides(tmp_path / "none", "trainer.val_only=True", "data.val_files=null"))
    assert none.status == 2 and "nothing to validate on" in none.stderr
    unsaved = fork_server.run(
        tiny.overrides(
            tmp_path / "unsaved",
            "trainer.total_training_steps=1",
            "trainer.save_freq=-1",
            "trainer.test_freq=0",
            "trainer.val_before_train=False",
        )
    )
    assert unsaved.status == 0, unsaved.stderr[-3000:]
    assert "will NOT be saved" in unsaved.stderr and not list((tmp_path / "unsaved").glob("global_step_*"))
    assert sorted(records(tmp_path / "unsaved")) == [1]
    assert "will NOT be saved" not in finished[1].stderr


def test_a_run_goes_on_from_its_copy_elsewhere(fork_server, tiny, finished, tmp_path) -> None:
    """Saved in the background, copied away, the run folder lost: the rest is the uninterrupted run, bit for bit."""
    away = f"trainer.default_hdfs_dir=file://{tmp_path}/away"
    background = "actor_rollout_ref.actor.checkpoint.async_save=True"
    first = fork_server.run(tiny.overrides(tmp_path / "lost", away, background, "trainer.total_training_steps=2"))
    assert first.status == 0, first.stderr[-3000:]
    assert [p.name for p in sorted((tmp_path / "away").glob("global_step_*"))] == [
        "global_step_1",
        "global_step_2",
    ]
    again = fork_server.run(tiny.overrides(tmp_path / "found", away, background))
    assert again.status == 0 and "fetching global_step_2" in again.stderr, again.stderr[-3000:]
    assert weights(tmp_path / "found", 4) == weights(finished[0], 4)
    assert records(tmp_path / "found")[4] == records(finished[0])[4]


def test_weights_that_training_blew_up_do_not_replace_a_checkpoint(fork_server, tiny, tmp_path) -> None:
    out = tmp_path / "out"
    assert fork_server.run(tiny.overrides(out, "trainer.total_training_steps=1")).status == 0
    optim = "actor_rollout_ref.actor.optim"
    blown = (f"{optim}.lr=1e4", f"+{optim}.override_optimizer_config.weight_decay=1e26")
    ended = fork_server.run(tiny.overrides(out, *blown))
    assert ended.status == 1
    assert "the checkpoint of step 2 could not be saved (UserError: the norm of the weight" in ended.stderr
    assert "was NOT written" in ended.stderr and "has blown" in ended.stderr
    assert "the newest checkpoint is global_step_1" in ended.stderr
    assert [p.name for p in out.glob("global_step_*")] == ["global_step_1"]
