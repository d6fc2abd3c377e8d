r"""Before the run: responses whose score is known (the reference in the form that a source expects, and wrong ones),
and a first try of the reward function with them."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from verl.reward.outcome import ABSTAINED, Outcome, RewardPrecheckError
from verl.reward.rules import rule_or_none

if TYPE_CHECKING:
    from verl.reward.runner import RewardRunner
    from verl.trajectory import Prompt

_FORMS = {
    "gsm8k": "#### {}",
    "math": "\\boxed{{{}}}",
    "math_dapo": "Answer: {}",
    "numina": "\\boxed{{{}}}",
    "geo3k": "<think>So it is.</think> \\boxed{{{}}}",
    "search_qa": "<answer>{}</answer>",
}
_NO_OUTPUT = "```python\npass\n```"


def truth_text(ground_truth: Any) -> str:
    """A ground truth as text: the first target of search QA, else `str` of it; "" if there is none."""
    if isinstance(ground_truth, Mapping) and "target" in ground_truth:
        ground_truth = ground_truth["target"]
    if isinstance(ground_truth, list | tuple) and ground_truth:
        ground_truth = ground_truth[0]
    return "" if ground_truth is None else str(ground_truth)


def forms(data_source: str, truth: str, built_in: bool) -> list[tuple[str, str]]:
    """(label, text) of ways to write a final answer: the rule's; for a custom function also the bare text.

    None for code, whose truth is tests, from which no program can be made.
    """
    rule = rule_or_none(data_source)
    if built_in and rule == "code":
        return []
    form = _FORMS.get(rule or "", "{}")
    answer = form.format(truth)
    if built_in or answer == truth:
        return [("", answer)]
    return [("", truth), (f", as {form.format('…')!r}", answer)]


def reference_responses(
    data_source: str, ground_truth: Any, extra_info: Mapping[str, Any] | None, built_in: bool = True
) -> list[tuple[str, str]]:
    """(label, text) of right answers: the ground truth in each of its forms, and the row's own `answer`.

    `answer` (or `response`, in the plain format) of extra_info is a worked solution in many data sets.
    """
    truth = truth_text(ground_truth)
    responses = [(f"ground truth{label}", text) for label, text in forms(data_source, truth, built_in)]
    only_code = not responses
    for key in ("answer", "response"):
        solution = (extra_info or {}).get(key)
        if isinstance(solution, str) and solution.strip() and (not only_code or "```" in solution):
            responses.append((f"extra_info.{key}", solution))
    return responses


@dataclass(frozen=True, slots=True)
class Probe:
    """What the function said of one row: of the reference response, and of an empty one."""

    prompt: Prompt
    reference: str
    of_reference: Outcome
    of_empty: Outcome


async def precheck(runner: RewardRunner, prompts: Sequence[Prompt], rows: int = 2) -> list[Probe]:
    """Try the first `rows` rows of every data_source among `prompts`; show the values on stderr.

    Raises RewardPrecheckError, naming the row, if any call raises, hangs, dies or returns no score. Scores are
    shown, not judged: a reference that earns no more than an empty response gets a notice. Of the forms in which
    the reference can be written, the one that earns most is shown.
    """
    counts: Counter[str] = Counter()
    chosen = []
    for prompt in prompts:
        counts[prompt.data_source] += 1
        if counts[prompt.data_source] <= rows:
            chosen.append(prompt)
    probes = await asyncio.gather(*(_probe(runner, prompt) for prompt in chosen))
    for probe in probes:
        print(_line(probe), file=sys.stderr, flush=True)
    return probes


async def _probe(runner: RewardRunner, prompt: Prompt) -> Probe:
    built_in = runner.settings.function.path is None
    references = reference_responses(prompt.data_source, prompt.ground_truth, prompt.extra_info, built_in)
    texts = [text for _, text in references] or [_NO_OUTPUT]  # which tries the sandbox
    texts.append("")
    outcomes = await asyncio.gather(*(runner.try_function(prompt, text) for text in texts))
    for text, outcome in zip(texts, outcomes, strict=True):
        if outcome.kind != ABSTAINED and (error := outcome.error or runner.lacks(outcome)):
            raise RewardPrecheckError(_message(runner, prompt, text, replace(outcome, error=error)))
    best = max(range(len(texts) - 1), key=lambda i: outcomes[i].score or 0.0)
    return Probe(prompt, texts[best], outcomes[best], outcomes[-1])


def _line(probe: Probe) -> str:
    full, empty = probe.of_reference.score or 0.0, probe.of_empty.score or 0.0
    has_reference, hint = probe.reference != _NO_OUTPUT, ""
    if has_reference and full <= empty:
        hint = "  <- the right answer earns nothing here; `verl reward check` shows more"
    label = f"the reference {short(probe.reference, 40)}" if has_reference else "a program without output"
    return (
        f"reward check: {probe.prompt.data_source or 'no data_source'} row {probe.prompt.row}: "
        f"{label} scores {full:g}, an empty response {empty:g}{hint}"
    )


def _message(runner: RewardRunner, prompt: Prompt, response: str, outcome: Outcome) -> str:
    label = f"the response {short(response, 40)}" if response else "an empty response"
    return (
        f"the reward cannot be used: {runner.settings.function.label} on {label} to "
        f"{prompt.file or 'the data'} row {prompt.row} (data_source {prompt.data_source!r}): {outcome.error}"
        f"\n{outcome.traceback}"
    ).rstrip()


def short(text: str, limit: int = 60) -> str:
    """The text quoted, on one line, cut to `limit` characters."""
    flat = " ".join(text.split())
    return repr(flat if len(flat) <= limit else flat[: limit - 3] + "...")
