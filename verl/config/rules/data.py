"""Data files and user code: files are opened and their columns looked at; functions are found without running them."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.config.model_facts import find
from verl.config.names import nearest
from verl.config.rules.context import Check
from verl.config.weights import scores_by_model
from verl.engine.registry import ROLLOUT_ENGINES, capabilities
from verl.errors import UserError
from verl.versions import NO_TORCHVISION, bound_names

TEXT_METRICS = {"bleu": "sacrebleu", "rouge": "rouge-score"}
"""Names of `metrics.text`, and the package that computes each."""
_LOOKED_AT = 256
_SHOWN = 5


def check(c: Check) -> None:
    """Code of the user's own, data files, and what scores their rows."""
    _user_code(c)
    if c.cfg.entry in ("eval", "generation"):
        _table(c)
    elif not c.cfg.data.custom_cls.path:
        sources: set[str] = set()
        if not any(c.cfg.data.train_files) and not c.trainer.get("val_only"):
            c.refuse("data.train_files", "names no file")
        for key in ("data.train_files", "data.val_files"):
            for file in _opened(c, key):
                with c.refusing(key):
                    sources |= _prompt_columns(c, key, file) if c.ppo else _dialogue_columns(c, file)
                    if _images(c, key, file):
                        _first_rows(c, key, file)
        if c.ppo:
            _sources(c, sources)
        _enough_rows(c)


def _opened(c: Check, key: str) -> list[Any]:
    """The data files of a key that can be opened; others are reported. Counts their rows if all can be opened."""
    from verl.data.files import DataError, is_remote, open_file

    value, files = c.cfg.select(key) or [], []
    paths = [value] if isinstance(value, str) else value
    for path in paths:
        if is_remote(path):
            c.notice(f"{key}={path}: remote, copied at the start; not looked at here")
            continue
        try:
            files.append(open_file(path))
        except DataError as error:
            report = c.refuse if os.path.exists(path) else c.lacks
            report(key, str(error))
    if files and len(files) == len(paths):
        c.rows[key] = sum(map(len, files))
    return files


def _prompt_columns(c: Check, key: str, file: Any) -> set[str]:
    """Check the columns of a file of prompts; returns the data sources found."""
    from verl.data.rows import RowRules, check_columns, check_plain_truth

    rules, warnings, sources = RowRules.of(c.cfg), io.StringIO(), set()
    with contextlib.redirect_stderr(warnings):
        if not check_columns(file, rules):
            sources = {source for source in file.values(rules.source_key) if isinstance(source, str)}
        elif key == "data.train_files" and "response" in file.columns:
            check_plain_truth(file.path, file.values("response"), len(file), rules)
    for line in warnings.getvalue().splitlines():
        c.notice(line.removeprefix("[data] "), run_says=True)
    if "agent_name" in file.columns:
        names = {str(value) for value in file.values("agent_name") if value}
        c.agent_names |= names
        # Data sources of rows that score themselves need no reward. Each row is checked when the run reads it.
        if any(map(rules.loop_makes_prompt, names)):
            return set()
    return sources


def _dialogue_columns(c: Check, file: Any) -> set[str]:
    """Check the columns of a file of dialogues; they have no data sources."""
    from verl.data.sft import check_columns

    check_columns(file, c.cfg.data)
    return set()


def _sources(c: Check, sources: set[str], key: str = "data.reward_fn_key") -> None:
    """Every data source has something that scores it."""
    from verl.data.rows import RowRules
    from verl.reward.rules import unsupported

    built_in = RowRules.of(c.cfg).needs_truth if c.ppo else not c.cfg.custom_reward_function.path
    if not built_in or not sources:
        return

    unknown = unsupported(sorted(sources))
    for source, message in list(unknown.items())[:_SHOWN]:
        c.refuse(f"{c.at(key)}, source {source:.80}", message)
    if len(unknown) > _SHOWN:
        c.refuse(c.at(key), f"{len(unknown) - _SHOWN} further values of that column have no built-in reward")


def _images(c: Check, key: str, file: Any) -> bool:
    """Rows with images need a model that sees them; videos more. False if that refuses the file."""
    columns = [k for k in (c.cfg.data.image_key, c.cfg.data.video_key) if k in file.columns]
    if c.facts is None:
        return True
    filled = [k for k in columns if file.filled(k)] or _in_messages(c, file)
    if not filled:
        return True
    column = filled[0]
    if not c.facts.vision:
        c.refuse(
            f"{key}, column {column}",
            f"{file.path} has rows with {column} and {c.model.path} ({c.facts.name}) is a text model; "
            "use a vision model, or data without that column",
        )
        return False
    if c.cfg.data.video_key in filled:
        videos = f"{file.path}: rows with {c.cfg.data.video_key}: videos"
        if why := _no_video(c, c.facts.name):
            c.refuse(key, f"{videos} {why}")
            return False
        if importlib.util.find_spec("torchvision") is None:
            c.lacks(key, f"{videos} need {NO_TORCHVISION}")
            return False
    _template(c)
    if c.ppo and scores_by_model(c.cfg) and not c.cfg.reward_model.images:
        why = f"reads text, and {file.path} has rows with {column}; score these with a function, or set"
        c.refuse("reward_model.model.path", f"{why} reward_model.images=True for a model that sees them")
    return True


def _in_messages(c: Check, file: Any) -> list[str]:
    """The media columns that parts of messages stand for; of a text model none, whose rows with parts are bad ones."""
    from verl.data.rows import cells_of

    data = c.cfg.data
    column = data.prompt_key if c.ppo else (data.prompt_key or data.messages_key)
    rows = file.first(_LOOKED_AT) if c.facts is not None and c.facts.vision else []
    messages = (message for row in rows for message in cells_of(row.get(column)) if isinstance(message, dict))
    parts = (part for entry in messages for part in cells_of(entry.get("content")) if isinstance(part, dict))
    kinds = {str(part.get("type")) for part in parts}
    return [key for kind, key in (("image", data.image_key), ("video", data.video_key)) if kind in kinds]


def _no_video(c: Check, model: str) -> str:
    """Why no run with this configuration can have videos, "" if one can."""
    if c.rollout is None:
        return "are not in this release outside of reinforcement learning; use rows without them"
    if model not in capabilities(c.rollout.name).videos:
        engines = {name: engine.capabilities.videos for name, engine in ROLLOUT_ENGINES.items()}
        able = [f"{name} with one of {', '.join(models)}" for name, models in engines.items() if models]
        advice = f"{c.rollout_key}.name={' or '.join(able)}"
        return f"of {model} models are not sampled by {c.rollout.name} in this release; take {advice}"
    return ""


def chat_template(c: Check) -> str:
    """The chat template's text where it is on this disk, or ""."""
    from verl.data.tokenizer import template_text

    try:
        if c.model.custom_chat_template:
            return template_text(c.model.custom_chat_template)
        folder = find(c.cfg.select("data.tokenizer") or c.model.tokenizer_path)
        if (file := folder / "chat_template.jinja").is_file():
            return file.read_text("utf-8")
        file = folder / "chat_template.json"
        file = file if file.is_file() else folder / "tokenizer_config.json"
        return str(json.loads(file.read_text("utf-8"))["chat_template"])
    except (UserError, OSError, ValueError, KeyError, TypeError):
        return ""


def _template(c: Check) -> None:
    """A prompt with images is messages, which a chat template makes text of."""
    other = {c.cfg.data.tokenizer, c.model.tokenizer_path} - {None, c.model.path}
    if not other and c.facts is not None and not chat_template(c):
        c.refuse(
            f"{c.model_key}.path",
            "has no chat template, and prompts with images need one; set "
            f"{c.model_key}.custom_chat_template (Jinja text or a file)",
        )


def _first_rows(c: Check, key: str, file: Any) -> None:
    """Read the first rows as the run does, with the paths and headers of images, and report bad ones."""
    from verl.data.dataset import by_problem
    from verl.data.rows import BadRow

    data, rows_read = c.cfg.data, 0
    bad: list[dict[str, Any]] = []
    if c.facts is None:
        return
    allowed = data.max_bad_row_ratio * len(file)
    for number, row in enumerate(_rows(file)):
        # Goes on only as long as the rows so far have too large a share of bad ones for the whole file.
        share = min(data.max_bad_row_ratio * number, number - 1)
        if number >= _LOOKED_AT and not share < len(bad) <= allowed:
            break
        rows_read = number + 1
        try:
            _look_at_row(c, file, row, number)
        except BadRow as wrong:
            entry = {"file": file.path, "row": number, "problem": wrong.problem, "detail": wrong.detail}
            bad.append(entry)
    if not bad:
        return
    summary = f"{len(bad)} of the first {rows_read} rows cannot be used: {'; '.join(by_problem(bad))}"
    if len(bad) > allowed or len(bad) == len(file):
        most = f"data.max_bad_row_ratio={data.max_bad_row_ratio} allows {int(allowed)}"
        advice = f"Repair the rows, or raise data.max_bad_row_ratio ({most})"
        c.refuse(key, f"{file.path}: {summary}. {advice}", run_says=True)
    else:
        c.notice(f"{key}: {summary}; they are left out", run_says=True)


def _rows(file: Any) -> Iterator[dict[str, Any]]:
    """All rows; for the first ones no more is read."""
    yield from file.first(_LOOKED_AT)
    for start in range(_LOOKED_AT, len(file), _LOOKED_AT):
        yield from file.rows(start, min(start + _LOOKED_AT, len(file)))


def _look_at_row(c: Check, file: Any, row: dict[str, Any], number: int) -> None:
    """Raises BadRow for a row that the run will not use."""
    from verl.data.media import check_number, folder_of, open_image, with_images
    from verl.data.rows import RowRules, Video, cells_of, fields_of, is_plain, messages_of
    from verl.data.sft import dialogue, template_options
    from verl.reward.rules import check_truth

    data, seeing = c.cfg.data, c.facts is not None and c.facts.vision
    if c.ppo:
        rules = replace(RowRules.of(c.cfg), images=seeing)
        plain = is_plain(file, rules)
        fields = fields_of(row, number, plain, rules)
        if rules.needs_truth and not rules.loop_makes_prompt(fields.facts["agent_name"]):
            check_truth(fields.facts["data_source"], fields.facts["ground_truth"], any_source=not plain)
        messages, cells = messages_of(fields, rules), fields.images
    else:
        messages, cells = dialogue(row, data, images=seeing), cells_of(row.get(data.image_key))
        template_options(row, data)
    cells = with_images(messages, cells)[1] if seeing else []
    check_number(cells, c.rollout.limit_images if c.ppo else None)
    for cell in cells if not data.allow_image_urls else ():
        if not isinstance(cell, Video):
            open_image(cell, folder_of(file.path))


def _enough_rows(c: Check) -> None:
    most, size = c.rows_used("train"), c.cfg.data.train_batch_size
    if most is not None and most < size:
        c.refuse("data.train_batch_size", f"more than {most} rows of data.train_files; lower it to {most}")


def _table(c: Check) -> None:
    """The file of prompts or of responses that generation and evaluation read."""
    from verl.data.rows import RowRules

    if "://" in (c.cfg.select("data.output_path") or ""):
        c.refuse("data.output_path", "is not a local path; write to a disk of this machine and copy the file")
    elif c.cfg.entry == "generation" and (target := c.cfg.select("data.output_path")):
        if Path(target).suffix in (".json", ".jsonl", ".csv", ".txt"):
            c.refuse(f"data.output_path={target}", "a parquet file is written; let its name end in .parquet")
        if any(Path(target).resolve() == Path(file).resolve() for file in c.cfg.select("data.path") or ()):
            c.refuse(
                f"data.output_path={target}", "is a file of data.path and would be replaced; name another"
            )
    for file in _opened(c, "data.path"):
        with c.refusing("data.path"):
            if c.cfg.entry == "generation":
                rules = RowRules(loop=c.rollout.agent.default_agent_loop)
                if "agent_name" not in file.columns and not rules.loop_makes_prompt(None):
                    _has_columns(c, file, "prompt_key")
            else:
                _responses_file(c, file)


def _has_columns(c: Check, file: Any, *keys: str) -> bool:
    for key in keys:
        with c.refusing(f"data.{key}"):
            file.need(c.cfg.data[key], f"data.{key}")
    return all(c.cfg.data[key] in file.columns for key in keys)


def _responses_file(c: Check, file: Any) -> None:
    """A file to be scored: the columns of its format, and a reward for every data source."""
    from verl.data.rows import RowRules, is_plain

    data = c.cfg.data
    scored = ("data_source_key", "reward_model_key")
    plain = is_plain(file, RowRules(data.prompt_key, data.data_source_key))
    if _has_columns(c, file, "response_key", *(() if plain else scored)) and not plain:
        sources = file.values(data.data_source_key)
        _sources(c, {str(source) for source in sources if source}, "data.data_source_key")
    _text_metrics(c, file)


def _text_metrics(c: Check, file: Any) -> None:
    """The packages that compare texts, and the column that they compare with."""
    for name in c.cfg.metrics.text:
        package = TEXT_METRICS.get(name)
        if package and importlib.util.find_spec(package.replace("-", "_")) is None:
            install = f"pip install {package} (or 'verl[evaluation]')"
            c.lacks(f"metrics.text={name}", f"needs {package}, which is not installed: {install}")
    reference = c.cfg.metrics.reference
    if reference and reference.split(".")[0] not in file.columns:
        choices = f"{nearest(reference, file.columns)} (columns: {', '.join(file.columns)})"
        c.refuse("metrics.reference", f"{file.path} has no such column{choices}")


# ---- code of the user's own ----


def _user_code(c: Check) -> None:
    """The file is there, holds the name, and the function takes the arguments."""
    for path, name in (
        ("custom_reward_function.path", "custom_reward_function.name"),
        ("data.custom_cls.path", "data.custom_cls.name"),
        ("data.sampler.class_path", "data.sampler.class_name"),
        ("data.datagen.path", "data.datagen.name"),
        ("data.augmentation.path", "data.augmentation.name"),
    ):
        if c.cfg.select(path):
            _object(c, path, name)
        elif name in c.keys and c.cfg.select(name) not in (None, "", c.keys[name].default()):
            c.refuse(name, f"nothing is loaded without {path}; set it to the file that defines the name")
    if c.cfg.select("reward_manager.source") == "importlib":
        path, name = "reward_manager.module.path", "reward_manager.name"
        if c.cfg.select(path):
            _object(c, path, name)
        else:
            c.refuse("reward_manager.source", f"needs {path}=FILE.py with the class {c.cfg.select(name)}")
    elif c.cfg.select("reward_manager.module.path"):
        c.refuse("reward_manager.module.path", "nothing is loaded without reward_manager.source=importlib")


def _object(c: Check, path_key: str, name_key: str) -> None:
    """Look for a name in the source of the file that `path_key` names."""
    source, name = _source(c, path_key), c.cfg.select(name_key)
    if source is None:
        return
    try:
        tree = ast.parse(source.read_bytes(), str(source))
    except (OSError, SyntaxError, ValueError) as error:
        c.refuse(path_key, f"cannot be read as Python: {type(error).__name__}: {error}")
        return
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    defined = {node.name: node for node in tree.body if isinstance(node, (*functions, ast.ClassDef))}
    names = ", ".join(defined) or "nothing"
    if not name:
        c.refuse(name_key, f"is required with {path_key} (found there: {names})")
    elif not {name, "*"} & bound_names(tree):
        c.refuse(name_key, f"{source} defines no such name{nearest(name, defined)} ({names})")
    elif name_key == "custom_reward_function.name" and isinstance(defined.get(name), functions):
        _takes(c, name_key, defined[name])


def _source(c: Check, key: str) -> Path | None:
    """The Python file a path means, or None (reported unless it is a compiled module)."""
    path: str = c.cfg.select(key)
    if not path.startswith("pkg://"):
        file = Path(path.removeprefix("file://"))
        if file.is_file():
            return file
        beside = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        c.refuse(key, f"no such file (looked at {file.absolute()}){nearest(file.name, beside)}")
        return None
    module = path.removeprefix("pkg://").strip("/").removesuffix(".py").replace("/", ".")
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        c.refuse(key, f"no module {module} can be imported here")
        return None
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _takes(c: Check, key: str, function: Any) -> None:
    """A reward function takes what the manager calls it with."""
    from verl.reward.load import MANY, OF_JUDGES, ONE

    manager, parameters = c.cfg.select("reward_model.reward_manager"), function.args
    positional = [*parameters.posonlyargs, *parameters.args]
    by_position = manager == "prime" or (not c.ppo and manager != "batch")  # main_eval
    if by_position and (parameters.vararg or len(positional) >= 3):
        return
    called = MANY if manager == "batch" else ONE
    names = [argument.arg for argument in (*positional, *parameters.kwonlyargs)]
    missing = [] if parameters.kwarg else [name for name in called if name not in names]
    supplied = {*called, *(c.cfg.select("custom_reward_function.reward_kwargs") or ())}
    unset = {*names[: len(positional) - len(parameters.defaults)]} - supplied - {*OF_JUDGES}
    if missing or unset:
        message = f"is called with {', '.join(called)}; it takes {', '.join(names) or 'nothing'}"
        advice = "add {} or **kwargs" if missing else "give {} a default"
        c.refuse(key, f"{message}; {advice.format(', '.join(missing or sorted(unset)))}")
