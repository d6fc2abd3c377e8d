"""What a row means: the chat format and the plain format, checked; its messages, rendered and tokenised once.

A row that cannot be used raises BadRow; a file whose columns cannot be used raises DataError. `media.py` places images,
`videos.py` opens videos; audio is not in this release. The formats: docs/data.md.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.config.matching import nearest
from verl.config.reward_weights import built_in_scores
from verl.config.schema.base import select
from verl.data.files import DataError, RowFile, UnreadableRow, notice
from verl.trajectory import AGENT_LOOP_ARGUMENTS, SINGLE_TURN, Prompt

if TYPE_CHECKING:
    from verl.config.schema.entries import Config

GSM8K = "openai/gsm8k"
PLAIN = "plain"
"""data_source of plain rows whose response holds no `#### n`: only a custom function can score them."""
Schemas = Mapping[str, dict[str, Any]]
TOOL_AGENT = "tool_agent"
PLACEHOLDER = "<image>"
ROLES = ("system", "developer", "user", "assistant", "tool")

_MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
_FINAL = re.compile(r"#### (-?\$?[0-9.,]*[0-9][0-9.,]*)")
RESERVED = ("tokenize", "return_tensors", "return_dict", "conversation", "padding", "truncation")


@dataclass(frozen=True, slots=True)
class Video:
    """A video of a row, as its cell holds it, among the images of the row."""

    cell: Any


class BadRow(ValueError):
    """A row that cannot be used. `problem` is its class in data_report.jsonl, `detail` says what was found."""

    def __init__(self, problem: str, detail: str):
        super().__init__(f"{problem}: {detail}")
        self.problem = problem
        self.detail = detail


# ------------------------------------------------------------------------------------------- from cell to token ids


def as_messages(cell: Any, column: str | None = "prompt", *, images: bool = False) -> list[dict[str, Any]]:
    """The cell as a list of {role, content, …}; a string is one user message. Raises BadRow.

    Content is text; where `images` are allowed and it has parts of type image, it is a list of parts. Null keys
    (parquet gives every message the union of all keys) are left out, so that a template's `is defined` works as meant.
    """
    if cell is None:
        raise BadRow("prompt missing", f"column {column!r} is null")
    if not isinstance(cell, Sequence):
        raise BadRow("prompt is not messages", f"column {column!r} is a {type(cell).__name__}")
    if not cell or (isinstance(cell, str) and not cell.strip()):
        raise BadRow("prompt empty", f"column {column!r} is an empty {type(cell).__name__}")
    if isinstance(cell, str):
        if _MESSAGES_AS_TEXT.match(cell):
            raise BadRow("messages stored as text", f"column {column!r} is the text of a list; store the list itself")
        return [{"role": "user", "content": cell}]
    messages = [_message(item, f"{column}[{number}]", images) for number, item in enumerate(cell)]
    if not any(m.get("tool_calls") or str(m["content"]).strip() for m in messages):
        raise BadRow("prompt empty", f"the messages of column {column!r} have no content")
    return messages


def messages_of(fields: RowFields, rules: RowRules) -> list[dict[str, Any]]:
    """The messages of a row's prompt; none where its loop makes the prompt and the row has none. Raises BadRow."""
    if not fields.cell and rules.loop_makes_prompt(fields.facts["agent_name"]):
        return []
    return as_messages(fields.cell, rules.prompt_key, images=rules.images)


def _message(item: Any, where: str, images: bool) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise BadRow("prompt is not messages", f"{where} is a {type(item).__name__}, not a message")
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise BadRow("unknown role", f"{where}.role is {role!r:.60}; known: {', '.join(ROLES)}")
    if content is None and item.get("tool_calls"):
        content = ""
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = [media_part(part) for part in content]
        if images and any(_is_media(part) for part in content):
            content = [_part(part, f"{where}.content") for part in content]
        else:
            content = "".join(_part_text(part, f"{where}.content") for part in content)
    if not isinstance(content, str | list):
        raise BadRow("prompt is not messages", f"{where}.content is {type(content).__name__}")
    fields = {key: value for key, value in item.items() if value is not None} | {"content": content}
    return fields | {"tool_calls": _calls(fields, f"{where}.tool_calls")} if "tool_calls" in fields else fields


def _calls(message: Mapping[str, Any], where: str) -> list[Any]:
    """The tool calls of an assistant's message; the arguments of each are a mapping, or one as JSON text."""
    calls = without_nulls(message["tool_calls"])
    if not isinstance(calls, list) or (calls and message["role"] != "assistant"):
        problem = f"{type(calls).__name__} of a message with role {message['role']!r}"
        raise BadRow("unusable tool call", f"{where} is a {problem}, a list in an assistant's message is needed")
    for number, call in enumerate(calls):
        arguments = named_function(call, f"{where}[{number}]", "unusable tool call").get("arguments", {})
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise BadRow("unusable tool call", f"the arguments of {where}[{number}] are not a JSON object")
    return calls


def named_function(cell: Any, where: str, problem: str) -> Mapping[str, Any]:
    """The `function` of a tool call or of a tool's schema, or the cell itself in the form without it.

    Raises BadRow of that problem where it has no name.
    """
    function = cell.get("function", cell) if isinstance(cell, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRow(problem, f"{where} is {cell!r:.60}, {{function: {{name, …}}}} or {{name, …}} is needed")
    return function


def without_nulls(value: Any) -> Any:
    """The value without keys that are null, at every depth: parquet unites the keys of structs in a column."""
    if isinstance(value, Mapping):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def media_part(part: Any) -> Any:
    """A content part; one of OpenAI's, {type: image_url, image_url: {url}}, as {type: image, image}. video_url too."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("image_url", "video_url"):
        return part
    source = part.get(kind)
    name = kind.removesuffix("_url")
    return {"type": name, name: source.get("url") if isinstance(source, Mapping) else source}


def _is_media(part: Any) -> bool:
    """True for a video, too."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "video")


def _part(part: Any, where: str) -> dict[str, Any]:
    if _is_media(part):
        return {key: value for key, value in part.items() if value is not None}
    return {"type": "text", "text": _part_text(part, where)}


def _part_text(part: Any, where: str) -> str:
    text, kind = part, "text"
    if isinstance(part, Mapping):
        text, kind = part.get("text"), part.get("type", "text")
    if kind in ("image", "video", "audio"):
        raise BadRow("media", f"{where} holds a part of type {kind!r}, {_no_media(kind)}")
    if kind != "text" or not isinstance(text, str):
        raise BadRow("prompt is not messages", f"{where} holds a part {part!r:.60}")
    return text


def cells_of(column: Any) -> list[Any]:
    """What a media column of a row holds, a single cell as a list of one; [] for nothing."""
    if isinstance(column, list | tuple):
        return list(column)
    empty = column is None or (isinstance(column, Mapping | str | bytes) and not column)
    return [] if empty else [column]


def path_in(folder: Path, text: str) -> Path:
    """A file that a row names by a path, relative to `folder`, or by a file URI. Raises BadRow."""
    try:
        return folder / Path(text.removeprefix("file://")).expanduser()
    except RuntimeError as error:
        raise BadRow("image missing", f"{text[:200]}: {error}") from error


def _no_media(kind: str) -> str:
    if kind.startswith("image"):
        return "which this model does not see; use a vision-language model, or rows without them"
    return "which is not in this release"


class ChatRenderer:
    """Renders messages with the tokenizer's template and fixed keyword arguments (data.apply_chat_template_kwargs), the
    same for every use."""

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any] | None = None):
        self.tokenizer = tokenizer
        self.kwargs = dict(kwargs or {})
        if wrong := [key for key in self.kwargs if key in RESERVED]:
            raise DataError(f"data.apply_chat_template_kwargs: {', '.join(wrong)} is set by the system")

    @property
    def has_template(self) -> bool:
        """True if the tokenizer carries a chat template."""
        return bool(self.tokenizer.chat_template)

    def text(self, messages: Sequence[Mapping[str, Any]], *, generation: bool = True, **extra: Any) -> str:
        """The dialogue as the template writes it, with the generation prompt if asked for.

        Raises DataError without a template, BadRow where the template refuses the messages.
        """
        if not self.has_template:
            todo = "set actor_rollout_ref.model.custom_chat_template (Jinja text or a file)"
            raise DataError(f"the tokenizer has no chat template and the prompts are messages; {todo}")
        options = {"add_generation_prompt": generation} | self.kwargs | extra
        try:
            return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
        except Exception as error:  # a template is user code: whatever it raises is about this row
            raise BadRow("template failed", f"{type(error).__name__}: {error}") from error

    def ids(self, text: str) -> np.ndarray:
        """Token ids int64 [P] of rendered text."""
        return self.batch_ids([text])[0]

    def batch_ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`ids` of many texts in one call.

        No special tokens are added: the template wrote them. Raw text (no template) gets the begin token
        where the tokenizer would put one, since nothing else does.
        """
        if not texts:
            return []
        encoded = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        begin = self.begin()
        return [np.array(begin + list(ids), dtype=np.int64) for ids in encoded]

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text: `len` of `batch_ids`, in half the time where the tokenizer is transformers' own."""
        from transformers import PreTrainedTokenizerFast

        # A tokenizer with an encoding of its own may add to what the library's does.
        plain = getattr(type(self.tokenizer), "_encode_plus", None) is PreTrainedTokenizerFast._encode_plus
        first = self.batch_ids(texts[:1] if plain else texts)  # sets the library's options
        remaining = texts[len(first) :]
        if not remaining:
            return [len(ids) for ids in first]
        encodings = self.tokenizer.backend_tokenizer.encode_batch_fast(list(remaining), add_special_tokens=False)
        begin = len(self.begin())
        return [len(first[0]), *(begin + len(encoding) for encoding in encodings)]

    def begin(self) -> list[int]:
        """The id put before a text: the begin token where no template writes it and the tokenizer would, else none."""
        if self.has_template:
            return []
        begin = self.tokenizer.bos_token_id
        first = self.tokenizer("a")["input_ids"][:1]
        return [begin] if begin is not None and first == [begin] else []


def text_of(tokenizer: Any, ids: np.ndarray) -> str:
    """What a response of ids int64 [L] says: decoded without special tokens. Driver and sampler hosts both decode so.

    Costs about 0.1 ms per 1,000 tokens and holds the interpreter for so long.
    """
    from transformers import PreTrainedTokenizerBase

    # Of a list transformers looks at every id in Python, which takes as long as the decoding; of an array it does not.
    # A tokenizer with a `decode` of its own may know lists only.
    takes_arrays = getattr(type(tokenizer), "decode", None) is PreTrainedTokenizerBase.decode
    return str(tokenizer.decode(ids if takes_arrays else ids.tolist(), skip_special_tokens=True))


# ------------------------------------------------------------------------------------------------------- formats


def final_number(text: str) -> str | None:
    """The number after the last `#### ` with commas, `$` and a trailing full stop removed, or None."""
    numbers = _FINAL.findall(text)
    return numbers[-1].replace(",", "").replace("$", "").rstrip(".") if numbers else None


@dataclass(frozen=True)
class RowRules:
    """The keys and demands of a run, picklable.

    `needs_truth`: a built-in function scores the rows; `needs_source`: their data_source selects it; `images`: the
    model sees them, and the first of `media_keys` is their column, the second that of videos; `loop`: of rows without
    `agent_name`.
    """

    prompt_key: str = "prompt"
    source_key: str = "data_source"
    media_keys: tuple[str, ...] = ("images", "videos", "audios")
    needs_truth: bool = True
    needs_source: bool = True
    images: bool = False
    loop: str = SINGLE_TURN

    def loop_makes_prompt(self, agent_name: str | None) -> bool:
        """True for rows of an environment or of a user's loop, which may make the prompt and the score."""
        return (agent_name or self.loop) not in (SINGLE_TURN, TOOL_AGENT)

    @classmethod
    def of(cls, config: Config) -> RowRules:
        """The rules of a run's configuration."""
        data, loop = config.data, select(config, "actor_rollout_ref.rollout.agent.default_agent_loop")
        environment = select(config, "actor_rollout_ref.rollout.agent.environment.name")
        media = (data.image_key, data.video_key, data.audio_key)
        rules = cls(data.prompt_key, data.reward_fn_key, media, loop=loop or SINGLE_TURN)
        scored = built_in_scores(config) and not environment and not rules.loop_makes_prompt(None)
        return replace(rules, needs_truth=scored)


@dataclass(slots=True)
class RowFields:
    """One usable row.

    `cell` is the prompt as it stands in the file; `facts` are the parts of a `Prompt` that follow from the other
    columns, by name: data_source, ground_truth, extra_info, agent_name, and in `columns` everything else. `images`: the
    cells of its images, then its videos.
    """

    cell: Any
    facts: dict[str, Any]
    images: Sequence[Any] = ()

    def prompt(self, uid: str, ids: np.ndarray, messages: Any, **place: Any) -> Prompt:
        """The row as a Prompt; `place`: file, row, epoch."""
        return Prompt(uid, ids, messages, **self.facts, **place)


@dataclass(frozen=True, slots=True)
class RowTools:
    """The tools that prompts are rendered with. schemas: name → OpenAI schema; every_row: also without `agent_name`."""

    schemas: Schemas
    every_row: bool

    def of(self, fields: RowFields) -> list[dict[str, Any]] | None:
        """The schemas of a row of `tool_agent`, None for another's. Raises BadRow."""
        name = fields.facts.get("agent_name")
        if name != TOOL_AGENT and not (name is None and self.every_row):
            return None
        return tools_of_row(self.schemas, fields.facts["extra_info"], fields.facts["columns"].get("tools"))


def tools_of_row(schemas: Schemas, extra: Mapping[str, Any], column: Any) -> list[dict[str, Any]]:
    """The schemas that a row may use: those named in its column `tools` or in `tool_selection`.

    Without these, `need_tools_kwargs` selects those for which `tools_kwargs` has a value; else all. BadRow for an
    unknown tool.
    """
    names = column if column is not None else extra.get("tool_selection")
    try:
        if names is None and extra.get("need_tools_kwargs"):
            names = [name for name, arguments in (extra.get("tools_kwargs") or {}).items() if arguments is not None]
        names = schemas if names is None else names
        names = [str(name if isinstance(name, str) else name["function"]["name"]) for name in names]
    except (AttributeError, KeyError, TypeError) as error:
        raise BadRow("wrong column type", f"tools are neither names nor schemas: {error!r}") from error
    if unknown := [name for name in names if name not in schemas]:
        raise BadRow("unknown tool", f"{unknown[0]!r}; the run has {', '.join(schemas) or 'none'}")
    return [schemas[name] for name in names]


def is_plain(file: RowFile, rules: RowRules) -> bool:
    """True for a file of the plain format: a string prompt and neither data_source nor reward_model."""
    chat = {rules.source_key, "data_source", "reward_model"} & {*file.columns}
    return not chat and rules.prompt_key in file.columns and file.is_string(rules.prompt_key)


def check_columns(file: RowFile, rules: RowRules) -> bool:
    """True: plain format, False: chat format. Raises DataError for an absent column, naming the nearest."""
    columns = file.columns
    rows_tell = "agent_name" in columns  # which of them need a prompt and a ground truth
    if not rows_tell and not rules.loop_makes_prompt(None):
        file.need(rules.prompt_key, "data.prompt_key")
    if hidden := [name for name in columns if name in AGENT_LOOP_ARGUMENTS]:
        where = "an agent loop, whose own arguments have these names, finds them in `columns`"
        notice(f"{file.path}: columns {', '.join(hidden)}: {where}")
    if not is_plain(file, rules):
        if rules.needs_source:
            file.need(rules.source_key, "data.reward_fn_key")
        if rules.needs_truth and not rows_tell:
            file.need("reward_model", "")
        return False
    candidates = [name for name in columns if name != rules.prompt_key]
    for name in ("response", "reward"):
        if name in columns or not rules.needs_source:
            continue
        if nearest(name, candidates, cutoff=0.6) or (name == "response" and rules.needs_truth):
            file.need(name, "")
        notice(f"{file.path}: plain format without a column {name!r}; taken as null")
    if "reward" in columns:
        use = "passed in extra_info and otherwise unused (the reward function scores what is sampled)"
        notice(f"{file.path}: plain format; the column 'reward' is {use}")
    return True


def plain_truth(response: Any) -> tuple[Any, str]:
    """(ground truth or None, data_source) of a plain row's response."""
    if response is None or (isinstance(response, str) and not response.strip()):
        return None, PLAIN
    number = final_number(response) if isinstance(response, str) else None
    return (number, GSM8K) if number is not None else (response, PLAIN)


def check_plain_truth(path: str, responses: Iterable[Any], rows: int, rules: RowRules) -> None:
    """Refuse a plain training file in which no row has a ground truth and only built-in functions score.

    responses: those of its `rows` rows, or the distinct ones.
    """
    truths = [plain_truth(response) for response in responses]
    if not rules.needs_truth or any(source == GSM8K for _, source in truths):
        return
    problem = f"column 'response' of its {rows} rows holds no `#### number`, which a built-in function needs"
    if all(truth is None for truth, _ in truths):
        problem = f"none of its {rows} rows has a ground truth: column 'response' is empty or null in every row"
    raise DataError(
        f"{path}: {problem}. Every reward would be 0. Ways out: `verl prepare gsm8k` or "
        "`python3 examples/data_preprocess/gsm8k.py --local_dataset_path DIR` (data with answers), or "
        "custom_reward_function.path=FILE.py (your own scoring)"
    )


def check_readable(row: Mapping[str, Any]) -> None:
    """Raises BadRow for an UnreadableRow."""
    if isinstance(row, UnreadableRow):
        raise BadRow(row.problem, row.detail)


def fields_of(row: Mapping[str, Any], number: int, plain: bool, rules: RowRules) -> RowFields:
    """Row `number` of a file in its format. Raises BadRow."""
    check_readable(row)
    return plain_row(row, number, rules) if plain else chat_row(row, rules)


def plain_row(row: Mapping[str, Any], number: int, rules: RowRules) -> RowFields:
    """The plain format: prompt (str), response, reward."""
    fields, response = _shared(row, rules, "response", "reward"), row.get("response")
    for name, value in ((rules.prompt_key, fields.cell), ("response", response)):
        _typed(name, value, str, "a string")
    truth, source = plain_truth(response)
    if truth is None and rules.needs_truth and not rules.loop_makes_prompt(fields.facts["agent_name"]):
        raise BadRow("no ground truth", "column 'response' is empty")
    if source == GSM8K:
        fields.facts["columns"]["reward_kwargs"] = {"method": "flexible"}
    fields.facts["extra_info"] |= {"index": number, "response": response, "reward": row.get("reward")}
    fields.facts |= {"data_source": source, "ground_truth": truth}
    return fields


def chat_row(row: Mapping[str, Any], rules: RowRules) -> RowFields:
    """The chat format. `raw_prompt`, where a custom dataset gives one, wins over the prompt column."""
    fields = _shared(row, rules, "raw_prompt", rules.source_key)
    source, raw = row.get(rules.source_key), row.get("raw_prompt")
    if not source and not rules.needs_source:
        source = PLAIN
    if not isinstance(source, str) or not source:
        advice = "a name is needed; data.reward_fn_key names its column"
        raise BadRow("data_source missing", f"column {rules.source_key!r} is {source!r:.60}, {advice}")
    needed = rules.needs_truth and not rules.loop_makes_prompt(fields.facts["agent_name"])
    fields.facts |= {"data_source": source, "ground_truth": _truth(row.get("reward_model"), needed)}
    fields.cell = fields.cell if raw is None else raw
    return fields


def _shared(row: Mapping[str, Any], rules: RowRules, *format_keys: str) -> RowFields:
    """The fields of both formats; `format_keys`, the columns of one, are not among the free ones. Raises BadRow."""
    images: list[Any] = []
    for number, key in enumerate(rules.media_keys):
        media = cells_of(row.get(key))
        if media and (not rules.images or number > 1):
            kind = key if number else "images"
            raise BadRow("media", f"column {key!r} is not empty: {kind}, {_no_media(kind)}")
        images += map(Video, media) if number else media
    used = {rules.prompt_key, "extra_info", "agent_name", *format_keys}
    if images:
        used |= {*rules.media_keys[:2]}
    facts = {
        "extra_info": dict(_typed("extra_info", row.get("extra_info"), Mapping, "a struct") or {}),
        "agent_name": _typed("agent_name", row.get("agent_name"), str, "a string"),
        "columns": {k: v for k, v in row.items() if k not in used},
    }
    return RowFields(row.get(rules.prompt_key), facts, images)


def _typed(name: str, value: Any, kind: type, word: str) -> Any:
    """The value, which is null or of that type. Raises BadRow."""
    if value is not None and not isinstance(value, kind):
        raise BadRow("wrong column type", f"{name} is {type(value).__name__}, {word} is needed")
    return value


def _truth(reward_model: Any, needed: bool) -> Any:
    if reward_model is None and needed:
        raise BadRow("no ground truth", "reward_model is null, {style, ground_truth} is needed")
    if reward_model is None:
        return None
    truth = _typed("reward_model", reward_model, Mapping, "{style, ground_truth}").get("ground_truth")
    absent = truth is None or (isinstance(truth, float) and math.isnan(truth)) or not str(truth).strip()
    if absent and needed:
        raise BadRow("no ground truth", f"reward_model.ground_truth is {truth!r}")
    return truth
