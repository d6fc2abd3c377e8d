"""A run that is killed again and again ends exactly as one that never was."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.chaos.fork_server import SFT, until
from tests.chaos.killing import (
    assert_none_left,
    moments,
    newest_step,
    one_of_each,
    responses,
    run_and_kill,
    sealed_steps,
    state_files,
    step_lines,
)
from tests.runs import records, weights

# What each of the kills may be seen to have hit, by the last mark before it.
PARTS = {
    "start-up": {"start-up"},
    "sampling": {"gen", "reward"},
    "update": {"old_log_prob", "ref", "adv", "update_actor", "update_weights"},
    "middle of a save": {"half written"},
    "end of a save": {"sealed", "published"},
    "deletion": {"retired"},
    "records": {"saved, not logged", "logged"},
}
# Everything that has state: adaptive β, orders of prompts and mini-batches, epochs of updates, a schedule, the
# default precision; checkpoints every other step, so that half of the kills cost work that must be done again.
EVERYTHING = [
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=100",
    "actor_rollout_ref.actor.entropy_coeff=0.01",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.shuffle=True",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
    "actor_rollout_ref.actor.fsdp_config.dtype=null",
    "data.shuffle=True",
    "reward_model.reward_manager=dapo",
    "trainer.save_freq=2",
    "trainer.test_freq=3",
]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "steps"), [(8, 18), pytest.param(20, 32, marks=pytest.mark.long)])
def test_many_kills(tiny, fork_server, tmp_path, count, steps) -> None:
    """Eight that meet every part of a run once; or several of each, at random."""
    everything = [*EVERYTHING, f"trainer.total_training_steps={steps}"]
    whole = tmp_path / "whole"  # in one go
    done = fork_server.run(tiny.overrides(whole, *everything))
    assert done.status == 0, done.stderr
    seed = int(os.environ.get("CHAOS_SEED") or random.randrange(10**6))
    rng = random.Random(seed)
    plan = moments(rng) if count == 20 else one_of_each(rng)
    assert len(plan) == count
    out, hit = tmp_path / "run", []
    for number, kill in enumerate(plan):
        before = newest_step(out)
        workers = 1 + 2 * (number % 2)
        words = tiny.overrides(out, *everything, "trainer.max_ckpt_to_keep=2", f"reward_model.num_workers={workers}")
        run, mark = run_and_kill(fork_server, words, kill, tmp_path / "marks")
        hit.append(mark)
        story = f"CHAOS_SEED={seed}, kill {number}: {kill} hit {mark!r}; so far {hit}\n{run.stderr[-2000:]}"
        assert run.status == -signal.SIGKILL, f"ended by itself with {run.status}; {story}"
        assert newest_step(out) >= before, f"a checkpoint was lost; {story}"
        if before and mark != "start-up":
            assert f"resuming from {out}/global_step_{before}, step {before}\n" in run.stderr, story
    done = fork_server.run(tiny.overrides(out, *everything, "trainer.max_ckpt_to_keep=2"))
    story = f"CHAOS_SEED={seed}, kills hit {hit}"
    assert done.status == 0, f"{story}\n{done.stderr}"
    for part, marks in PARTS.items():
        assert marks & set(hit), f"no kill hit the {part}; {story}"
    assert records(out) == records(whole), story
    assert [line["step"] for line in step_lines(out)] == list(range(steps + 1)), f"each step once; {story}"
    assert sealed_steps(out) == [steps - 2, steps] and not list(out.glob("*.tmp")), story
    for step in (steps - 2, steps):
        mine, theirs = state_files(out, step), state_files(whole, step)
        assert mine.keys() == theirs.keys(), story
        differing = [name for name in mine if mine[name] != theirs[name]]
        assert not differing, f"{differing} of step {step} differ; {story}"
    for step in range(1, steps + 1):
        assert responses(out, step) == responses(whole, step), f"responses of step {step}; {story}"
    assert_none_left("CHAOS_MARKS", str(tmp_path / "marks"))


def resumable(tiny, fork_server, out: Path, *more: str) -> list[str]:
    """Run two steps of four and return the words of the whole run."""
    done = fork_server.run(tiny.overrides(out, "trainer.total_training_steps=2", *more))
    assert done.status == 0, done.stderr
    return tiny.overrides(out, *more)


@pytest.fixture(scope="module")
def half(tiny, fork_server, tmp_path_factory) -> Path:
    """A run folder with steps 1 and 2; nothing may be written to it."""
    out = tmp_path_factory.mktemp("half") / "run"
    resumable(tiny, fork_server, out)
    return out


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("data.train_files={other}", "data.train_files"),
        ("data.seed=77", "data.seed: "),
        ("data.shuffle=False", "data.shuffle: True then, False now"),
        ("data.train_max_samples=20", "usable rows: "),
        ("data.train_batch_size=8", "data.train_batch_size: 4 then, 8 now"),
        ("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.n: 3 then, 4 now"),
    ],
)
def test_other_data_order_is_refused(tiny, fork_server, half, tmp_path, word, said) -> None:
    from tests.runs import write_rows

    other = write_rows(tmp_path / "other.parquet", 24)
    before = sorted(p.name for p in half.rglob("*"))
    done = fork_server.run(tiny.overrides(half, word.format(other=other)))
    assert done.status == 2
    message = [line for line in done.stderr.splitlines() if line.startswith("verl: cannot resume")]
    assert len(message) == 1 and said in message[0], done.stderr
    assert "global_step_2" in message[0] and "trainer.resume_mode=disable" in message[0]
    assert "Traceback" not in done.stderr
    assert sorted(p.name for p in half.rglob("*")) == before, "nothing is lost"


@pytest.mark.slow
def test_resume_modes(tiny, fork_server, half, tmp_path) -> None:
    one_go = tmp_path / "one_go"
    assert fork_server.run(tiny.overrides(one_go)).status == 0
    elsewhere = tmp_path / "elsewhere"
    path = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={half}/global_step_1"]
    done = fork_server.run(tiny.overrides(elsewhere, *path))
    assert done.status == 0 and f"resuming from {half}/global_step_1, step 1" in done.stderr, done.stderr
    assert sorted(records(elsewhere)) == [1, 2, 3, 4] or sorted(records(elsewhere)) == [2, 3, 4]
    for step in (2, 3, 4):
        assert records(elsewhere)[step] == records(one_go)[step]
    assert weights(elsewhere, 4) == weights(one_go, 4)
    again = fork_server.run(tiny.overrides(elsewhere, "trainer.resume_mode=disable", "trainer.total_training_steps=2"))
    assert again.status == 0 and "resuming" not in again.stderr
    assert records(elsewhere) == {k: v for k, v in records(half).items() if k <= 2}
    assert {line["step"] for line in map(dict, step_lines(elsewhere / "superseded"))} >= {2, 3, 4}, "kept aside"
    third = fork_server.run(tiny.overrides(elsewhere, "trainer.total_training_steps=3"))
    assert f"resuming from {elsewhere}/global_step_2" in third.stderr, "newest is what was sealed last"
    missing = fork_server.run(
        tiny.overrides(tmp_path / "m", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/no")
    )
    assert missing.status == 2 and f"trainer.resume_from_path={tmp_path}/no" in missing.stderr
    assert "Traceback" not in missing.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_stop_leaves_a_folder_to_go_on_with(tiny, fork_server, tmp_path, number) -> None:
    out = tmp_path / "run"
    many = tiny.overrides(out, "trainer.total_training_steps=500", "trainer.save_freq=2", "trainer.test_freq=-1")
    run = fork_server.start(many)
    until(lambda: "\nstep:3 " in run.stdout or run.ended)
    run.kill(number)
    assert run.wait(20) == 130, run.stderr
    assert "Run the same command again to go on" in run.stderr and "Traceback" not in run.stderr, run.stderr
    last = sealed_steps(out)[-1]
    assert str(last) in run.stderr.splitlines()[-1], "says from which step"
    for name in ("metrics.jsonl", "events.jsonl"):
        assert (out / name).read_text().endswith("\n")
    done = fork_server.run([*many, f"trainer.total_training_steps={last + 1}"])
    assert done.status == 0 and f"global_step_{last}, step {last}" in done.stderr, done.stderr


@pytest.mark.slow
def test_supervised_training_survives_kills(tiny, fork_server, tmp_path) -> None:
    seed = int(os.environ.get("CHAOS_SEED") or random.randrange(10**6))
    rng = random.Random(seed)

    def words(out: Path) -> list[str]:
        return [
            f"model.path={tiny.model}",
            f"data.train_files={tiny.train}",
            f"data.val_files={tiny.val}",
            "data.prompt_key=data_source",
            "data.response_key=ability",
            "data.train_batch_size=4",
            "data.max_token_len_per_gpu=150",
            "optim.lr=1e-2",
            "optim.lr_warmup_steps=2",
            "optim.lr_scheduler_type=cosine",
            "trainer.device=cpu",
            "trainer.n_gpus_per_node=1",
            "trainer.total_training_steps=24",
            "trainer.save_freq=2",
            "trainer.test_freq=3",
            "trainer.max_ckpt_to_keep=2",
            "trainer.logger=console",
            f"trainer.default_local_dir={out}",
        ]

    whole, out, hit = tmp_path / "whole", tmp_path / "run", []
    done = fork_server.run(words(whole), module=SFT)
    assert done.status == 0, done.stderr
    from tests.chaos.killing import Kill

    plan = [
        Kill("", delay=rng.uniform(0.05, 0.8)),
        Kill("update", rng.randint(1, 2), rng.uniform(0, 0.02)),
        Kill("save_checkpoint", 1, rng.uniform(0, 0.1)),
        Kill("published", 1, slow=True),
        Kill("testing", 1, rng.uniform(0, 0.02)),
        Kill("saved, not logged", 2, slow=True),
    ]
    rng.shuffle(plan)
    for kill in plan:
        run, mark = run_and_kill(fork_server, words(out), kill, tmp_path / "marks", SFT)
        hit.append(mark)
        assert run.status == -signal.SIGKILL, f"CHAOS_SEED={seed} {kill} {hit}\n{run.stderr}"
    done = fork_server.run(words(out), module=SFT)
    story = f"CHAOS_SEED={seed}, kills hit {hit}"
    assert done.status == 0, f"{story}\n{done.stderr}"

    def steady(run: Path) -> dict[int, dict]:
        return {step: {k: v for k, v in r.items() if "time" not in k} for step, r in records(run).items()}

    assert steady(out) == steady(whole), story
    assert sealed_steps(out) == [22, 24], story
    mine, theirs = state_files(out, 24), state_files(whole, 24)
    assert [name for name in theirs if mine.get(name) != theirs[name]] == [], story
