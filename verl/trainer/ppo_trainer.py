"""The training loop; nothing else. Parts never know the loop, the loop wires and drives them.

    driver: one process, holds prompts, trajectories and scalars, never a model

    schedule.take → rewards → passes (old log-probs, reference, values, …) → advantages → update (critic, policy)
          ↑ waits for the sampler  (scored while sampling)                                        │
          └──────────────────── weight sync (a new version) ←─────────────────────────────────────┘

A step, in `_train_step`: sample the step's groups (with `algorithm.filter_groups` those whose responses differ); score
what is not scored yet; run the forward passes that the algorithm declares (`verl.algorithms.needs`), each by the role
that it names; turn scores into advantages; update the critic, if there is one, and then the policy, unless the critic
is still warming up; push the policy's weights to the sampler; validate, save, log.

Who waits for whom: the loop waits for the last response of the step's oldest groups (`gen`), then for missing scores
(`reward`), then for each pass of the trainer. With trainer.max_staleness = 0 nothing else is in flight, and the sampler
waits for the trainer between `take`s; where both are on the same devices it lends its memory meanwhile (`Colocation`).
With k > 0 the groups of the next k steps are in flight too: the sampler goes on while the trainer computes, stops for
the weight sync, and continues every response with the new weights. With trainer.weight_sync_every = t > 1 the weights
are synced every t steps, and a version's t steps are in flight together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from verl.algorithms.batch_advantages import compute_advantages, rows_of_update
from verl.algorithms.kl import KLController
from verl.algorithms.needs import Pass, passes, with_old_log_probs
from verl.config import Config
from verl.rollout.recorded import Recorded
from verl.rollout.schedule import evict_stale, open_schedule
from verl.trainer.parts import Parts
from verl.trainer.step_record import StepRecord
from verl.trainer.sync_probe import SyncProbe
from verl.trajectory import Batch
from verl.weight_sync.verify import SyncResult
from verl.workers.roles import Role, trained_of
from verl.workers.update_plan import UpdateResult


class PPOTrainer:
    """Trains on the oldest groups; max_staleness = 0 is synchronous on-policy training."""

    def __init__(self, config: Config, parts: Parts, total_steps: int):
        self.config, self.parts, self.total_steps = config, parts, total_steps
        self.step = 0
        self.schedule = open_schedule(config, parts.stream, parts.rewards, total_steps)
        self.versions = self.schedule.versions
        assert parts.workers.weight_sync is not None
        self.weight_sync = parts.workers.weight_sync
        self.passes = passes(config, parts.workers.policy.updates_per_step)
        self.colocation = parts.colocation
        self.record = StepRecord(config, parts, self.schedule)
        self.probe = SyncProbe(config, parts)
        self.recorded = Recorded.of(config)

    def fit(self) -> None:
        """Train from the newest checkpoint, or from the start, to the last step."""
        parts, trainer = self.parts, self.config.trainer
        self.start()
        parts.tracking.start_progress(self.total_steps, self.step)
        if (trainer.val_before_train and self.step == 0) or trainer.val_only:
            self._validate(first=True)
            parts.tracking.write_page(last=trainer.val_only)
        while self.step < self.total_steps and not trainer.val_only:
            self.step += 1
            self._train_step(self.step)
        parts.checkpoints.finish()
        parts.tracking.finish("finished")

    def start(self) -> None:
        """Resume, and give the sampler its first weights."""
        self.colocation.to_training()
        self.step = self.parts.checkpoints.resume()
        self.record.announce(self.step, self.total_steps)
        self.record.proven(self.weight_sync.push(self.versions.at(self.step + 1)))
        self.colocation.to_sampling()

    def _train_step(self, step: int) -> None:
        parts, record = self.parts, self.record
        with record.timed(step):
            batch = self.sample(step)
            metrics = self.score(step, batch)
            self.probe.begin(batch)
            self.colocation.to_training()
            self.probe.before_update(self.versions.at(step))
            metrics |= self.train(step, batch)
            record.synced(self.push(step, metrics), self.versions.at(step) + 1)
            metrics |= self._validate() if self._due(self.config.trainer.test_freq, step) else {}
            parts.tracking.dump_trajectories(step, batch)
            parts.tracking.keep(step, batch, total_steps=self.total_steps, threads=torch.get_num_threads())
            if self._due(self.config.trainer.save_freq, step):
                with parts.phases("save_checkpoint"):
                    parts.tracking.flush()  # a step that is never computed again has its responses on disk
                    state = self.schedule.state(step)
                    parts.checkpoints.save(step, state, batch, metrics | record.facts(step, batch))
        record.log(step, batch, metrics)
        parts.tracking.write_page(last=step == self.total_steps)
        record.check_limits(step, batch, metrics)
        self.probe.check()

    def sample(self, step: int) -> Batch:
        """The step's groups, oldest draws first; those of the steps that may follow are begun with them."""
        parts = self.parts
        responses = self.config.data.train_batch_size * parts.rollouts.settings.per_prompt
        progress = parts.tracking.progress("responses", total=responses, beat=parts.phases.beat)
        with parts.phases("gen", waits_for=f"{responses} responses of the sampler"):
            batch = None if self.recorded is None else self.recorded.load(step)
            if batch is not None:
                self.schedule.due(step)  # the data goes on as if its prompts had been sampled
            else:
                batch = parts.loop.run(self.schedule.take(parts.rollouts, step, progress))
                if self.recorded is not None:
                    self.recorded.save(step, batch)
        self.record.sampled = parts.workers.sampler.stats()
        return batch

    def score(self, step: int, batch: Batch) -> dict[str, float]:
        """Wait for the batch's missing scores; RewardErrorLimit where too many failed."""
        parts = self.parts
        with parts.phases("reward", waits_for="scores of the last responses"):
            parts.loop.run(parts.rollouts.scored(batch))
            parts.loop.run(parts.rewards.score_batch(batch))
            evicted = evict_stale(batch, self.versions, step)
            parts.rewards.check_errors(batch)
        return self.schedule.metrics | evicted

    def train(self, step: int, batch: Batch) -> dict[str, Any]:
        """From scores to new weights; fills the token-level columns on the way."""
        parts = self.parts
        self.record.check_images(step, batch, self.colocation)
        roles, kl, n = parts.workers.roles, parts.kl_controller, parts.rollouts.settings.n
        metrics, updates = train_on(
            self.config, roles, self.passes, batch, step, n=n, kl=kl, state=parts.estimator_state, within=self._within
        )
        parts.stream.update(batch)
        return metrics | self.record.of_updates(step, batch, updates)

    @contextmanager
    def _within(self, phase: str, role: Role | None, optimizer: bool) -> Iterator[None]:
        computing = nullcontext() if role is None else self.colocation.computing(role, optimizer=optimizer)
        with self.parts.phases(phase), computing:
            yield

    def push(self, step: int, metrics: dict[str, Any]) -> SyncResult:
        """Weights of this step to the sampler; responses in flight go on with them, and new ones begin. Adds the
        proof's metrics."""
        parts, trainer = self.parts, self.config.trainer
        if not self.versions.pushed(step, self.total_steps):
            return SyncResult(0, 0.0)
        if not trainer.partial_rollout:
            with parts.phases("gen", waits_for="responses in flight, before new weights"):
                parts.loop.run(parts.rollouts.drain())
        self.probe.before_push()
        with parts.phases("update_weights"):
            parts.loop.run(parts.rollouts.requests.pause())
            # A sleeping sampler takes the weights asleep: its cache comes back after the trainer's part.
            sync = self.weight_sync.push(self.versions.at(step) + 1, verify=trainer.verify_weight_sync)
            self.colocation.to_sampling()
        metrics |= self.probe.after_push(self.versions.at(step) + 1)
        parts.loop.run(parts.rollouts.requests.resume())
        if trainer.max_staleness:
            parts.loop.run(parts.rollouts.begin(self.schedule.due(step + 1)))
        return sync

    def _due(self, frequency: int, step: int) -> bool:
        return frequency > 0 and (step % frequency == 0 or step == self.total_steps)

    def _validate(self, *, first: bool = False) -> dict[str, Any]:
        parts = self.parts
        if parts.validator is None:
            return {}
        with parts.phases("testing", waits_for="validation responses"):
            metrics: dict[str, Any] = parts.loop.run(parts.validator.run(self.step, first=first))
        parts.workers.sampler.stats()  # what validation took is no part of the next step's
        if first:
            parts.tracking.log(self.step, metrics)
        return metrics


def train_on(
    config: Config,
    roles: Mapping[str, Role],
    passes: Sequence[Pass],
    batch: Batch,
    step: int,
    *,
    n: int,
    kl: KLController | None,
    state: dict[str, Any],
    within: Callable[[str, Role | None, bool], AbstractContextManager[None]],
) -> tuple[dict[str, Any], dict[str, UpdateResult]]:
    """A step from scores to new weights: passes, advantages, updates; fills the batch's columns on the way. Returns
    metrics, and the result of each role that was updated.

    state: what the estimator keeps from step to step. within: makes the context of a phase, of the role that computes
    in it and whether it is updated.
    """
    warm = step >= config.trainer.critic_warmup or "critic" not in roles
    for forward_pass in passes if warm else with_old_log_probs(list(passes)):
        role = roles[forward_pass.role]
        with within(forward_pass.name, role, False):
            role.forward(batch, forward_pass.name, forward_pass.outputs)
    with within("adv", None, False):
        beta = kl.value if kl is not None else None
        metrics: dict[str, Any] = compute_advantages(batch, config.algorithm, n, beta, state)
        trained, drawn = rows_of_update(batch, config.algorithm, (config.trainer.seed, step))
    updates = {}
    for trained_role in trained_of(roles, policy=warm):
        with within(trained_role.phase, trained_role, True):
            updates[trained_role.name] = trained_role.update(trained, step=step)
    if kl is not None:
        kl.update(metrics["actor/reward_kl_penalty"], len(batch))
    return metrics | drawn, updates
