"""Supervised training: the loop, and what it is built of.

    rows (ids, mask) → order = f(seed, epoch) → a batch of rows → engine.step(−Σ mask·log p / T) → tracking

The same engine, packing, checkpoints, tracking and resume as the reinforcement-learning loop. A row travels as a
trajectory: what comes before the first learned token is the prompt, the rest the response. Of several ranks each
takes its share of a batch, and rank 0 keeps the records.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl import interrupt
from verl.checkpoint import Checkpoint, open_checkpoint, rng
from verl.config import SFTConfig
from verl.config.layout import policy_placement
from verl.config.schema.trainer import EACH_EPOCH
from verl.data.load_object import load_extern_object
from verl.data.rows import BadRow
from verl.data.sft import SFTDataset, SFTRow
from verl.data.tokenizer import save_tokenizer
from verl.engine.registry import TRAINING_ENGINES
from verl.engine.training.base import MicroBatch, TrainingEngine, TrainStepResult
from verl.engine.training.process_group import init_from_environment
from verl.errors import UserError
from verl.platform import detect
from verl.tracking.names import plain_metrics
from verl.tracking.profiler import announce, open_profiler
from verl.tracking.step_metrics import BACKWARD, Counters, mfu
from verl.tracking.timer import Phases, Watchdog, profiled
from verl.trainer.checkpoints import Storage, data_identity
from verl.trainer.image_checks import changes_of, probes_of, refuse_unseen
from verl.trainer.parts import open_tokenizer
from verl.trainer.sft_ranks import Ranks
from verl.trainer.step_record import RefusedSteps
from verl.trajectory import Prompt, Trajectory
from verl.workers.update_plan import Refusal, UpdateResult


class SFTTrainer:
    """The loop: whole batches of an epoch's order, one optimizer step each. A step number fixes its rows."""

    def __init__(
        self,
        config: SFTConfig,
        engine: TrainingEngine,
        train: SFTDataset,
        validation: SFTDataset | None,
        tracking: Any,
        ranks: Ranks,
    ):
        self.ranks, self.tracking = ranks, tracking
        self.config, self.engine, self.train, self.validation = config, engine, train, validation
        self.batch_size: int = config.data.train_batch_size
        if len(train) < self.batch_size:
            raise UserError(
                f"data.train_files hold {len(train)} usable rows, fewer than data.train_batch_size={self.batch_size}; "
                "lower the batch size or add data"
            )
        self.steps_per_epoch = len(train) // self.batch_size
        trainer = config.trainer
        self.total_steps: int = trainer.total_training_steps or trainer.total_epochs * self.steps_per_epoch
        self.step = 0
        self.total_tokens = 0
        self._saw_images = False
        self.counters = Counters()
        self.profiler = open_profiler(config, roles=("sft",), rank=self.ranks.rank, platform=engine.platform)
        self.storage = Storage(config, "checkpoint", tracking)

    def fit(self) -> None:
        """Train from the newest checkpoint, or from the start, to the last step."""
        trainer, tracking = self.config.trainer, self.tracking
        self.engine.schedule(self.total_steps)
        self.step = self._resume()
        if self.ranks.lead:
            announce(self.config, self.total_steps, tracking.notice)
        tracking.start_progress(self.total_steps, done=self.step)
        self.phases = Phases()
        limit = trainer.max_refused_steps
        refused = RefusedSteps(limit, tracking, self.counters, lead=self.ranks.lead)
        with Watchdog(self.phases, trainer.watchdog_timeout, tracking.event), interrupt.patient():
            if trainer.val_only or (trainer.val_before_train and self.step == 0 and self.validation):
                tracking.log(self.step, self._validate())
            while self.step < self.total_steps and not trainer.val_only:
                self.step += 1
                with profiled(self.profiler, self.step, self.phases, tracking):
                    metrics, update = self._train_step()
                    refused.note(self.step, update)
                    if self.validation is not None and self._due(trainer.test_freq):
                        metrics |= self._validate()
                    if self._due(trainer.save_freq):
                        self._save(metrics)
                tracking.log(self.step, metrics)
                tracking.write_page()
                refused.check()
        self.storage.finish()
        tracking.finish("finished")
        tracking.write_page(last=True)

    def rows(self, step: int) -> list[Trajectory]:
        """The batch of a step (counted from 1): a function of data, seed and step alone."""
        return self._drawn(step)[0]

    def _drawn(self, step: int) -> tuple[list[Trajectory], dict[int, BadRow]]:
        """The batch, and the rows that could not be drawn: the next of the epoch's order replace them."""
        data = self.config.data
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        seed = data.seed if data.seed is not None else self.config.trainer.seed
        order = self.train.order(seed=int(seed), shuffle=data.shuffle, epoch=epoch)
        start, stop = place * self.batch_size, (place + 1) * self.batch_size
        numbers, spare = order[start:stop].tolist(), [*order[stop:].tolist(), *order[:start].tolist()]
        rows, failed = self.ranks.draw(self.train, numbers, spare, data.max_bad_row_ratio)
        return [as_trajectory(row, f"{i}@{epoch}") for i, row in rows.items()], failed

    def _train_step(self) -> tuple[dict[str, float], Any]:
        started = time.perf_counter()
        self.phases.start_step()
        with self.phases("update"):
            rows, skipped = self._drawn(self.step)
            self._check_images(rows)
            loss = CrossEntropy(sum(int(row.loss_mask.sum()) for row in rows if row.loss_mask is not None))
            mine = self.ranks.share(rows, self.engine)
            result: TrainStepResult = self.engine.step(mine, loss, temperature=1.0)
            rate = self.engine.advance()
        tokens = sum(len(row.prompt.ids) + row.length for row in rows)
        self.total_tokens += tokens
        metrics = {
            "training/epoch": (self.step - 1) // self.steps_per_epoch,
            **result.metrics,
            "train/grad_norm": result.grad_norm,
            "train/lr": rate,
            "train/lr(1e-3)": rate * 1000,
            "train/global_tokens": tokens,
            "train/total_tokens(B)": self.total_tokens / 1e9,
            "train/time": time.perf_counter() - started,
        }
        if (cost := self.engine.cost()) is not None:
            lengths = (len(row.prompt.ids) + row.length for row in rows)
            metrics["train/mfu"] = mfu(cost, lengths, metrics["train/time"], passes=1 + BACKWARD)
        if skipped:
            metrics["training/skipped_rows"] = len(skipped)
        for row, bad in skipped.items():
            record = {"row": row, "problem": bad.problem, "detail": bad.detail}
            self.tracking.event("row_skipped", step=self.step, epoch=metrics["training/epoch"], **record)
        refusals = [Refusal(result.refused, rows)] if result.refused else []
        return metrics, UpdateResult(result.metrics, updates=int(not refusals), refused=refusals)

    def _check_images(self, rows: list[Trajectory]) -> None:
        """At the first step with images: a response changes where its images are blanked. ImagesUnseen if not."""
        with_images = (s for row in rows for s in row.segments if s.media is not None)
        if self._saw_images or (row := next(with_images, None)) is None or row.media is None:
            return
        self._saw_images = True
        probes = [segment for probe in probes_of(row, row.media) for segment in probe.segments]
        log_probs = self.engine.forward(probes, temperature=1.0)["log_probs"]
        changes = changes_of(np.split(log_probs, len(probes)))
        refuse_unseen(self.step, row.uid, self.ranks.first(lambda: list(changes)), self.tracking)

    def _validate(self) -> dict[str, float]:
        """Mean loss over the learned tokens of the validation rows."""
        if self.validation is None:
            raise UserError("trainer.val_only=True needs data.val_files")
        total, tokens = 0.0, 0.0
        ratio = self.config.data.max_bad_row_ratio
        progress = self.tracking.progress("validation", total=len(self.validation))
        with self.phases("testing"):
            for start in range(0, len(self.validation), self.batch_size):
                numbers = range(start, min(start + self.batch_size, len(self.validation)))
                rows_by_number, _ = self.ranks.draw(self.validation, numbers, (), ratio)
                if not rows_by_number:
                    continue
                rows = [as_trajectory(row, f"val{i}") for i, row in rows_by_number.items()]
                mine = self.ranks.share(rows, self.engine)
                learned = np.concatenate([np.zeros(0, bool), *(row.loss_mask for row in mine)])
                outputs = self.engine.forward(mine, temperature=1.0)
                if self.engine.holds_outputs:
                    total -= float(outputs["log_probs"][learned].sum(dtype=np.float64))
                    tokens += int(learned.sum())
                progress(len(rows))
                self.phases.beat()
                interrupt.check()
        total, tokens = self.ranks.add([total, tokens], self.engine)
        return {"val/loss": total / tokens}

    def _due(self, frequency: int | str) -> bool:
        frequency = self.steps_per_epoch if frequency == EACH_EPOCH else int(frequency)
        return frequency > 0 and (self.step % frequency == 0 or self.step == self.total_steps)

    # --------------------------------------------------------------------------------------------- checkpoints

    def _identity(self) -> dict[str, Any]:
        return data_identity(self.config.data, len(self.train), self.config.data.seed)

    def _save(self, record: dict[str, float]) -> None:
        """Write `global_step_N`; `record` is the step's metrics, in case a kill comes before they are logged."""

        def log_probs(row: Trajectory) -> np.ndarray:
            values = self.engine.forward(row.segments, temperature=1.0).get("log_probs", np.zeros(0))
            return values if all(self.ranks.gather(bool(np.isfinite(values).all()))) else np.full(1, np.nan)

        if self.storage.refuses(self.step, self.rows(self.step), log_probs, "optim.lr"):
            return
        jobs = self.storage.chosen(
            [
                ("model", "actor", self._save_model),
                ("optimizer", "state/actor_optim", self.engine.save_optimizer),
                ("extra", "state/rng", rng.save if self.ranks.lead else lambda _: None),
            ]
        )
        epoch, place = divmod(self.step, self.steps_per_epoch)
        state = {
            "data_position": {"epoch": epoch, "offset": place * self.batch_size},
            "data_identity": self._identity(),
            "total_tokens": self.total_tokens,
            "counters": self.counters.state(),
            "record": plain_metrics(record)[0],
        }
        with self.phases("save_checkpoint"):
            self.ranks.save(jobs, lambda parts: self.storage.save(self.step, parts, state))

    def _save_model(self, directory: Path) -> None:
        self.engine.save_weights(directory)
        if self.ranks.lead:
            sees = getattr(self.train, "processor", None) is not None
            save_tokenizer(self.tracking.tokenizer, self.config.model.path if sees else None, directory)

    def _resume(self) -> int:
        """Restore what `trainer.resume_mode` names; returns its step, 0 for a fresh start.

        Rank 0 looks for the checkpoint, tidies up and verifies it.
        """

        def look() -> str:
            checkpoint = self.storage.find()
            return str(checkpoint.path) if checkpoint else ""

        path = self.ranks.first(look)
        checkpoint = open_checkpoint(Path(path), hashes=False) if path else None
        return self.storage.resume(
            checkpoint, self._identity(), self._restore, model_key="model.path", lead=self.ranks.lead
        )

    def _restore(self, checkpoint: Checkpoint) -> None:
        state, wants = checkpoint.loop_state, self.storage.wants
        if wants("model"):
            self.engine.load_weights(checkpoint.part("actor"))
        if wants("optimizer"):
            self.engine.load_optimizer(checkpoint.part("state/actor_optim"))
        if wants("extra"):
            rng.load(checkpoint.part("state/rng"))
        self.counters.load(state.get("counters", {}))
        self.total_tokens = int(state["total_tokens"])


def train_sft(config: SFTConfig, tracking: Any) -> None:
    """Build the parts and train, data before the model: a user's mistakes are found soonest."""
    ranks, trainer = Ranks.of_environment(), config.trainer
    tokenizer, processor = open_tokenizer(config.model, config.data, tracking)
    train, validation = open_data(config, tokenizer, tracking, processor)
    if trainer.save_freq != EACH_EPOCH and int(trainer.save_freq) <= 0 and not trainer.val_only:
        tracking.notice("trainer.save_freq is not set: the trained model will NOT be saved (trainer.save_freq=N saves)")
    training = SFTTrainer(config, build_engine(config, ranks), train, validation, tracking, ranks)
    try:
        training.fit()
    finally:
        if training.profiler is not None:
            training.profiler.close()
        training.storage.finish()
    if ranks.size > 1:
        from verl.engine.training.process_group import leave

        leave()


def engine_settings(config: SFTConfig) -> dict[str, Any]:
    """The SFT keys under the names that the training engine reads from a role."""
    data = config.data
    return {
        **config.engine,
        "ppo_micro_batch_size_per_gpu": data.micro_batch_size_per_gpu,
        "use_dynamic_bsz": data.use_dynamic_bsz,
        "ppo_max_token_len_per_gpu": data.max_token_len_per_gpu,
        "use_prefix_grouper": False,
        "grad_clip": config.optim.grad_clip,
        "optim": config.optim,
        "checkpoint": config.checkpoint,
    }


def open_data(
    config: SFTConfig, tokenizer: Any, tracking: Any, processor: Any = None
) -> tuple[SFTDataset, SFTDataset | None]:
    """Training rows, and validation rows or None; `data.custom_cls` may replace the class. processor: of a model that
    sees images."""
    data, kind = config.data, SFTDataset
    if data.custom_cls.path:
        kind = load_extern_object(data.custom_cls.path, str(data.custom_cls.name))
    files = config.as_written("data.train_files")
    train = kind(files, tokenizer, data, processor, max_samples=data.train_max_samples)
    validation = None
    if data.val_files:
        files = config.as_written("data.val_files")
        validation = kind(files, tokenizer, data, processor, max_samples=data.val_max_samples)
        validation.split = "val"
    tracking.data_report(train, validation)
    return train, validation


def build_engine(config: SFTConfig, ranks: Ranks) -> TrainingEngine:
    """The engine of one device, or this rank's part of the sharded one."""
    settings: dict[str, Any] = {
        "model_cfg": config.model,
        "role_cfg": engine_settings(config),
        "seed": config.trainer.seed,
        "longest": int(config.data.max_length),
        "role": "train",
        "idles": False,
        "placement": policy_placement(config),
    }
    build = TRAINING_ENGINES.named(config.engine.strategy).build
    if ranks.size == 1:
        return build(str(config.model.path), device=config.trainer.device, **settings)
    platform = detect(config.trainer.device, ranks.local + 1)
    index = 0 if platform.on_host else ranks.local
    platform.select(index)
    init_from_environment(platform)
    return build(str(config.model.path), device=platform, device_index=index, **settings)


def as_trajectory(row: SFTRow, uid: str) -> Trajectory:
    """A row for the engine: prompt up to the first learned token (at least one), response up to the last."""
    learned = np.flatnonzero(row.mask[1:]) + 1
    start, stop = int(learned[0]), int(learned[-1]) + 1
    response = row.ids[start:stop]
    return Trajectory(
        prompt=Prompt(uid=uid, ids=row.ids[:start], messages=None, media=row.media),
        index=0,
        response_ids=response,
        response_mask=np.ones(len(response), bool),
        loss_mask=row.mask[start:stop],
    )


class CrossEntropy:
    """−Σ log p of the learned tokens / `total`, the learned tokens of the whole batch."""

    def __init__(self, total: int):
        self._total = total

    def __call__(self, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
        assert micro.log_probs is not None
        mask = np.concatenate([row.loss_mask for row in micro.rows])
        learned = micro.log_probs[torch.from_numpy(mask).to(micro.log_probs.device)]
        negative = -learned.sum()
        return negative / self._total, {"train/loss": (float(negative.detach()), float(learned.numel()))}
