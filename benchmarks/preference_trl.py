"""Three steps of DPO, its variants and a reward model here and with TRL's trainers, from one tiny model: losses,
rewards.

    python benchmarks/preference_trl.py [--work DIR]       # an environment with verl, TRL, datasets; a minute on a CPU

Every batch is all pairs, in float32, with SGD: what differs is the implementation. A row of TRL's default collator is
padded, and each of its log-probs is that of a whole forward pass; here the prompt of a pair is computed once.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer
from verl.trainer.sft_trainer import main as train

WORDS = ["one", "two", "three", "four", "five", "six"]
STEPS, RATE = 3, 0.05
LOSSES = {"dpo": "sigmoid", "dpo_norm": "sigmoid_norm", "ipo": "ipo", "reward": None}
SHOWN = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")


def pairs() -> list[dict[str, Any]]:
    """Preference rows in TRL's conversational format."""

    def turn(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    return [
        {"prompt": turn("user", f"{w} {v}?"), "chosen": turn("assistant", w), "rejected": turn("assistant", f"no {v}")}
        for w in WORDS
        for v in WORDS[:2]
    ]


def ours(model: Path, data: Path, run: Path, loss: str) -> list[dict[str, float]]:
    """Metrics by step."""
    words = f"""
        model.path={model} engine.dtype=float32 preference.loss={loss} data.train_files={data}
        data.train_batch_size={len(pairs())} optim.optimizer=SGD optim.lr={RATE} optim.weight_decay=0
        optim.grad_clip=1e9 optim.lr_scheduler_type=constant trainer.device=cpu trainer.n_gpus_per_node=1
        trainer.total_training_steps={STEPS} trainer.logger=[] trainer.default_local_dir={run}"""
    assert train(words.split()) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{"loss": line["train/loss"], **line} for line in lines if line.get("step") and "train/loss" in line]


def theirs(model: Path, run: Path, loss: str) -> list[dict[str, float]]:
    """The same of TRL's trainer."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

    common = {
        "output_dir": str(run), "max_steps": STEPS, "per_device_train_batch_size": len(pairs()), "logging_steps": 1,
        "optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 1e9, "bf16": False,
        "use_cpu": True, "report_to": "none", "gradient_checkpointing": False, "save_strategy": "no",
        "disable_tqdm": True,
    }  # fmt: skip
    arguments = {"train_dataset": Dataset.from_list(pairs()), "processing_class": AutoTokenizer.from_pretrained(model)}
    if loss == "reward":
        network = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
        torch.nn.init.zeros_(network.score.weight)
        trainer: Any = RewardTrainer(network, args=RewardConfig(**common), **arguments)
    else:
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        trainer = DPOTrainer(network, args=DPOConfig(**common, beta=0.1, loss_type=LOSSES[loss]), **arguments)
    trainer.train()
    metrics = [line for line in trainer.state.log_history if "loss" in line]
    if loss != "reward":
        return metrics
    return [line | {"rewards/margins": line["margin"], "rewards/accuracies": line["accuracy"]} for line in metrics]


def main() -> None:
    """Print the largest difference for each loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=None)
    work = parser.parse_args().work or Path(tempfile.mkdtemp())
    model = tiny_model(work / "model", tied=True, seed=3)
    # TRL learns what the template writes after the end token, too; here it is not learned.
    tiny_tokenizer(model, template=CHAT_TEMPLATE.replace("'<|im_end|>' + '\n'", "'<|im_end|>'"))
    (work / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in pairs()))
    for loss in LOSSES:
        mine, other = ours(model, work / "pairs.jsonl", work / loss, loss), theirs(model, work / f"trl_{loss}", loss)
        print(f"\n{loss}\n{'':24}{'here':>36}{'TRL':>36}")
        for name in SHOWN:
            if name in other[0]:
                columns = ["".join(f"{line[name]:12.6f}" for line in lines) for lines in (mine, other)]
                print(f"{name:24}{columns[0]:>36}{columns[1]:>36}")


if __name__ == "__main__":
    main()
