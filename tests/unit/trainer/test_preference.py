"""Training on pairs: losses against transformers row by row, exact resume, ranks, a reward model that a run loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

from tests import ranks, runs
from tests.runs import TinyRun
from tests.tiny import tiny_model
from tests.unit.trainer.test_sft_trainer import records, weights
from verl.trainer.main_ppo import main as main_ppo
from verl.trainer.sft_trainer import main

WORDS = ["one", "two", "three", "four", "five", "six"]
ROWS = [{"prompt": f"{w} {v}?", "chosen": f"{w}!", "rejected": f"no, {v}"} for w in WORDS for v in WORDS[:2]]
MARGINS = [0.25 * n for n in range(len(ROWS))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "m", tied=True, seed=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, whole dialogues with and without a prompt before them."""
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    lines = []
    for number, row in enumerate(ROWS):
        prompt = [{"role": "user", "content": row["prompt"]}]
        sides = {key: [{"role": "assistant", "content": row[key]}] for key in ("chosen", "rejected")}
        whole = {key: prompt + side for key, side in sides.items()}
        kinds = [row, {"prompt": prompt} | sides, whole, {"prompt": row["prompt"]} | whole]
        lines.append(json.dumps(kinds[number % 4] | {"margin": MARGINS[number]}))
    path.write_text("\n".join(lines))
    return path


def arguments(model: Path, data: Path, run: Path, loss: str, *more: str) -> list[str]:
    words = f"""
        model.path={model} engine.dtype=float32 optim.lr=1e-3 optim.lr_scheduler_type=constant preference.loss={loss}
        data.train_files={data} data.val_files={data} data.train_batch_size=4 data.max_token_len_per_gpu=150
        trainer.device=cpu trainer.n_gpus_per_node=1 trainer.total_training_steps=5 trainer.test_freq=5
        trainer.logger=[] trainer.default_local_dir={run}"""
    return [*words.split(), *more]


def sequences(model: Path) -> list[tuple[list[int], int]]:
    """Ids of all dialogues, chosen and rejected in turn, and where the answer begins."""
    from transformers import AutoTokenizer

    tokenizer, out = AutoTokenizer.from_pretrained(model), []
    for row in ROWS:
        for key in ("chosen", "rejected"):
            header = f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n"
            out.append(
                (tokenizer(header + row[key] + "<|im_end|>\n")["input_ids"], len(tokenizer(header)["input_ids"]))
            )
    return out


def values(network: Any, rows: list[tuple[list[int], int]], *, mean: bool = False) -> torch.Tensor:
    """Of each dialogue, one padded batch: the score of a classifier, else Σ or mean of the answer's log-probs."""
    width = max(len(ids) for ids, _ in rows)
    padded = torch.tensor([ids + [256] * (width - len(ids)) for ids, _ in rows])
    attended = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows])
    logits = network(input_ids=padded, attention_mask=attended).logits
    if "SequenceClassification" in type(network).__name__:
        return logits[:, 0]
    log_probs = logits[:, :-1].log_softmax(-1).gather(2, padded[:, 1:, None])[..., 0]
    # Up to the end token: the line feed after it is not learned.
    parts = [log_probs[n, start - 1 : len(ids) - 2] for n, (ids, start) in enumerate(rows)]
    return torch.stack([part.mean() if mean else part.sum() for part in parts])


def reference(loss: str, network: Any, initial: Any, rows: list[tuple[list[int], int]]) -> torch.Tensor:
    """The mean loss over all pairs, written from the papers. β = 0.3, ε = 0.1, γ = 0.5."""
    per_token = loss in ("dpo_norm", "ipo", "simpo")
    current = values(network, rows, mean=per_token)
    if loss == "reward":
        return -logsigmoid(current[::2] - current[1::2] - torch.tensor(MARGINS)).mean()
    if loss == "simpo":
        return -logsigmoid(0.3 * current[::2] - 0.3 * current[1::2] - 0.5).mean()
    current = current - values(initial, rows, mean=per_token).detach()
    h = current[::2] - current[1::2]
    if loss == "ipo":
        return ((h - 1 / 0.6) ** 2).mean()
    return (-0.9 * logsigmoid(0.3 * h) - 0.1 * logsigmoid(-0.3 * h)).mean()


@pytest.mark.parametrize("loss", ["dpo", "dpo_norm", "ipo", "simpo", "reward"])
def test_losses_and_gradients_are_those_of_padded_rows(loss: str, model: Path, data: Path, tmp_path: Path) -> None:
    """A step of SGD over all pairs, and a second one, against transformers."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    keys = [] if loss == "reward" else ["preference.beta=0.3"]
    keys += ["preference.label_smoothing=0.1"] if loss.startswith("dpo") else []
    sgd = ("optim.optimizer=SGD", "optim.weight_decay=0", "optim.lr=0.05", "optim.grad_clip=1e9")
    whole = (f"data.train_batch_size={len(ROWS)}", "trainer.total_training_steps=2", "trainer.save_freq=2")
    assert main(arguments(model, data, tmp_path / "run", loss, *keys, *sgd, *whole)) == 0
    steps = records(tmp_path / "run")
    rows, kind, options = sequences(model), AutoModelForCausalLM, {}
    if loss == "reward":
        kind, options = AutoModelForSequenceClassification, {"num_labels": 1}
    network, initial = (kind.from_pretrained(model, **options).eval() for _ in range(2))
    if loss == "reward":
        torch.nn.init.zeros_(network.score.weight)
    for number in (1, 2):
        network.zero_grad()
        total = reference(loss, network, initial, rows)
        total.backward()
        assert steps[number]["train/loss"] == pytest.approx(float(total), abs=1e-5)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter -= 0.05 * parameter.grad
    trained = kind.from_pretrained(tmp_path / "run/global_step_2/actor").eval()
    for (name, ours), theirs in zip(trained.named_parameters(), network.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5), name
    assert steps[-1]["val/loss"] == pytest.approx(float(reference(loss, network, initial, rows)), abs=1e-5)
    assert steps[-1]["val/rewards/margins"] == pytest.approx(
        steps[-1]["val/rewards/chosen"] - steps[-1]["val/rewards/rejected"], abs=1e-5
    )


@pytest.mark.parametrize("loss", ["dpo", pytest.param("reward", marks=pytest.mark.long)])
def test_resume_is_exact_and_keeps_the_reference(loss: str, model: Path, data: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words = arguments(model, data, whole, loss, "trainer.save_freq=3")
    assert main(words) == 0
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "global_step_5")
    assert main([*words, f"trainer.default_local_dir={parts}"]) == 0
    assert records(parts) == records(whole) and weights(parts, 5) == weights(whole, 5)
    first, *_, last = records(whole)
    assert last["rewards/accuracies"] > 0.5 and last["val/loss"] < first["val/loss"]


_LONG = [pytest.param(loss, size, marks=pytest.mark.long) for loss, size in (("dpo", 1), ("reward", 4))]


@pytest.mark.parametrize(("loss", "size"), [("dpo", 4), *_LONG])
def test_two_ranks_train_like_one(loss: str, size: int, model: Path, data: Path, tmp_path: Path) -> None:
    """A batch of one pair as well: it is not cut, a rank goes without."""
    one, two = tmp_path / "one", tmp_path / "two"
    short = (f"data.train_batch_size={size}", "trainer.total_training_steps=2", "trainer.test_freq=2")
    assert main(arguments(model, data, one, loss, *short)) == 0
    assert ranks.run(main, 2, arguments(model, data, two, loss, *short), join=False) == [0, 0]
    for mine, other in zip(records(two), records(one), strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("change", ["", "model.lora_rank=4"])
def test_a_run_trains_with_a_reward_model_made_here(change: str, model: Path, data: Path, tmp_path: Path) -> None:
    """It scores as transformers does, in padded batches too, and a PPO run loads it."""
    from transformers import AutoModelForSequenceClassification

    if change:
        pytest.importorskip("peft")
    run, more = tmp_path / "run", ("optim.lr=1e-2", "trainer.total_training_steps=8", "trainer.save_freq=8")
    assert main(arguments(model, data, run, "reward", *more, *change.split())) == 0
    found = records(run)
    assert found[-1]["val/rewards/accuracies"] == 1.0 and found[0]["val/rewards/margins"] == 0.0
    trained = run / "global_step_8/actor"
    network = AutoModelForSequenceClassification.from_pretrained(trained).eval()
    with torch.no_grad():
        scores = values(network, sequences(model))
    assert found[-1]["val/rewards/chosen"] == pytest.approx(float(scores[::2].mean()), abs=1e-4)
    if not change:
        tiny = TinyRun(tmp_path / "ppo")
        scorer = (f"reward_model.model.path={trained}", "reward_model.enable=True", "custom_reward_function.path=null")
        assert main_ppo(tiny.overrides(tmp_path / "out", *scorer, "trainer.total_training_steps=1")) == 0
        (record,) = [r for r in runs.records(tmp_path / "out").values() if "critic/score/mean" in r]
        assert record["critic/score/max"] > record["critic/score/min"]


BAD = {
    "no difference": {"prompt": "a", "chosen": "b", "rejected": "b"},
    "different prompts": {key: [{"role": "user", "content": key}] for key in ("chosen", "rejected")},
    "prompt missing": {"chosen": "a", "rejected": "b"},
    "prompt empty": {"prompt": "a", "chosen": " ", "rejected": "b"},
    "wrong column type": {"prompt": "a", "chosen": "c", "rejected": "b", "margin": "much"},
}


def test_mistakes_are_named(model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    good = {"prompt": "a", "chosen": "c", "rejected": "b", "margin": None}
    bad.write_text("\n".join(json.dumps(good | row) for row in ({}, *({"prompt": None} | row for row in BAD.values()))))
    few = ("data.train_batch_size=1", "data.max_bad_row_ratio=0.9", "trainer.total_training_steps=1")
    assert main(arguments(model, bad, tmp_path / "run", "dpo", *few)) == 0
    lines = [json.loads(line) for line in (tmp_path / "run/data_report.jsonl").read_text().splitlines()]
    assert {line["row"]: line["problem"] for line in lines if "row" in line} == dict(enumerate(BAD, 1))
    capsys.readouterr()
    for word, message in (
        ("data.chosen_key=better", "there is no column 'better'"),
        ("data.max_length=20", "data.truncation=left|right"),
        ("engine.strategy=megatron", "use fsdp"),
        ("data.max_bad_row_ratio=0", "5 of 6 rows cannot be used"),
    ):
        assert main(arguments(model, bad, tmp_path / "not", "dpo", *few[:2], word)) in (2, 3)
        assert message in capsys.readouterr().err
