"""Before the run: call the reward function on the first rows, with the ground truth and with an empty answer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl.reward.errors import RewardPrecheckError
from verl.reward.outcome import Outcome
from verl.reward.reference import reference_answers

if TYPE_CHECKING:
    from verl.reward.runner import RewardRunner
    from verl.trajectory import Prompt


@dataclass(frozen=True, slots=True)
class Probe:
    """What the function said of one row: of the reference answer, and of an empty one."""

    prompt: Prompt
    reference: str
    of_reference: Outcome
    of_empty: Outcome


async def precheck(runner: RewardRunner, prompts: Sequence[Prompt], rows: int = 2) -> list[Probe]:
    """Try the first `rows` rows of every data_source among `prompts`; show the values on stderr.

    Raises RewardPrecheckError, naming the row, if any call raises, hangs, dies or returns no score. Scores are
    shown, not judged: a reference that earns no more than an empty answer gets a notice. Of the forms in which
    the reference can be written, the one that earns most is shown.
    """
    chosen: list[Prompt] = []
    seen: dict[str, int] = {}
    for prompt in prompts:
        if seen.setdefault(prompt.data_source, 0) < rows:
            seen[prompt.data_source] += 1
            chosen.append(prompt)
    probes = await asyncio.gather(*(_probe(runner, prompt) for prompt in chosen))
    for probe in probes:
        for outcome, text in ((probe.of_reference, probe.reference), (probe.of_empty, "")):
            if outcome.error is not None:
                raise RewardPrecheckError(_message(runner, probe.prompt, text, outcome))
    for line in describe(probes):
        print(line, file=sys.stderr, flush=True)
    return probes


async def _probe(runner: RewardRunner, prompt: Prompt) -> Probe:
    """A right answer may be wanted in one of several forms: the one that earns most is shown."""
    built_in = runner.settings.function.path is None
    references = reference_answers(prompt.data_source, prompt.ground_truth, prompt.extra_info, built_in)
    texts = [text for _, text in references]
    *outcomes, of_empty = await asyncio.gather(*(runner.try_function(prompt, text) for text in [*texts, ""]))
    failed = [i for i, outcome in enumerate(outcomes) if outcome.error is not None]
    best = failed[0] if failed else max(range(len(texts)), key=lambda i: outcomes[i].score or 0.0)
    return Probe(prompt, texts[best], outcomes[best], of_empty)


def describe(probes: Sequence[Probe]) -> list[str]:
    """One line per row, for people."""
    lines = []
    for probe in probes:
        full, empty = probe.of_reference, probe.of_empty
        assert full.score is not None and empty.score is not None
        line = (
            f"reward check: {probe.prompt.data_source or 'no data_source'} row {probe.prompt.row}: "
            f"the reference {_short(probe.reference)} scores {full.score:g}, an empty answer {empty.score:g}"
        )
        if full.score <= empty.score:
            line += "  <- the right answer earns nothing here; `verl reward check` shows more"
        lines.append(line)
    return lines


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return repr(flat if len(flat) <= 40 else flat[:37] + "...")


def _message(runner: RewardRunner, prompt: Prompt, answer: str, outcome: Outcome) -> str:
    what = f"the answer {_short(answer)}" if answer else "an empty answer"
    message = (
        f"the reward cannot be used: {runner.settings.function.label} on {what} to "
        f"{prompt.file or 'the data'} row {prompt.row} (data_source {prompt.data_source!r}): {outcome.error}"
    )
    return message + (f"\n{outcome.traceback.rstrip()}" if outcome.traceback else "")
