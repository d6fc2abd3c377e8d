"""The supervised trainer: the loss is plain cross-entropy, resume is exact, mistakes are explained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import ranks
from tests.runs import check_listed
from tests.tiny import tiny_model, tiny_vision_model, unseeing
from tests.unit.data.test_media import noise, picture
from verl.data.sft import SFTRow
from verl.trainer.sft_loop import as_trajectory
from verl.trainer.sft_trainer import main

WORDS = ["one", "two", "three", "four", "five", "six", "seven"]
ROWS = [{"question": f"{w} and {v}?", "answer": f"{w} {v}, {v}"} for w in WORDS for v in WORDS[:2]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "m", tied=True, seed=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS))
    return path


def arguments(model: Path, data: Path, run: Path, *more: str) -> list[str]:
    words = f"""
        model.path={model} engine.dtype=float32 optim.lr=1e-2 optim.lr_warmup_steps=2 optim.lr_scheduler_type=cosine
        data.train_files={data} data.val_files={data} data.prompt_key=question data.response_key=answer
        data.train_batch_size=4 data.max_token_len_per_gpu=150 trainer.device=cpu trainer.n_gpus_per_node=1
        trainer.total_training_steps=8 trainer.test_freq=4 trainer.logger=[] trainer.default_local_dir={run}"""
    return [*words.split(), *more]


def records(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without events and without what measures time."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [check_listed(one) for one in lines if "step" in one and "event" not in one]
    return [{k: v for k, v in one.items() if "time" not in k} for one in steps]


def weights(run: Path, step: int) -> bytes:
    return (run / f"global_step_{step}/actor/model.safetensors").read_bytes()


def reference_loss(model: Path, rows: list[dict[str, str]]) -> float:
    """Cross-entropy by transformers, one row at a time, the answer's place found by lengths."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    total, tokens = 0.0, 0
    for row in rows:
        header = f"<|im_start|>user\n{row['question']}<|im_end|>\n<|im_start|>assistant\n"
        start = len(tokenizer(header)["input_ids"])
        ids = torch.tensor(tokenizer(header + row["answer"] + "<|im_end|>\n")["input_ids"])
        labels = ids.clone()
        labels[:start] = -100
        labels[-1] = -100
        count = int((labels != -100).sum())
        with torch.no_grad():
            total += float(network(ids[None], labels=labels[None]).loss) * count
        tokens += count
    return total / tokens


def test_loss_is_cross_entropy_of_the_answers_and_falls(model: Path, data: Path, tmp_path: Path) -> None:
    more = ("data.train_batch_size=14", "trainer.save_freq=8")
    assert main(arguments(model, data, tmp_path / "run", *more)) == 0
    found = records(tmp_path / "run")
    expected = reference_loss(model, ROWS)
    assert found[0]["val/loss"] == pytest.approx(expected, abs=1e-5)
    assert found[1]["train/loss"] == pytest.approx(expected, abs=1e-5)
    assert found[-1]["train/loss"] < 0.7 * expected
    trained = tmp_path / "run/global_step_8/actor"
    assert found[-1]["val/loss"] == pytest.approx(reference_loss(trained, ROWS), abs=1e-5)
    assert found[-1]["train/lr(1e-3)"] == pytest.approx(found[-1]["train/lr"] * 1000)
    assert found[-1]["train/total_tokens(B)"] == pytest.approx(8 * found[1]["train/global_tokens"] / 1e9)
    assert {"train/grad_norm", "train/lr", "train/global_tokens"} <= set(found[1])


def whole_and_resumed(model: Path, data: Path, folder: Path, *words: str) -> Path:
    """A run of 8 steps and one resumed at step 5, asserted to be equal; the folder of the first."""
    whole, parts = folder / "whole", folder / "parts"
    assert main(arguments(model, data, whole, "trainer.save_freq=5", *words)) == 0
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "global_step_8")
    assert main(arguments(model, data, parts, "trainer.save_freq=5", *words)) == 0
    assert records(parts) == records(whole)
    assert weights(parts, 8) == weights(whole, 8) and weights(whole, 5) != weights(whole, 8)
    return whole


def test_resume_equals_the_uninterrupted_run(model: Path, data: Path, tmp_path: Path) -> None:
    whole_and_resumed(model, data, tmp_path)


def test_packing_does_not_change_the_result_and_a_run_that_saves_nothing_says_so(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(model, data, tmp_path / "a")) == 0
    assert "will NOT be saved" in capsys.readouterr().err and not list((tmp_path / "a").glob("global_step_*"))
    one_by_one = ("data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=1")
    assert main(arguments(model, data, tmp_path / "b", *one_by_one)) == 0
    for a, b in zip(records(tmp_path / "a"), records(tmp_path / "b"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_resume_with_other_data_order_is_refused(model, data, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    assert main(arguments(model, data, run, "trainer.save_freq=1", "trainer.total_training_steps=1")) == 0
    assert main(arguments(model, data, run, "data.seed=77")) == 2
    assert "data.seed: 1 then, 77 now" in capsys.readouterr().err


def test_mistakes_end_with_status_2_and_one_message(model, data, tmp_path, capsys) -> None:
    assert main(arguments(model, data, tmp_path / "a", "data.max_length=20")) == 2
    assert "data.truncation=left|right" in capsys.readouterr().err
    assert main(arguments(model, data, tmp_path / "b", "data.train_batch_size=15")) == 2
    assert "data.train_batch_size=15" in capsys.readouterr().err
    assert main(arguments(model, data, tmp_path / "c", "data.responce_key=x")) == 2
    assert "data.response_key" in capsys.readouterr().err
    assert main(arguments(model, tmp_path / "none.jsonl", tmp_path / "d")) in (2, 3)
    assert "none.jsonl" in capsys.readouterr().err


def test_row_as_trajectory() -> None:
    mask = np.array([1, 0, 0, 1, 0, 1, 0], bool)
    one = as_trajectory(SFTRow(np.arange(7), mask), "u")
    assert one.prompt.ids.tolist() == [0, 1, 2] and one.response_ids.tolist() == [3, 4, 5]
    assert one.loss_mask is not None and one.loss_mask.tolist() == [True, False, True]


def test_weights_that_training_blew_up_do_not_replace_a_checkpoint(model, data, tmp_path) -> None:
    words = ["trainer.total_training_steps=6", "trainer.save_freq=1", "trainer.test_freq=-1"]
    first = ["trainer.total_training_steps=1", "trainer.save_freq=1"]
    assert main(arguments(model, data, tmp_path, *first)) == 0
    blown = "+optim.override_optimizer_config.weight_decay=1e26"
    absurd = [*words, "optim.lr=1e4", blown, "optim.lr_warmup_steps=0", "trainer.max_refused_steps=2"]
    assert main(arguments(model, data, tmp_path, *absurd)) == 1, "refused steps in a row end the run"
    assert [p.name for p in tmp_path.glob("global_step_*")] == ["global_step_1"]
    events = (tmp_path / "events.jsonl").read_text()
    assert "the checkpoint of step 2 could not be saved (UserError: the norm of the weight" in events
    assert "2 steps in a row had a non-finite update" in events


def test_lora_trains_the_adapter_and_resumes_exactly(model: Path, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    whole = whole_and_resumed(model, data, tmp_path, "model.lora_rank=4")
    losses = [r["val/loss"] for r in records(whole) if "val/loss" in r]
    assert losses[-1] < losses[0]
    assert (whole / "global_step_8/actor/lora_adapter/adapter_model.safetensors").is_file()
    alone = tmp_path / "alone"
    words = ("model.lora_rank=4", "trainer.save_freq=5", "checkpoint.save_lora_only=True")
    assert main(arguments(model, data, alone, *words)) == 0
    assert records(alone) == records(whole)
    assert not list((alone / "global_step_8/actor").glob("*.safetensors"))


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_row_whose_image_cannot_be_drawn_is_replaced(tmp_path, count) -> None:
    """Said and counted, on two ranks too; more than the ratio end the run."""
    files = tiny_vision_model(tmp_path / "m")
    (tmp_path / "cut.png").write_bytes(noise(cut=900))
    (tmp_path / "a.png").write_bytes(picture())
    rows = [{"question": f"{w} <image>?", "answer": w, "images": ["a.png"]} for w in WORDS]
    rows[2]["images"] = ["cut.png"]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    run, once = tmp_path / "run", ("trainer.total_training_steps=2", "data.max_length=200")
    words = arguments(files, tmp_path / "rows.jsonl", run, *once, "trainer.test_freq=2", "data.train_batch_size=3")
    words = [*words, "data.max_bad_row_ratio=0.2"]
    assert (ranks.run(main, 2, words, join=False) == [0, 0]) if count > 1 else (main(words) == 0)
    assert sum(line.get("training/skipped_rows", 0) for line in records(run)) == 1
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (told,) = (event for event in events if event["event"] == "row_skipped")
    assert "rows.jsonl row 2: " in told["detail"] and told["problem"] == "undecodable image"
    assert sum(event["event"] == "images_seen" for event in events) == 1
    if count == 1:
        assert main([*words, "data.max_bad_row_ratio=0.1", "trainer.resume_mode=disable"]) == 2
        unseeing(files)
        assert main([*words, "trainer.resume_mode=disable"]) == 1
        assert "does not see them" in (run / "events.jsonl").read_text()
