"""Scores of the responses of a file: the reward function of training, metrics by data source, a page.

    file → trajectories (text, no tokens) → RewardRunner → validation's metrics, and eval/{data_source}/… beside them

A response has the uid and the number that validation on the same file would give it: the same samples get the same scores
and metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.config.schema.base import setting
from verl.data.dataset import by_problem
from verl.data.files import DataError, RowFile, open_file
from verl.data.media import folder_of, shown
from verl.data.rows import BadRow, RowFields, RowRules, fields_of, is_plain
from verl.errors import UserError
from verl.reward.answers import final_answer, has_answers, predicted
from verl.reward.pool import FunctionSpec
from verl.reward.rules import check_truth, unsupported
from verl.reward.runner import RewardRunner
from verl.reward.settings import RewardSettings
from verl.tracking.console import Progress, say
from verl.tracking.evaluation_metrics import source_metrics, text_metrics
from verl.tracking.jsonl import write_lines
from verl.tracking.names import Number, plain
from verl.tracking.responses import by_group, dump_rows
from verl.tracking.validation_metrics import validation_metrics
from verl.trajectory import Trajectory

if TYPE_CHECKING:
    from verl.config import EvalConfig
    from verl.tracking.tracker import Tracking

OVERALL = "all"
"""Stands for all data sources together, where there are several."""
SCORES = "scores.jsonl"
_ROUNDING = 1e-9
_CHUNK = 512


def evaluate(config: EvalConfig, tracking: Tracking) -> None:
    """Score, and write metrics, scores, sampled responses and the page to the run folder; see `run_guarded` for how it ends."""
    table = read_table(config)
    tracking.data_report(table)
    rewards = RewardRunner(None, events=tracking.event, settings=_reward_settings(config))
    try:
        asyncio.run(_score(rewards, table.responses))
    finally:
        rewards.close()
    _refuse_all_failed(table.responses)
    metrics, notes = evaluation_metrics(table, config)
    for note in notes:
        tracking.notice(note)
    tracking.log(0, metrics)
    tracking.dump_trajectories(0, table.responses)
    write_lines(tracking.run_dir / SCORES, dump_rows(0, table.responses))
    _show(metrics, table)
    tracking.finish("finished")
    tracking.write_page(last=True)


# ------------------------------------------------------------------------------------------------------- reading


@dataclass
class Table:
    """What a file of responses holds. references: uid → texts to compare with; bad_rows as in data_report.jsonl."""

    path: str
    rows: int
    responses: list[Trajectory] = field(default_factory=list)
    references: dict[str, list[str]] = field(default_factory=dict)
    bad_rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def report(self) -> dict[str, Any]:
        """Counts for events.jsonl."""
        used = len({t.uid for t in self.responses})
        return {"files": [self.path], "rows": self.rows, "used": used, "responses": len(self.responses)}

    def describe(self) -> list[str]:
        """Lines for the console."""
        used = f"{self.report['used']} of {self.rows} rows from {self.path}"
        return [
            f"{used}, {len(self.responses)} responses",
            *(f"left out {text}" for text in by_problem(self.bad_rows)),
        ]


def read_table(config: EvalConfig) -> Table:
    """The responses of `data.path`; rows that cannot be used are left out and counted.

    DataError if a column is missing or no row is left, or where a data source has nothing that scores it.
    """
    data, file = config.data, open_file(str(config.data.path))
    rules = RowRules(
        data.prompt_key,
        data.data_source_key,
        (data.image_key,) if config.reward_model.images else (),
        needs_truth=not config.custom_reward_function.path,
        images=True,
    )
    plain_format = is_plain(file, rules)
    for key in ("response_key",) if plain_format else ("response_key", "data_source_key", "reward_model_key"):
        file.need(data[key], f"data.{key}")
    table = Table(file.path, len(file))
    for number, row in _numbered(file):
        try:
            row["reward_model"] = _truth(row.get(data.reward_model_key))
            fields = fields_of(row, number, plain_format, rules)
            if rules.needs_truth:
                check_truth(fields.facts["data_source"], fields.facts["ground_truth"], any_source=True)
            table.responses += _responses(row.pop(data.response_key), fields, file.path, number)
            uid = table.responses[-1].uid
            table.references[uid] = _reference(row, config.metrics.reference, fields.facts["ground_truth"])
        except BadRow as bad:
            record = {"file": file.path, "row": number, "problem": bad.problem, "detail": bad.detail}
            table.bad_rows.append(record)
    _refuse_unusable(table, rules)
    return table


def _numbered(file: RowFile) -> Iterator[tuple[int, dict[str, Any]]]:
    for start in range(0, len(file), _CHUNK):
        yield from enumerate(file.rows(start, min(start + _CHUNK, len(file))), start)


def _truth(cell: Any) -> Any:
    """The struct of the chat format; a column that holds the ground truth itself is taken as it is."""
    return cell if cell is None or isinstance(cell, Mapping) else {"ground_truth": cell}


def _responses(cell: Any, fields: RowFields, path: str, row: int) -> list[Trajectory]:
    """A row's responses as trajectories without tokens. BadRow if there is none. A null one was lost by the sampler."""
    texts = [cell] if isinstance(cell, str) else cell
    if texts is None or texts == []:
        raise BadRow("no responses", "the column is empty")
    if not isinstance(texts, list) or not all(text is None or isinstance(text, str) for text in texts):
        raise BadRow("wrong column type", "responses must be a list of strings, or one string")
    nothing = np.zeros(0, np.int64)
    media = shown(fields.images, folder_of(path)) if fields.images else None
    prompt = fields.prompt(f"0:{row}@0", nothing, fields.cell, file=path, row=row, media=media)
    state: dict[str, Any] = {"finish_reason": ""}
    lost = {"finish_reason": "lost", "score_error": "lost by the sampler (null in the file)"}
    return [
        Trajectory(
            prompt, i, nothing, nothing.astype(bool), text=text or "", **(lost if text is None else state)
        )
        for i, text in enumerate(texts)
    ]


def _reference(row: Mapping[str, Any], path: str | None, truth: Any) -> list[str]:
    """Texts that this row's responses are compared with; [] if it has none."""
    found = setting(row, path) if path else truth
    found = found.get("target") if isinstance(found, Mapping) else found
    texts = found if isinstance(found, list) else [found]
    return [str(text) for text in texts if text is not None and str(text).strip()]


def _refuse_unusable(table: Table, rules: RowRules) -> None:
    if not table.responses:
        why = "; ".join(by_problem(table.bad_rows))
        raise DataError(f"{table.path}: no usable row is left: {why}", table.bad_rows)
    if rules.needs_truth and (unknown := unsupported({t.prompt.data_source for t in table.responses})):
        raise DataError("; ".join(unknown.values()))


# ------------------------------------------------------------------------------------------------------- scoring


def _reward_settings(config: EvalConfig) -> RewardSettings:
    custom, processes = config.custom_reward_function, config.reward_model
    function = FunctionSpec(path=custom.path or None, name=custom.name, kwargs=dict(custom.reward_kwargs))
    return RewardSettings(function, num_workers=processes.num_workers, timeout=processes.timeout)


async def _score(rewards: RewardRunner, responses: Sequence[Trajectory]) -> None:
    """Every failure is an event of the runner; the response stays without a score."""
    progress, done = Progress(len(responses), title="Scoring"), 0

    async def one(trajectory: Trajectory) -> None:
        nonlocal done
        await rewards.score(trajectory)
        done += 1
        progress.advance_to(done)

    try:
        await asyncio.gather(*(one(trajectory) for trajectory in responses))
    finally:
        progress.close()


def _refuse_all_failed(responses: Sequence[Trajectory]) -> None:
    if not any(t.scored for t in responses):
        raise UserError(
            f"not one of {len(responses)} responses could be scored; the first: {responses[0].score_error}. "
            "`verl reward check` tries the function on the data"
        )


# ------------------------------------------------------------------------------------------------------- metrics


def evaluation_metrics(table: Table, config: EvalConfig) -> tuple[dict[str, Number], list[str]]:
    """All metrics of scored responses, and what there is to say: test_score/{source}, eval/{source}/…, and validation's."""
    sources: dict[str, list[list[Trajectory]]] = {}
    for group in by_group(table.responses):
        sources.setdefault(group[0].prompt.data_source, []).append(group)
    if len(sources) > 1:
        sources[OVERALL] = [group for groups in list(sources.values()) for group in groups]
    out, notes = dict(validation_metrics(table.responses)), []
    for source, groups in sources.items():
        found, said = _source_metrics(source, groups, table, config)
        out |= found
        notes += said
    return out, notes


def _source_metrics(
    source: str, groups: Sequence[Sequence[Trajectory]], table: Table, config: EvalConfig
) -> tuple[dict[str, Number], list[str]]:
    metrics, notes = config.metrics, []
    right = [[_is_right(t, metrics.pass_score) for t in group] for group in groups]
    answers = _answers(groups, config)
    if answers is None and source != OVERALL and max(map(len, groups)) > 1:
        notes.append(
            f"no maj@k for {source}: nothing tells the answer that is voted on (a reward function can return it as `pred`)"
        )
    found = source_metrics(right, answers, metrics.k, metrics.confidence)
    scores = [[t.score for t in group if t.score is not None and t.scored] for group in groups]
    means = [fmean(values) for values in scores if values]
    if failed := sum(map(len, groups)) - sum(map(len, scores)):
        found["errors"] = failed
    if metrics.text:
        pairs = [(t.text or "", table.references[t.uid]) for group in groups for t in group]
        pairs = [pair for pair in pairs if pair[1]]
        if pairs:
            found |= text_metrics(metrics.text, [text for text, _ in pairs], [texts for _, texts in pairs])
        else:
            notes.append(f"no {', '.join(metrics.text)} for {source}: no row has a reference text")
    out: dict[str, Number] = {f"eval/{source}/{name}": value for name, value in found.items()}
    if means:
        out |= {f"eval/{source}/score": fmean(means)}
        out |= {f"test_score/{source}": fmean(means)} if source != OVERALL else {}
    return out, notes


def _is_right(t: Trajectory, pass_score: float) -> bool:
    """Whether its `acc`, or without one its score, reaches the bound; a response that was not scored is not right."""
    if not t.scored or t.score is None:
        return False
    accuracy = plain(t.score_parts.get("acc"))
    return float(t.score if accuracy is None else accuracy) >= pass_score - _ROUNDING


def _answers(groups: Sequence[Sequence[Trajectory]], config: EvalConfig) -> list[list[str | None]] | None:
    """The final answer of each response: the function's `pred`, or what the built-in rule reads. None where neither is."""
    custom = config.custom_reward_function
    every = [t for group in groups for t in group if t.scored]
    if every and all("pred" in t.score_parts for t in every):
        return [[predicted(t.score_parts) for t in group] for group in groups]
    if custom.path or not all(map(has_answers, {t.prompt.data_source for t in every})):
        return None
    return [[_read(t, custom.reward_kwargs) if t.scored else None for t in group] for group in groups]


def _read(t: Trajectory, options: Mapping[str, Any]) -> str | None:
    return final_answer(
        t.prompt.data_source, t.text or "", {**(t.prompt.columns.get("reward_kwargs") or {}), **options}
    )


def _some(count: Number, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _show(metrics: Mapping[str, Number], table: Table) -> None:
    """A line for each source, then the public system's dictionary."""
    sources = dict.fromkeys(t.prompt.data_source for t in table.responses)
    for source in [*sources, *([OVERALL] if len(sources) > 1 else [])]:
        found = {
            name.rpartition("/")[2]: value
            for name, value in metrics.items()
            if name.rpartition("/")[0] == f"eval/{source}"
        }
        interval = f"({found.pop('accuracy_low'):.4f} to {found.pop('accuracy_high'):.4f})"
        words = [f"{name} {value:.4f}" for name, value in found.items() if isinstance(value, float)]
        words[0] += f" {interval}"
        counts = f"{_some(found['prompts'], 'prompt')}, {_some(found['responses'], 'response')}"
        errors = f", {found['errors']} not scored" if "errors" in found else ""
        say(f"{source}: {counts}{errors}: {', '.join(words)}")
    say(str({name: value for name, value in metrics.items() if name.startswith("test_score/")}))
