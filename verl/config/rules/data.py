"""Data files and user code: files are opened and their columns looked at; functions are found without running them."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import os
from pathlib import Path
from typing import Any

from verl.config.rules.context import Check, nearest

_ARGUMENTS = {
    "one": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "batch": ("data_sources", "solution_strs", "ground_truths", "extra_infos"),
}


def check(c: Check) -> None:
    """Rules 19, 20 and 25."""
    _user_code(c)
    if c.ppo and not c.cfg.data.custom_cls.path:
        sources = _rl_files(c, "data.train_files", c.cfg.data.train_files)
        sources |= _rl_files(c, "data.val_files", c.cfg.data.val_files or [])
        _sources(c, sources)
        _enough_rows(c)
    elif c.cfg.entry == "sft" and not c.cfg.data.custom_cls.path:
        _sft_files(c, "data.train_files", c.cfg.data.train_files)
        _sft_files(c, "data.val_files", c.cfg.data.val_files or [])
        _enough_rows(c)
    elif c.cfg.entry in ("eval", "generation") and c.cfg.data.path:
        _table(c)


def _open(c: Check, key: str, path: str) -> Any:
    """A data file opened, or None (which is reported)."""
    from verl.data.files import DataError, is_remote, open_file

    if is_remote(path):
        c.notice(f"{key}={path}: remote, copied at the start; not looked at here")
        return None
    try:
        return open_file(path)
    except DataError as error:
        if os.path.exists(path):
            c.refuse(key, str(error))
        else:
            c.lacks(key, str(error))
        return None


def _rl_files(c: Check, key: str, paths: list[str]) -> set[str]:
    """Rows counted, columns checked; returns the data sources found."""
    from verl.data.files import DataError
    from verl.data.rows import RowRules, check_columns

    rules = RowRules.of(c.cfg)
    sources: set[str] = set()
    opened = [file for path in paths if (file := _open(c, key, path)) is not None]
    for file in opened:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                plain = check_columns(file, rules)
        except DataError as error:
            c.refuse(key, str(error))
            continue
        finally:
            for line in said.getvalue().splitlines():
                c.notice(line.removeprefix("[data] "), run_says=True)
        if plain:
            _plain_truth(c, key, file, rules)
        else:
            sources |= _values(file, rules.source_key)
        _images(c, key, file)
    if len(opened) == len(paths) and opened:
        c.rows[key] = sum(len(file) for file in opened)
    return sources


def _plain_truth(c: Check, key: str, file: Any, rules: Any) -> None:
    from verl.data.files import DataError
    from verl.data.rows import check_plain_truth

    if key != "data.train_files" or "response" not in file.columns:
        return
    try:
        check_plain_truth(file.path, _values(file, "response", distinct=False), rules)
    except DataError as error:
        c.refuse(key, str(error))


def _values(file: Any, column: str, distinct: bool = True) -> Any:
    """The values of one column; parquet reads that column alone."""
    if file.local.suffix == ".parquet":
        import pyarrow.parquet as pq

        cells = pq.read_table(file.local, columns=[column], partitioning=None).column(column)
        values = (cells.unique() if distinct else cells).to_pylist()
    else:
        values = [row.get(column) for row in file.rows(0, len(file))]
    return {str(v) for v in values if v is not None} if distinct else values


def _sources(c: Check, sources: set[str]) -> None:
    """Rule 19: every data source has something that scores it."""
    own = c.cfg.custom_reward_function.path or c.cfg.select("reward_manager.source") == "importlib"
    if own or c.cfg.reward_model.enable or not sources:
        return
    from verl.reward.rules import unsupported

    for source, message in unsupported(sorted(sources)).items():
        c.refuse(f"data.reward_fn_key={c.cfg.data.reward_fn_key}, source {source}", message)


def _images(c: Check, key: str, file: Any) -> None:
    """Rule 25: rows with pictures need a model that sees, and this release has none."""
    columns = [
        k for k in (c.cfg.data.image_key, c.cfg.data.video_key) if k in file.columns and _filled(file, k)
    ]
    if not columns or c.facts is None:
        return
    if c.facts.vision:
        c.lacks(key, f"{file.path}: rows with {columns[0]}: vision is not in this release")
    else:
        c.refuse(
            f"{key}, column {columns[0]}",
            f"{file.path} has rows with {columns[0]} and {c.model.path} ({c.facts.name}) is a text model; "
            "use a vision model, or data without that column",
        )


def _filled(file: Any, column: str) -> bool:
    """True if a media column holds anything; parquet answers from its statistics, without reading pixels."""
    if file.local.suffix != ".parquet":
        return any(row.get(column) for row in file.rows(0, min(len(file), 1000)))
    import pyarrow.parquet as pq

    meta = pq.read_metadata(file.local)
    for group in range(meta.num_row_groups):
        for number in range(meta.num_columns):
            chunk = meta.row_group(group).column(number)
            if chunk.path_in_schema.split(".")[0] != column:
                continue
            if chunk.statistics is None or chunk.statistics.null_count is None:
                return True
            if chunk.num_values > chunk.statistics.null_count:
                return True
    return False


def _enough_rows(c: Check) -> None:
    rows, size = c.rows.get("data.train_files"), c.cfg.data.train_batch_size
    limit = c.cfg.data.train_max_samples
    usable = min(rows, limit) if rows and limit > 0 else rows
    if usable is not None and usable < size:
        message = f"more than the {usable} rows of data.train_files; lower it to {usable} or less"
        c.refuse(f"data.train_batch_size={size}", message)


def _sft_files(c: Check, key: str, paths: list[str]) -> None:
    data = c.cfg.data
    named = [k for k in (data.prompt_key, data.response_key) if k] or [data.messages_key]
    opened = [file for path in paths if (file := _open(c, key, path)) is not None]
    for file in opened:
        for column in named:
            if column not in file.columns:
                listed = ", ".join(file.columns)
                message = (
                    f"{file.path}: no column {column!r}{nearest(column, file.columns)} (columns: {listed})"
                )
                c.refuse(key, f"{message}; set data.messages_key, or data.prompt_key and data.response_key")
    if len(opened) == len(paths) and opened:
        c.rows[key] = sum(len(file) for file in opened)


def _table(c: Check) -> None:
    data = c.cfg.data
    file = _open(c, "data.path", data.path)
    if file is None:
        return
    c.rows["data.path"] = len(file)
    keys = ("prompt_key", "response_key", "data_source_key", "reward_model_key")
    for key in keys[:1] if c.cfg.entry == "generation" else keys[1:]:
        column = data[key]
        if column not in file.columns:
            message = (
                f"{data.path} has no such column{nearest(column, file.columns)} ({', '.join(file.columns)})"
            )
            c.refuse(f"data.{key}={column}", message)


# ---- code of the user's own ----


def _user_code(c: Check) -> None:
    """Rule 20: the file is there, holds the name, and the function takes the arguments."""
    batch = c.ppo and c.cfg.reward_model.reward_manager == "batch"
    for path_key, name_key, arguments in (
        (
            "custom_reward_function.path",
            "custom_reward_function.name",
            _ARGUMENTS["batch" if batch else "one"],
        ),
        ("data.custom_cls.path", "data.custom_cls.name", ()),
        ("data.sampler.class_path", "data.sampler.class_name", ()),
        ("data.datagen.path", "data.datagen.name", ()),
    ):
        path = c.cfg.select(path_key)
        if path:
            _object(c, path_key, path, name_key, c.cfg.select(name_key), arguments)
    if c.cfg.select("reward_manager.source") == "importlib":
        key, name = "reward_manager.module.path", "reward_manager.name"
        if c.cfg.select(key):
            _object(c, key, c.cfg.select(key), name, c.cfg.select(name), ())
        else:
            c.refuse(
                "reward_manager.source=importlib", f"needs {key}=FILE.py, which defines the class {name}"
            )


def _object(
    c: Check, key: str, path: str, name_key: str, name: str | None, arguments: tuple[str, ...]
) -> None:
    source = _source(c, key, path)
    if source is None:
        return
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"), str(source))
    except (OSError, SyntaxError, ValueError) as error:
        c.refuse(f"{key}={path}", f"cannot be read as Python: {error}")
        return
    defined = {
        n.name: n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    }
    if not name:
        c.refuse(name_key, f"is required with {key} (found there: {', '.join(defined) or 'nothing'})")
        return
    found = defined.get(name)
    if found is None:
        if not _bound_otherwise(tree, name):
            listed = ", ".join(defined) or "nothing"
            c.refuse(
                f"{name_key}={name}",
                f"{source} defines no such name{nearest(name, list(defined))} ({listed})",
            )
    elif arguments and isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
        _takes(
            c, f"{name_key}={name}", found, arguments, c.cfg.select("reward_model.reward_manager") == "prime"
        )


def _source(c: Check, key: str, path: str) -> Path | None:
    """The Python file a path means, or None (reported unless it is a compiled module)."""
    if not path.startswith("pkg://"):
        file = Path(path.removeprefix("file://"))
        if file.is_file():
            return file
        beside = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        c.refuse(f"{key}={path}", f"no such file (looked at {file.absolute()}){nearest(file.name, beside)}")
        return None
    module = path.removeprefix("pkg://").strip("/").removesuffix(".py").replace("/", ".")
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        c.refuse(f"{key}={path}", f"no module {module} can be imported here")
        return None
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _bound_otherwise(tree: ast.Module, name: str) -> bool:
    """True if the module may bind the name by an assignment, an import or a nested statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*"):
            return True
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name:
            return True
    return False


def _takes(c: Check, key: str, function: Any, arguments: tuple[str, ...], positional: bool) -> None:
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    if positional and (given.vararg or len(given.args) + len(given.posonlyargs) >= 3):
        return
    missing = [a for a in arguments if a not in names]
    if missing and given.kwarg is None:
        message = f"is called with {', '.join(arguments)}; it takes {', '.join(names) or 'nothing'}"
        c.refuse(key, f"{message}; add {', '.join(missing)} or **kwargs")
