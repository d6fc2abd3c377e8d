"""What bad input gets, through the command line: the right exit status, one clear message, nothing lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.chaos.fork_server import Run
from tests.chaos.killing import responses, sealed_steps
from tests.runs import TinyRun, environment, records, weights

PLUGIN = {"VERL_USE_EXTERNAL_MODULES": "tests.integration.bad_plugin"}
CONFIGURATION, MACHINE, FAILED, UNSAVED = 2, 3, 1, 4


def errors(run: Run) -> list[str]:
    """The messages a run ended with: what starts with "verl: " and is neither progress nor about the data it read."""
    harmless = ("verl: Training Progress", "verl: train: ", "verl: val: ")
    lines = run.stderr.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("verl: ") and not line.startswith(harmless)]
    return ["\n".join(lines[a:b]) for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]


def assert_refused(run: Run, status: int, *said: str) -> str:
    """Assert that the run ended with the status and one message without a traceback that says all of `said`."""
    assert run.status == status, f"{run.status}\n{run.stderr}"
    assert "Traceback" not in run.stderr, run.stderr
    found = errors(run)
    assert len(found) == 1, run.stderr
    for words in said:
        assert words in found[0], f"{words!r} is not in\n{found[0]}"
    return found[0]


def table(tiny: TinyRun, path: Path, *, drop: str = "", rows: int | None = None) -> Path:
    """The training file without a column, or with fewer rows."""
    data = pq.read_table(tiny.train)
    data = data.drop([drop]) if drop else data
    pq.write_table(data.slice(0, rows), path)
    return path


# ---------------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize(
    ("key", "make", "status", "said"),
    [
        ("data.train_files", lambda tiny, to: None, MACHINE, ["no such file"]),
        ("data.train_files", lambda tiny, to: to.write_bytes(b""), CONFIGURATION, ["empty"]),
        ("data.val_files", lambda tiny, to: to.write_bytes(b""), CONFIGURATION, ["empty"]),
        ("data.train_files", lambda tiny, to: table(tiny, to, rows=0), CONFIGURATION, ["no rows"]),
        ("data.val_files", lambda tiny, to: table(tiny, to, rows=0), CONFIGURATION, ["no rows"]),
        ("data.train_files", lambda tiny, to: to.write_text("a,b\n1,2\n"), CONFIGURATION, ["not a parquet file"]),
    ],
    ids=["absent", "empty", "empty val", "no rows", "no rows val", "csv"],
)  # fmt: skip
def test_files_that_cannot_be_read(tiny, fork_server, tmp_path, key, make, status, said) -> None:
    make(tiny, tmp_path / "trian.parquet")
    (tmp_path / "train.parquet").touch()
    run = fork_server.run(tiny.overrides(tmp_path / "out", f"{key}={tmp_path}/trian.parquet"))
    message = assert_refused(run, status, key, f"{tmp_path}/trian.parquet", *said)
    assert status != MACHINE or "train.parquet" in message.replace("trian", ""), "the nearest name"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("column", "key"), [("prompt", "data.prompt_key"), ("data_source", "data.reward_fn_key")])
def test_absent_column(tiny, fork_server, tmp_path, column, key) -> None:
    path = table(tiny, tmp_path / "short.parquet", drop=column)
    run = fork_server.run(tiny.overrides(tmp_path / "out", f"data.train_files={path}"))
    assert_refused(run, CONFIGURATION, str(path), f"no column '{column}'", "ability", f"{key}=")


def test_absent_ground_truth_of_a_built_in_rule(tiny, fork_server, tmp_path) -> None:
    data = pq.read_table(tiny.train).drop(["reward_model", "data_source"])
    path = tmp_path / "none.parquet"
    pq.write_table(data.append_column("data_source", pa.array(["openai/gsm8k"] * len(data))), path)
    words = tiny.overrides(tmp_path / "out", f"data.train_files={path}", f"data.val_files={path}")
    run = fork_server.run([word for word in words if not word.startswith("custom_reward_function")])
    assert run.status == CONFIGURATION and "Traceback" not in run.stderr, run.stderr
    assert "reward_model" in errors(run)[0] or "ground truth" in errors(run)[0], run.stderr


LONG = ["trainer.total_training_steps=1", "trainer.val_before_train=False", "trainer.test_freq=-1"]
TEXT = "".join(f"{i:03d} " for i in range(30))


@pytest.fixture(scope="module")
def long_rows(tiny) -> Path:
    """24 rows, every other one 120 characters of content."""
    rows = pq.read_table(tiny.train).to_pylist()
    for row in rows[1::2]:
        row["prompt"] = [{"role": "user", "content": TEXT}]
    pq.write_table(pa.Table.from_pylist(rows), tiny.root / "long.parquet")
    return tiny.root / "long.parquet"


def test_long_prompts_are_refused_by_default(tiny, fork_server, long_rows, tmp_path) -> None:
    run = fork_server.run(tiny.overrides(tmp_path / "out", f"data.train_files={long_rows}", "data.truncation=error"))
    message = assert_refused(
        run, CONFIGURATION, "12 of 24 rows", f"{long_rows} row 1: 139", "data.max_prompt_length=64"
    )
    for way_out in (
        "data.max_prompt_length=139",
        "data.filter_overlong_prompts=True",
        "data.truncation=left|right|middle",
    ):
        assert way_out in message


# How each of them cuts: test_data_dataset.py.
@pytest.mark.parametrize("mode", ["middle", *(pytest.param(m, marks=pytest.mark.long) for m in ("left", "right"))])
def test_long_prompts_are_cut(tiny, fork_server, long_rows, tmp_path, mode) -> None:
    out = tmp_path / "out"
    words = [f"data.train_files={long_rows}", f"data.truncation={mode}", "data.train_batch_size=24", *LONG]
    run = fork_server.run(tiny.overrides(out, *words, "actor_rollout_ref.rollout.n=2", "trainer.save_freq=-1"))
    assert run.status == 0, run.stderr
    assert f"12 prompts are cut to 64 tokens (data.truncation={mode})" in run.stderr
    assert records(out)[1]["prompt_length/max"] == 64
    cut = [a["input"] for a in responses(out, 1) if "001" in a["input"] or "029" in a["input"]]
    assert cut
    for text in cut:
        assert ("000 " in text) == (mode != "left"), text
        assert ("029 " in text) == (mode != "right"), text
        assert text.endswith("assistant\n") == (mode != "right"), text


def test_long_prompts_are_dropped_with_the_filter(tiny, fork_server, long_rows, tmp_path) -> None:
    out = tmp_path / "out"
    words = [
        f"data.train_files={long_rows}",
        "data.filter_overlong_prompts=True",
        "data.train_batch_size=12",
        *LONG,
    ]
    run = fork_server.run(tiny.overrides(out, *words, "trainer.save_freq=-1"))
    assert run.status == 0 and "dropped 12 prompts (50.0%) longer than 64 tokens" in run.stderr, run.stderr
    run = fork_server.run(tiny.overrides(tmp_path / "b", *words, "data.train_batch_size=13"))
    assert_refused(run, CONFIGURATION, "12 usable rows", "data.train_batch_size=13")


# -------------------------------------------------------------------------------------------------- reward

SIGNATURE = "data_source, solution_str, ground_truth, extra_info=None"


def reward(folder: Path, body: str, signature: str = SIGNATURE) -> str:
    path = folder / "my_reward.py"
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    path.write_text(f"import os, time\n\ndef compute_score({signature}):\n{lines}")
    return f"custom_reward_function.path={path}"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("time.sleep(1000)", "it took more than 1 s"),
        ("return float('nan')", "what it returned is nan; a score must be finite"),
        ("os._exit(3)", "it ended the scoring process (exit code 3)"),
    ],
    ids=["hangs", "nan", "exits"],
)
def test_a_useless_reward_is_refused_before_the_run(tiny, fork_server, tmp_path, body, said) -> None:
    words = tiny.overrides(tmp_path / "out", reward(tmp_path, body), "reward_model.timeout=1")
    message = assert_refused(
        fork_server.run(words), CONFIGURATION, "the reward cannot be used", f"{tmp_path}/my_reward.py", said
    )
    assert f"{tiny.train} row 0" in message


def test_a_reward_that_raises_shows_its_own_traceback(tiny, fork_server, tmp_path) -> None:
    run = fork_server.run(tiny.overrides(tmp_path / "out", reward(tmp_path, "return {}['key']")))
    assert run.status == CONFIGURATION and len(errors(run)) == 1, run.stderr
    assert "it raised KeyError: 'key'" in errors(run)[0] and 'my_reward.py", line 4' in errors(run)[0]
    assert "site-packages" not in run.stderr and "verl/trainer" not in run.stderr, "only the function's own lines"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "def compute_score(answer):\n    return 1.0\n",
            "is called with data_source, solution_str, ground_truth",
        ),
        (
            "def compute_score(data_source, solution_str, ground_truth, extra_info, more):\n    return 1.0\n",
            "give more a default",
        ),
        ("def compute_score(\n", "cannot be read as Python: SyntaxError: "),
        ("def compute_scores(**kwargs):\n    return 1.0\n", "compute_scores"),
        (None, "no such file"),
    ],
    ids=["signature", "more", "syntax", "other name", "no file"],
)
def test_a_reward_that_cannot_be_called(tiny, fork_server, tmp_path, text, said) -> None:
    if text is not None:
        (tmp_path / "r.py").write_text(text)
    run = fork_server.run(tiny.overrides(tmp_path / "out", f"custom_reward_function.path={tmp_path}/r.py"))
    assert_refused(run, CONFIGURATION, "custom_reward_function.", said)


FAILS_ON_LONG = "if ground_truth in {rows} and len(solution_str) > 3:\n    {what}\nreturn float(len(solution_str))"


@pytest.mark.parametrize(
    ("what", "timeouts"),
    [
        pytest.param("raise ValueError(f'odd answer {len(solution_str)}')", 0, id="raises", marks=pytest.mark.long),
        pytest.param("return float('inf')", 0, id="inf", marks=pytest.mark.long),
        pytest.param("time.sleep(1000)", 1, id="hangs"),
    ],
)
def test_failed_scores_below_the_limit_are_counted(tiny, fork_server, tmp_path, what, timeouts) -> None:
    out = tmp_path / "out"
    body = FAILS_ON_LONG.format(rows="('17',)", what=what)
    limits = ["reward_model.max_error_ratio=0.4", "reward_model.timeout=0.5", "trainer.save_freq=-1", *LONG]
    run = fork_server.run(tiny.overrides(out, reward(tmp_path, body), *limits))
    assert run.status == 0, run.stderr
    failed = [a for a in responses(out, 1) if a["gts"] == "17"]
    assert len(failed) == 3, "the first step draws row 17"
    assert all(a["score"] is None and a["score_error"] for a in failed), "a failure is not a zero"
    first = records(out)[1]
    assert first["reward/errors"] == 3 and first["reward/error_ratio"] == pytest.approx(3 / 12)
    assert first["reward/timeouts"] == 3 * timeouts
    assert first["critic/score/min"] > 0, "left out of the statistics"
    told = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert sum("17" in json.dumps(event) and "my_reward" in json.dumps(event) for event in told) >= 3


def test_failed_scores_above_the_limit_stop_the_run(tiny, fork_server, tmp_path) -> None:
    out = tmp_path / "out"
    body = "if len(solution_str) > 3:\n    raise ValueError(f'odd answer {len(solution_str)}')\nreturn 1.0"
    run = fork_server.run(tiny.overrides(out, reward(tmp_path, body), "trainer.val_before_train=False"))
    assert run.status == CONFIGURATION, run.stderr
    message = errors(run)[-1]
    for said in (
        "12 of 12 responses",
        "reward_model.max_error_ratio",
        "The most frequent error (12 times)",
        "ValueError: odd answer",
    ):
        assert said in message, message
    assert "run_end" in (out / "events.jsonl").read_text()


# --------------------------------------------------------------------------------------------------- model


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("name", "damage", "status", "said"),
    [
        ("model.safetensors", Path.unlink, CONFIGURATION,
         ["actor_rollout_ref.model.path=", "no *.safetensors", "config.json"]),
        ("model.safetensors", cut_short, CONFIGURATION, ["model.path=", "model.safetensors (", " bytes)"]),
        ("config.json", Path.unlink, CONFIGURATION, ["actor_rollout_ref.model.path", "config.json does not exist"]),
        ("tokenizer*", Path.unlink, CONFIGURATION, ["no tokenizer", "actor_rollout_ref.model.tokenizer_path"]),
        ("", shutil.rmtree, MACHINE, ["actor_rollout_ref.model.path", "no such directory"]),
    ],
)  # fmt: skip
def test_a_model_directory_that_is_not_whole(tiny, fork_server, tmp_path, name, damage, status, said) -> None:
    model = Path(shutil.copytree(tiny.model, tmp_path / "model"))
    for file in list(model.glob(name)) if name else [model]:
        damage(file)
    run = fork_server.run(tiny.overrides(tmp_path / "out", f"actor_rollout_ref.model.path={model}"))
    assert_refused(run, status, str(model), *said)


# ------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["data.train_batchsize=4"], 2, ["no key data.train_batchsize", "nearest: data.train_batch_size"]),
        (["actor_rolout_ref.actor.optim.lr=1"], 2, ["nearest: actor_rollout_ref.actor.optim.lr"]),
        (["data.train_batch_size=100"], 2, ["data.train_batch_size=100", "24 rows", "lower it to 24"]),
        (["data.train_batch_size=0"], 2, ["data.train_batch_size=0", "at least 1"]),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=-1"], 2, ["ppo_mini_batch_size=-1", "at least 1"]),
        (
            [
                "actor_rollout_ref.actor.ppo_micro_batch_size=2",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            ],
            2,
            ["2 and 4", "keep actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"],
        ),
        (["data.max_response_length=5000"], 2, ["5064 tokens", "2048"]),
        (["data.truncation=centre"], 2, ["data.truncation=centre", "left, right, middle"]),
        (["actor_rollout_ref.rollout.temperature=0"], 2, ["temperature"]),
        (
            ["trainer.device=auto", "trainer.n_gpus_per_node=800"],
            3,
            ["trainer.n_gpus_per_node=800", "800 devices asked for", "lower trainer.n_gpus_per_node"],
        ),
        (["actor_rollout_ref.model.external_lib=my_plugins.loss"], 2, ["my_plugins", "PYTHONPATH"]),
    ],
    ids=lambda value: value[0].rpartition(".")[2] if isinstance(value, list) and "=" in value[0] else "",
)
def test_settings_that_cannot_work(tiny, fork_server, tmp_path, words, status, said) -> None:
    assert_refused(fork_server.run(tiny.overrides(tmp_path / "out", *words)), status, *said)
    assert not (tmp_path / "out").exists()


def test_all_problems_come_in_one_report(tiny, fork_server, tmp_path) -> None:
    words = [
        "data.train_batch_size=100",
        "data.max_response_length=5000",
        f"data.val_files={tmp_path}/none.parquet",
    ]
    assert_refused(fork_server.run(tiny.overrides(tmp_path / "out", *words)), 2, "=100", "5064 tokens", "none.parquet")


def test_a_plugin_that_raises_shows_where(tiny, fork_server, tmp_path) -> None:
    (tmp_path / "broken_plugin.py").write_text("import math\n\nmath.nothing()\n")
    words = tiny.overrides(tmp_path / "out", "actor_rollout_ref.model.external_lib=broken_plugin")
    run = fork_server.run(words, PYTHONPATH=str(tmp_path))
    assert run.status == CONFIGURATION and len(errors(run)) == 1, run.stderr
    assert 'broken_plugin.py", line 3' in errors(run)[0] and "AttributeError" in errors(run)[0]


def test_a_run_folder_that_cannot_be_made(tiny, fork_server, tmp_path) -> None:
    (tmp_path / "file").write_text("mine")
    run = fork_server.run(tiny.overrides(tmp_path / "file"))
    assert_refused(run, CONFIGURATION, f"trainer.default_local_dir={tmp_path}/file")
    assert (tmp_path / "file").read_text() == "mine"


# --------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def three_steps(tiny, fork_server, tmp_path_factory) -> Path:
    """A finished run of three steps, each saved; not to be written to."""
    out = tmp_path_factory.mktemp("three") / "out"
    run = fork_server.run(tiny.overrides(out, "trainer.total_training_steps=3"))
    assert run.status == 0, run.stderr
    return out


@pytest.mark.parametrize(
    "damage",
    [("actor/model.safetensors", "state/loop.json"), ("manifest.json", "state/actor_optim/__0_0.distcp")],
    ids=["model", "manifest"],
)
def test_a_checkpoint_cut_in_the_middle_is_passed_over(tiny, fork_server, three_steps, tmp_path, damage) -> None:
    out = Path(shutil.copytree(three_steps, tmp_path / "out"))
    for step, file in zip((2, 3), damage, strict=True):
        cut_short(out / f"global_step_{step}" / file)
    run = fork_server.run(tiny.overrides(out, "trainer.total_training_steps=3"))
    assert run.status == 0 and "Traceback" not in run.stderr, run.stderr
    for step, file in zip((2, 3), damage, strict=True):
        line = next(line for line in errors(run) if "passed over" in line and f"global_step_{step}" in line)
        assert file in line, line
    assert f"resuming from {out}/global_step_1, step 1" in run.stderr
    assert records(out) == records(three_steps) and weights(out, 3) == weights(three_steps, 3)


def test_a_damaged_checkpoint_that_was_named_is_refused(tiny, fork_server, three_steps, tmp_path) -> None:
    out = Path(shutil.copytree(three_steps, tmp_path / "out"))
    (out / "global_step_2/state/rng").rename(out / "global_step_2/state/gone")
    path = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={out}/global_step_2"]
    run = fork_server.run(tiny.overrides(tmp_path / "other", *path))
    assert_refused(run, CONFIGURATION, f"{out}/global_step_2 is damaged", "state/rng/")


@pytest.mark.parametrize("plugin", ["full_disk:2", "small_files:60000"], ids=["once", "always"])
def test_a_full_disk_during_a_save_does_not_end_the_run(tiny, fork_server, three_steps, tmp_path, plugin) -> None:
    out = tmp_path / "out"
    run = fork_server.run(tiny.overrides(out, "trainer.total_training_steps=3"), BAD_PLUGIN=plugin, **PLUGIN)
    once = plugin == "full_disk:2"
    assert run.status == (0 if once else UNSAVED) and "Traceback" not in run.stderr, run.stderr
    assert ("step 3 was NOT written" in errors(run)[-1]) != once, "the last thing that is said"
    assert sealed_steps(out) == ([1, 3] if once else []) and not list(out.glob("*.tmp"))
    said = [line for line in errors(run) if "could not be saved" in line]
    assert len(said) == (1 if once else 3) and "the run goes on with the checkpoints saved before" in said[0]
    assert ("No space left on device" if once else "File too large") in said[0] or not once, said
    assert records(out) == records(three_steps), "a failed save changes nothing"


@pytest.mark.long
def test_a_log_on_a_full_disk_does_not_end_the_run(tiny, tmp_path) -> None:
    out = tmp_path / "out"
    words = tiny.overrides(out, "trainer.total_training_steps=1", "trainer.test_freq=-1")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=full, env=environment(), timeout=120, check=False)
    assert done.returncode == 0 and sorted(records(out)) == [0, 1] and sealed_steps(out) == [1]


# ------------------------------------------------------------------------------- updates, sampler, trackers

NAN = ["actor_rollout_ref.actor.policy_loss.loss_mode=nan_at_times"]


def test_a_non_finite_update_is_refused_and_counted(tiny, fork_server, tmp_path) -> None:
    out = tmp_path / "out"
    run = fork_server.run(tiny.overrides(out, *NAN), BAD_UPDATES="3,8", **PLUGIN)
    assert run.status == 0, run.stderr
    found = records(out)
    assert [found[step]["training/refused_steps"] for step in (1, 2, 3, 4)] == [0, 1, 1, 2]
    assert all(np.isfinite(found[step]["actor/grad_norm"]) for step in (1, 2, 3, 4)), "the other mini-batch counts"
    for step in (2, 4):
        dump = out / f"refused/step_{step}/0"
        listing = json.loads((dump / "batch.json").read_text())
        assert len(listing["rows"]) == 6 and "nan" in listing["reason"]
        assert (dump / "batch.safetensors").stat().st_size > 0
        assert f"step {step}: update refused" in run.stderr and str(dump) in run.stderr
    told = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in told if event["event"] == "refused_update"] == [2, 4]


def test_too_many_refused_updates_stop_the_run(tiny, fork_server, tmp_path) -> None:
    out = tmp_path / "out"
    words = tiny.overrides(out, *NAN, "trainer.max_refused_steps=3", "trainer.total_training_steps=9")
    run = fork_server.run(words, BAD_UPDATES="all", **PLUGIN)
    assert run.status == FAILED and "Traceback" not in run.stderr, run.stderr
    message = errors(run)[-1]
    assert "3 steps in a row" in message and "trainer.max_refused_steps=3" in message and f"{out}/refused" in message
    from safetensors.numpy import load_file

    before = {name: tensor.tobytes() for name, tensor in load_file(tiny.model / "model.safetensors").items()}
    assert sealed_steps(out) == [1, 2, 3]
    assert weights(out, 3) == before, "the optimizer never moved"
    assert records(out)[3]["training/refused_steps"] >= 3, "the step that ended the run is logged"


def test_a_learning_rate_that_blows_the_weights_up_is_explained(tiny, fork_server, tmp_path) -> None:
    optim = "actor_rollout_ref.actor.optim"
    blown = (f"{optim}.lr=1e4", f"+{optim}.override_optimizer_config.weight_decay=1e35")
    run = fork_server.run(tiny.overrides(tmp_path / "out", *blown))
    assert run.status == FAILED and "Traceback" not in run.stderr, run.stderr
    assert "the sampler lost 12 of 12 responses" in errors(run)[-2] and "logits are not finite" in errors(run)[-2]
    assert "learning rate" in errors(run)[-2], run.stderr


def test_lost_responses(tiny, fork_server, tmp_path) -> None:
    out, no_val = tmp_path / "out", ["trainer.val_before_train=False", "trainer.test_freq=-1"]
    run = fork_server.run(tiny.overrides(out, *no_val), BAD_PLUGIN="losing_sampler:12", **PLUGIN)
    assert run.status == 0, run.stderr
    lost = [a for step in (1, 2, 3, 4) for a in responses(out, step) if a["finish_reason"] == "lost"]
    assert len(lost) == 4 and all(a["score"] is None and "dropped request" in a["score_error"] for a in lost)
    told = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert sum(event["event"] == "rollout_failure" for event in told) == 4
    run = fork_server.run(tiny.overrides(tmp_path / "b", *no_val), BAD_PLUGIN="losing_sampler:3", **PLUGIN)
    assert run.status == FAILED and "Traceback" not in run.stderr, run.stderr
    assert "the sampler lost 4 of 12 responses" in errors(run)[-1] and "dropped request" in errors(run)[-1]


def test_a_tracker_without_its_account_or_library_never_stops_a_run(tiny, fork_server, tmp_path) -> None:
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent/wandb.py").write_text("raise ImportError('no wandb here')\n")
    words = [
        "trainer.logger=[console,wandb,tensorboard]",
        "trainer.total_training_steps=1",
        "trainer.save_freq=-1",
    ]
    home = {"HOME": str(tmp_path), "WANDB_API_KEY": None, "WANDB_MODE": None}
    run = fork_server.run(tiny.overrides(tmp_path / "a", *words), PYTHONPATH=str(tmp_path / "absent"), **home)
    assert run.status == 0 and "tracker wandb" in run.stderr and 1 in records(tmp_path / "a"), run.stderr
