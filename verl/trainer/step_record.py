"""What is recorded of a step: its phases and profile, its metrics, what was refused, and the limits that end a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from verl.algorithms.advantage import variance_proxies
from verl.algorithms.agreement import first_step_bound, first_step_disagreement
from verl.algorithms.correction import parse_correction, weights_of_the_update
from verl.algorithms.registry import ESTIMATORS
from verl.algorithms.value_loss import explained_variance
from verl.config import Config
from verl.config.layout import policy_placement
from verl.planning import compare
from verl.rollout.schedule import PromptSchedule
from verl.tracking.step_metrics import Counters, StepFacts, step_metrics, step_mfu
from verl.tracking.timer import StepTimes, Timeline, profiled
from verl.tracking.tracker import Tracking
from verl.trainer.colocation import Colocation
from verl.trainer.image_checks import ImageRecord
from verl.trainer.parts import Parts
from verl.trainer.step_checks import StepChecks
from verl.trajectory import COLUMNS, Batch, Trajectory
from verl.weight_sync.verify import SyncResult
from verl.workers.update_plan import Refusal, UpdateResult

REJECTED_SHARE = 0.05
"""Share of rejected responses above which a run says that they stay in their groups' statistics."""
_PLANNED = 3
"""After so many steps a run is held against its plan for the first time."""


class DisagreementError(RuntimeError):
    """Sampler and trainer disagree by more than `trainer.logprob_diff_limit`."""

    explained = True


class TooManyRefused(RuntimeError):
    """`trainer.max_refused_steps` updates in a row were refused."""

    explained = True


def dump_rows(directory: Path, rows: list[Trajectory], reason: str) -> None:
    """Write the rows of a refused update: `batch.safetensors` (columns of all segments, one after the other, and the
    length of each) and `batch.json` (a mapping for each trajectory, with the contexts of its segments).

    OSError where they cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    segments = [segment for row in rows for segment in row.segments]
    arrays = {"lengths": np.array([segment.length for segment in segments], np.int64)}
    for column in COLUMNS:
        values = [segment.columns[column] for segment in segments if column in segment.columns]
        if len(values) == len(segments):
            arrays[column] = np.concatenate(values)
    try:
        save_file(arrays, directory / "batch.safetensors")
    except SafetensorError as error:  # what the library makes of a full disk
        raise OSError(str(error)) from error
    listing = [
        {name: getattr(row, name) for name in ("uid", "index", "status", "text", "score")}
        | {"context_ids": [segment.context_ids.tolist() for segment in row.segments]}
        for row in rows
    ]
    (directory / "batch.json").write_text(json.dumps({"reason": reason, "rows": listing}, ensure_ascii=False))


class RefusedSteps:
    """Counts steps in a row with a refused update; `counters` keeps the count across a resume. `lead`: this rank dumps
    what was refused; the others count, so that all end at the same step."""

    def __init__(self, limit: int, tracking: Tracking, counters: Counters, *, lead: bool = True):
        self._limit, self._tracking, self._counters, self._lead = limit, tracking, counters, lead
        self._last = ""

    def note(self, step: int, *updates: UpdateResult) -> None:
        """Record a step's outcome, of every role; `check` then says whether the run may go on."""
        refused = [refusal for update in updates for refusal in update.refused]
        if not refused:
            if any(update.updates for update in updates):
                self._counters.refused_in_a_row = 0
            return
        self._counters.refused_steps += len(refused)
        self._counters.refused_in_a_row += 1
        self._last = refused[-1].reason
        for number, refusal in enumerate(refused if self._lead else ()):
            self._keep(step, number, refusal)

    def _keep(self, step: int, number: int, refusal: Refusal) -> None:
        """Dump the batch, and say where."""
        directory, why = self._tracking.run_dir / "refused" / f"step_{step}" / str(number), refusal.reason
        try:
            dump_rows(directory, refusal.rows, why)
        except OSError as error:
            self._tracking.event("dump_failed", path=str(directory), error=str(error))
        message = f"step {step}: update refused, {why}; the batch is in {directory}"
        self._tracking.event("refused_update", step=step, reason=why, dump=str(directory), message=message)

    def check(self) -> None:
        """Raise TooManyRefused at the limit. Called when the step is logged, so that its record is there."""
        if self._last and self._counters.refused_in_a_row >= self._limit:
            raise TooManyRefused(
                f"{self._counters.refused_in_a_row} steps in a row had a non-finite update "
                f"(trainer.max_refused_steps={self._limit}); the last: {self._last}. "
                f"The batches are in {self._tracking.run_dir}/refused. "
                "Lower the learning rate (optim.lr), check the reward's range, or start from an earlier checkpoint"
            )


class StepRecord:
    """The record of the step in progress. `sampled` (the sampler's counters) and `sync` come from the loop."""

    def __init__(self, config: Config, parts: Parts, schedule: PromptSchedule):
        self.counters = parts.counters
        self.sampled: dict[str, float] = {}
        self.sync = SyncResult(0, 0.0)
        self._proof: dict[str, float] = {}
        self._steps = 0
        self._announced: set[str] = set()
        self._config, self._parts, self._schedule = config, parts, schedule
        self._bound = first_step_bound(config, parts.workers.policy.compute_dtype)
        self._correction = parse_correction(config.algorithm.rollout_correction)
        self._timeline = Timeline(parts.tracking.run_dir / "timeline.jsonl", parts.tracking.notice)
        seeing = getattr(parts.stream.dataset, "images", None) is not None
        self._images = ImageRecord(parts) if seeing else None
        self._refused = RefusedSteps(config.trainer.max_refused_steps, parts.tracking, self.counters)
        self.checks = StepChecks(config, parts, schedule, self._announce_once)
        self.updates: Mapping[str, UpdateResult] = {}

    def announce(self, step: int, total_steps: int) -> None:
        """Say what a user does not expect of a run that starts at `step`."""
        trainer, tracking = self._config.trainer, self._parts.tracking
        if step >= total_steps > 0 and not trainer.val_only:
            tracking.notice(
                f"nothing is left to do: step {step} of {total_steps} is saved in {tracking.run_dir}. Raise "
                "trainer.total_training_steps (or trainer.total_epochs), or start anew with another "
                "trainer.experiment_name or trainer.resume_mode=disable"
            )
        if trainer.save_freq <= 0 and step < total_steps and not trainer.val_only:
            tracking.notice(
                "trainer.save_freq is not set: the trained model will NOT be saved (trainer.save_freq=N saves)"
            )

    @contextmanager
    def timed(self, step: int) -> Iterator[None]:
        """The phases of a step, and its profile if there is one."""
        parts = self._parts
        parts.phases.start_step()
        with parts.phases("step"), profiled(parts.workers.profiler, step, parts.phases, parts.tracking):
            yield

    def proven(self, sync: SyncResult) -> None:
        """training/sync_proof/* of the first push, in the record of the next step. A difference ends the run before."""
        self._proof = {"training/sync_proof/max_abs_diff": 0.0, "training/sync_proof/tensors": sync.verified}

    def synced(self, sync: SyncResult, version: int) -> None:
        """What the push of `version` cost, and whether it was verified."""
        self.sync = sync
        if sync.verified:
            self._parts.tracking.event("weights_verified", version=version, bytes=sync.bytes)

    def check_images(self, step: int, batch: Batch, colocation: Colocation) -> None:
        """See `ImageRecord.check`; nothing for a model that sees none."""
        if self._images is not None:
            self._images.check(step, batch, colocation)

    def of_updates(self, step: int, batch: Batch, updates: Mapping[str, UpdateResult]) -> dict[str, Any]:
        """Metrics of the updates of a step, by role; what was refused is dumped and counted."""
        metrics: dict[str, Any] = {}
        self.updates = updates
        for update in updates.values():
            self.counters.skipped_updates += update.skipped
            metrics |= update.metrics
        self._refused.note(step, *updates.values())
        if "critic" in updates:
            rows = [t for t in batch if t.loss_mask is not None and t.loss_mask.any()]
            returns, values = (
                np.concatenate([np.zeros(0), *(getattr(t, name)[t.loss_mask] for t in rows)])
                for name in ("returns", "values")
            )
            metrics["critic/vf_explained_var"] = explained_variance(returns, values)
            metrics |= self._efficiency("critic", batch, updates["critic"])
        if "actor" in updates:
            metrics |= self._of_policy(step, batch, updates["actor"])
        return metrics

    def _say_without_signal(self, step: int, batch: Batch) -> None:
        """An event, and the first time a notice, where every advantage is 0: the rewards do not tell responses
        apart."""
        taught = self._config.distillation.enabled
        if taught or any(t.advantages is not None and t.advantages.any() for t in batch):
            return
        scores = sorted({t.score for t in batch if t.score is not None})
        message = (
            f"step {step}: every advantage is 0 (scores: {', '.join(map(str, scores[:5])) or 'none'}), "
            "so its rewards teach nothing; if it goes on, look at the reward function (verl reward check) and the data"
        )
        self._announce_once("no_signal", message, step=step, scores=scores[:5])

    def _say_rejected(self, step: int, metrics: Mapping[str, Any]) -> None:
        """An event, and the first time a notice, where rejected responses shift the baseline of the accepted ones."""
        share = metrics.get("rollout_corr/rollout_rs_rejected_fraction", 0.0)
        if (
            not share > REJECTED_SHARE
            or not self._correction.rejected_in_baseline
            or not ESTIMATORS.declared(self._config.algorithm.adv_estimator).compares_groups
        ):
            return
        message = (
            f"step {step}: rollout_rs rejects {share:.0%} of the responses, "
            "and their scores still count in the mean and standard deviation of their groups"
        )
        if not self._correction.bypass:
            message += " (algorithm.rollout_correction.rollout_rs_in_baseline=False leaves them out)"
        self._announce_once("rejected_in_baseline", message, step=step, share=share)

    def _announce_once(self, kind: str, message: str, **fields: Any) -> None:
        """An event of this kind, with the message the first time."""
        first = kind not in self._announced
        self._announced.add(kind)
        self._parts.tracking.event(kind, **fields, message=message if first else None)

    def _of_policy(self, step: int, batch: Batch, update: UpdateResult) -> dict[str, Any]:
        self._say_without_signal(step, batch)
        metrics: dict[str, Any] = weights_of_the_update(batch.trajectories, self._correction)
        if batch.has("sum_pi_squared"):
            metrics |= variance_proxies(batch.trajectories, update.metrics.get("actor/grad_norm", math.nan))
        if update.tokens:
            metrics["perf/prompt_sharing_saved_ratio"] = max(0.0, 1 - update.computed / update.tokens)
        return metrics | self._efficiency("actor", batch, update)

    def _efficiency(self, role: str, batch: Batch, update: UpdateResult) -> dict[str, float]:
        """perf/mfu/… of a role in training."""
        if not update.tokens:
            return {}
        trained: Any = self._parts.workers.roles[role]
        config = self._config.critic if role == "critic" else self._config.actor_rollout_ref.actor
        computed = min(1.0, update.computed / update.tokens)
        timings = self._parts.phases.timings()
        return step_mfu(role, trained.cost(), batch, timings, epochs=config.ppo_epochs, computed=computed)

    def facts(self, step: int, batch: Batch) -> dict[str, Any]:
        """What follows from the batch and the clock, as metrics."""
        facts = StepFacts(
            step=step,
            epoch=self._schedule.epoch(step),
            timings=self._parts.phases.timings(),
            sampler=self.sampled,
            sync_bytes=self.sync.bytes,
            weight_version=self._schedule.versions.at(step) + 1,
            max_prompt_length=self._config.data.max_prompt_length,
            max_response_length=self._config.data.max_response_length,
            memory=self._parts.workers.policy.memory() | self._parts.workers.policy.balance(batch),
            devices=self._parts.workers.devices,
        )
        return step_metrics(batch, facts, self.counters)

    def log(self, step: int, batch: Batch, metrics: dict[str, Any]) -> None:
        """The step's one record; adds to `metrics` what follows from the batch and the clock."""
        metrics |= self.facts(step, batch) | self._times(step) | self._skipped_rows(step) | self._proof
        self._proof = {}
        if self._images is not None:
            metrics |= self._images.metrics(batch, self.sampled)
        self._say_rejected(step, metrics)
        self.checks.after_step(step, batch, self.updates, metrics)
        self.updates = {}
        self._parts.tracking.log(step, metrics)
        self._steps += 1
        tracking = self._parts.tracking
        if self._steps == _PLANNED and (pairs := compare.compared(self._config, tracking.run_dir)):
            tracking.event("planned", pairs)  # for the page; the end of the run shows the comparison

    def _skipped_rows(self, step: int) -> dict[str, int]:
        """training/skipped_rows: rows that failed when they were drawn since the last step; {} where none did."""
        stream = self._parts.stream
        skipped, stream.skipped = stream.skipped, []
        self.counters.skipped_rows += len(skipped)
        for record in skipped:
            self._parts.tracking.event("row_skipped", step=step, **record)
        return {"training/skipped_rows": len(skipped)} if skipped else {}

    def _times(self, step: int) -> dict[str, float]:
        parts, trainer, rollout = self._parts, self._config.trainer, self._config.actor_rollout_ref.rollout
        times = StepTimes(parts.phases.spans, parts.loop.run(parts.rollouts.requests.busy()))
        self._timeline.write(step, times)
        devices = rollout.nnodes * rollout.n_gpus_per_node if rollout.nnodes else 0
        return times.metrics(devices, trainer.nnodes * trainer.n_gpus_per_node)

    def check_limits(self, step: int, batch: Batch, metrics: dict[str, Any]) -> None:
        """Raises TooManyRefused and DisagreementError at their limits, after the step is logged."""
        self._refused.check()
        bound, self._bound = self._bound, None  # only the first step is held to it
        if problem := first_step_disagreement(metrics, bound, batch):
            raise DisagreementError(f"step {step}: {problem}")
        limit = self._config.trainer.logprob_diff_limit
        worst = metrics.get("training/rollout_logprob_abs_diff/max")
        if limit is not None and worst is not None and worst > limit:
            raise DisagreementError(
                f"step {step}: sampler and trainer differ by {worst:.3g} nats on a token, more than "
                f"trainer.logprob_diff_limit={limit:g}. Raise the limit, or compute in float32 "
                f"({policy_placement(self._config).key('dtype')}=float32)"
            )
