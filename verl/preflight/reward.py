"""`verl reward check`: does a reward function tell right responses from wrong ones on this data?

On a sample of rows it scores the reference, an empty response, another row's reference, garbage and hostile text, and
says what looks wrong. `--check` calls a run's function on the first rows. Nothing here needs a model, and torch is not
imported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.config.report import Report
from verl.data.files import RowFile, open_file
from verl.data.rows import BadRow, RowRules, as_messages, check_columns, fields_of
from verl.errors import UserError
from verl.reward.outcome import Outcome, RewardLoadError
from verl.reward.pool import FunctionSpec
from verl.reward.precheck import forms, precheck, reference_responses, short, truth_text
from verl.reward.rules import check_truth, rule_or_none, unsupported
from verl.reward.rules.gsm8k import clean_number, same_number
from verl.reward.runner import RewardRunner
from verl.reward.settings import RewardSettings
from verl.trajectory import Prompt

_FIRST_ROWS = 8
_BOMB = 60

HOSTILE: tuple[tuple[str, str], ...] = (
    ("very long", "the answer is 31337 and " * 20_000),
    ("very long number", "#### " + "9" * 50_000),
    ("open braces", "\\boxed{" * 500),
    ("closed braces", "\\boxed{1" + "}" * 500),
    ("nested \\frac", "\\boxed{" + "\\frac{" * _BOMB + "1" + "}{2}" * _BOMB + "}"),
    ("power tower", "\\boxed{2^{2^{2^{2}}}}"),
    ("unicode", "#### ٧٢ ７２ ½ \u202e31337 \U0001f600 \\boxed{７２}"),
    ("null bytes", "\x00#### \x00\\boxed{\x00}"),
    ("lone surrogate", "\ud800 #### \\boxed{\udfff}"),
    ("tags", "<answer>" * 50 + "</answer>" * 50 + "</think>" * 20),
    ("marks only", "#### \\boxed{} Answer: <answer></answer>"),
    ("format string", "%s%n{0}{__class__} $(id) `id` ${HOME}"),
)

GARBAGE: tuple[tuple[str, str], ...] = (
    ("one word", "banana"),
    ("prose", "I am not sure about this question, sorry."),
    ("repetition", "12 345 6789 31337 " * 20 + "..."),
    ("every number", " ".join(f"\\boxed{{{n}}}" for n in [*range(100), 31337]) + " I do not know."),
)

HOSTILE_ROWS = 3
SLOW = 1.0
SLOW_HOSTILE = 5.0
OTHER = "another row's reference"


@dataclass(frozen=True, slots=True)
class Trial:
    """One response to one row. `kind`: reference, empty, other, garbage or hostile."""

    kind: str
    label: str
    prompt: Prompt
    response: str
    outcome: Outcome

    @property
    def score(self) -> float:
        """Its score; 0 where scoring failed."""
        return self.outcome.score or 0.0


@dataclass(slots=True)
class RewardReport:
    """What `reward_check` found. `problems` make it fail; `notes` are worth knowing."""

    data: str
    function: str
    rows: int
    total_rows: int
    trials: list[Trial] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if nothing looks wrong."""
        return not self.problems

    def show(self) -> None:
        """Print the table of scores and what looks wrong."""
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        console = Console(highlight=False)
        rows = f"{self.rows} of {self.total_rows} rows"
        console.print(f"[bold]{escape(self.function)}[/] on {escape(self.data)}: {rows}")
        table = Table("response", "calls", "mean", "min", "max", "failed", "slowest", header_style="bold")
        for column in table.columns[1:]:
            column.justify = "right"
        for label, trials in _by_label(self.trials).items():
            scores = [t.score for t in trials if t.outcome.error is None]
            failed = len(trials) - len(scores)
            numbers = [f"{x:.3g}" for x in (np.mean(scores), min(scores), max(scores))] if scores else "–––"
            slowest = f"{max(t.outcome.seconds for t in trials):.3f} s"
            mark = f"[red]{failed}[/]" if failed else "0"
            table.add_row(escape(label), str(len(trials)), *numbers, mark, slowest)
        console.print(table)
        for note in self.notes:
            console.print(f"[yellow]note[/]   {escape(note)}", soft_wrap=True)
        for problem in self.problems:
            console.print(f"[red]wrong[/]  {escape(problem)}", soft_wrap=True)
        if self.ok:
            console.print("[green]nothing looks wrong[/]")


def _grouped(trials: Iterable[Trial], key: Callable[[Trial], str]) -> dict[str, list[Trial]]:
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(key(trial), []).append(trial)
    return groups


def _by_label(trials: Iterable[Trial]) -> dict[str, list[Trial]]:
    return _grouped(trials, lambda trial: trial.label)


def read_prompts(path: str, samples: int, custom: bool) -> tuple[list[Prompt], int, list[str]]:
    """(rows evenly spread over the file, rows in it, bad rows among them as text). DataError for a bad file."""
    file = open_file(path)
    rules = RowRules(needs_truth=not custom, images=True)
    plain = check_columns(file, rules)
    numbers = sorted({int(i) for i in np.linspace(0, len(file) - 1, num=min(samples, len(file)))})
    prompts, bad = [], []
    for number in numbers:
        try:
            prompt = _prompt(file, number, plain, rules)
            if not custom:
                check_truth(prompt.data_source, prompt.ground_truth, any_source=True)
        except BadRow as error:
            bad.append(f"{path} row {number} cannot be used: {error}")
            continue
        prompts.append(prompt)
    return prompts, len(file), bad


def _prompt(file: RowFile, number: int, plain: bool, rules: RowRules) -> Prompt:
    fields = fields_of(file.row(number), number, plain, rules)
    messages = as_messages(fields.cell, images=True)
    return fields.prompt(f"0:{number}@0", np.zeros(0, np.int64), messages, file=file.path, row=number)


def try_first_rows(report: Report) -> None:
    """Call the run's reward function on the first rows, as the run does before it loads a model. Where a reward model
    or a judge has a part in it there is nothing to call yet."""
    config = report.config
    files = report.files.get("data.train_files") or ()
    if config.reward_model.enable or not config.custom_reward_function.path or not files:
        return
    if str(config.custom_reward_function.path).startswith("pkg://verl.reward.") or config.data.custom_cls.path:
        return
    rules, prompts = RowRules.of(config), list[Prompt]()
    plain = check_columns(files[0], rules)
    for number in range(min(_FIRST_ROWS, len(files[0]))):
        with suppress(BadRow):
            prompts.append(_prompt(files[0], number, plain, rules))
    with closing(RewardRunner(config, events=lambda kind, **fields: None)) as runner:
        if runner.asks_function and prompts:
            with report.refusing("custom_reward_function.path"):
                asyncio.run(precheck(runner, prompts))


def reward_check(
    data_path: str,
    reward_file: str | None = None,
    name: str = "compute_score",
    samples: int = 32,
    *,
    timeout: float = 30.0,
    reward_kwargs: dict[str, Any] | None = None,
) -> RewardReport:
    """Try a reward function (None: the built-in ones) on up to `samples` rows of a data file.

    Raises UserError (DataError, RewardLoadError) if the data or the function cannot be used at all.
    """
    prompts, total, bad = read_prompts(data_path, samples, custom=reward_file is not None)
    spec = FunctionSpec(path=reward_file, name=name, kwargs=dict(reward_kwargs or {}))
    report = RewardReport(data_path, spec.label, len(prompts), total)
    report.problems += bad[:5]
    if reward_file is None:
        report.problems += unsupported(dict.fromkeys(p.data_source for p in prompts)).values()
        prompts = [p for p in prompts if rule_or_none(p.data_source)]
    settings = RewardSettings(function=spec, num_workers=2, timeout=timeout)
    with closing(RewardRunner(None, settings=settings)) as runner:
        report.trials = asyncio.run(_try_all(runner, prompts))
    if report.trials and all(trial.outcome.kind == "load" for trial in report.trials):
        raise RewardLoadError(_told(report.trials[0].outcome))
    _judge(report, built_in=reward_file is None)
    return report


async def _try_all(runner: RewardRunner, prompts: Sequence[Prompt]) -> list[Trial]:
    built_in = runner.settings.function.path is None
    planned = [plan for i in range(len(prompts)) for plan in _plan(prompts, i, built_in)]
    outcomes = await asyncio.gather(*(runner.try_function(prompt, text) for _, _, prompt, text in planned))
    return [Trial(*plan, outcome) for plan, outcome in zip(planned, outcomes, strict=True)]


def _plan(prompts: Sequence[Prompt], i: int, built_in: bool) -> Iterator[tuple[str, str, Prompt, str]]:
    """What to try on row i."""
    prompt = prompts[i]
    right = reference_responses(prompt.data_source, prompt.ground_truth, prompt.extra_info, built_in)
    kinds: dict[str, Sequence[tuple[str, str]]] = {
        "reference": right,
        "empty": [("empty", "")],
        "other": [(OTHER + label, text) for label, text in _another(prompts, i, built_in)],
        "garbage": GARBAGE,
        "hostile": HOSTILE if i < HOSTILE_ROWS else (),
    }
    for kind, texts in kinds.items():
        for label, text in texts:
            yield kind, label, prompt, text


def _another(prompts: Sequence[Prompt], i: int, built_in: bool) -> list[tuple[str, str]]:
    """The reference of another row of the same source whose truth differs, in each of its forms."""
    mine = clean_number(truth_text(prompts[i].ground_truth)).lower()
    for prompt in [*prompts[i + 1 :], *prompts[:i]]:
        truth = truth_text(prompt.ground_truth)
        different = truth and not same_number(clean_number(truth).lower(), mine)
        if prompt.data_source == prompts[i].data_source and different:
            return forms(prompt.data_source, truth, built_in)
    return []


def _judge(report: RewardReport, built_in: bool) -> None:
    for label, trials in _by_label(report.trials).items():
        failed = [t for t in trials if t.outcome.error is not None]
        if failed:
            report.problems.append(_failures(label, len(trials), failed))
        limit = SLOW_HOSTILE if trials[0].kind == "hostile" else SLOW
        slow = [t for t in trials if t.outcome.error is None and t.outcome.seconds > limit]
        if slow:
            worst = max(slow, key=lambda t: t.outcome.seconds)
            report.problems.append(
                f"slow: {len(slow)} of {len(trials)} calls on {label!r} took over {limit:g} s "
                f"(row {worst.prompt.row}: {worst.outcome.seconds:.1f} s)"
            )
    _judge_scores(report, built_in)
    if all(trial.kind != "reference" for trial in report.trials):
        report.notes.append("no row has a reference: right responses could not be tried")


def _failures(label: str, total: int, failed: Sequence[Trial]) -> str:
    first = failed[0]
    message = _told(first.outcome)
    return f"{len(failed)} of {total} calls on {label!r} failed; row {first.prompt.row}: {message}"


def _told(outcome: Outcome) -> str:
    """The error, and the line of code that it comes from."""
    lines = [line.strip() for line in outcome.traceback.splitlines()]
    frames = [line for line in lines if line.startswith("File ")]
    return f"{outcome.error} ({frames[-1]})" if frames else str(outcome.error)


def _judge_scores(report: RewardReport, built_in: bool) -> None:
    """Compare, row by row, what the reference earns with what every wrong response earns."""
    scored = [trial for trial in report.trials if trial.outcome.error is None]
    right = [trial for trial in scored if trial.kind == "reference" and trial.response.strip()]
    wrong = [trial for trial in scored if trial.kind != "reference"]
    best, of_wrong = _best_by_row(right), _best_by_row(wrong)
    bars = {uid: of_wrong[uid].score if uid in of_wrong else 0.0 for uid in best}
    low = [t for uid, t in best.items() if uid in of_wrong and _is_low(t.score, bars[uid], built_in)]
    if low:
        trial, rows = low[0], {trial.prompt.uid for trial in scored}
        report.problems.append(
            f"the reference scores low on {len(low)} of {len(rows)} rows; row {trial.prompt.row}: {trial.label} "
            f"{short(trial.response)} earns {trial.score:g}, the best wrong response {bars[trial.prompt.uid]:g}"
        )
    sound = best.keys() - {trial.prompt.uid for trial in low}
    high = [t for t in wrong if t.prompt.uid in sound and t.score >= best[t.prompt.uid].score]
    of_worth = {trial.label for trial in right if trial.score > bars[trial.prompt.uid]}
    worthless = [repr(label) for label in _by_label(right) if label not in of_worth]
    if worthless and of_worth:
        problem = "right responses of this form earn no more than wrong ones on every row"
        report.notes.append(f"{problem}: {', '.join(worthless)}")
    for label, trials in _by_label(high).items():
        trial = trials[0]
        report.problems.append(
            f"a wrong response scores high on {len(trials)} rows: {label!r} {short(trial.response)} "
            f"earns {trial.score:g} on row {trial.prompt.row}, "
            f"where the reference earns {best[trial.prompt.uid].score:g}"
        )


def _is_low(score: float, bar: float, built_in: bool) -> bool:
    """True if a right response earns too little; `bar`: what the best wrong one does."""
    return score < 1.0 - 1e-9 if built_in else score <= min(bar, 0.0)


def _best_by_row(trials: Iterable[Trial]) -> dict[str, Trial]:
    """Of these trials of each row, by its uid, the one that earns most."""
    rows = _grouped(trials, lambda trial: trial.prompt.uid)
    return {uid: max(group, key=lambda trial: trial.score) for uid, group in rows.items()}


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="verl reward check",
        description="Try a reward function on rows of a data file: the reference, empty, garbage, hostile text.",
    )
    add = parser.add_argument
    add("paths", nargs="*", metavar="FILE", help="reward file (.py or pkg://module) and data file")
    add("--data", help="data file: parquet, json or jsonl")
    add("--reward", help="file.py or pkg://module; without it the built-in rules by data_source")
    add("--name", default="compute_score", help="name of the function (default: compute_score)")
    add("--samples", type=int, default=32, help="rows to try (default: 32)")
    add("--timeout", type=float, default=30.0, help="seconds for one call (default: 30)")
    add("--kwargs", default="{}", help="JSON object: custom_reward_function.reward_kwargs")
    args = parser.parse_intermixed_args(argv[1:] if argv[:1] == ["check"] else argv)
    for path in args.paths:
        kind = "reward" if path.endswith(".py") or path.startswith("pkg://") else "data"
        if getattr(args, kind):
            parser.error(f"two {kind} files are named: {path} is the second")
        setattr(args, kind, path)
    if not args.data:
        parser.error("name a data file: verl reward check --data train.parquet [--reward file.py]")
    if args.samples < 1:
        parser.error("--samples must be 1 or more")
    if not 0 < args.timeout < 1e9:
        parser.error("--timeout must be a positive number of seconds")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """`verl reward check …`: 0 nothing looks wrong, 1 something does, 2 it could not be tried."""
    args = _arguments(sys.argv[1:] if argv is None else list(argv))
    try:
        kwargs = json.loads(args.kwargs)
        if not isinstance(kwargs, dict):
            raise UserError(f"--kwargs must be a JSON object, not {args.kwargs}")
        arguments = (args.data, args.reward, args.name, args.samples)
        report = reward_check(*arguments, timeout=args.timeout, reward_kwargs=kwargs)
    except (UserError, json.JSONDecodeError) as error:
        problem = f"--kwargs is not JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
        print(f"verl reward check: {problem}", file=sys.stderr)
        return 2
    report.show()
    return 0 if report.ok else 1
