"""What a row means: the chat format and the plain format, checked. Specification: data.md §2, §3, §6.

A row that cannot be used raises BadRow; a file whose columns cannot be used raises DataError.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.data.chat import BadRow
from verl.data.files import DataError, RowFile, absent_column, nearest, notice
from verl.trajectory import Prompt

GSM8K = "openai/gsm8k"
PLAIN = "plain"
"""data_source of plain rows whose response holds no `#### n`: only a custom function can score them."""

_FINAL = re.compile(r"#### (-?\$?[0-9.,]*[0-9][0-9.,]*)")


def final_number(text: str) -> str | None:
    """The number after the last `#### ` with commas, `$` and a trailing full stop removed, or None."""
    found = _FINAL.findall(text)
    return found[-1].replace(",", "").replace("$", "").rstrip(".") if found else None


@dataclass(frozen=True)
class RowRules:
    """The keys and demands of a run, picklable. `needs_truth`: rows are scored by a built-in function; `needs_source`: by
    one that their data_source selects."""

    prompt_key: str = "prompt"
    source_key: str = "data_source"
    media_keys: tuple[str, ...] = ("images", "videos", "audios")
    needs_truth: bool = True
    needs_source: bool = True

    @classmethod
    def of(cls, config: Any) -> RowRules:
        """The rules of a run's configuration."""
        data = config.data
        own = getattr(getattr(config, "reward_manager", None), "source", None) == "importlib"
        custom = config.custom_reward_function.path or config.reward_model.enable or own
        return cls(
            prompt_key=data.prompt_key,
            source_key=data.reward_fn_key,
            media_keys=(data.image_key, data.video_key, data.audio_key),
            needs_truth=not custom,
        )


@dataclass(slots=True)
class RowFields:
    """One usable row. `cell` is the prompt as it stands in the file; `columns` everything not named here."""

    cell: Any
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    agent_name: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)

    def prompt(self, uid: str, ids: np.ndarray, messages: Any, **place: Any) -> Prompt:
        """The row as a Prompt; `place`: file, row, epoch."""
        return Prompt(
            uid=uid,
            ids=ids,
            messages=messages,
            data_source=self.data_source,
            ground_truth=self.ground_truth,
            extra_info=self.extra_info,
            agent_name=self.agent_name,
            columns=self.columns,
            **place,
        )


def is_plain(file: RowFile, rules: RowRules) -> bool:
    """True for a file of the plain format: a string prompt and neither data_source nor reward_model."""
    columns = file.columns
    if rules.prompt_key not in columns or not file.is_string(rules.prompt_key):
        return False
    return not {rules.source_key, "data_source", "reward_model"} & set(columns)


def check_columns(file: RowFile, rules: RowRules) -> bool:
    """True: plain format, False: chat format. Raises DataError for an absent column, naming the nearest."""
    from verl.rollout.agent_loop import OWN_NAMES

    if rules.prompt_key not in file.columns:
        raise DataError(absent_column(rules.prompt_key, "data.prompt_key", file.path, file.columns))
    if hidden := [name for name in file.columns if name in OWN_NAMES]:
        notice(
            f"{file.path}: an agent loop's own arguments have the name{'s' if len(hidden) > 1 else ''} "
            f"{', '.join(hidden)}; it finds the column{'s' if len(hidden) > 1 else ''} in `columns`"
        )
    if not is_plain(file, rules):
        if rules.needs_source and rules.source_key not in file.columns:
            raise DataError(absent_column(rules.source_key, "data.reward_fn_key", file.path, file.columns))
        if rules.needs_truth and "reward_model" not in file.columns:
            raise DataError(absent_column("reward_model", "", file.path, file.columns))
        return False
    others = [name for name in file.columns if name != rules.prompt_key]
    for name in ("response", "reward"):
        if name in file.columns or not rules.needs_source:
            continue
        if nearest(name, others) or (name == "response" and rules.needs_truth):
            raise DataError(absent_column(name, "", file.path, file.columns))
        notice(f"{file.path}: plain format without a column {name!r}; taken as null")
    if "reward" in file.columns:
        notice(
            f"{file.path}: plain format; the column 'reward' is passed in extra_info and otherwise unused "
            "(sampled answers are scored by the reward function)"
        )
    return True


def plain_truth(response: Any) -> tuple[Any, str]:
    """(ground truth or None, data_source) of a plain row's response."""
    if response is None or (isinstance(response, str) and not response.strip()):
        return None, PLAIN
    number = final_number(response) if isinstance(response, str) else None
    return (number, GSM8K) if number is not None else (response, PLAIN)


def check_plain_truth(path: str, responses: Iterable[Any], rules: RowRules) -> None:
    """Refuse a plain training file in which no row has a ground truth and only built-in functions score."""
    if not rules.needs_truth:
        return
    total = with_truth = unscored = 0
    for response in responses:
        truth, source = plain_truth(response)
        total += 1
        with_truth += truth is not None
        unscored += truth is not None and source == PLAIN
    if with_truth and unscored < with_truth:
        return
    found = (
        f"none of its {total} rows has a ground truth: column 'response' is empty or null in every row"
        if not with_truth
        else f"column 'response' of its {total} rows holds no `#### number` that a built-in function could check"
    )
    raise DataError(
        f"{path}: {found}. Every reward would be 0. Ways out: `verl prepare gsm8k` or "
        "`python3 examples/data_preprocess/gsm8k.py --local_dataset_path DIR` (data with answers), or "
        "custom_reward_function.path=FILE.py (your own scoring)"
    )


def fields_of(row: Mapping[str, Any], number: int, plain: bool, rules: RowRules) -> RowFields:
    """Row `number` of a file in its format. Raises BadRow."""
    return plain_row(row, number, rules) if plain else chat_row(row, rules)


def plain_row(row: Mapping[str, Any], number: int, rules: RowRules) -> RowFields:
    """The plain format: prompt (str), response, reward."""
    cell, response = row.get(rules.prompt_key), row.get("response")
    if cell is not None and not isinstance(cell, str):
        raise BadRow("wrong column type", f"{rules.prompt_key} is {type(cell).__name__}, a string is needed")
    if response is not None and not isinstance(response, str):
        raise BadRow("wrong column type", f"response is {type(response).__name__}, a string is needed")
    truth, source = plain_truth(response)
    if rules.needs_truth and truth is None:
        raise BadRow("no ground truth", "column 'response' is empty")
    extra = {"index": number, "response": response, "reward": row.get("reward")}
    rest = {k: v for k, v in row.items() if k not in (rules.prompt_key, "response", "reward")}
    if source == GSM8K:
        rest["reward_kwargs"] = {"method": "flexible"}
    return RowFields(cell, source, truth, extra, None, rest)


def chat_row(row: Mapping[str, Any], rules: RowRules) -> RowFields:
    """The chat format. `raw_prompt`, where a custom dataset gives one, wins over the prompt column."""
    if row.get("row_error"):
        raise BadRow(*row["row_error"])
    for key in rules.media_keys:
        media = row.get(key)
        if media is not None and len(media):
            raise BadRow(
                "media", f"column {key!r} is not empty: images, videos, audio are not in this release"
            )
    source = row.get(rules.source_key)
    if not source and not rules.needs_source:
        source = PLAIN
    if not isinstance(source, str) or not source:
        raise BadRow("data_source missing", f"column {rules.source_key!r} is {source!r}, a name is needed")
    extra, agent = row.get("extra_info"), row.get("agent_name")
    if extra is not None and not isinstance(extra, Mapping):
        raise BadRow("wrong column type", f"extra_info is {type(extra).__name__}, a struct is needed")
    if agent is not None and not isinstance(agent, str):
        raise BadRow("wrong column type", f"agent_name is {type(agent).__name__}, a string is needed")
    taken = (rules.prompt_key, "raw_prompt", "extra_info", "agent_name", rules.source_key)
    return RowFields(
        cell=row["raw_prompt"] if row.get("raw_prompt") is not None else row.get(rules.prompt_key),
        data_source=source,
        ground_truth=_truth(row.get("reward_model"), rules),
        extra_info=dict(extra or {}),
        agent_name=agent,
        columns={k: v for k, v in row.items() if k not in taken},
    )


def _truth(reward_model: Any, rules: RowRules) -> Any:
    if not isinstance(reward_model, Mapping):
        if rules.needs_truth:
            kind = type(reward_model).__name__
            problem = "no ground truth" if reward_model is None else "wrong column type"
            raise BadRow(problem, f"reward_model is {kind}, {{style, ground_truth}} is needed")
        return None
    truth = reward_model.get("ground_truth")
    if rules.needs_truth and (truth is None or (isinstance(truth, str) and not truth.strip())):
        raise BadRow("no ground truth", f"reward_model.ground_truth is {truth!r}")
    return truth
