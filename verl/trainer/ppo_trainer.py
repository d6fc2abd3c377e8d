"""The training loop; nothing else. Parts never know the loop, the loop wires and drives them.

    driver: one process, holds prompts, trajectories and scalars, never a model

    stream → rollouts.take ──→ rewards ──→ old log-probs, reference ──→ advantages ──→ actor.update
                ↑ waits for the sampler    (scored while sampling)                          │
                └────────────────────────── weight sync (version = step) ←─────────────────┘

Who waits for whom: the loop waits for the last response of the step's oldest groups (`gen`), then for scores that
are not there yet (`reward`), then for each pass of the trainer. With trainer.max_staleness = 0 nothing else is in
flight, and the sampler waits for the trainer between `take`s. With k > 0 the groups of the next k steps are in
flight too: the sampler goes on while the trainer computes, stops for the weight sync, and continues every response
with the new weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl.algorithms.agreement import first_step_disagreement
from verl.algorithms.correction import weights_of_the_update
from verl.algorithms.driver import compute_advantages
from verl.algorithms.importance import parse_correction
from verl.rollout.schedule import PromptSchedule, evict_stale
from verl.tracking.mfu import step_mfu
from verl.tracking.step_metrics import Counters, StepFacts, step_metrics
from verl.tracking.timeline import Timeline, step_times
from verl.trainer.profiled import profiled
from verl.trainer.refused import RefusedSteps

if TYPE_CHECKING:
    from verl.algorithms.kl import KLController
    from verl.config import Config
    from verl.data.stream import PromptStream
    from verl.engine.rollout.base import RolloutEngine
    from verl.profiling.profiler import Profiler
    from verl.report.live import LiveReport
    from verl.reward.runner import RewardRunner
    from verl.rollout.event_loop import Loop
    from verl.rollout.manager import RolloutManager
    from verl.tracking.timer import Phases
    from verl.tracking.tracker import Tracking
    from verl.trainer.resume import Checkpoints
    from verl.trainer.validation import Validator
    from verl.trajectory import Batch
    from verl.weight_sync.base import SyncResult, WeightSync
    from verl.workers.actor import ActorRole
    from verl.workers.reference import ReferenceRole


@dataclass
class Parts:
    """Everything the loop drives, built by `verl.trainer.run`."""

    stream: PromptStream
    rollouts: RolloutManager
    rewards: RewardRunner
    actor: ActorRole
    reference: ReferenceRole | None
    kl_controller: KLController | None
    weight_sync: WeightSync
    sampler: RolloutEngine
    validator: Validator | None
    checkpoints: Checkpoints
    tracking: Tracking
    phases: Phases
    report: LiveReport
    loop: Loop
    counters: Counters = field(default_factory=Counters)
    devices: int = 1
    close: Callable[[], None] = lambda: None
    profiler: Profiler | None = None


class PPOTrainer:
    """Trains on the oldest groups; max_staleness = 0 is synchronous on-policy training."""

    def __init__(self, config: Config, parts: Parts, total_steps: int):
        self.config = config
        self.parts = parts
        self.total_steps = total_steps
        self.step = self._resumed_at = 0
        self.last_batch: Batch | None = None
        self.draws = PromptSchedule(
            parts.stream, max_staleness=config.trainer.max_staleness, last_step=total_steps
        )
        self._correction = parse_correction(config.algorithm.rollout_correction)
        self._timeline = Timeline(parts.tracking.run_dir / "timeline.jsonl", parts.tracking.notice)
        self._refused = RefusedSteps(config.trainer.max_refused_steps, parts.tracking, parts.counters)

    def fit(self) -> None:
        """Train from the newest checkpoint, or from the start, to the last step."""
        parts, trainer = self.parts, self.config.trainer
        if self._sampler_rests:
            parts.sampler.sleep()
        self.step = self._resumed_at = parts.checkpoints.resume(self)
        if self.step >= self.total_steps > 0 and not trainer.val_only:
            parts.tracking.notice(
                f"nothing is left to do: step {self.step} of {self.total_steps} is saved in {parts.tracking.run_dir}. Raise "
                "trainer.total_training_steps (or trainer.total_epochs), or start anew with another "
                "trainer.experiment_name or trainer.resume_mode=disable"
            )
        if trainer.save_freq <= 0 and self.step < self.total_steps and not trainer.val_only:
            parts.tracking.notice(
                "trainer.save_freq is not set: the trained model will NOT be saved (trainer.save_freq=N saves)"
            )
        parts.weight_sync.push(self.step)
        if self._sampler_rests:
            parts.sampler.wake()
        parts.tracking.start_progress(self.total_steps, self.step)
        if (trainer.val_before_train and self.step == 0) or trainer.val_only:
            self._validate(first=True)
            parts.report.write(last=trainer.val_only)
        if not trainer.val_only:
            for step in self.steps():
                self._one_step(step)
        parts.checkpoints.finish()
        parts.tracking.finish("finished")

    def steps(self) -> Iterator[int]:
        """Step numbers still to do; `self.step` is the one in progress."""
        while self.step < self.total_steps:
            self.step += 1
            yield self.step

    def _one_step(self, step: int) -> None:
        parts, phases = self.parts, self.parts.phases
        phases.start_step()
        with phases("step"), profiled(parts.profiler, step, phases, parts.tracking):
            batch = self._sample(step)
            sampled = parts.sampler.stats()
            metrics = self._score(step, batch)
            if self._sampler_rests:
                parts.sampler.sleep()
            metrics |= self._train(step, batch)
            parts.stream.update(batch)
            with phases("update_weights"):
                sync = self._push(step)
            metrics |= self._validate() if self._due(self.config.trainer.test_freq, step) else {}
            parts.tracking.dump_trajectories(step, batch)
            if self._due(self.config.trainer.save_freq, step):
                record = metrics | self._facts(step, batch, sampled, sync)
                with phases("save_checkpoint"):
                    parts.tracking.flush()  # a step that is never computed again has its responses on disk
                    parts.checkpoints.save(self, batch, record)
        metrics |= self._facts(step, batch, sampled, sync) | self._times(step)
        self.last_batch = batch
        parts.tracking.log(step, metrics)
        parts.report.write(last=step == self.total_steps)
        self._refused.check()
        self._limit_disagreement(metrics)

    def _facts(self, step: int, batch: Batch, sampled: dict[str, float], sync: SyncResult) -> dict[str, Any]:
        """What follows from the batch and the clock, as metrics."""
        facts = StepFacts(
            step=step,
            epoch=self.draws.epoch(step),
            timings=self.parts.phases.timings(),
            sampler=sampled,
            sync_bytes=sync.bytes,
            weight_version=step,
            max_prompt_length=self.config.data.max_prompt_length,
            max_response_length=self.config.data.max_response_length,
            memory=self.parts.actor.memory(),
            devices=self.parts.devices,
        )
        return step_metrics(batch, facts, self.parts.counters)

    def _sample(self, step: int) -> Batch:
        """The step's groups, oldest draws first; those of the steps that may follow are begun with them."""
        parts = self.parts
        prompts = self.draws.due(step)
        size = self.draws.size(step)
        responses = size * self.config.actor_rollout_ref.rollout.n
        show = parts.tracking.progress("responses", total=responses)

        def advance(count: int) -> None:
            parts.phases.beat()
            show(count)

        with parts.phases("gen", waits_for=f"{responses} responses of the sampler"):
            return parts.loop.run(parts.rollouts.take(prompts, advance, count=size))

    def _score(self, step: int, batch: Batch) -> dict[str, float]:
        parts = self.parts
        with parts.phases("reward", waits_for="scores of the last responses"):
            parts.loop.run(parts.rollouts.scored(batch))
            parts.loop.run(parts.rewards.score_batch(batch))
            metrics = self._evict(step, batch)
            parts.rewards.check_errors(batch)
            return metrics

    def _evict(self, step: int, batch: Batch) -> dict[str, float]:
        lag = self.config.trainer.max_staleness
        if not lag:
            return {}
        return {
            "training/off_policy/evicted_samples": evict_stale(batch, step - 1 - lag),
            "training/off_policy/continued_samples": sum("interruptions" in t.extra for t in batch),
        }

    def _train(self, step: int, batch: Batch) -> dict[str, float]:
        """From scores to new weights; fills the token-level columns on the way."""
        parts, phases, algorithm = self.parts, self.parts.phases, self.config.algorithm
        if self._needs_old_log_probs:
            with phases("old_log_prob"):
                parts.actor.old_log_probs(batch)
        if parts.reference is not None:
            with phases("ref"):
                parts.reference.log_probs(batch)
        with phases("adv"):
            beta = parts.kl_controller.value if parts.kl_controller is not None else None
            metrics = compute_advantages(batch, algorithm, self.config.actor_rollout_ref.rollout.n, beta)
        with phases("update_actor"):
            update = parts.actor.update(batch, step=step)
        metrics |= weights_of_the_update(batch.trajectories, self._correction)
        parts.counters.skipped_updates += update.skipped
        if parts.kl_controller is not None:
            parts.kl_controller.update(metrics["actor/reward_kl_penalty"], len(batch))
        self._refused.note(step, update)
        if update.tokens:
            shared, epochs = update.computed / update.tokens, self.config.actor_rollout_ref.actor.ppo_epochs
            metrics["perf/prompt_sharing_saved_ratio"] = max(0.0, 1 - shared)
            metrics |= step_mfu(
                parts.actor.cost(), batch, phases.timings(), epochs=epochs, computed=min(1.0, shared)
            )
        return metrics | update.metrics

    def _push(self, step: int) -> SyncResult:
        """Weights of this step to the sampler; responses in flight go on with them, and new ones begin."""
        parts, trainer = self.parts, self.config.trainer
        parts.loop.run(parts.rollouts.pause())
        # A sampler that sleeps takes the weights in its sleep: its cache comes back when the trainer's part is over.
        sync = parts.weight_sync.push(step, verify=trainer.verify_weight_sync)
        if sync.verified:
            parts.tracking.event("weights_verified", version=step, bytes=sync.bytes)
        if self._sampler_rests:
            parts.sampler.wake()
        parts.loop.run(parts.rollouts.resume())
        if trainer.max_staleness:
            parts.loop.run(parts.rollouts.begin(self.draws.due(step + 1)))
        return sync

    def _times(self, step: int) -> dict[str, float]:
        times = step_times(self.parts.phases.spans(), self.parts.loop.run(self.parts.rollouts.busy()))
        self._timeline.write(step, times)
        trainer, rollout = self.config.trainer, self.config.actor_rollout_ref.rollout
        own = rollout.nnodes * rollout.n_gpus_per_node if rollout.nnodes else 0
        return times.metrics(own, trainer.nnodes * trainer.n_gpus_per_node)

    @property
    def _sampler_rests(self) -> bool:
        """True if the sampler has nothing to do while the trainer works on the same devices, and is to lend its memory."""
        rollout, lag = self.config.actor_rollout_ref.rollout, self.config.trainer.max_staleness
        return rollout.free_cache_engine and not rollout.nnodes and not lag

    @property
    def _needs_old_log_probs(self) -> bool:
        """False when the first update's own log-probs are the old ones, or the sampler's (algorithms.md §1)."""
        if self._correction.bypass:
            return False
        several = self.parts.actor.updates_per_step > 1
        return several or self.config.algorithm.use_kl_in_reward or self._correction.active

    def _due(self, frequency: int, step: int) -> bool:
        return frequency > 0 and (step % frequency == 0 or step == self.total_steps)

    def _validate(self, *, first: bool = False) -> dict[str, float]:
        parts = self.parts
        if parts.validator is None:
            return {}
        with parts.phases("testing", waits_for="validation responses"):
            metrics = parts.loop.run(parts.validator.run(self.step, first=first))
        parts.sampler.stats()
        if first:
            parts.tracking.log(self.step, metrics)
        return metrics

    def _limit_disagreement(self, metrics: dict[str, Any]) -> None:
        if self.step == self._resumed_at + 1 and (said := first_step_disagreement(metrics, self.config)):
            raise DisagreementError(f"step {self.step}: {said}")
        limit = self.config.trainer.logprob_diff_limit
        worst = metrics.get("training/rollout_logprob_abs_diff/max")
        if limit is not None and worst is not None and worst > limit:
            raise DisagreementError(
                f"step {self.step}: sampler and trainer differ by {worst:.3g} nats on a token, more than "
                f"trainer.logprob_diff_limit={limit:g}. Raise the limit, or compute in float32 "
                "(actor_rollout_ref.actor.fsdp_config.dtype=float32)"
            )


class DisagreementError(RuntimeError):
    """Sampler and trainer disagree by more than `trainer.logprob_diff_limit`, or than rounding explains in the first batch."""

    explained = True
