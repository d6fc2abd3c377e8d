"""From the prompt cell of a row to token ids: messages checked, rendered by the chat template, tokenised once.

Specification: data.md §2. Content made of parts keeps only text here: media are not in this release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl.data.files import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
_RESERVED = ("tokenize", "return_tensors", "return_dict", "conversation", "padding", "truncation")


class BadRow(ValueError):
    """A row that cannot be used. `problem` is its class in data_report.jsonl, `detail` says what was found."""

    def __init__(self, problem: str, detail: str):
        super().__init__(f"{problem}: {detail}")
        self.problem = problem
        self.detail = detail


def as_messages(cell: Any, column: str = "prompt") -> list[dict[str, Any]]:
    """The cell as a list of {role, content, …}; a string is one user message. Raises BadRow.

    Keys that are null (parquet gives every message the union of all keys) are left out, so that a
    template's `is defined` means what its author thought.
    """
    if cell is None:
        raise BadRow("prompt missing", f"column {column!r} is null")
    if isinstance(cell, str):
        if not cell.strip():
            raise BadRow("prompt empty", f"column {column!r} is an empty string")
        return [{"role": "user", "content": cell}]
    if not isinstance(cell, Sequence):
        raise BadRow("prompt is not messages", f"column {column!r} is a {type(cell).__name__}")
    if not cell:
        raise BadRow("prompt empty", f"column {column!r} is an empty list")
    return [_message(item, number, column) for number, item in enumerate(cell)]


def _message(item: Any, number: int, column: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise BadRow(
            "prompt is not messages", f"{column}[{number}] is a {type(item).__name__}, not a message"
        )
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow("unknown role", f"{column}[{number}].role is {role!r}; known: {', '.join(ROLES)}")
    message = {key: value for key, value in item.items() if value is not None}
    content = item.get("content")
    if content is None and message.get("tool_calls"):
        content = ""
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = _join_parts(content, f"{column}[{number}].content")
    if not isinstance(content, str):
        raise BadRow("prompt is not messages", f"{column}[{number}].content is {type(content).__name__}")
    return message | {"content": content}


def _join_parts(parts: Sequence[Any], where: str) -> str:
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in ("image", "video", "audio"):
            raise BadRow("media", f"{where} holds a part of type {kind!r}: media are not in this release")
        else:
            raise BadRow("prompt is not messages", f"{where} holds a part {part!r}")
    return "".join(texts)


class ChatRenderer:
    """Renders messages with the tokenizer's template and fixed keyword arguments, the same for every use.

    kwargs: data.apply_chat_template_kwargs; tools: tool schemas, or None.
    """

    def __init__(
        self, tokenizer: Any, kwargs: Mapping[str, Any] | None = None, tools: list[Any] | None = None
    ):
        self.tokenizer = tokenizer
        self.kwargs = dict(kwargs or {})
        self.tools = tools
        wrong = [key for key in self.kwargs if key in _RESERVED]
        if wrong:
            raise DataError(
                f"data.apply_chat_template_kwargs: {', '.join(wrong)} is set by the system; remove it"
            )

    @property
    def has_template(self) -> bool:
        """True if the tokenizer carries a chat template."""
        return bool(self.tokenizer.chat_template)

    def text(self, messages: Sequence[Mapping[str, Any]], *, generation: bool = True, **extra: Any) -> str:
        """The dialogue as the template writes it, with the generation prompt if asked for.

        Raises DataError without a template, BadRow where the template refuses the messages.
        """
        if not self.has_template:
            raise DataError(
                "the tokenizer has no chat template and the prompts are messages; "
                "set actor_rollout_ref.model.custom_chat_template (Jinja text or a file)"
            )
        options = {"tools": self.tools, "add_generation_prompt": generation} | self.kwargs | extra
        try:
            rendered = self.tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
        except Exception as error:  # a template is user code: whatever it raises is about this row
            raise BadRow("template failed", f"{type(error).__name__}: {error}") from error
        return str(rendered)

    def prompt_text(self, cell: Any, column: str = "prompt") -> str:
        """What a prompt cell becomes before tokenising. A string without a template stays raw text."""
        messages = as_messages(cell, column)
        if isinstance(cell, str) and not self.has_template:
            return cell
        return self.text(messages)

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
        prefix = [] if self.has_template else self._begin()
        return [np.array(prefix + list(ids), dtype=np.int64) for ids in encoded]

    def _begin(self) -> list[int]:
        begin = self.tokenizer.bos_token_id
        first = self.tokenizer("a")["input_ids"][:1]
        return [begin] if begin is not None and first == [begin] else []
