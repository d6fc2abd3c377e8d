"""What a teacher reads in place of the policy's prompt: the question with an answer, a demonstration or feedback, or
without its images."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl.data.rows import ChatRenderer, as_messages
from verl.errors import UserError
from verl.trajectory import Segment, Trajectory

_READ = ("response_ids", "response_mask", "teacher_topk_ids")
_NAME = re.compile(r"\{(\w+)\}")


def _after(context: np.ndarray, segment: Segment) -> Segment:
    """The segment's response after another context."""
    columns: dict[str, Any] = {name: segment.column(name) for name in _READ}
    return Segment(context, **columns)


class Reading(ABC):
    """What a teacher reads in place of a response."""

    @abstractmethod
    def __call__(self, trajectory: Trajectory, group: Sequence[Trajectory]) -> Trajectory:
        """The same response as the teacher reads it. group: the responses to its prompt."""

    def contrasts(self, trajectory: Trajectory, group: Sequence[Trajectory], count: int) -> list[Trajectory]:
        """At most `count` other readings of the response, with which the first is compared."""
        return []

    def column(self, trajectory: Trajectory, reading: Trajectory, name: str) -> np.ndarray | None:
        """A column of what was read, for the response's own tokens."""
        return reading.column(name)


class WithoutImages(Reading):
    """The policy's prompt without the tokens of images, for a teacher that is a text model. tokens: those that stand
    for images or mark where they begin and end."""

    def __init__(self, tokens: Sequence[int], key: str):
        self._tokens, self._key = tokens, key

    def __call__(self, trajectory: Trajectory, group: Sequence[Trajectory]) -> Trajectory:
        """The same response after the text of its context. UserError where it holds images, which a tool gave."""
        segments, prompt = [], trajectory.prompt
        for segment in trajectory.segments:
            if np.isin(segment.response_ids, self._tokens).any():
                raise UserError(
                    f"{self._key}: {prompt.file} row {prompt.row}: a tool gave the policy an image, which a text model "
                    "cannot see; take a teacher that sees images"
                )
            segments.append(_after(segment.context_ids[~np.isin(segment.context_ids, self._tokens)], segment))
        return Trajectory(prompt, trajectory.index, segments=segments)


class TeacherPrompt(Reading):
    """`template` stands in the place of a prompt's last user message. In it `{prompt}` is that message, and any other
    name is the ground truth, a field of extra_info, a column of the row, or what the reward function returned; with
    `{solution}`, the best other response to the prompt of at least `solution_score`, a response without one keeps the
    policy's prompt."""

    def __init__(self, template: str, key: str, renderer: ChatRenderer, solution_score: float):
        self._template, self._key, self._renderer = template, key, renderer
        self._solution_score = solution_score

    def __call__(self, trajectory: Trajectory, group: Sequence[Trajectory]) -> Trajectory:
        """The same response after the teacher's prompt. group: the responses to its prompt.

        UserError for a name that the row has not, and for a prompt that is more than the rendering of its messages
        (tools, images, a prompt that was cut).
        """
        return self._after(trajectory, self._solution(trajectory, group))

    def contrasts(self, trajectory: Trajectory, group: Sequence[Trajectory], count: int) -> list[Trajectory]:
        """The same response after prompts with other responses below `solution_score` as the solution: the `count` that
        follow it in the group, or as many as there are; none where there is no `{solution}` either."""
        place = next(number for number, member in enumerate(group) if member is trajectory)
        other_members = [*group[place + 1 :], *group[:place]]
        wrong = [t for t in other_members if t.scored and t.score is not None and t.score < self._solution_score]
        if self._solution(trajectory, group) is None:
            return []
        return [self._after(trajectory, other.text) for other in wrong[:count]]

    def _after(self, trajectory: Trajectory, solution: str | None) -> Trajectory:
        """The response after the teacher's prompt with a solution."""
        prompt, segments = trajectory.prompt, []
        messages = as_messages(prompt.messages)
        whole = self._ids(messages)
        users = [number for number, message in enumerate(messages) if message["role"] == "user"]
        question = self._question(trajectory, solution, messages[users[-1]]["content"]) if users else ""
        changed = [*messages]
        if users:
            changed[users[-1]] = {**messages[users[-1]], "content": question}
        context = self._ids(changed)
        for segment in trajectory.segments:
            rest = segment.context_ids[len(whole) :]
            if not users or not np.array_equal(segment.context_ids, np.concatenate([whole, rest])):
                why = "the prompt is not the rendering of its messages alone (tools, images, truncation)"
                raise UserError(f"{self._key}: {prompt.file} row {prompt.row}: {why}; take a teacher without prompt")
            segments.append(_after(np.concatenate([context, rest]), segment))
        return Trajectory(prompt, trajectory.index, segments=segments)

    def _ids(self, messages: list[dict[str, Any]]) -> np.ndarray:
        rendered = self._renderer.has_template
        return self._renderer.ids(self._renderer.text(messages) if rendered else messages[-1]["content"])

    def _solution(self, trajectory: Trajectory, group: Sequence[Trajectory]) -> str | None:
        scores = [(t.score, t.text) for t in group if t is not trajectory and t.scored and t.score is not None]
        score, text = max(scores, key=lambda entry: entry[0], default=(-math.inf, None))
        return text if score >= self._solution_score else None

    def _question(self, trajectory: Trajectory, solution: str | None, content: str) -> str:
        prompt = trajectory.prompt
        if solution is None and "{solution}" in self._template:
            return content
        values: Mapping[str, Any] = {
            **trajectory.score_parts,
            **prompt.columns,
            **(prompt.extra_info or {}),
            "ground_truth": prompt.ground_truth,
            "solution": solution,
            "prompt": content,
        }

        def value(name: re.Match[str]) -> str:
            if values.get(name[1]) is None:
                present = ", ".join(key for key, held in values.items() if held is not None)
                raise UserError(
                    f"{self._key}: {prompt.file} row {prompt.row} has no {name[1]!r} (there are: {present})"
                )
            return str(values[name[1]])

        return _NAME.sub(value, self._template)
