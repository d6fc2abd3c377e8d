"""Scores of the responses of a file: the reward function of training, metrics by data source, a page.

    file → trajectories (text, no tokens) → RewardRunner → validation's metrics, and eval/{data_source}/… beside them

A response has the uid and the number that validation on the same file would give it: the same samples get the same
scores and metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from verl.config import Config, EvalConfig
from verl.config.schema.base import setting
from verl.data.dataset import CHUNK, CheckedRows, by_problem
from verl.data.files import DataError, RowFiles
from verl.data.media import folder_of, shown, with_images
from verl.data.rows import BadRow, RowFields, RowRules, Video, as_messages, fields_of, is_plain
from verl.errors import UserError
from verl.reward.rules import check_truth, final_answer, has_answers, predicted, unsupported
from verl.reward.runner import RewardRunner
from verl.reward.settings import RewardSettings
from verl.tracking.console import Progress, say
from verl.tracking.evaluation_metrics import source_metrics, text_metrics
from verl.tracking.jsonl import write_lines
from verl.tracking.names import Number, plain
from verl.tracking.responses import dump_rows
from verl.tracking.tracker import Tracking
from verl.tracking.validation_metrics import validation_metrics
from verl.trajectory import Batch, Trajectory

LENGTHS = "response_lengths"
"""The column of main_generation with the tokens of each response."""
OVERALL = "all"
"""Stands for all data sources together, where there are several."""
SCORES = "scores.jsonl"
_ROUNDING = 1e-9


def evaluate(config: EvalConfig, tracking: Tracking) -> None:
    """Score; write metrics, scores, sampled responses and the page to the run folder. `run_guarded` says how it
    ends."""
    data = Responses(config)
    tracking.data_report(data)
    rewards = RewardRunner(None, events=tracking.event, settings=_reward_settings(config))
    try:
        asyncio.run(_score(rewards, data.all))
    finally:
        rewards.close()
    rewards.check_usable(data.all)
    _refuse_all_failed(data.all)
    metrics, notes, lines = evaluation_metrics(data, config)
    for note in notes:
        tracking.notice(note)
    tracking.log(0, metrics)
    tracking.dump_trajectories(0, data.all)
    write_lines(tracking.run_dir / SCORES, dump_rows(0, data.all))
    for text in lines:
        say(text)
    tracking.finish("finished")
    tracking.write_page(last=True)


# ------------------------------------------------------------------------------------------------------- reading


class Responses(CheckedRows):
    """The responses of `data.path`, and what they are compared with: `references`, uid → texts. Rows that cannot be
    used are left out and counted.

    DataError if a column is missing or no row is left, or where a data source has nothing that scores it.
    """

    split = "responses"

    def __init__(self, config: EvalConfig):
        super().__init__(RowFiles(str(config.data.path)))
        self.all: list[Trajectory] = []
        self.references: dict[str, list[str]] = {}
        data, file = config.data, self.source.files[0]
        rules = RowRules(
            data.prompt_key,
            data.data_source_key,
            (data.image_key,) if config.reward_model.images else (),
            needs_truth=not config.custom_reward_function.path,
            images=True,
        )
        plain_format = is_plain(file, rules)
        needed = ("response_key", "data_source_key", "reward_model_key")
        for key in needed[:1] if plain_format else needed:
            file.need(data[key], f"data.{key}")
        if config.reward_model.reward_kwargs.overlong_buffer_cfg.enable:
            file.need(LENGTHS, "", f": the overlong penalty is on tokens; main_generation writes {LENGTHS}")
        for start in range(0, len(file), CHUNK):
            for number, row in enumerate(file.rows(start, min(start + CHUNK, len(file))), start):
                try:
                    self._add(number, row, plain_format, rules, config)
                except BadRow as bad:
                    self.bad[number] = (bad.problem, bad.detail)
        if not self.all:
            why = "; ".join(by_problem(self.bad_rows))
            raise DataError(f"{self.names}: no usable row is left: {why}", self.bad_rows)
        unknown = unsupported({t.prompt.data_source for t in self.all}) if rules.needs_truth else {}
        if unknown:
            raise DataError("; ".join(unknown.values()))

    def _add(self, number: int, row: dict[str, Any], plain_format: bool, rules: RowRules, config: EvalConfig) -> None:
        data = config.data
        row["reward_model"] = _truth(row.get(data.reward_model_key))
        fields = fields_of(row, number, plain_format, rules)
        if rules.needs_truth:
            check_truth(fields.facts["data_source"], fields.facts["ground_truth"], any_source=True)
        if isinstance(fields.cell, list):
            _take_images(fields, wanted=bool(rules.media_keys))
        responses = _responses(row.pop(data.response_key), fields, self.names, number)
        for response, length in zip(responses, row.pop(LENGTHS, None) or [], strict=False):
            response.extra["tokens"] = length or 0
        self.all += responses
        texts = _reference(row, config.metrics.reference, fields.facts["ground_truth"])
        self.references[self.all[-1].uid] = texts

    @property
    def report(self) -> dict[str, Any]:
        """Counts for events.jsonl."""
        used = len(self.references)
        return {"files": self.paths, "rows": len(self.source), "used": used, "responses": len(self.all)}

    def describe(self) -> list[str]:
        """Lines for the console."""
        used = f"{len(self.references)} of {len(self.source)} rows from {self.names}"
        return [f"{used}, {len(self.all)} responses", *self.left_out()]


def _truth(cell: Any) -> Any:
    """The struct of the chat format; a column that holds the ground truth itself is taken as it is."""
    return cell if cell is None or isinstance(cell, Mapping) else {"ground_truth": cell}


def _take_images(fields: RowFields, *, wanted: bool) -> None:
    """Move images from message parts to the row's `images`, where they are `wanted` by what scores; the messages keep
    their places, so that no data URI gets into the report."""
    with suppress(BadRow):  # a prompt that the sampler would refuse: its responses are scored as they are
        fields.cell, cells = with_images(as_messages(fields.cell, images=True), fields.images)
        fields.images = [cell for cell in cells if wanted and not isinstance(cell, Video)]


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
        Trajectory(prompt, i, nothing, nothing.astype(bool), text=text or "", **(lost if text is None else state))
        for i, text in enumerate(texts)
    ]


def _reference(row: Mapping[str, Any], path: str | None, truth: Any) -> list[str]:
    """Texts that this row's responses are compared with; [] if it has none."""
    reference = setting(row, path) if path else truth
    reference = reference.get("target") if isinstance(reference, Mapping) else reference
    texts = reference if isinstance(reference, list) else [reference]
    return [str(text) for text in texts if text is not None and str(text).strip()]


# ------------------------------------------------------------------------------------------------------- scoring


def _reward_settings(config: EvalConfig) -> RewardSettings:
    """Those of a training run with these keys. As in the public main_eval, a function whose arguments have other names
    gets data source, response and ground truth by position."""
    run = Config()
    run.custom_reward_function = config.custom_reward_function
    for name in config.reward_model:
        run.reward_model[name] = config.reward_model[name]
    settings = RewardSettings.from_config(run)
    function = settings.function
    return replace(settings, function=replace(function, positional=0 if function.batch else 3))


async def _score(rewards: RewardRunner, responses: Sequence[Trajectory]) -> None:
    """Every failure is an event of the runner; the response stays without a score."""
    if not rewards.per_response:
        await rewards.score_batch(responses)
        return
    progress = Progress(len(responses), title="Scoring")
    begun = [asyncio.ensure_future(rewards.score(trajectory)) for trajectory in responses]  # in their order
    scorings = asyncio.as_completed(begun)
    try:
        for done, scoring in enumerate(scorings, 1):
            await scoring
            progress.advance_to(done)
    finally:
        progress.close()


def _refuse_all_failed(responses: Sequence[Trajectory]) -> None:
    if not any(t.scored for t in responses):
        raise UserError(
            f"not one of {len(responses)} responses could be scored; the first: {responses[0].score_error}. "
            "`verl reward check` tries the function on the data"
        )


# ------------------------------------------------------------------------------------------------------- metrics


def evaluation_metrics(data: Responses, config: EvalConfig) -> tuple[dict[str, Number], list[str], list[str]]:
    """(metrics, notices, printed lines) of scored responses: test_score/{source}, eval/{source}/…, and validation's
    metrics; a line for each source, then the public system's dictionary."""
    sources: dict[str, list[list[Trajectory]]] = {}
    for group in Batch(data.all).groups():
        sources.setdefault(group[0].prompt.data_source, []).append(group)
    if len(sources) > 1:
        sources[OVERALL] = [group for groups in list(sources.values()) for group in groups]
    out, notes, lines = dict(validation_metrics(data.all)), [], []
    test_scores: dict[str, Number] = {}
    for source, groups in sources.items():
        values, source_notes = _source_metrics(source, groups, data, config)
        out |= {f"eval/{source}/{name}": value for name, value in values.items()}
        if "score" in values and source != OVERALL:
            test_scores[f"test_score/{source}"] = values["score"]
            out |= test_scores
        notes += source_notes
        lines.append(_line(source, values))
    return out, notes, [*lines, str(test_scores)]


def _source_metrics(
    source: str, groups: Sequence[Sequence[Trajectory]], data: Responses, config: EvalConfig
) -> tuple[dict[str, Number], list[str]]:
    metrics, notes = config.metrics, []
    right = [[_is_right(t, metrics.pass_score) for t in group] for group in groups]
    answers = _answers(groups, config)
    if answers is None and source != OVERALL and max(map(len, groups)) > 1:
        notes.append(
            f"no maj@k for {source}: nothing tells the answer that is voted on "
            "(a reward function can return it as `pred`)"
        )
    out = source_metrics(right, answers, metrics.k, metrics.confidence)
    scores = [[t.score for t in group if t.score is not None and t.scored] for group in groups]
    means = [fmean(values) for values in scores if values]
    if failed := sum(map(len, groups)) - sum(map(len, scores)):
        out["errors"] = failed
    if metrics.text:
        pairs = [(t.text or "", data.references[t.uid]) for group in groups for t in group]
        pairs = [pair for pair in pairs if pair[1]]
        if pairs:
            out |= text_metrics(metrics.text, [text for text, _ in pairs], [texts for _, texts in pairs])
        else:
            notes.append(f"no {', '.join(metrics.text)} for {source}: no row has a reference text")
    if means:
        out["score"] = fmean(means)
    return out, notes


def _is_right(t: Trajectory, pass_score: float) -> bool:
    """Whether its `acc`, or without one its score, reaches the bound; a response that was not scored is not right."""
    if not t.scored or t.score is None:
        return False
    accuracy = plain(t.score_parts.get("acc"))
    return float(t.score if accuracy is None else accuracy) >= pass_score - _ROUNDING


def _answers(groups: Sequence[Sequence[Trajectory]], config: EvalConfig) -> list[list[str | None]] | None:
    """The final answer of each response: the function's `pred`, or what the built-in rule reads; None without both."""
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


def _some(count: Number, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _line(source: str, metrics: Mapping[str, Number]) -> str:
    values = dict(metrics)
    interval = f"({values.pop('accuracy_low'):.4f} to {values.pop('accuracy_high'):.4f})"
    words = [f"{name} {value:.4f}" for name, value in values.items() if isinstance(value, float)]
    words[0] += f" {interval}"
    counts = f"{_some(values['prompts'], 'prompt')}, {_some(values['responses'], 'response')}"
    errors = f", {values['errors']} not scored" if "errors" in values else ""
    return f"{source}: {counts}{errors}: {', '.join(words)}"
