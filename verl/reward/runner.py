"""Scores trajectories: the call each needs, the pool that makes it, what comes of the result.

    trajectory ──score()──→ Call → Pool (processes) → Outcome ──→ score, score_parts │ score_error, event, console

A failed score is never a number: the answer is left out of the step and counted; too many end the run.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from verl.reward.errors import RewardErrorLimit
from verl.reward.manager_class import row_of
from verl.reward.outcome import Outcome, failed
from verl.reward.pool import Call, Pool
from verl.reward.settings import RewardSettings
from verl.reward.wire import NotPlain
from verl.trajectory import Batch, Prompt, Trajectory

SHOWN_PER_REASON = 2
SHOWN_IN_ALL = 10

Events = Callable[..., None]


class RewardRunner:
    """Scores answers by the configured function, in processes that start at the first answer.

    `events(kind, **fields)` receives each failure and each replaced process. Usable from several event loops,
    one after another. RewardLoadError if the configuration cannot work.
    """

    def __init__(self, config: Any, *, events: Events | None = None, settings: RewardSettings | None = None):
        self.settings = settings or RewardSettings.from_config(config)
        self._events = events or (lambda kind, **fields: None)
        self._pool: Pool | None = None
        self._shown: Counter[str] = Counter()

    # ---- scoring ---------------------------------------------------------------------------------------------

    @property
    def per_answer(self) -> bool:
        """False with the batch manager: answers are then scored by `score_batch`, not as they finish."""
        return self.settings.manager != "batch"

    async def score(self, trajectory: Trajectory) -> None:
        """Fill `score`, `score_parts`, `timing["compute_score"]`, or `score_error` if it could not be scored.

        Never raises for what a reward function does. Does nothing where there is a result already, nor with
        the batch manager (see `score_batch`). The answer needs its `text`.
        """
        if not self.per_answer or not _open(trajectory):
            return
        (outcome,) = await self._run(self._call(trajectory))
        self._apply(trajectory, outcome)

    async def score_batch(self, trajectories: Iterable[Trajectory]) -> None:
        """Score all that have no result yet: in one call with the batch manager, else one by one, at once.

        The batch call as a whole gets `reward_model.timeout` seconds.
        """
        todo = [t for t in trajectories if _open(t)]
        if self.per_answer:
            await asyncio.gather(*(self.score(t) for t in todo))
            return
        if not todo:
            return
        outcomes = await self._run(self._batch_call(todo))
        for trajectory, outcome in zip(todo, outcomes, strict=True):
            self._apply(trajectory, outcome)

    async def try_function(self, prompt: Prompt, answer: str) -> Outcome:
        """What the function says of a text, without a trajectory; for checks before the run."""
        import numpy as np

        probe = Trajectory(prompt, 0, np.zeros(0, np.int64), np.zeros(0, bool), text=answer)
        if not self.per_answer:
            return (await self._run(self._batch_call([probe])))[0]
        return (await self._run(self._call(probe)))[0]

    def close(self) -> None:
        """End the scoring processes. The runner can be used again afterwards: it then starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
            self._drain(pool)

    def _call(self, trajectory: Trajectory) -> Call:
        """The call that scores one answer."""
        function = self.settings.function
        if function.manager is None:
            return _call(trajectory, function.path is None)
        return Call({"rows": [row_of(trajectory)]}, seed=_seed(trajectory))

    def _batch_call(self, trajectories: Sequence[Trajectory]) -> Call:
        """The call that scores all of them."""
        if self.settings.function.manager is None:
            return _batch_call(trajectories)
        return Call({"rows": [row_of(t) for t in trajectories]}, count=len(trajectories))

    async def _run(self, call: Call) -> list[Outcome]:
        if self._pool is None:
            settings = self.settings
            self._pool = Pool(settings.function, workers=settings.num_workers, gate=settings.gate())
        pool = self._pool
        try:
            future = pool.submit(call, self.settings.timeout)
        except NotPlain as error:
            return [failed("value", str(error))] * (1 if call.count is None else call.count)
        outcomes = await asyncio.wrap_future(future)
        self._drain(pool)
        return outcomes

    # ---- results ---------------------------------------------------------------------------------------------

    def _apply(self, trajectory: Trajectory, outcome: Outcome) -> None:
        trajectory.timing["compute_score"] = outcome.seconds
        missing = [key for key in self.settings.required_parts if key not in outcome.parts]
        if outcome.error is None and missing:
            found = ", ".join(outcome.parts) or "none"
            problem = (
                f"its result lacks {', '.join(missing)} (algorithm.gdpo_reward_keys); keys there: {found}"
            )
            outcome = failed("value", problem, seconds=outcome.seconds)
        if outcome.error is not None:
            self._fail(trajectory, outcome)
            return
        assert outcome.score is not None
        trajectory.score = outcome.score
        trajectory.score_parts = dict(outcome.parts)
        if self.settings.overlong is not None:
            self._charge(trajectory, outcome)

    def _charge(self, trajectory: Trajectory, outcome: Outcome) -> None:
        """Subtract the penalty on long answers; `acc` stays what the function said."""
        overlong = self.settings.overlong
        assert overlong is not None and trajectory.score is not None
        penalty = overlong.penalty(trajectory.length)
        if outcome.bare:
            trajectory.score_parts["acc"] = trajectory.score
        trajectory.score += penalty
        if overlong.log:
            trajectory.score_parts |= {"overlong_reward": penalty, "overlong": penalty < 0}

    def _fail(self, trajectory: Trajectory, outcome: Outcome) -> None:
        prompt = trajectory.prompt
        reason = f"{self.settings.function.label}: {outcome.error}"
        where = (
            f"data_source {prompt.data_source!r}, {prompt.file or 'no file'} row {prompt.row}, "
            f"uid {prompt.uid}, answer {trajectory.index}"
        )
        trajectory.score_error = f"{reason} [{where}]"
        trajectory.extra["score_failure"] = {"kind": outcome.kind, "reason": reason}
        self._events(
            "reward_failed",
            failure=outcome.kind,
            error=reason,
            data_source=prompt.data_source,
            file=prompt.file,
            row=prompt.row,
            uid=prompt.uid,
            index=trajectory.index,
            seconds=outcome.seconds,
            prompt=prompt.messages,
            answer=trajectory.text,
            traceback=outcome.traceback,
        )
        self._show(reason, where, outcome)

    def _show(self, reason: str, where: str, outcome: Outcome) -> None:
        """The first failures of each kind on stderr; all of them are in events.jsonl."""
        key = _shape(reason)
        self._shown[key] += 1
        total = sum(min(n, SHOWN_PER_REASON) for n in self._shown.values())
        if self._shown[key] > SHOWN_PER_REASON or total > SHOWN_IN_ALL:
            return
        lines = [f"reward failed: {reason}", f"  at {where}"]
        lines += [f"  {line}" for line in outcome.traceback.strip().splitlines()[-12:]]
        if self._shown[key] == SHOWN_PER_REASON or total == SHOWN_IN_ALL:
            lines.append("  further ones like this are in events.jsonl only")
        print("\n".join(lines), file=sys.stderr, flush=True)

    def _drain(self, pool: Pool) -> None:
        while pool.notices:
            notice = dict(pool.notices.popleft())
            self._events(notice.pop("event"), **notice)

    # ---- the step --------------------------------------------------------------------------------------------

    def check_errors(self, batch: Batch | Sequence[Trajectory]) -> dict[str, float]:
        """Metrics of a step's scoring; raises RewardErrorLimit if too many answers failed to score.

        `reward/{errors,timeouts,error_ratio}`, `reward/latency_s/{mean,max}`, and
        `reward_extra/{key}/{mean,max,min}` over the answers that have a finite number under the key. Answers the
        sampler lost are not counted here.
        """
        answers = [t for t in batch if t.finish_reason != "lost"]
        errors = [t for t in answers if t.score_error is not None]
        kinds = Counter(t.extra.get("score_failure", {}).get("kind", "exception") for t in errors)
        ratio = len(errors) / len(answers) if answers else 0.0
        metrics: dict[str, float] = {
            "reward/errors": float(len(errors)),
            "reward/timeouts": float(kinds["timeout"]),
            "reward/error_ratio": ratio,
        }
        seconds = [t.timing["compute_score"] for t in answers if "compute_score" in t.timing]
        if seconds:
            metrics |= {
                "reward/latency_s/mean": sum(seconds) / len(seconds),
                "reward/latency_s/max": max(seconds),
            }
        metrics |= _extra_metrics(answers)
        if ratio > self.settings.max_error_ratio:
            raise RewardErrorLimit(self._limit_message(errors, len(answers)), metrics)
        return metrics

    def _limit_message(self, errors: Sequence[Trajectory], total: int) -> str:
        reasons = [t.extra.get("score_failure", {}).get("reason") or str(t.score_error) for t in errors]
        shapes = Counter(map(_shape, reasons))
        shape, count = shapes.most_common(1)[0]
        example = next(t for t, reason in zip(errors, reasons, strict=True) if _shape(reason) == shape)
        return (
            f"{len(errors)} of {total} answers of this step could not be scored "
            f"({len(errors) / total:.0%}, reward_model.max_error_ratio is {self.settings.max_error_ratio:.0%}). "
            f"The most frequent error ({count} times): {example.score_error}. Prompts, answers and tracebacks are in "
            "events.jsonl; `verl reward check` tries the function on the data"
        )


def _open(trajectory: Trajectory) -> bool:
    return trajectory.score is None and trajectory.score_error is None


def _shape(reason: str) -> str:
    """A reason without its numbers and quoted texts, to count the same error as one."""
    import re

    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+(?:\.\d+)?", "…", reason)[:300]


def _extra_info(trajectory: Trajectory) -> dict[str, Any]:
    prompt = trajectory.prompt
    return {
        "index": prompt.row,
        **(prompt.extra_info or {}),
        "num_turns": trajectory.num_turns,
        "rollout_reward_scores": trajectory.extra.get("reward_scores", {}),
    }


def _text(trajectory: Trajectory) -> str:
    if trajectory.text is None:
        raise ValueError(
            f"answer {trajectory.index} of {trajectory.uid} has no text: decode it before scoring"
        )
    return trajectory.text


def _call(trajectory: Trajectory, built_in: bool) -> Call:
    prompt = trajectory.prompt
    arguments = {
        "data_source": prompt.data_source,
        "solution_str": _text(trajectory),
        "ground_truth": prompt.ground_truth,
        "extra_info": _extra_info(trajectory),
    }
    # A row of the plain format asks the built-in rule for its flexible form; settings of the run win over it.
    kwargs = dict(prompt.columns.get("reward_kwargs") or {}) if built_in else {}
    return Call(arguments, kwargs, seed=_seed(trajectory))


def _seed(trajectory: Trajectory) -> int:
    """Seed of the random numbers that scoring draws: the same for an answer in whatever process."""
    digest = hashlib.blake2b(f"{trajectory.uid}/{trajectory.index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _batch_call(trajectories: Sequence[Trajectory]) -> Call:
    return Call(
        {
            "data_sources": [t.prompt.data_source for t in trajectories],
            "solution_strs": [_text(t) for t in trajectories],
            "ground_truths": [t.prompt.ground_truth for t in trajectories],
            "extra_infos": [_extra_info(t) for t in trajectories],
        },
        count=len(trajectories),
    )


def _extra_metrics(answers: Sequence[Trajectory]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for t in answers:
        for key, value in t.score_parts.items():
            if isinstance(value, bool | int | float) and math.isfinite(value):
                values.setdefault(key, []).append(float(value))
    out: dict[str, float] = {}
    for key in sorted(values):
        found = values[key]
        out |= {
            f"reward_extra/{key}/mean": sum(found) / len(found),
            f"reward_extra/{key}/max": max(found),
            f"reward_extra/{key}/min": min(found),
        }
    return out
