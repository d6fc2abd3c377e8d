"""Supervised training: the loop, and what it is built of.

    rows (ids, mask) → order = f(seed, epoch) → a batch of rows → engine.step(−Σ mask·log p / T) → tracking
    pairs                                                         engine.step(a loss of `verl.algorithms.preference`)

The same engine, packing, checkpoints, tracking and resume as the reinforcement-learning loop. A row travels as a
trajectory: what comes before the first learned token is the prompt, the rest the response. A pair is a group of two,
whose prompt is computed once; log-probs of the reference are those of the model at the start. Of several ranks each
takes its share of a batch, and rank 0 keeps the records.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl import interrupt
from verl.algorithms.flat_tokens import Rows, loss_mask
from verl.algorithms.preference import MARGIN, REFERENCE, PreferenceLoss, needs_reference
from verl.checkpoint import Checkpoint, open_checkpoint, rng
from verl.config import SFTConfig
from verl.config.layout import policy_placement
from verl.config.schema.trainer import EACH_EPOCH
from verl.data.load_object import load_extern_object
from verl.data.pairs import PairDataset
from verl.data.rows import BadRow, ChatRenderer
from verl.data.sft import SFTDataset, SFTRow
from verl.data.tokenizer import save_tokenizer
from verl.engine.registry import TRAINING_ENGINES
from verl.engine.training.base import LOG_PROBS, MicroBatch, MicroLoss, TrainingEngine, TrainStepResult
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
from verl.trajectory import Prompt, Segment, Trajectory, flat
from verl.workers.update_plan import Refusal, UpdateResult

_REFERENCES = "state/references"


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
        self.preference = config.preference if config.preference.loss else None
        self.outputs = ("scores",) if config.preference.loss == "reward" else LOG_PROBS
        #: By split, of each row Σ log π_ref of both responses, float32 [rows, 2].
        self.references: dict[str, np.ndarray] = {}

    def fit(self) -> None:
        """Train from the newest checkpoint, or from the start, to the last step."""
        trainer, tracking = self.config.trainer, self.tracking
        self.engine.schedule(self.total_steps)
        self.phases = Phases()
        checkpoint = self._newest()
        self._compute_references(checkpoint)
        self.step = self._resume(checkpoint)
        if self.ranks.lead:
            announce(self.config, self.total_steps, tracking.notice)
        tracking.start_progress(self.total_steps, done=self.step)
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
        return self._trajectories(self.train, rows, str(epoch)), failed

    def _trajectories(self, data: SFTDataset, rows: dict[int, Any], suffix: str) -> list[Trajectory]:
        """Rows by number as the engine gets them; of a pair two neighbours, chosen and rejected."""
        if self.preference is None:
            return [as_trajectory(row, f"{number}@{suffix}") for number, row in rows.items()]
        out = []
        for number, pair in rows.items():
            references = self.references[data.split][number] if data.split in self.references else (0.0, 0.0)
            for index, (row, reference) in enumerate(zip((pair.chosen, pair.rejected), references, strict=True)):
                make = self._scored if self.preference.loss == "reward" else as_trajectory
                out.append(make(row, f"{number}@{suffix}", index))
                out[-1].extra |= {REFERENCE: float(reference), MARGIN: pair.margin}
        return out

    def _scored(self, row: SFTRow, uid: str, index: int) -> Trajectory:
        """A row as `verl.reward.reward_model` has it: without padding at its end, and with one token more, for a
        sequence is scored at the token after it."""
        start = int(np.flatnonzero(row.mask[1:])[0]) + 1
        module: Any = self.engine.module
        padding = module.config.get_text_config().pad_token_id
        ids = row.ids[: int(np.flatnonzero(row.ids != (-1 if padding is None else padding))[-1]) + 1]
        response, prompt = np.append(ids[start:], 0), Prompt(uid=uid, ids=ids[:start], messages=None)
        return Trajectory(prompt, index, response, np.ones(len(response), bool))

    def _loss(self, rows: list[Trajectory]) -> MicroLoss:
        """The loss of a batch."""
        if self.preference is not None:
            return PreferenceLoss(self.preference, len(rows) // 2)
        return CrossEntropy(sum(int(loss_mask(row.segments[0]).sum()) for row in rows))

    def _train_step(self) -> tuple[dict[str, float], Any]:
        started = time.perf_counter()
        self.phases.start_step()
        with self.phases("update"):
            rows, skipped = self._drawn(self.step)
            self._check_images(rows)
            mine = self.ranks.share(rows, self.engine)
            result: TrainStepResult = self.engine.step(mine, self._loss(rows), self.outputs, temperature=1.0)
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
        """Mean loss over the learned tokens of the validation rows; of pairs over these, with their other metrics."""
        if self.validation is None:
            raise UserError("trainer.val_only=True needs data.val_files")
        sums: dict[str, list[float]] = {}
        with self.phases("testing"):
            for rows, mine, outputs in self._passes(self.validation, "validation"):
                tensors: dict[str, Any] = {name: torch.from_numpy(values).double() for name, values in outputs.items()}
                _, metrics = self._loss(rows)(MicroBatch(mine, **tensors))
                for name, pair in metrics.items():
                    sums[name] = [a + b for a, b in zip(sums.get(name, (0.0, 0.0)), pair, strict=True)]
        numbers = iter(self.ranks.add([number for pair in sums.values() for number in pair], self.engine))
        return {f"val/{name.removeprefix('train/')}": next(numbers) / next(numbers) for name in sums}

    def _passes(
        self, data: SFTDataset, doing: str
    ) -> Iterator[tuple[list[Trajectory], list[Segment], dict[str, np.ndarray]]]:
        """Of all rows, batch after batch in file order: the rows, this rank's share, and its outputs, empty with an
        empty share where another rank of the pipeline holds them."""
        ratio, progress = self.config.data.max_bad_row_ratio, self.tracking.progress(doing, total=len(data))
        for start in range(0, len(data), self.batch_size):
            numbers = range(start, min(start + self.batch_size, len(data)))
            drawn, _ = self.ranks.draw(data, numbers, (), ratio)
            if drawn:
                rows = self._trajectories(data, drawn, doing)
                mine = self.ranks.share(rows, self.engine)
                outputs = self.engine.forward(mine, self.outputs, temperature=1.0)
                if not self.engine.holds_outputs:
                    mine, outputs = [], {name: np.zeros(0, np.float32) for name in self.outputs}
                yield rows, mine, outputs
            progress(len(drawn))
            self.phases.beat()
            interrupt.check()

    def _compute_references(self, checkpoint: Checkpoint | None) -> None:
        """Fill `references` where the loss needs them: what a checkpoint holds, else a pass over all rows, with the
        weights of the start."""
        if not needs_reference(self.config.preference.loss):
            return
        for data in (self.train, self.validation):
            if data is self.train and checkpoint is not None and checkpoint.has(_REFERENCES):
                self.references[data.split] = np.load(checkpoint.part(_REFERENCES) / "train.npy", allow_pickle=False)
            elif data is not None:
                sums = np.full((len(data), 2), np.nan, np.float32)
                for _rows, mine, outputs in self._passes(data, f"reference log-probs of {data.split}"):
                    tokens = Rows([row.length for row in mine])
                    learned = outputs["log_probs"] * flat(mine, "loss_mask")
                    values = tokens.sums(torch.from_numpy(learned)).tolist()
                    entries = [[row.uid, row.index, x] for row, x in zip(mine, values, strict=True)]
                    for uid, index, value in chain.from_iterable(self.ranks.gather(entries)):
                        sums[int(uid.partition("@")[0]), index] = value
                self.references[data.split] = sums

    def _save_references(self, directory: Path) -> None:
        if self.ranks.lead:
            np.save(directory / "train.npy", self.references["train"])

    def _due(self, frequency: int | str) -> bool:
        frequency = self.steps_per_epoch if frequency == EACH_EPOCH else int(frequency)
        return frequency > 0 and (self.step % frequency == 0 or self.step == self.total_steps)

    # --------------------------------------------------------------------------------------------- checkpoints

    def _identity(self) -> dict[str, Any]:
        return data_identity(self.config.data, len(self.train), self.config.data.seed)

    def _save(self, record: dict[str, float]) -> None:
        """Write `global_step_N`; `record` is the step's metrics, in case a kill comes before they are logged."""

        def log_probs(row: Trajectory) -> np.ndarray:
            outputs = self.engine.forward(row.segments, self.outputs, temperature=1.0)
            values = outputs.get(self.outputs[0], np.zeros(0))
            return values if all(self.ranks.gather(bool(np.isfinite(values).all()))) else np.full(1, np.nan)

        if self.storage.refuses(self.step, self.rows(self.step), log_probs, "optim.lr"):
            return
        jobs = self.storage.chosen(
            [
                ("model", "actor", self._save_model),
                ("optimizer", "state/actor_optim", self.engine.save_optimizer),
                ("extra", "state/rng", rng.save if self.ranks.lead else lambda _: None),
                *([("extra", _REFERENCES, self._save_references)] if self.references else ()),
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

    def _newest(self) -> Checkpoint | None:
        """What `trainer.resume_mode` names. Rank 0 looks for it, tidies up and verifies it."""

        def look() -> str:
            checkpoint = self.storage.find()
            return str(checkpoint.path) if checkpoint else ""

        path = self.ranks.first(look)
        return open_checkpoint(Path(path), hashes=False) if path else None

    def _resume(self, checkpoint: Checkpoint | None) -> int:
        """Restore it; returns its step, 0 for a fresh start."""
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
    engine = build_engine(config, ranks)
    if config.preference.loss == "reward":
        module: Any = engine.module
        model_config = module.config.get_text_config()
        if model_config.pad_token_id is None:
            model_config.pad_token_id = tokenizer.pad_token_id  # transformers scores padded batches
    training = SFTTrainer(config, engine, train, validation, tracking, ranks)
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
    data, pairs = config.data, config.preference.loss is not None
    rows = data.micro_batch_size_per_gpu
    return {
        **config.engine,
        "ppo_micro_batch_size_per_gpu": 2 * rows if pairs and rows else rows,
        "use_dynamic_bsz": data.use_dynamic_bsz,
        "ppo_max_token_len_per_gpu": data.max_token_len_per_gpu,
        "use_prefix_grouper": None if pairs else False,
        "whole_groups": pairs,
        "grad_clip": config.optim.grad_clip,
        "optim": config.optim,
        "checkpoint": config.checkpoint,
    }


def open_data(
    config: SFTConfig, tokenizer: Any, tracking: Any, processor: Any = None
) -> tuple[SFTDataset, SFTDataset | None]:
    """Training rows, and validation rows or None; `data.custom_cls` may replace the class. processor: of a model that
    sees images."""
    data, kind = config.data, PairDataset if config.preference.loss else SFTDataset
    if data.custom_cls.path:
        kind = load_extern_object(data.custom_cls.path, str(data.custom_cls.name))
    if config.preference.loss == "reward" and not ChatRenderer(tokenizer).has_template:
        raise UserError(
            "preference.loss=reward: the tokenizer has no chat template; add chat_template.jinja to the model"
        )
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
        "head": "score" if config.preference.loss == "reward" else "lm",
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


def as_trajectory(row: SFTRow, uid: str, index: int = 0) -> Trajectory:
    """A row for the engine: prompt up to the first learned token (at least one), response up to the last."""
    learned = np.flatnonzero(row.mask[1:]) + 1
    start, stop = int(learned[0]), int(learned[-1]) + 1
    response = row.ids[start:stop]
    return Trajectory(
        prompt=Prompt(uid=uid, ids=row.ids[:start], messages=None, media=row.media),
        index=index,
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
        mask = flat(micro.rows, "loss_mask")
        learned = micro.log_probs[torch.from_numpy(mask).to(micro.log_probs.device)]
        negative = -learned.sum()
        return negative / self._total, {"train/loss": (float(negative.detach()), float(learned.numel()))}
