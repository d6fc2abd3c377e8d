"""Data files, code of the user's own, tokenizer and chat template: found and read without running or fetching
anything."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import json
import os
import re
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError, meta, pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from verl.config.matching import nearest
from verl.config.model_facts import ModelTrouble, find
from verl.config.report import ACTOR, Report
from verl.config.schema.base import Root
from verl.data import pairs, sft
from verl.data.files import DataError, RowFile, is_remote, open_file
from verl.data.rows import RESERVED, RowRules, check_columns, check_plain_truth
from verl.data.tokenizer import template_text
from verl.errors import UserError
from verl.versions import bound_names

_ARGUMENTS_OF_TRANSFORMERS = ("tools", "documents", "continue_final_message", "add_generation_prompt")
_TAG_OF_TRANSFORMERS = re.compile(r"{%-?\s*generation")
_USER_CODE = {
    "data.custom_cls.path": "data.custom_cls.name",
    "data.sampler.class_path": "data.sampler.class_name",
    "data.datagen.path": "data.datagen.name",
    "data.augmentation.path": "data.augmentation.name",
}
_OF_IMAGES = (
    *(f"data.augmentation.{name}" for name in ("rotate", "crop", "color_jitter", "path")),
    *(f"{ACTOR}.freeze_vision_tower", "data.mm_processor_kwargs", "reward_model.images"),
)


def check(config: Root, report: Report) -> None:
    """Check `data.*`: code of the user's own, files with their columns, the tokenizer and its template."""
    for path_key, name_key in _USER_CODE.items():
        user_code(report, path_key, name_key)
    if config.entry in ("eval", "generation"):
        report.files["data.path"] = opened(report, "data.path")
    elif not report.config.data.custom_cls.path:
        if not any(report.config.data.train_files) and not report.trainer.get("val_only"):
            report.refuse("data.train_files", "names no file")
        for key in ("data.train_files", "data.val_files"):
            files = report.files[key] = []
            for file in opened(report, key):
                with report.refusing(key):
                    _columns(report, key, file)
                    files.append(file)
    if report.model is not None:
        _tokenizer(report)
        _template_arguments(report)
    if report.ppo and report.facts is not None and not report.facts.vision:
        for key in [name for name in _OF_IMAGES if report.was_set(name) and config.select(name)]:
            report.notice(f"no effect: {report.at(key)}: this model sees no images")


def opened(report: Report, key: str) -> list[Any]:
    """The data files of a key that can be opened; others are reported. Counts their rows if all can be opened."""

    value, files = report.config.select(key) or [], []
    paths = [value] if isinstance(value, str) else value
    for path in paths:
        if is_remote(path):
            report.notice(f"{key}={path}: remote, copied at the start; not looked at here")
            continue
        try:
            files.append(open_file(path))
        except DataError as error:
            say = report.refuse if os.path.exists(path) else report.lacks
            say(key, str(error))
    if files and len(files) == len(paths):
        report.rows[key] = sum(map(len, files))
    return files


def _columns(report: Report, key: str, file: RowFile) -> None:
    """Check the columns of a file, and note which data sources and agent loops its rows name. DataError if one
    lacks."""
    if not report.ppo:
        columns = pairs.check_pair_columns if report.config.preference.loss else sft.check_columns
        columns(file, report.config.data)
        return
    rules, warnings, sources = RowRules.of(report.config), io.StringIO(), set[str]()
    with contextlib.redirect_stderr(warnings):
        if not check_columns(file, rules):
            sources = {source for source in file.values(rules.source_key) if isinstance(source, str)}
        elif key == "data.train_files" and "response" in file.columns:
            check_plain_truth(file.path, file.values("response"), len(file), rules)
    for line in warnings.getvalue().splitlines():
        report.notice(line.removeprefix("[data] "), run_says=True)
    names = {str(value) for value in file.values("agent_name") if value} if "agent_name" in file.columns else set()
    report.agent_names |= names
    # Data sources of rows that score themselves need no reward. Each row is checked when the run reads it.
    if not any(map(rules.loop_makes_prompt, names)):
        report.sources |= sources


def user_code(report: Report, path_key: str, name_key: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function in the file of `path_key` that `name_key` names; None if it is none, or is not there (reported)."""
    if report.config.select(path_key):
        return _definition(report, path_key, name_key)
    default = report.keys[name_key].default() if name_key in report.keys else None
    if report.config.select(name_key) not in (None, "", default):
        report.refuse(name_key, f"nothing is loaded without {path_key}; set it to the file that defines the name")
    return None


def _definition(report: Report, path_key: str, name_key: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    source, name = _source(report, path_key), report.config.select(name_key)
    if source is None:
        return None
    try:
        tree = ast.parse(source.read_bytes(), str(source))
    except (OSError, SyntaxError, ValueError) as error:
        report.refuse(path_key, f"cannot be read as Python: {type(error).__name__}: {error}")
        return None
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    defined = {node.name: node for node in tree.body if isinstance(node, (*functions, ast.ClassDef))}
    names = ", ".join(defined) or "nothing"
    if not name:
        report.refuse(name_key, f"is required with {path_key} (found there: {names})")
    elif not {name, "*"} & bound_names(tree):
        report.refuse(name_key, f"{source} defines no such name{nearest(name, defined)} ({names})")
    node = defined.get(name)
    return node if isinstance(node, functions) else None


def _source(report: Report, key: str) -> Path | None:
    """The Python file a path means, or None (reported unless it is a compiled module)."""
    path: str = report.config.select(key)
    if not path.startswith("pkg://"):
        file = Path(path.removeprefix("file://"))
        if file.is_file():
            return file
        beside = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        report.refuse(key, f"no such file (looked at {file.absolute()}){nearest(file.name, beside)}")
        return None
    module = path.removeprefix("pkg://").strip("/").removesuffix(".py").replace("/", ".")
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        report.refuse(key, f"no module {module} can be imported here")
        return None
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def chat_template(report: Report) -> str:
    """The chat template's text where it is on this disk, or ""."""

    try:
        if report.model.custom_chat_template:
            return template_text(report.model.custom_chat_template)
        folder = find(report.config.select("data.tokenizer") or report.model.tokenizer_path)
        if (file := folder / "chat_template.jinja").is_file():
            return file.read_text("utf-8")
        file = folder / "chat_template.json"
        file = file if file.is_file() else folder / "tokenizer_config.json"
        return str(json.loads(file.read_text("utf-8"))["chat_template"])
    except (UserError, OSError, ValueError, KeyError, TypeError):
        return ""


def _tokenizer(report: Report) -> None:
    """A folder that is not there, and a template that does not compile."""

    for key in ("data.tokenizer", f"{report.model_key}.tokenizer_path"):
        path = str(report.config.select(key) or "") if report.was_set(key) else ""
        if path.startswith(("/", "~", "./", "../")) and not Path(path).expanduser().is_dir():
            report.refuse(key, "no such directory; name one that holds the tokenizer's files, or a hub id")
        elif path:
            try:
                find(path)
            except ModelTrouble as trouble:
                report.lacks(key, str(trouble), download=trouble.download or "/" not in path)
    template, key = report.model.get("custom_chat_template"), f"{report.model_key}.custom_chat_template"
    if template is not None:
        with report.refusing(key):
            _parsed(template_text(template))
    elif text := chat_template(report):
        keys = ("data.tokenizer", f"{report.model_key}.tokenizer_path", f"{report.model_key}.path")
        with report.refusing(next(filter(report.was_set, keys), keys[-1])):
            _parsed(text)


def _parsed(text: str) -> Any:
    """A parsed template; None with a tag of transformers or several templates. UserError if it does not compile."""

    if _TAG_OF_TRANSFORMERS.search(text) or text.startswith("[{"):
        return None
    # Leaves constant expressions, which may have results of any size, to the rendering.
    lazy: Any = {"optimized": False, "finalize": pass_context(lambda _, value: value)}
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"], **lazy)
    try:
        parsed = environment.parse(text)
        environment.compile(parsed)  # filters and tests that there are not
        return parsed
    except TemplateSyntaxError as error:
        raise UserError(f"is no Jinja template: {error.message} (line {error.lineno})") from error
    except (SyntaxError, RecursionError) as error:
        raise UserError(f"is no Jinja template that can be run: {error}") from error


def _template_arguments(report: Report) -> None:
    """Arguments that the system sets, or that the chat template does not read.

    A name close to one that it reads is taken for a mistake.
    """
    key = "data.apply_chat_template_kwargs"
    text = chat_template(report) if (arguments := report.config.select(key)) else ""
    if arguments:
        for name in filter(RESERVED.__contains__, arguments):
            report.refuse(f"{key}.{name}", "is set by the system; remove it")
    if not text:
        return

    try:
        parsed = _parsed(text)
    except UserError:  # said where it is set, or when the tokenizer is loaded
        return
    read = meta.find_undeclared_variables(parsed) if parsed is not None else arguments
    for name in arguments:
        if name in read or name in _ARGUMENTS_OF_TRANSFORMERS or name in RESERVED:
            continue
        if near := nearest(name, sorted(read), cutoff=0.8):
            report.refuse(f"{key}.{name}", f"the chat template reads no such variable{near}")
        else:
            report.notice(f"no effect: {key}.{name}: the chat template does not read it")
