"""Identities that hold in every step of a right run, checked with what the step has computed anyway.

A wrong mask, denominator, baseline, reference or position raises nothing: the run trains, on something else. Each check
compares two numbers that are equal unless a part is wrong; a difference is an event `check_NAME`, and the first of a
name a notice that says the cause. They cost passes over arrays of the driver, and no pass of a model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.algorithms.agreement import BOUNDS, precision_of
from verl.algorithms.correction import parse_correction
from verl.algorithms.entropy import controls_entropy
from verl.algorithms.flat_tokens import trajectory_tokens
from verl.algorithms.needs import needed_columns
from verl.algorithms.objective import ActorObjective
from verl.algorithms.source_losses import chosen_losses
from verl.config import Config
from verl.engine.training.base import MicroBatch
from verl.reward.outcome import text_digest
from verl.rollout.schedule import PromptSchedule
from verl.trainer.parts import Parts
from verl.trajectory import Batch, Segment
from verl.workers.update_plan import UpdateResult

CENTRED = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized")
"""Estimators whose advantages add up to 0 over a group and order its responses as their scores do."""
_TINY = 1e-4
_CLIPPED = 1e-3  # share of clipped tokens, which have no gradient


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """How turns end. tokens: every token that ends one, by the model's files, its tokenizer and its template; token:
    the one that the chat template writes after the model's turn (-1: none), and separator the white space after
    that."""

    tokens: tuple[int, ...]
    token: int = -1
    separator: str = ""

    @classmethod
    def of(cls, path: str, tokenizer: Any) -> TurnEnds:
        """path: folder of the model."""
        ends = {tokenizer.eos_token_id}
        for name in ("generation_config.json", "config.json"):
            file = Path(path).expanduser() / name
            ids = json.loads(file.read_text("utf-8")).get("eos_token_id") if file.is_file() else None
            ends.update(ids if isinstance(ids, list) else [ids])
        messages = [("user", "Hi"), ("assistant", "@end@"), ("user", "@more@")]
        try:
            turns = [{"role": role, "content": content} for role, content in messages]
            after = tokenizer.apply_chat_template(turns, tokenize=False).partition("@end@")[2].lstrip()
        except Exception:  # a template of any kind: one that takes other messages says nothing here
            after = ""
        special = {str(t.content): int(i) for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        end = next((text for text in special if after.startswith(text)), None)
        if end is None:
            return cls(tuple(sorted(ends - {None})))
        remainder = after.removeprefix(end)
        separator = remainder[: len(remainder) - len(remainder.lstrip())]
        return cls(tuple(sorted({*ends, special[end]} - {None})), special[end], separator)

    def passed(self, segment: Segment) -> int | None:
        """The first of `tokens` that the policy drew and went on after, within a turn."""
        ids, mask = segment.response_ids, segment.response_mask
        drawn = ids[:-1][np.isin(ids[:-1], self.tokens) & mask[:-1] & mask[1:]]
        return int(drawn[0]) if len(drawn) else None

    def joined(self, segment: Segment, tokenizer: Any) -> str | None:
        """What follows the end of a turn of the policy where that is not the separator; None where all is right."""
        ids, mask = segment.response_ids, segment.response_mask
        for last in np.flatnonzero(mask[:-1] & ~mask[1:]) if self.separator else ():
            end = last if ids[last] == self.token else last + 1
            following = ids[end + 1 : end + 1 + len(self.separator)]
            if ids[end] == self.token and len(following):
                text = str(tokenizer.decode(following, skip_special_tokens=False))
                if not text.startswith(self.separator[: len(text)]):
                    return text
        return None


class StepChecks:
    """Of one run. `announce` is of `StepRecord`."""

    def __init__(self, config: Config, parts: Parts, schedule: PromptSchedule, announce: Callable[..., None]):
        self._config, self._parts, self._schedule, self._announce = config, parts, schedule, announce
        actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
        self._precision = precision_of(parts.workers.policy.compute_dtype)
        trained = parts.workers.trained(policy=True)
        self._precisions = {role.name: precision_of(role.compute_dtype) for role in trained}
        correction = config.algorithm.rollout_correction
        # In bypass mode each update has masks of its own, which the next one replaces.
        self._keeps_masks = not correction.bypass_mode
        plain = actor.policy_loss.loss_mode == "vanilla" and not correction.rollout_is and self._keeps_masks
        losses = chosen_losses(actor, config.algorithm.by_source, parse_correction(correction))
        plain &= len(losses) == 1
        self._knows_loss = plain and not config.distillation.enabled
        other = config.actor_rollout_ref.ref.model.path or model.lora_adapter_path
        self._has_reference = "ref_log_probs" in needed_columns(config) and not other
        simple = not (config.algorithm.filter_groups.enable or config.data.sampler.class_path)
        self._counts = simple and not config.trainer.max_staleness and config.trainer.weight_sync_every == 1
        self._knows_gradient = self._knows_loss and not actor.observation_loss_coef
        self._knows_gradient &= not actor.use_kl_loss or actor.kl_loss_type in ("low_var_kl", "k3")
        further = actor.demonstrations.column or (model.mtp.enable and model.mtp.enable_train)  # losses of their own
        self._bonus = bool(actor.entropy_coeff) or controls_entropy(config.algorithm)
        self._knows_gradient &= not further and not self._bonus
        # A loss with the formula of its own function: of the library's, which keep nothing from call to call.
        own = all(loss.function.__module__.startswith("verl.") for loss in losses)
        again = actor.ppo_epochs > 1 and any(loss.whole is not None for loss in losses)  # what was read first is gone
        recomputed = self._keeps_masks and own and not (again or further or config.distillation.enabled)
        self._recomputes = recomputed and not self._knows_gradient
        self._tokenizer = parts.tracking.tokenizer
        ends = self._tokenizer is not None and not config.actor_rollout_ref.rollout.ignore_eos
        self._turns = TurnEnds.of(str(model.path), self._tokenizer) if ends else None
        self._still, self._updated = 0, False

    def after_step(
        self, step: int, batch: Batch, updates: Mapping[str, UpdateResult], metrics: Mapping[str, Any]
    ) -> None:
        """Check a step, and announce what is wrong."""
        for cause in self.causes(step, batch, updates, metrics):
            self._announce(f"check_{cause.partition(':')[0]}", f"step {step}: {cause}", step=step)

    def causes(
        self, step: int, batch: Batch, updates: Mapping[str, UpdateResult], metrics: Mapping[str, Any]
    ) -> list[str]:
        """What is wrong by the step's batch, updates and metrics, each as "name: cause"."""
        causes = [
            *self._of_sampling(step, batch),
            *self._of_scores(batch),
            *self._of_advantages(batch),
            *self._of_losses(updates, metrics),
            *self._of_reference(step, batch),
            *self._of_push(metrics),
        ]
        moves = metrics.get("actor/grad_norm", 0) and metrics.get("actor/lr", 0)
        self._updated = self._updated or bool(moves)
        return causes

    def _of_sampling(self, step: int, batch: Batch) -> Iterator[str]:
        written = [s for s in batch.segments if s.rollout_log_probs is not None]
        if left_out := sum(int((s.rollout_log_probs[~s.response_mask] != 0).any()) for s in written):
            yield (
                f"mask: {left_out} of {len(written)} responses have tokens that the sampler drew and the mask leaves "
                "out, so they are not trained on"
            )
        position, stream = self._schedule.position(step), self._parts.stream
        drawn = position["epoch"] * stream.steps_per_epoch + position["offset"] // stream.batch_size
        if self._counts and not self._parts.counters.skipped_rows and drawn != step:
            yield f"data: the position in the data is that of step {drawn}: rows were skipped or are drawn again"
        yield from self._of_turns(written)

    def _of_turns(self, segments: list[Segment]) -> Iterator[str]:
        ends = self._turns
        for s in segments if ends is not None else ():
            assert ends is not None
            if (token := ends.passed(s)) is not None:
                yield (
                    f"end: response {s.index} of {s.uid} goes on after token {token}, with which the model ends a "
                    f"turn: the sampler does not know it as an end (rollout.stop_token_ids=[{token}] says so)"
                )
                return
            if (text := ends.joined(s, self._tokenizer)) is not None:
                yield (
                    f"turns: in response {s.index} of {s.uid} {text!r} follows the end of a turn, where the chat "
                    f"template writes {ends.separator!r}: the model sees dialogues that its template does not make"
                )
                return

    def _of_scores(self, batch: Batch) -> Iterator[str]:
        """What each score was made of, as the scoring process notes it."""
        noted = [(t, *t.extra["scored"]) for t in batch if "scored" in t.extra]
        if failed := sum(bool(failure) and t.score is not None for t, _, failure in noted):
            yield f"reward: {failed} of {len(noted)} responses have a score, and their reward failed"
        if changed := sum(text is not None and text != text_digest(t.text) for t, text, _ in noted):
            yield f"scores: {changed} of {len(noted)} scores are those of other responses"

    def _of_advantages(self, batch: Batch) -> Iterator[str]:
        algorithm = self._config.algorithm
        for group in batch.groups():
            of_source = algorithm.by_source.get(group[0].prompt.data_source) or {}
            if of_source.get("adv_estimator", algorithm.adv_estimator) not in CENTRED:
                continue
            # Where rejected responses are left out of the baseline they have none, and add nothing to the sum.
            rows = [t for t in group if t.scored and t.advantages is not None and t.advantages.any()]
            values = np.array([t.advantages[t.response_mask][0] for t in rows], np.float64)
            size = np.abs(values).max(initial=0.0)
            if sum(t.scored for t in group) < 2 or not rows:
                continue
            if abs(values.sum()) > len(rows) * _TINY * max(1.0, size):
                yield (
                    f"baseline: the advantages of prompt {rows[0].uid} add up to {values.sum():.3g}, not 0: their "
                    "baseline is not the mean of their group"
                )
                return
            by_token = self._config.algorithm.use_kl_in_reward or any("token_scores" in t.extra for t in rows)
            order = np.argsort(np.array([t.score for t in rows], np.float64), kind="stable")
            if not by_token and (np.diff(values[order]) < -_TINY * size).any():
                yield (
                    f"pairing: the advantages of prompt {rows[0].uid} are not in the order of its scores: they are "
                    "those of other responses, or have the wrong sign"
                )
                return

    def _of_losses(self, updates: Mapping[str, UpdateResult], metrics: Mapping[str, Any]) -> Iterator[str]:
        """The loss of each role's first mini-batch, where the new policy or value still is the old one."""
        actor, critic = self._config.actor_rollout_ref.actor, self._config.critic
        terms: list[tuple[str, Any, Callable[[Segment], np.ndarray | None]]] = [
            ("critic/vf_loss", critic, lambda s: (s.values - s.returns) ** 2 / 2),
        ]
        # Advantages may cancel; entropies do not, and are aggregated by the same mask and denominator.
        terms += [("actor/entropy_loss", actor, lambda s: s.entropy)] if self._keeps_masks else []
        terms += [("actor/pg_loss", actor, lambda s: -s.advantages)] if self._knows_loss else []
        terms += [("critic/scale_derivative", critic, lambda s: (s.values - s.returns) * s.values)]
        terms += [("actor/scale_derivative", actor, self._scale_derivative)] if self._knows_gradient else []
        for name, settings, term in terms:
            role, _, of_metric = name.partition("/")
            update = updates.get(role)
            if update is None or update.first is None:
                continue
            (mini, result), segments = update.first, update.first[0].usable
            derived = of_metric == "scale_derivative"
            if derived and result.metrics.get("actor/pg_clipfrac", 0.0) > _CLIPPED:
                continue
            reported = result.scale_derivative if derived else result.metrics.get(name)
            if reported is None or any(s.loss_mask is None or term(s) is None for s in segments):
                continue
            counted = sum(int(np.count_nonzero(s.loss_mask)) for s in segments)
            if mini.denominators.tokens != counted:
                yield (
                    f"loss: the first mini-batch is divided by {mini.denominators.tokens} tokens and has {counted} to "
                    "train on: a mask is in the loss's numerator and not in its denominator"
                )
                break
            expected, size = self._aggregated(segments, term, settings)
            if wrong := self._apart(name, reported, expected, size):
                yield wrong
                break
        else:
            yield from self._of_objective(updates)
        updates_of_actor = updates["actor"].updates if "actor" in updates and self._knows_loss else 0
        moves = metrics.get("actor/lr") and metrics.get("actor/grad_norm")
        # In half precision a small step may change no product.
        if self._precision == "float32" and updates_of_actor > 1 and metrics.get("actor/ppo_kl") == 0 and moves:
            yield (
                f"ratio: after {updates_of_actor} updates the policy is exactly the old one: old log-probs are "
                "computed anew for each, and nothing is ever clipped"
            )

    def _apart(self, name: str, reported: float, expected: float, size: float) -> str:
        """What it means that a loss, or a role's scale_derivative, is not the expected one; "" where it is. size: of
        its terms."""
        if not abs(reported - expected) > BOUNDS[self._precisions[name.partition("/")[0]]].loss * size + 1e-6:
            return ""
        check, subject = "loss", name
        why = "a mask or a denominator of the loss is wrong (normalised per micro-batch?)"
        if name.endswith("/scale_derivative"):
            check, subject = "gradient", f"the gradient of {name.partition('/')[0]} along its last normalisation"
            why = "gradients are divided or added up once more, or those of an earlier mini-batch are among them"
        numbers = f"is {reported:.4g}; its rows and masks give {expected:.4g}"
        return f"{check}: {subject} of the first mini-batch {numbers}: {why}"

    def _of_objective(self, updates: Mapping[str, UpdateResult]) -> Iterator[str]:
        """The actor's loss, and its gradient, of the first mini-batch as a single micro-batch: for losses whose value
        and slope at ratio 1 no formula here gives, by their own functions."""
        first = updates["actor"].first if "actor" in updates and self._recomputes else None
        if first is None:
            return
        (mini, result), actor = first, self._config.actor_rollout_ref.actor
        segments, counts = mini.usable, trajectory_tokens(mini.usable)
        if any(s.old_log_probs is None or s.entropy is None or s.sampling_mask is not None for s in segments):
            return
        of_row = None if counts is None else dict(zip(map(id, segments), counts, strict=True))
        log_probs = torch.from_numpy(np.concatenate([s.old_log_probs for s in segments], dtype=np.float64))
        entropy = torch.from_numpy(np.concatenate([s.entropy for s in segments], dtype=np.float64))
        algorithm = self._config.algorithm
        objective = ActorObjective(
            actor, mini.denominators, algorithm.rollout_correction, of_row, by_source=algorithm.by_source
        )
        loss, _ = objective(MicroBatch(segments, log_probs.requires_grad_(), entropy))
        (slopes,) = torch.autograd.grad(loss, log_probs)
        terms = slopes * (log_probs.detach() + entropy)
        pairs = [("actor/loss", result.metrics.get("actor/loss"), loss.item(), float(slopes.abs().sum()))]
        if not self._bonus:
            size = float(terms.abs().sum())
            pairs.append(("actor/scale_derivative", result.scale_derivative, float(terms.sum()), size))
        for name, reported, expected, size in pairs:
            if reported is not None and (wrong := self._apart(name, reported, expected, size)):
                yield wrong
                return

    def _scale_derivative(self, s: Segment) -> np.ndarray | None:
        """Of a token's loss at ratio 1, by s, which multiplies all logits: d log p / ds = log p + entropy."""
        if s.entropy is None or s.advantages is None or s.old_log_probs is None or s.sampling_mask is not None:
            return None
        by_log_prob = -s.advantages
        actor = self._config.actor_rollout_ref.actor
        if actor.use_kl_loss:
            by_log_prob = by_log_prob + actor.kl_loss_coef * (1 - np.exp(s.ref_log_probs - s.old_log_probs))
        return by_log_prob * (s.old_log_probs + s.entropy)

    def _aggregated(
        self, segments: list[Segment], term: Callable[[Segment], Any], settings: Any
    ) -> tuple[float, float]:
        """A term of each token, aggregated over a mini-batch by loss_agg_mode, and its size; counted anew, float64."""
        own: dict[int, int] = {}
        for segment in segments:
            key = id(segment.trajectory or segment)
            own[key] = own.get(key, 0) + int(np.count_nonzero(segment.loss_mask))
        longest = float(settings.loss_scale_factor or self._config.data.max_response_length)
        divisors: dict[str, Callable[[int], float]] = {
            "token-sum": lambda tokens: 1.0,
            "token-mean": lambda tokens: sum(own.values()),
            "seq-mean-token-sum": lambda tokens: len(own),
            "seq-mean-token-mean": lambda tokens: len(own) * tokens,
            "seq-mean-token-sum-norm": lambda tokens: len(own) * longest,
        }
        value = size = 0.0
        for segment in segments:
            divisor = divisors[settings.loss_agg_mode](own[id(segment.trajectory or segment)])
            values = term(segment)[segment.loss_mask].astype(np.float64) / max(1.0, divisor)
            value, size = value + values.sum(), size + np.abs(values).sum()
        return value, size

    def _of_reference(self, step: int, batch: Batch) -> Iterator[str]:
        rows = [t for t in batch if t.ref_log_probs is not None and t.old_log_probs is not None and t.policy_tokens]
        if not self._has_reference or not rows:
            return
        apart = np.concatenate([np.abs(t.ref_log_probs - t.old_log_probs)[t.response_mask] for t in rows])
        kind, limit = BOUNDS[self._precision].far
        difference = float(apart.max() if kind == "max" else apart.mean())
        if step == 1 and difference > limit:
            yield (
                f"reference: before the first update the reference is the policy, and their log-probs differ by "
                f"{difference:.3g} nats ({kind}): it is another model, or scored at another temperature"
            )
        elif self._updated and not apart.any():
            yield (
                "reference: the policy was updated and the reference has exactly its log-probs: it moves with it, and "
                "the KL term does nothing"
            )

    def _of_push(self, metrics: Mapping[str, Any]) -> Iterator[str]:
        moved, tokens = metrics.get("training/sync_proof/moved"), metrics.get("training/sync_proof/tokens")
        updated = metrics.get("actor/grad_norm", 0) > 0 and metrics.get("actor/lr", 0) > 0
        self._still = self._still + 1 if tokens and moved == 0 and updated else 0
        if self._still == 2:
            yield (
                "update: two updates with a gradient and a learning rate changed no log-prob at all: the optimizer "
                "does not hold the weights that compute, or its steps are lost in their precision"
            )
