"""Tiny runs of every kind of thing that verl does: a base of overrides that tests add to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.integration.test_agent_runs import ROLLOUT, WORDS
from tests.integration.test_vision_runs import VisionRun
from tests.runs import TinyRun
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.reward.test_reward_model import classifier
from tests.unit.rollout.test_session import _QWEN

USER = Path(__file__).parent / "unit" / "rollout" / "agents_of_a_user.py"
TEACHER = "distillation.teacher_models.teacher_model.model_path"
POOL = [f"{ROLLOUT}nnodes=1", f"{ROLLOUT}n_gpus_per_node=1"]


class TeacherRun(TinyRun):
    """A `TinyRun` with a teacher beside it."""

    def __init__(self, root: Path):
        super().__init__(root)
        tiny_model(root / "teacher", seed=1, scale=4.0, hidden_size=16)


class ScoredRun(TinyRun):
    """A `TinyRun` with a reward model beside it."""

    def __init__(self, root: Path):
        super().__init__(root)
        classifier(root / "classifier")


class ToolRun(TinyRun):
    """A `TinyRun` whose chat template knows tools."""

    def __init__(self, root: Path):
        super().__init__(root)
        tiny_tokenizer(template=_QWEN.replace("%THINK%", "")).save_pretrained(self.model)


class Supervised(TinyRun):
    """A `TinyRun` of the supervised trainer, on questions and answers."""

    columns = ("data.prompt_key=question", "data.response_key=answer")

    def __init__(self, root: Path):
        super().__init__(root)
        rows = [{"question": f"{i} and {i + 1}?", "answer": f"{2 * i + 1}" * (1 + i % 3)} for i in range(24)]
        self.train = root / "train.jsonl"
        self.train.write_text("\n".join(map(json.dumps, rows)))

    def overrides(self, out: Path, *more: str) -> list[str]:
        words = f"""
            data.train_files={self.train} data.val_files={self.train} data.val_max_samples=4 data.train_batch_size=4
            model.path={self.model} engine.dtype=float32 optim.lr=1e-2 trainer.device=cpu trainer.save_freq=1
            trainer.test_freq=1 trainer.logger=console trainer.default_local_dir={out}"""
        return [*words.split(), *self.columns, *more]


class SupervisedVision(Supervised):
    """The same on dialogues with images."""

    columns = ()

    def __init__(self, root: Path):
        seeing, said = VisionRun(root), {"role": "assistant", "content": "It is red."}
        rows = pq.read_table(seeing.train).to_pylist()
        self.root, self.model, self.train = root, seeing.model, seeing.train
        table = pa.Table.from_pylist([row | {"messages": [*row["prompt"], said]} for row in rows])
        pq.write_table(table, self.train)


@dataclass(frozen=True)
class Kind:
    """Runs of one kind. steering: parts of the keys that matter most to it; make(folder): the model and the data;
    words(what was made): overrides beside those of a `TinyRun`."""

    steering: tuple[str, ...]
    make: Callable[[Path], TinyRun] = TinyRun
    words: Callable[[TinyRun], list[str]] = lambda run: []
    entry: str = "ppo"


def critic(run: TinyRun) -> list[str]:
    return ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-2"]


def teacher(run: TinyRun) -> list[str]:
    on = ["distillation.enabled=True", "distillation.distillation_loss.loss_mode=k2"]
    return [*on, f"{TEACHER}={run.root / 'teacher'}"]


def reward_model(run: TinyRun) -> list[str]:
    on = ["reward_model.enable=True", f"reward_model.model.path={run.root / 'classifier'}"]
    return [*on, "reward_model.weights={function: 1, model: 0.5, length: 0.01}"]


def tools(run: TinyRun) -> list[str]:
    words = [word for word in WORDS if not word.startswith("trainer.")]
    return [*words, f"{ROLLOUT}agent.num_workers=0"]


def environment(run: TinyRun) -> list[str]:
    game = [f"{ROLLOUT}agent.environment.name=custom", f"{ROLLOUT}agent.environment.path={USER}:Guess"]
    lengths = ["data.max_prompt_length=200", "data.max_response_length=120"]
    return [*game, *lengths, f"{ROLLOUT}agent.num_workers=0"]


def lora(run: TinyRun) -> list[str]:
    return ["model.lora_rank=4" if isinstance(run, Supervised) else "actor_rollout_ref.model.lora_rank=4"]


def ahead(run: TinyRun) -> list[str]:
    return ["trainer.max_staleness=1", *POOL, "trainer.test_freq=-1"]


_TEXT = (
    "adv_estimator",
    "kl",
    "filter_groups",
    "pf_ppo",
    "rollout_correction",
    "loss_",
    "lora_rank",
    "enable",
)
_TEXT += ("reward_manager", "multi_turn", "rollout.agent", "max_staleness", "save_contents", "async_save")
_TEXT += (
    "offload",
    "dynamic_bsz",
    "batch_size",
    "optim.",
    "val_kwargs",
    "shuffle",
    "use_fused",
    "checkpointing",
)
_AGENT = ("multi_turn", "rollout.agent", "val_kwargs", "rollout.stop", "filter_groups", "max_")
_LORA = ("model.lora", "target_modules", "exclude_modules", "save_lora_only", "save_contents", "async_save")
_AHEAD = (
    "staleness",
    "weight_sync",
    "partial",
    "per_version",
    "rollout_correction",
    "filter_groups",
    "agent",
)
_SFT = ("data.", "optim.", "engine.", "checkpoint.", "trainer.")
KINDS: dict[str, Kind] = {
    "text": Kind(_TEXT),
    "critic": Kind(("critic.", "gamma", "lam", "pf_ppo", "use_kl", "warmup", "save_contents"), words=critic),
    "teacher": Kind(("distillation.", "use_kl", "ref.", "log_prob"), TeacherRun, teacher),
    "reward model": Kind(("reward_model.", "filter_groups", "val_kwargs"), ScoredRun, reward_model),
    "images": Kind(("data.", "limit_images", "freeze_vision", "lora_rank", "use_kl"), VisionRun),
    "tools": Kind(_AGENT, ToolRun, tools),
    "environment": Kind(_AGENT, words=environment),
    "LoRA": Kind((*_LORA, "use_kl", "ref.", "offload", "optim.", "verify_weight"), words=lora),
    "supervised": Kind(_SFT, Supervised, entry="sft"),
    "supervised images": Kind(_SFT, SupervisedVision, entry="sft"),
    "supervised LoRA": Kind((*_LORA, *_SFT), Supervised, lora, entry="sft"),
}
AHEAD = Kind(_AHEAD, words=ahead)
"""Asynchronous, on a cluster."""
