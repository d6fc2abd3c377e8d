"""Scores trajectories: the call each needs, the pool that makes it, what comes of the result.

    trajectory ──score()──→ Call → ScoringPool (processes) → Outcome → score, score_parts │ score_error, event, console
          └──score_batch(), where a model scores──→ RewardModel → Outcome ──┘

With `reward_model.weights` a response has its score when all of its rewards are there. A failed score is never a
number: the response is left out of the step and counted; too many end the run.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from verl.config.reward_weights import FUNCTION, MODEL
from verl.config.schema.base import select
from verl.data.load_object import read_source
from verl.platform.child_process import NotPlain
from verl.reward.judge_server import ServedJudge
from verl.reward.managers import row_of
from verl.reward.outcome import ABSTAINED, Outcome, RewardErrorLimit, RewardLoadError, failed
from verl.reward.pool import Call, ScoringPool
from verl.reward.reward_model import RewardModel
from verl.reward.settings import RewardSettings
from verl.tracking.names import plain
from verl.trajectory import SINGLE_TURN, Batch, Prompt, Trajectory, data_uris

if TYPE_CHECKING:
    from verl.config.schema.entries import Config

SHOWN_PER_REASON = 2
SHOWN_IN_ALL = 10
JUDGE = "pkg://verl.reward.judge"
WITH_JUDGES = (JUDGE, *(f"pkg://verl.reward.{name}" for name in ("ensemble", "rubric", "tournament")))
_OF_LOOPS: dict[str, Any] = {
    "agent_metrics": {},
    "tool_metrics": [],
    "environment_reward": 0.0,
    "environment_metrics": {},
}
_REWARDS_OF_LOOPS: dict[str, Any] = {"tool_rewards": [], "turn_scores": []}

Events = Callable[..., None]


class RewardRunner:
    """Scores responses by the configured function, in processes that start at the first response.

    `events(kind, **fields)` receives each failure and each replaced process. Usable from several event loops, one after
    another. `model`: the sequence classifier, where `settings.weights` names it. `judge`: the model that the function
    asks; it ends with the runner. RewardLoadError if the configuration cannot work.
    """

    def __init__(
        self,
        config: Config | None,
        *,
        events: Events | None = None,
        settings: RewardSettings | None = None,
        model: RewardModel | None = None,
        judge: ServedJudge | None = None,
    ):
        offered = {} if judge is None else judge.offered
        if settings is None:
            assert config is not None
            settings = RewardSettings.from_config(config, offered)
        self.settings = settings
        self.model, self.judge = model, judge
        self.asks_function = self.settings.weights.keys() != {MODEL}  # else a model alone scores
        self._default_loop = select(config, "actor_rollout_ref.rollout.agent.default_agent_loop")
        self._events = events or (lambda kind, **fields: None)
        self._pool: ScoringPool | None = None
        self._shown: Counter[str] = Counter()
        self._unchanged = dict(self.settings.function.sources)

    # ---- scoring ---------------------------------------------------------------------------------------------

    @property
    def per_response(self) -> bool:
        """False with the batch manager: responses are then scored by `score_batch`, not as they finish."""
        return not self.settings.function.batch

    async def score(self, trajectory: Trajectory) -> None:
        """Fill `score`, `score_parts`, `timing["compute_score"]`, or `score_error` if it could not be scored.

        Never raises for what a reward function does. Does nothing where there is a result already, nor with
        the batch manager (see `score_batch`). The response needs its `text`.
        """
        if self.per_response and self._asks_function(trajectory):
            self._apply(trajectory, (await self._run([trajectory]))[0])

    async def score_batch(self, trajectories: Iterable[Trajectory]) -> None:
        """Score all that have no result yet, their greedy baselines too: in one call with the batch manager, else
        concurrently, one call each; then those that a model scores, together.

        The batch call as a whole gets `reward_model.timeout` seconds. RewardLoadError as `check_usable`.
        """
        rows = list(trajectories)
        rows += dict.fromkeys(t.baseline for t in rows if t.baseline is not None)
        todo = [t for t in rows if self._asks_function(t)]
        if self.per_response:
            await asyncio.gather(*(self.score(t) for t in todo))
        elif todo:
            for trajectory, outcome in zip(todo, await self._run(todo), strict=True):
                self._apply(trajectory, outcome)
        if self.model is not None and (unscored := [t for t in rows if _open(t)]):
            for trajectory, outcome in zip(unscored, await self.model.score(unscored), strict=True):
                self._apply(trajectory, outcome, MODEL)
        self.check_usable(rows)

    async def try_function(self, prompt: Prompt, text: str) -> Outcome:
        """The function's outcome for a text, without a trajectory; for checks before the run. Where an agent loop may
        play the row, extra_info holds what the release's loops add, as for a dialogue without calls and rewards."""
        import numpy as np

        probe = Trajectory(prompt, 0, np.zeros(0, np.int64), np.zeros(0, bool), text=text)
        if (prompt.agent_name or self._default_loop) != SINGLE_TURN and self.settings.function.path not in WITH_JUDGES:
            reply = {"role": "assistant", "content": text}
            probe.fields = {"messages": [*prompt.messages, reply], **_OF_LOOPS, **_REWARDS_OF_LOOPS}
            probe.extra["reward_scores"] = _REWARDS_OF_LOOPS
        return (await self._run([probe]))[0]

    def lacks(self, outcome: Outcome) -> str:
        """What the configuration counts on and a result of the function does not have; "" for nothing."""
        parts = {MODEL: 0.0} if self.model is not None or MODEL in self.settings.weights else {}
        parts |= ({"acc": outcome.score} if outcome.bare else {}) | self._named(outcome)
        return self._missing(parts, {"algorithm.filter_groups.metric": self.settings.groups_metric})

    def close(self) -> None:
        """End the scoring processes. The runner can be used again afterwards: it then starts new ones."""
        self._note_changes()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
            self._drain(pool)
        if self.judge is not None:
            self.judge.close()

    def _asks_function(self, trajectory: Trajectory) -> bool:
        """True if there is a function to score it, and it has not."""
        return self.asks_function and _open(trajectory) and FUNCTION not in trajectory.score_parts

    async def _run(self, trajectories: Sequence[Trajectory]) -> list[Outcome]:
        """One call for all of them."""
        settings = self.settings
        if self._pool is None:
            self._pool = ScoringPool(settings.function, workers=settings.num_workers, rate=settings.rate)
        pool = self._pool
        try:
            future = pool.submit(self._call(trajectories), settings.timeout)
        except NotPlain as error:
            return [failed("value", str(error)) for _ in trajectories]
        outcomes = await asyncio.wrap_future(future)
        self._drain(pool)
        return outcomes

    def _call(self, trajectories: Sequence[Trajectory]) -> Call:
        function, count = self.settings.function, len(trajectories)
        seed = 0 if function.batch else _seed(trajectories[0])
        if function.manager is not None:
            return Call({"rows": [row_of(t, _extra_info(t)) for t in trajectories]}, seed=seed, count=count)
        rows = [
            {
                "data_source": t.prompt.data_source,
                "solution_str": t.text,
                "ground_truth": t.prompt.ground_truth,
                "extra_info": {"index": t.prompt.row, **_extra_info(t)},
            }
            for t in trajectories
        ]
        if function.path in WITH_JUDGES:
            for row, t in zip(rows, trajectories, strict=True):
                row["extra_info"] |= {"messages": _question(t), "uid": t.uid}
        if function.batch:
            return Call({f"{name}s": [row[name] for row in rows] for name in rows[0]}, count=count)
        # A row of the plain format asks the built-in rule for its flexible form; settings of the run win over it.
        kwargs = trajectories[0].prompt.columns.get("reward_kwargs") if function.path is None else None
        return Call(rows[0], dict(kwargs or {}), seed)

    # ---- results ---------------------------------------------------------------------------------------------

    def _apply(self, trajectory: Trajectory, outcome: Outcome, name: str = FUNCTION) -> None:
        """Keep what a reward said of a response: its score, once all that `weights` names have spoken."""
        if outcome.undecided:
            trajectory.extra["undecided"] = outcome.undecided
            self._events("reward_undecided", **_place(trajectory), response=trajectory.text)
        settings, timing = self.settings, trajectory.timing
        if name == FUNCTION:  # `verl.trainer.step_checks` compares it with what the response ends up with
            trajectory.extra["scored"] = [outcome.scored, outcome.kind]
        parts = trajectory.score_parts | self._named(outcome, name)
        timing["compute_score"] = timing.get("compute_score", 0.0) + outcome.seconds
        label = self.model.label if self.model is not None and name == MODEL else settings.function.label
        if outcome.error is None and self.model is not None and name == FUNCTION:
            trajectory.score_parts = parts
            return
        # validation data may lack the values by which training groups are filtered
        groups = [name for name in settings.groups_metric if name in parts]
        if outcome.error is None and (problem := self._missing(parts, {"algorithm.filter_groups.metric": groups})):
            outcome, label = failed("value", problem, seconds=outcome.seconds), settings.function.label
        if outcome.error is not None:
            self._fail(trajectory, outcome, label)
            return
        trajectory.score, trajectory.score_parts = outcome.score, parts
        if settings.weights:
            trajectory.extra["rewards"] = rewards = {name: float(parts[name]) for name in settings.weights}
            trajectory.score = sum(settings.weights[name] * value for name, value in rewards.items())
        self._charge(trajectory)
        if (earned := trajectory.extra.get("step_reward")) is not None and trajectory.score is not None:
            trajectory.score += earned

    def _named(self, outcome: Outcome, name: str = FUNCTION) -> dict[str, Any]:
        """The values in a result of the reward `name`. Where values are needed by name, a bare number is `acc`."""
        settings = self.settings
        named = {name: outcome.score} if settings.weights and outcome.error is None else {}
        counted_on = settings.weights or settings.required_parts or settings.overlong
        if counted_on and outcome.bare and name == FUNCTION:
            named["acc"] = outcome.score
        return outcome.parts | named

    def _missing(self, parts: Mapping[str, Any], more: Mapping[str, Iterable[str]] | None = None) -> str:
        """Which rewards that the configuration needs are missing or not finite; "" for none. more: key → names."""
        required: dict[str, Iterable[str]] = {
            "reward_model.weights": self.settings.weights,
            "algorithm.gdpo_reward_keys": self.settings.required_parts,
            **(more or {}),
        }
        for key, names in required.items():
            if lacking := [n for n in names if (v := plain(parts.get(n))) is None or not math.isfinite(v)]:
                there = ", ".join(parts) or "none"
                return f"its result lacks {', '.join(lacking)} ({key}) as a finite number; it has {there}"
        return ""

    def _charge(self, trajectory: Trajectory) -> None:
        """Subtract the penalty on long responses; `acc` stays what the function said."""
        overlong = self.settings.overlong
        if overlong is None:
            return
        assert trajectory.score is not None
        # An evaluation has texts without tokens, and their lengths in a note.
        penalty = overlong.penalty(max(trajectory.longest, trajectory.extra.get("tokens", 0)))
        trajectory.score += penalty
        if overlong.log:
            trajectory.score_parts |= {"overlong_reward": penalty, "overlong": penalty < 0}

    def _fail(self, trajectory: Trajectory, outcome: Outcome, label: str) -> None:
        prompt = trajectory.prompt
        reason = f"{label}: {outcome.error}"
        where = (
            f"data_source {prompt.data_source!r}, {prompt.file or 'no file'} row {prompt.row}, "
            f"uid {prompt.uid}, response {trajectory.index}"
        )
        trajectory.score_error = f"{reason} [{where}]"
        trajectory.extra["score_failure"] = {"kind": outcome.kind, "reason": reason}
        abstained = outcome.kind == ABSTAINED
        if abstained:
            trajectory.score_parts |= outcome.parts
        self._events(
            "reward_abstained" if abstained else "reward_failed",
            failure=outcome.kind,
            error=reason,
            data_source=prompt.data_source,
            **_place(trajectory),
            seconds=outcome.seconds,
            prompt=prompt.messages,
            response=trajectory.text,
            traceback=outcome.traceback,
        )
        if not abstained:
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

    def _drain(self, pool: ScoringPool) -> None:
        while pool.notices:
            kind, fields = pool.notices.popleft()
            self._events(kind, **fields)

    def _note_changes(self) -> None:
        """One event for each file of the function whose content on disk is another one now."""
        for path, source in list(self._unchanged.items()):
            if read_source(path).get(path) != source:
                del self._unchanged[path]
                message = f"{path} was changed on disk; this run goes on with what it read at its start"
                self._events("reward_file_changed", path=path, message=message)

    # ---- the step --------------------------------------------------------------------------------------------

    @staticmethod
    def check_usable(rows: Iterable[Trajectory]) -> None:
        """Raise RewardLoadError if the function could not be loaded, or asked for a name that verl lacks."""
        for t in rows:
            if t.extra.get("score_failure", {}).get("kind") == "load":
                raise RewardLoadError(f"the reward cannot be used: {t.score_error}")

    def check_errors(self, batch: Batch | Sequence[Trajectory]) -> None:
        """Raise RewardErrorLimit if scoring failed for too many responses of a step, not counting lost ones."""
        self._note_changes()
        scored = [t for t in batch if t.finish_reason != "lost"]
        failed = [t for t in scored if t.score_error is not None]
        errors = [t for t in failed if t.extra.get("score_failure", {}).get("kind") != ABSTAINED]
        limit = self.settings.max_error_ratio
        if not errors or len(errors) / len(scored) <= limit:
            return
        reasons = [t.extra.get("score_failure", {}).get("reason") or str(t.score_error) for t in errors]
        shapes = [_shape(reason) for reason in reasons]
        shape, count = Counter(shapes).most_common(1)[0]
        raise RewardErrorLimit(
            f"{len(errors)} of {len(scored)} responses of this step could not be scored "
            f"({len(errors) / len(scored):.0%}, reward_model.max_error_ratio is {limit:.0%}). The most frequent error "
            f"({count} times): {errors[shapes.index(shape)].score_error}. Prompts, responses and tracebacks are in "
            "events.jsonl; `verl reward check` tries the function on the data"
        )


def _open(trajectory: Trajectory) -> bool:
    return trajectory.score is None and trajectory.score_error is None


def _place(trajectory: Trajectory) -> dict[str, Any]:
    """Where a response comes from, as fields of an event."""
    prompt = trajectory.prompt
    return {"file": prompt.file, "row": prompt.row, "uid": prompt.uid, "index": trajectory.index}


def _shape(reason: str) -> str:
    """A reason without its numbers and quoted texts, to count the same error as one."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+(?:\.\d+)?", "…", reason)[:300]


def _extra_info(trajectory: Trajectory) -> dict[str, Any]:
    media = trajectory.prompt.media
    images = {"images": media.uris()} if media is not None and media.files else {}
    if shown := _shown(trajectory):
        images["shown_images"] = shown
    return {
        **(trajectory.prompt.extra_info or {}),
        **trajectory.fields,
        "num_turns": trajectory.num_turns,
        "rollout_reward_scores": trajectory.extra.get("reward_scores", {}),
        **images,
    }


def _shown(trajectory: Trajectory) -> list[str]:
    """The images that tools and environments showed, in their order, as data URIs; [] unless `reward_model.images`."""
    all_media = (leaf for segment in trajectory.segments if segment.media is not None for leaf in segment.media.leaves)
    other_media = dict.fromkeys(leaf for leaf in all_media if leaf is not trajectory.prompt.media)
    return data_uris(file for leaf in other_media for file in leaf.files)


def _question(trajectory: Trajectory) -> Any:
    """What a judge is told was asked: the row's messages, or those that an environment began with instead."""
    prompt_messages, messages = trajectory.prompt.messages, trajectory.fields.get("messages")
    if messages and isinstance(prompt_messages, list) and messages[: len(prompt_messages)] != prompt_messages:
        return list(takewhile(lambda message: message["role"] != "assistant", messages))
    return (trajectory.prompt.extra_info or {}).get("messages", prompt_messages)


def _seed(trajectory: Trajectory) -> int:
    """Seed of the random numbers that scoring draws: the same for a response in whatever process."""
    digest = hashlib.blake2b(f"{trajectory.uid}/{trajectory.index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
