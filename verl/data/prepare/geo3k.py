"""Geometry3K: geometry problems with a diagram each."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.data.files import DataError
from verl.data.prepare import common

REPO = "hiyouga/geometry3k"
INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
    "The reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \\boxed{}."
)
_DATA, _DIAGRAM = "data.json", "img_diagram.png"


def row(problem: str, answer: str, images: list[dict[str, Any]], split: str, index: int) -> dict[str, Any]:
    """One row of the chat format. images: {bytes, path} for each `<image>` of the problem."""
    text, extra = f"{problem} {INSTRUCTION}", {"answer": answer, "question": problem}
    return common.chat_row(REPO, text, answer, split, index, images=images, **extra)


def rows(local: str | None, split: str) -> list[dict[str, Any]]:
    """All rows of a split: of the original folders, of a directory in the hub's layout, or of the hub."""
    folders = _folders(local) if local else []
    if folders:
        problems = [item for item in map(_original, folders) if item[0] == split]
        return [row(*parts, split, index) for index, (_, *parts) in enumerate(problems)]
    files = common.find_split(local, split) if local else common.from_hub(REPO, split)
    out = []
    for where, raw in common.raw_rows(files):
        problem, answer, images = (raw.get(name) for name in ("problem", "answer", "images"))
        if not isinstance(problem, str) or not isinstance(answer, str) or not images:
            raise DataError(f"{where}: images, problem and answer are needed; it has {', '.join(raw)}")
        cells = [_image(image, files[0].parent, where) for image in images]
        out.append(row(problem, answer, cells, split, len(out)))
    return out


def _folders(local: str) -> list[Path]:
    """The folders of single problems, in the order of their numbers."""
    base = Path(os.path.expandvars(local)).expanduser()
    folders = [file.parent for file in base.glob(f"**/{_DATA}")]
    return sorted(folders, key=lambda folder: (not folder.name.isdigit(), folder.name.zfill(8)))


def _original(folder: Path) -> tuple[str, str, str, list[dict[str, Any]]]:
    """(split, problem, answer, images) of a folder: the answer is the value of the choice that its letter names."""
    try:
        facts = json.loads((folder / _DATA).read_text(encoding="utf-8"))
        text = facts.get("annotat_text") or facts["problem_text"]
        answer = str(facts["choices"]["ABCD".index(facts["answer"])])
        content = (folder / _DIAGRAM).read_bytes()
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise DataError(f"{folder}: no problem of Geometry3K: {type(error).__name__}: {error}") from error
    images = [{"bytes": content, "path": f"{folder.name}/{_DIAGRAM}"}]
    return str(facts.get("data_type", "train")), f"<image>{text}", answer, images


def _image(cell: Any, folder: Path, where: str) -> dict[str, Any]:
    """{bytes, path} of a cell that holds the bytes or names a file."""
    image = dict(cell) if isinstance(cell, Mapping) else {"path": cell}
    if not image.get("bytes"):
        try:
            image["bytes"] = (folder / str(image.get("path"))).read_bytes()
        except OSError as error:
            raise DataError(f"{where}: image {image.get('path')!r}: {error.strerror}") from error
    return {"bytes": image["bytes"], "path": image.get("path")}


def main(argv: Sequence[str] | None = None) -> int:
    """The script."""
    return common.two_splits("geo3k", "Geometry3K with its diagrams: train.parquet, test.parquet", rows, argv)
