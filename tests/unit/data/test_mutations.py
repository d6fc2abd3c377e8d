"""Damaged and odd data files: every one is refused by name, or its bad rows are named and counted, or it can be trained
on. In both formats of rows, with images and without, as parquet and as JSON, with columns of tools.

VERL_DATA_MUTATIONS: how many files; VERL_DATA_MUTATIONS_FROM: the number of the first. A failure names the file's
number.
"""

from __future__ import annotations

import base64
import copy
import io
import itertools
import json
import os
import pickle
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.tiny import CHAT_TEMPLATE, tiny_vision_model
from verl.config import load
from verl.config.report import Report
from verl.data import check as data_rules
from verl.data.dataset import CheckedRows, PromptDataset
from verl.data.media import decoded, has_frames, load_processor, open_image
from verl.data.rows import BadRow, RowTools
from verl.data.sft import SFTDataset
from verl.data.tokenizer import load_tokenizer
from verl.errors import UserError
from verl.preflight import rows
from verl.reward.rules import check_truth, default_compute_score

COUNT = int(os.environ.get("VERL_DATA_MUTATIONS", "80"))
FIRST = int(os.environ.get("VERL_DATA_MUTATIONS_FROM", "0"))
ROWS = 6
SCHEMA = {
    "type": "function",
    "function": {"name": "calc", "description": "d", "parameters": {"type": "object"}},
}
Rows = list[dict[str, Any]]


def picture() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (16, 8)).save(out, "PNG")
    return out.getvalue()


@dataclass(frozen=True)
class Form:
    """What a file is before it is changed: the plain format or the chat format, with images or without, as text or as
    parquet."""

    plain: bool
    images: bool
    text: bool

    def rows(self) -> Rows:
        """Rows with every column that something reads."""
        asked = "<image> 1+1?" if self.images else "What is 1+1?"
        choice = {
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc": {"create_kwargs": {"truth": "2"}}},
            "tool_selection": ["calc"],
        }
        row: dict[str, Any] = {"agent_name": "tool_agent", "tools": [SCHEMA]}
        if self.plain:
            row |= {"prompt": asked, "response": "#### 2", "reward": 0.5, "extra_info": choice}
        else:
            user = {"role": "user", "content": asked}
            row |= {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "system", "content": "Count."}, user],
                "messages": [user, {"role": "assistant", "content": "#### 2"}],
                "reward_model": {"style": "rule", "ground_truth": "2"},
                "extra_info": choice | {"index": 3, "answer": "#### 2"},
            }
        encoded = f"data:image/png;base64,{base64.b64encode(picture()).decode()}"
        cells = [encoded] if self.text else [{"bytes": picture(), "path": None}]
        return [row | ({"images": cells} if self.images else {}) for _ in range(ROWS)]


FORMS = [Form(*ways) for ways in itertools.product((False, True), repeat=3)]

# ------------------------------------------------------------------------------------------------------ mutations


def deep(levels: int, value: Any = 1) -> Any:
    for _ in range(levels):
        value = [value]
    return value


ODD: list[Any] = [
    *(None, True, 0, -1, 2**80, 1e308, float("nan"), float("inf"), "", " ", "abc", "\x00", "\ud800", "x" * 20_000),
    *([], {}, [None], [[]], {"": None}, {"a": 1}, [1, 2], ["x"], [{"role": "user"}], deep(70), deep(990), "~nobody/x"),
    *("<image>", "<|im_end|>", "<|image_pad|>", "data:image/png;base64,AAAA", "http://localhost:1/x.png", "/", "a\nb"),
    *({"type": "image"}, {"bytes": "x"}, {"bytes": b"x".hex()}, {"function": 3}, {"target": []}, {"type": None}),
]  # fmt: skip


def set_odd(rng: random.Random, row: Any, value: Any, path: list[Any] | None) -> list[Any]:
    """Put the value somewhere into the row (`path`, where given); the place."""
    way: list[Any] = []
    while True:
        step = path[len(way)] if path else rng.choice(list(row) if isinstance(row, dict) else range(len(row)))
        way.append(step)
        inner = row[step]
        if (len(way) == len(path)) if path else (not isinstance(inner, dict | list) or not inner or rng.random() < 0.3):
            row[step] = value
            return way
        row = inner


def odd_value(rng: random.Random, rows: Rows) -> Rows:
    """One cell, or a part of it, in some of the rows or in all."""
    value, path = rng.choice(ODD), None
    changed = [copy.deepcopy(row) for row in rows]
    for row in changed[rng.choice([0, 0, 3, 5]) :]:
        path = set_odd(rng, row, value, path)
    return changed


def other_columns(rng: random.Random, rows: Rows) -> Rows:
    """A column dropped, renamed, or swapped with another."""
    names = list(rows[0])
    one, two = rng.sample(names, 2)
    new = rng.choice([None, two, one.upper(), one + " ", "", "row_error", "a.b", "uid"])
    order = {name: (new if name == one else one if name == two and new == two else name) for name in names}
    return [{order[name]: cell for name, cell in row.items() if order[name] is not None} for row in rows]


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Bytes changed, cut out, put in."""
    data = bytearray(content)
    kind = rng.choice(["flip", "flip", "flip", "cut", "zero", "insert", "double", "swap", "encode"])
    at = rng.randrange(len(data)) if rng.random() < 0.5 else max(0, len(data) - rng.randrange(1, 4000))
    size = rng.choice([1, 4, 30, 500])
    if kind == "flip":
        for _ in range(rng.choice([1, 1, 3, 20])):
            data[min(len(data) - 1, at + rng.randrange(size))] = rng.randrange(256)
    elif kind == "cut":
        del data[at : rng.choice([at + size, len(data)])]
    elif kind == "zero":
        data[at : at + size] = bytes(len(data[at : at + size]))
    elif kind == "insert":
        data[at:at] = rng.choice([rng.randbytes(size), b"\xff\xfe", b"\xef\xbb\xbf", b"[" * 100_000, b"NaN", b"\x00"])
    elif kind == "double":
        data = data + data
    elif kind == "swap":
        data = data[at:] + data[:at]
    elif kind == "encode":
        data = bytearray(content.decode("latin-1").encode(rng.choice(["utf-8", "utf-16", "utf-32", "utf-8-sig"])))
    return bytes(data)


def raw_strings(count: int) -> pa.Array:
    """Strings that are not UTF-8."""
    return pa.array([b"ab\xff\xc3"] * count, pa.binary()).view(pa.string())


def struct_of(*columns: pa.Array, names: list[str]) -> pa.Array:
    return pa.StructArray.from_arrays(columns, names=names)


ODD_COLUMNS: list[Callable[[int], pa.Array]] = [
    raw_strings,
    lambda n: pa.array([1] * n, pa.duration("ns")),
    lambda n: pa.array([1] * n, pa.timestamp("ns")),
    lambda n: pa.array([1] * n, pa.timestamp("us", tz="Nowhere/Land")),
    lambda n: pa.array([2**62] * n, pa.timestamp("s")),
    lambda n: pa.array([1] * n, pa.time64("ns")),
    lambda n: pa.array([10**6] * n, pa.date32()),
    lambda n: pa.array([Decimal("1.5")] * n, pa.decimal256(60, 3)),
    lambda n: pa.array([1.5] * n, pa.float16()),
    lambda n: pa.array([None] * n, pa.null()),
    lambda n: pa.array(["a"] * n).dictionary_encode(),
    lambda n: pa.array([["a"]] * n, pa.large_list(pa.large_string())),
    lambda n: pa.array([[("k", 1), ("k", 2)]] * n, pa.map_(pa.string(), pa.int64())),
    lambda n: pa.array([b"2"] * n, pa.binary(1)),
    lambda n: pa.array([b"\xff"] * n, pa.large_binary()),
    lambda n: struct_of(*[pa.array([1] * n)] * 2, names=["a", "a"]),
    lambda n: struct_of(raw_strings(n), names=["ground_truth"]),
    lambda n: struct_of(pa.array([7] * n, pa.duration("ns")), names=["ground_truth"]),
    lambda n: pa.array([deep(90)] * n),
]  # fmt: skip


def odd_column(rng: random.Random, table: pa.Table) -> pa.Table:
    """A column of an odd type in the place of another, beside the others, or a second time."""
    name, made = rng.choice(table.column_names), rng.choice(ODD_COLUMNS)(len(table))
    way = rng.choice(["replace", "replace", "add", "twice"])
    if way == "replace":
        return table.set_column(table.column_names.index(name), name, made)
    return table.append_column("further", made) if way == "add" else table.append_column(name, table.column(name))


def write_parquet(rng: random.Random, path: Path, rows: Rows, form: Form) -> None:
    """The rows, with a column of an odd type now and then; the unchanged ones where pyarrow cannot write these."""
    options = {"row_group_size": rng.choice([4, 100]), "compression": rng.choice(["none", "snappy"])}
    try:
        table = pa.Table.from_pylist(rows)
        pq.write_table(odd_column(rng, table) if rng.random() < 0.4 else table, path, **options)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, RecursionError, OSError):
        pq.write_table(pa.Table.from_pylist(form.rows()), path)


def write_text(path: Path, rows: Rows) -> None:
    """JSON lines or an array, by the name."""
    try:
        lines = [json.dumps(row) for row in rows]
    except RecursionError:  # one that is deeper than Python can write
        lines = ['{"a": ' * 2000 + "1" + "}" * 2000]
    path.write_text("\n".join(lines) if path.suffix == ".jsonl" else f"[{','.join(lines)}]")


def written(rng: random.Random, folder: Path, form: Form) -> Path:
    """A mutated file."""
    rows = form.rows()
    if rng.random() < 0.5:
        rows = rng.choice([odd_value, odd_value, odd_value, other_columns])(rng, rows)
    path = folder / (rng.choice(["rows.jsonl", "rows.jsonl", "rows.json"]) if form.text else "rows.parquet")
    if form.text:
        write_text(path, rows)
    else:
        write_parquet(rng, path, rows, form)
    if rng.random() < 0.4:
        path.write_bytes(damaged(rng, path.read_bytes()))
    return path


# -------------------------------------------------------------------------------------------------------- readers


class Reader:
    """Reads a file as `--check`, reinforcement learning and supervised training do."""

    def __init__(self, model: Path):
        self.model = model
        self.tokenizer = load_tokenizer(model)
        self.processor = load_processor(str(model), self.tokenizer, {})

    def config(self, path: Path, entry: str, form: Form) -> Any:
        sft = entry == "sft"
        key = "model.path" if sft else "actor_rollout_ref.model.path"
        words = [f"data.train_files={path}", f"{key}={self.model}", "data.max_bad_row_ratio=0.5"]
        if sft and form.plain:
            words += ["data.prompt_key=prompt", "data.response_key=response"]
        return load([*words, "data.val_files=null", "data.train_batch_size=1"], entry=entry)

    def check(self, path: Path, entry: str, form: Form) -> list[str]:
        config = self.config(path, entry, form)
        found = Report(config)
        data_rules.check(config, found)
        rows.check(config, found)
        return [str(problem) for problem in found.problems]

    def prompts(self, path: Path, form: Form) -> tuple[CheckedRows, Callable[[int], Any]]:
        config, processor = self.config(path, "ppo", form), self.processor if form.images else None
        tools = RowTools({"calc": SCHEMA}, every_row=True)
        data = PromptDataset(path, config, self.tokenizer, check_truth=check_truth, tools=tools, processor=processor)

        def use(number: int) -> Any:
            prompt = data.prompt(number)
            default_compute_score(prompt.data_source, "#### 5", prompt.ground_truth)
            return prompt

        return data, use

    def dialogues(self, path: Path, form: Form) -> tuple[CheckedRows, Callable[[int], Any]]:
        config, processor = self.config(path, "sft", form).data, self.processor if form.images else None
        data = SFTDataset(path, self.tokenizer, config, processor)
        return data, data.__getitem__


def outcome(open_file: Callable[..., Any], path: Path, form: Form) -> str:
    """What became of the file; AssertionError, or what was raised, where it was neither refused nor used as it should
    be."""
    try:
        data, use = open_file(path, form)
    except UserError as error:
        assert path.name in str(error), error
        return "refused"
    for record in data.bad_rows:
        assert record["file"].endswith(path.name) and record["row"] >= 0 and record["detail"], record
    for number in range(len(data)):
        try:
            pickle.dumps(use(number))
        except (BadRow, UserError) as bad:
            assert path.name in str(bad), bad
    assert data.report and data.describe()
    return "bad rows" if data.bad_rows else "used"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader(tiny_vision_model(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_a_damaged_animation_is_an_image_or_a_bad_row(kind: str) -> None:
    out, rng, ends = io.BytesIO(), random.Random(0), Counter[str]()
    frames = [Image.effect_noise((20, 12), 60).convert("RGB").rotate(30 * turn) for turn in range(3)]
    frames[0].save(out, kind, save_all=True, append_images=frames[1:])
    whole = out.getvalue()
    for content in [
        *(whole[:end] for end in range(1, len(whole))),
        *(damaged(rng, whole) for _ in range(200)),
    ]:
        try:
            image = open_image(content, Path())
            has_frames(image)
            ends[decoded(image).mode] += 1
        except BadRow as bad:
            ends[bad.problem] += 1
    assert set(ends) <= {"RGB", "undecodable image", "image too large"} and len(ends) > 1, ends


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_good_files_are_used_whole_with_their_images_and_tools(reader: Reader, tmp_path: Path, form: Form) -> None:
    path = tmp_path / ("rows.jsonl" if form.text else "rows.parquet")
    write_text(path, form.rows()) if form.text else pq.write_table(pa.Table.from_pylist(form.rows()), path)
    assert reader.check(path, "ppo", form) == reader.check(path, "sft", form) == []
    for opened in (reader.prompts, reader.dialogues):
        data, use = opened(path, form)
        assert len(data) == ROWS and not data.bad_rows
        assert (use(ROWS - 1).media is not None) == form.images
    prompt = reader.prompts(path, form)[1](0)
    assert prompt.agent_name == "tool_agent" and prompt.extra_info["tool_selection"] == ["calc"]
    assert (prompt.data_source, prompt.ground_truth) == ("openai/gsm8k", "2")
    assert not form.plain or (prompt.extra_info["response"], prompt.extra_info["reward"]) == ("#### 2", 0.5)


def test_mutated_files_end_in_no_traceback(reader: Reader, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: Counter[str] = Counter()
    assert CHAT_TEMPLATE
    for number in range(FIRST, FIRST + COUNT):
        rng, form = random.Random(number), FORMS[number % len(FORMS)]
        folder = tmp_path / str(number)
        folder.mkdir()
        path = written(rng, folder, form)
        try:
            for entry, opened in (("ppo", reader.prompts), ("sft", reader.dialogues)):
                problems = reader.check(path, entry, form)
                assert all(str(path) in problem or "source" in problem for problem in problems), problems
                seen[outcome(opened, path, form)] += 1
        except Exception as error:
            raise AssertionError(f"file {number}, {form}: {path}") from error
    capsys.readouterr()
    assert COUNT < 40 or all(seen[kind] > COUNT / 20 for kind in ("refused", "bad rows", "used")), seen
