"""main_generation from the command line: the rows that come out, several devices, bad prompts; and that a checkpoint's
score is the one that validation logged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.runs import TinyRun, check_listed
from verl.data.dataset import PromptDataset
from verl.data.rows import BadRow
from verl.trainer import main_eval, main_generation, main_ppo, sft_trainer


def words(tiny: TinyRun, out: Path, *more: str) -> list[str]:
    return [
        f"model.path={tiny.model}",
        f"data.path={tiny.val}",
        f"data.output_path={out}",
        "data.n_samples=2",
        "rollout.prompt_length=64",
        "rollout.response_length=12",
        "rollout.dtype=float32",
        "trainer.device=cpu",
        *more,
    ]


def responses(path: Path) -> list[Any]:
    return pq.read_table(path)["responses"].to_pylist()


def last_record(folder: Path) -> dict[str, Any]:
    return check_listed(json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]))


def test_a_checkpoints_score_is_what_validation_logged(tiny: TinyRun, tmp_path: Path) -> None:
    """The same file, seed and settings: the same samples, scores and metrics, bit for bit; with a manager of whole
    batches and a penalty on long responses."""
    batch = tmp_path / "batch.py"
    batch.write_text("def compute_score(solution_strs, **rows):\n    return [len(t) / 9 for t in solution_strs]\n")
    buffer = "{enable:True,len:8,log:True}"
    scoring = [
        f"custom_reward_function.path={batch}",
        "reward_model.reward_manager=batch",
        f"reward_model.reward_kwargs={{overlong_buffer_cfg:{buffer},max_resp_len:12}}",
    ]
    val = "actor_rollout_ref.rollout.val_kwargs"
    steps = ["trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.val_before_train=False"]
    sampling = [f"{val}.n=2", f"{val}.do_sample=True", f"{val}.temperature=0.8"]
    assert main_ppo.main(tiny.overrides(tmp_path / "run", *steps, *sampling, *scoring)) == 0
    out = tmp_path / "responses.parquet"
    actor = tmp_path / "run/global_step_2/actor"
    assert main_generation.main(words(tiny, out, f"model.path={actor}", "rollout.temperature=0.8")) == 0
    assert main_eval.main([f"data.path={out}", "reward_model.num_workers=1", *scoring]) == 0
    logged = {k: v for k, v in last_record(tmp_path / "run").items() if k.startswith("val")}
    found = last_record(tmp_path / "responses_evaluation")
    assert "val-core/test/letters/reward/mean@2" in logged and "val/accuracy" in logged
    assert logged["val-aux/test/letters/overlong_reward/mean@2"] < 0
    assert {name: found.get(name) for name in logged} == logged


def test_the_responses_are_learned_by_the_supervised_trainer(tiny: TinyRun, tmp_path: Path) -> None:
    """SSD: one truncated sample for each prompt, then cross-entropy on it, with no reward."""
    out = tmp_path / "responses.parquet"
    sampling = ["data.n_samples=1", "rollout.temperature=0.8", "rollout.top_k=20", "rollout.top_p=0.9"]
    assert main_generation.main(words(tiny, out, *sampling)) == 0
    learned = [
        "data.prompt_key=prompt",
        "data.response_key=responses",
        f"data.train_files={out}",
        "data.val_files=null",
    ]
    run = ["data.train_batch_size=4", "optim.lr=1e-2", "trainer.total_training_steps=2", "trainer.total_epochs=2"]
    folder = [f"model.path={tiny.model}", f"trainer.default_local_dir={tmp_path / 'sft'}", "trainer.device=cpu"]
    assert sft_trainer.main([*learned, *run, *folder, "data.max_length=128"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "sft/metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == 2 and losses[1] < losses[0]


def test_rows_come_out_with_a_column_more(tiny: TinyRun, tmp_path: Path, capfd: Any) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "new/out.parquet"
    rows = [{"prompt": "Say a"}, {"prompt": "x" * 300}, {"prompt": None}, {"prompt": "Say b"}]
    file.write_text("\n".join(json.dumps(row | {"id": i}) for i, row in enumerate(rows)))
    more = ["data.batch_size=1", f"trainer.default_local_dir={tmp_path}/records"]
    assert main_generation.main(words(tiny, out, f"data.path={file}", *more)) == 0
    said = capfd.readouterr()
    assert "dropped 1 prompts" in said.err and "left out 1 × prompt missing" in said.err
    assert "4 rows, 2 of them with responses" in said.out
    table = pq.read_table(out)
    assert table["id"].to_pylist() == [0, 1, 2, 3]
    found = responses(out)
    assert found[1] is None and found[2] is None
    assert all(len(texts) == 2 and all(isinstance(t, str) for t in texts) for texts in (found[0], found[3]))
    record = last_record(tmp_path / "records")
    assert record["generation/num_prompts"] == 2 and record["generation/lost"] == 0
    assert 0 < record["generation/num_tokens"] <= 2 * 2 * 12 and record["generation/tokens_per_s"] > 0
    assert (tmp_path / "records/report.html").exists()
    again = tmp_path / "again.parquet"  # all prompts at once, from the file that has responses already: nothing changes
    assert main_generation.main(words(tiny, again, f"data.path={out}")) == 0
    assert responses(again) == found and pq.read_table(again).column_names == table.column_names


def test_several_files_come_out_as_one(tiny: TinyRun, tmp_path: Path, capfd: Any) -> None:
    first, second, out = tmp_path / "first.jsonl", tmp_path / "second.jsonl", tmp_path / "both.parquet"
    first.write_text('{"prompt": "Say a"}\n{"prompt": "Say b"}')
    second.write_text('{"prompt": "Say c", "note": "x"}')
    assert main_generation.main(words(tiny, out, f"data.path=[{first},{second}]", "rollout.n=1")) == 0
    assert pq.read_table(out)["note"].to_pylist() == [None, None, "x"]
    assert [len(texts) for texts in responses(out)] == [1] * 3
    assert main_generation.main(words(tiny, out, f"data.path=[{first},{tiny.val}]")) == 2
    assert "do not fit into one table" in capfd.readouterr().err  # before anything is sampled
    assert len(responses(out)) == 3


def test_greedy_responses_are_the_same(tiny: TinyRun, tmp_path: Path, capfd: Any) -> None:
    assert main_generation.main(words(tiny, tmp_path / "o.parquet", "rollout.do_sample=False")) == 0
    assert all(a == b for a, b in responses(tmp_path / "o.parquet"))
    assert "greedy: all responses to a prompt will be the same" in capfd.readouterr().err


def test_prompts_are_not_replaced_by_what_is_written(tiny, capfd) -> None:
    assert main_generation.main(words(tiny, tiny.val)) == 2
    assert "is a file of data.path and would be replaced" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("more", "status", "message"),
    [
        (["rollout.prompt_length=8"], 2, "every prompt is longer than rollout.prompt_length=8"),
        (["rollout.nnodes=1"], 2, "no pool of its own"),
        (["data.output_path=s3://bucket/x.parquet"], 2, "is not a local path"),
        (["data.output_path=o.jsonl"], 2, "end in .parquet"),
        (["data.prompt_key=question"], 2, "there is no column 'question'"),
        (["trainer.nnodes=2"], 3, "need a Ray cluster"),
        (["rollout.name=vllm", "model.lora_rank=8"], 2, "give it the merged model"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_message(tiny, tmp_path, more, status, message, capfd) -> None:
    assert main_generation.main(words(tiny, tmp_path / "o.parquet", *more)) == status
    said = capfd.readouterr().err
    assert message in said and "Traceback" not in said, said


def test_lost_responses_are_null_and_too_many_end_the_run(tiny, tmp_path, capfd, monkeypatch) -> None:
    from verl.rollout import loops

    answer = loops.SingleTurnAgent.run
    lose = {("0:2@0", 1)}

    async def run(self: Any, row: Any, session: Any) -> Any:
        if (row["uid"], row["sample_index"]) in lose:
            raise RuntimeError("the tool is broken")
        return await answer(self, row, session)

    monkeypatch.setattr(loops.SingleTurnAgent, "run", run)
    many = tmp_path / "many.parquet"
    rows = [{"prompt": f"Say {i}"} for i in range(6)]
    pq.write_table(pa.Table.from_pylist(rows), many)
    command = words(tiny, tmp_path / "o.parquet", f"data.path={many}", "data.batch_size=2")
    assert main_generation.main(command) == 0
    found = responses(tmp_path / "o.parquet")
    assert found[2][1] is None and isinstance(found[2][0], str)
    assert "1 responses were lost by the sampler" in capfd.readouterr().err
    events = (tmp_path / "o_generation/events.jsonl").read_text()
    assert "rollout_failure" in events and "the tool is broken" in events
    lose |= {("0:0@0", 0), ("0:1@0", 0)}
    (tmp_path / "o.parquet").unlink()
    assert main_generation.main(command) == 1
    assert "responses are lost, nothing is written" in capfd.readouterr().err
    assert not (tmp_path / "o.parquet").exists()


def test_responses_that_have_no_room_are_kept_elsewhere(tiny, tmp_path, capfd, monkeypatch) -> None:
    write, spare = pq.write_table, tmp_path / "spare"

    def full(table: Any, where: Any, *more: Any) -> None:
        if where.parent == tmp_path:
            raise OSError(28, "No space left on device")
        write(table, where, *more)

    monkeypatch.setattr(pq, "write_table", full)
    monkeypatch.setattr("tempfile.tempdir", str(spare))
    spare.mkdir()
    assert main_generation.main(words(tiny, tmp_path / "o.parquet")) == 2
    (kept,) = spare.glob("verl-responses-*/o.parquet")
    assert all(responses(kept)) and f"the responses are in {kept}: move them" in (said := capfd.readouterr().err)
    assert "No space left on device" in said and "Traceback" not in said


def test_a_row_that_fails_when_it_is_drawn_is_null(tiny, tmp_path, capfd, monkeypatch) -> None:
    draw = PromptDataset.prompt

    def prompt(self: PromptDataset, number: int, epoch: int = 0) -> Any:
        if number == 1:
            raise BadRow("unreadable image", "it ends early")
        return draw(self, number, epoch)

    monkeypatch.setattr(PromptDataset, "prompt", prompt)
    assert main_generation.main(words(tiny, tmp_path / "o.parquet")) == 0
    found = responses(tmp_path / "o.parquet")
    assert found[1] is None and all(found[:1] + found[2:])
    assert (
        "it ends early" in (said := capfd.readouterr().err) and "1 rows could not be used when they were drawn" in said
    )


@pytest.mark.slow
def test_two_devices_give_the_same_responses(tiny, fork_server, ray_address, tmp_path) -> None:
    """Under the other public name of the module, with its keys."""
    one, two = tmp_path / "one.parquet", tmp_path / "two.parquet"
    assert main_generation.main(words(tiny, one)) == 0
    module = "verl.trainer.main_generation_server"
    spelled = [
        word.replace("model.", "actor_rollout_ref.model.").replace("data.path", "data.train_files")
        for word in words(tiny, two)
    ]
    spelled = [f"actor_rollout_ref.{word}" if word.startswith("rollout.") else word for word in spelled]
    done = fork_server.run([*spelled, "trainer.nnodes=2"], module=module, RAY_ADDRESS=ray_address)
    assert done.status == 0, done.stderr
    assert "all workers are ready" in done.stderr and responses(two) == responses(one)
