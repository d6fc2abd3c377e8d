"""Rows of the data files against the model, the sampler and the rewards of the run."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.config.matching import nearest
from verl.config.report import Report
from verl.config.reward_weights import scores_by_model
from verl.config.schema.base import Root
from verl.data.check import chat_template
from verl.data.dataset import by_problem
from verl.data.files import RowFile
from verl.data.media import check_number, folder_of, open_image, with_images
from verl.data.pairs import margin_of, pair_of_dialogues
from verl.data.rows import BadRow, RowRules, Video, cells_of, fields_of, is_plain, messages_of
from verl.data.sft import dialogue, template_options
from verl.engine.registry import ROLLOUT_ENGINES, capabilities
from verl.reward.rules import check_truth, unsupported
from verl.versions import NO_TORCHVISION

TEXT_METRICS = {"bleu": "sacrebleu", "rouge": "rouge-score"}
"""Names of `metrics.text`, and the package that computes each."""
_LOOKED_AT = 256
_SHOWN = 5


def check(config: Root, report: Report) -> None:
    """Check the files that `verl.data.check` has opened: images, the first rows, what scores their data sources."""
    if config.entry in ("eval", "generation"):
        _table(report)
    elif not report.config.data.custom_cls.path:
        for key, files in report.files.items():
            for file in files:
                with report.refusing(key):
                    if _images(report, key, file):
                        _first_rows(report, key, file)
        if report.ppo:
            _sources(report, report.sources)
        _enough_rows(report)


def _sources(report: Report, sources: set[str], key: str = "data.reward_fn_key") -> None:
    """Every data source has something that scores it."""

    built_in = RowRules.of(report.config).needs_truth if report.ppo else not report.config.custom_reward_function.path
    if not built_in or not sources:
        return

    unknown = unsupported(sorted(sources))
    for source, message in list(unknown.items())[:_SHOWN]:
        report.refuse(f"{report.at(key)}, source {source:.80}", message)
    if len(unknown) > _SHOWN:
        report.refuse(report.at(key), f"{len(unknown) - _SHOWN} further values of that column have no built-in reward")


def _images(report: Report, key: str, file: RowFile) -> bool:
    """Rows with images need a model that sees them; videos more. False if that refuses the file."""
    columns = [k for k in (report.config.data.image_key, report.config.data.video_key) if k in file.columns]
    if report.facts is None:
        return True
    filled = [k for k in columns if file.filled(k)] or _in_messages(report, file)
    if not filled:
        return not _left_out(report, file)
    column = filled[0]
    if not report.facts.vision:
        report.refuse(
            f"{key}, column {column}",
            f"{file.path} has rows with {column} and {report.model.path} ({report.facts.name}) is a text model; "
            "use a vision model, or data without that column",
        )
        return False
    if report.config.data.video_key in filled:
        videos = f"{file.path}: rows with {report.config.data.video_key}: videos"
        if why := _no_video(report, report.facts.name):
            report.refuse(key, f"{videos} {why}")
            return False
        if importlib.util.find_spec("torchvision") is None:
            report.lacks(key, f"{videos} need {NO_TORCHVISION}")
            return False
    _template(report)
    if report.ppo and scores_by_model(report.config) and not report.config.reward_model.images:
        why = f"reads text, and {file.path} has rows with {column}; score these with a function, or set"
        report.refuse("reward_model.model.path", f"{why} reward_model.images=True for a model that sees them")
    return True


def _left_out(report: Report, file: RowFile) -> bool:
    """True, which is reported, for a file without images whose prompts all show one to a model that would see it."""
    data, facts = report.config.data, report.facts
    column = _prompt_column(report)
    rows = file.first(_LOOKED_AT) if facts is not None and facts.vision else []
    if not rows or not all("<image>" in str(row.get(column)) for row in rows):
        return False
    near = nearest(data.image_key, [name for name in file.columns if name != data.image_key])
    why = f"{file.path} has no images in that column, and its prompts say <image>{near}"
    report.refuse("data.image_key", f"{why} (columns: {', '.join(file.columns)})")
    return True


def _prompt_column(report: Report) -> str:
    data = report.config.data
    return str(data.prompt_key if report.ppo else (data.prompt_key or data.messages_key))


def _in_messages(report: Report, file: RowFile) -> list[str]:
    """The media columns that parts of messages stand for; of a text model none, whose rows with parts are bad ones."""

    data, column = report.config.data, _prompt_column(report)
    rows = file.first(_LOOKED_AT) if report.facts is not None and report.facts.vision else []
    messages = (message for row in rows for message in cells_of(row.get(column)) if isinstance(message, dict))
    parts = (part for entry in messages for part in cells_of(entry.get("content")) if isinstance(part, dict))
    kinds = {str(part.get("type")) for part in parts}
    return [key for kind, key in (("image", data.image_key), ("video", data.video_key)) if kind in kinds]


def _no_video(report: Report, model: str) -> str:
    """Why no run with this configuration can have videos, "" if one can."""
    if report.rollout is None:
        return "are not in this release outside of reinforcement learning; use rows without them"
    if model not in capabilities(report.rollout.name).videos:
        engines = {name: engine.capabilities.videos for name, engine in ROLLOUT_ENGINES.items()}
        able = [f"{name} with one of {', '.join(models)}" for name, models in engines.items() if models]
        advice = f"{report.rollout_key}.name={' or '.join(able)}"
        return f"of {model} models are not sampled by {report.rollout.name} in this release; take {advice}"
    return ""


def _template(report: Report) -> None:
    """A prompt with images is messages, which a chat template makes text of."""
    other = {report.config.data.tokenizer, report.model.tokenizer_path} - {None, report.model.path}
    if not other and report.facts is not None and not chat_template(report):
        report.refuse(
            f"{report.model_key}.path",
            "has no chat template, and prompts with images need one; set "
            f"{report.model_key}.custom_chat_template (Jinja text or a file)",
        )


def _first_rows(report: Report, key: str, file: RowFile) -> None:
    """Read the first rows as the run does, with the paths and headers of images, and report bad ones."""

    data, rows_read = report.config.data, 0
    bad: list[dict[str, Any]] = []
    if report.facts is None:
        return
    allowed = data.max_bad_row_ratio * len(file)
    for number, row in enumerate(_rows(file)):
        # Goes on only as long as the rows so far have too large a share of bad ones for the whole file.
        share = min(data.max_bad_row_ratio * number, number - 1)
        if number >= _LOOKED_AT and not share < len(bad) <= allowed:
            break
        rows_read = number + 1
        try:
            _look_at_row(report, file, row, number)
        except BadRow as wrong:
            entry = {"file": file.path, "row": number, "problem": wrong.problem, "detail": wrong.detail}
            bad.append(entry)
    if not bad:
        return
    summary = f"{len(bad)} of the first {rows_read} rows cannot be used: {'; '.join(by_problem(bad))}"
    if len(bad) > allowed or len(bad) == len(file):
        most = f"data.max_bad_row_ratio={data.max_bad_row_ratio} allows {int(allowed)}"
        advice = f"Repair the rows, or raise data.max_bad_row_ratio ({most})"
        report.refuse(key, f"{file.path}: {summary}. {advice}", run_says=True)
    else:
        report.notice(f"{key}: {summary}; they are left out", run_says=True)


def _rows(file: RowFile) -> Iterator[dict[str, Any]]:
    """All rows; for the first ones no more is read."""
    yield from file.first(_LOOKED_AT)
    for start in range(_LOOKED_AT, len(file), _LOOKED_AT):
        yield from file.rows(start, min(start + _LOOKED_AT, len(file)))


def _look_at_row(report: Report, file: RowFile, row: dict[str, Any], number: int) -> None:
    """Raises BadRow for a row that the run will not use."""

    data, seeing = report.config.data, report.facts is not None and report.facts.vision
    if report.ppo:
        rules = replace(RowRules.of(report.config), images=seeing)
        plain = is_plain(file, rules)
        fields = fields_of(row, number, plain, rules)
        if rules.needs_truth and not rules.loop_makes_prompt(fields.facts["agent_name"]):
            check_truth(fields.facts["data_source"], fields.facts["ground_truth"], any_source=not plain)
        messages, cells = messages_of(fields, rules), fields.images
    elif report.config.preference.loss:
        messages, cells = pair_of_dialogues(row, data)[0], []
        margin_of(row, data)
    else:
        messages, cells = dialogue(row, data, images=seeing), cells_of(row.get(data.image_key))
        template_options(row, data)
    cells = with_images(messages, cells)[1] if seeing else []
    check_number(cells, report.rollout.limit_images if report.ppo else None)
    for cell in cells if not data.allow_image_urls else ():
        if not isinstance(cell, Video):
            open_image(cell, folder_of(file.path))


def _enough_rows(report: Report) -> None:
    most, size = report.rows_used("train"), report.config.data.train_batch_size
    if most is not None and most < size:
        report.refuse("data.train_batch_size", f"more than {most} rows of data.train_files; lower it to {most}")


def _table(report: Report) -> None:
    """The file of prompts or of responses that generation and evaluation read."""

    if "://" in (report.config.select("data.output_path") or ""):
        report.refuse("data.output_path", "is not a local path; write to a disk of this machine and copy the file")
    elif report.config.entry == "generation" and (target := report.config.select("data.output_path")):
        if Path(target).suffix in (".json", ".jsonl", ".csv", ".txt"):
            report.refuse(f"data.output_path={target}", "a parquet file is written; let its name end in .parquet")
        if any(Path(target).resolve() == Path(file).resolve() for file in report.config.select("data.path") or ()):
            report.refuse(f"data.output_path={target}", "is a file of data.path and would be replaced; name another")
    for file in report.files["data.path"]:
        with report.refusing("data.path"):
            if report.config.entry == "generation":
                rules = RowRules(loop=report.rollout.agent.default_agent_loop)
                if "agent_name" not in file.columns and not rules.loop_makes_prompt(None):
                    _has_columns(report, file, "prompt_key")
                if report.config.data.image_key not in file.columns:
                    _left_out(report, file)
            else:
                _responses_file(report, file)


def _has_columns(report: Report, file: RowFile, *keys: str) -> bool:
    for key in keys:
        with report.refusing(f"data.{key}"):
            file.need(report.config.data[key], f"data.{key}")
    return all(report.config.data[key] in file.columns for key in keys)


def _responses_file(report: Report, file: RowFile) -> None:
    """A file to be scored: the columns of its format, and a reward for every data source."""

    data = report.config.data
    scored = ("data_source_key", "reward_model_key")
    plain = is_plain(file, RowRules(data.prompt_key, data.data_source_key))
    if _has_columns(report, file, "response_key", *(() if plain else scored)) and not plain:
        sources = file.values(data.data_source_key)
        _sources(report, {str(source) for source in sources if source}, "data.data_source_key")
    _text_metrics(report, file)


def _text_metrics(report: Report, file: RowFile) -> None:
    """The packages that compare texts, and the column that they compare with."""
    for name in report.config.metrics.text:
        package = TEXT_METRICS.get(name)
        if package and importlib.util.find_spec(package.replace("-", "_")) is None:
            install = f"pip install {package} (or 'verl[evaluation]')"
            report.lacks(f"metrics.text={name}", f"needs {package}, which is not installed: {install}")
    reference = report.config.metrics.reference
    if reference and reference.split(".")[0] not in file.columns:
        choices = f"{nearest(reference, file.columns)} (columns: {', '.join(file.columns)})"
        report.refuse("metrics.reference", f"{file.path} has no such column{choices}")
