"""Sampled responses as rows of JSON, for the report (with tokens) and for full dumps; the thread that writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

import numpy as np

from verl.trajectory import Batch, Trajectory, data_uris

SAMPLED = 64
FINISHED = 32
"""Responses of the step under way that are shown as they finish."""
IMAGES_SHOWN = 16
"""Images of tools and environments that the report has of a dialogue."""
_DIGITS = 6
_BACKLOG = 8


class TokenTexts:
    """Text of single tokens, decoded once each. Without a tokenizer: the ids as text."""

    def __init__(self, tokenizer: Any = None):
        self.tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """One string per id."""
        numbers = np.asarray(ids).tolist()
        if self.tokenizer is None:
            return [str(i) for i in numbers]
        for i in set(numbers) - self._known.keys():
            self._known[i] = self.tokenizer.decode([i], clean_up_tokenization_spaces=False)
        return [self._known[i] for i in numbers]


def prompt_text(trajectory: Trajectory, tokenizer: Any = None) -> str:
    """What the first turn was sampled after (the prompt, or what an environment opened the dialogue with) as text:
    decoded without special tokens, or the messages' contents without a tokenizer."""
    prompt = trajectory.prompt
    if tokenizer is not None:
        return str(tokenizer.decode(np.asarray(trajectory.context_ids).tolist(), skip_special_tokens=True))
    if isinstance(prompt.messages, str):
        return prompt.messages
    contents = [m.get("content", "") if isinstance(m, dict) else str(m) for m in prompt.messages or []]
    return "\n".join(str(content) for content in contents)


def _with_prompts(group: Sequence[Trajectory], tokenizer: Any) -> Iterator[tuple[Trajectory, str]]:
    """Each trajectory of a group with its prompt as text; most have the same, which is decoded once."""
    first = prompt_text(group[0], tokenizer)
    for t in group:
        same = t.context_ids is group[0].context_ids or np.array_equal(t.context_ids, group[0].context_ids)
        yield t, first if same else prompt_text(t, tokenizer)


def response_text(trajectory: Trajectory, tokenizer: Any = None) -> str:
    """The response as text."""
    if trajectory.text is not None or tokenizer is None:
        return trajectory.text or ""
    return str(tokenizer.decode(np.asarray(trajectory.response_ids).tolist(), skip_special_tokens=True))


def dump_rows(step: int, trajectories: Iterable[Trajectory], tokenizer: Any = None) -> list[dict[str, Any]]:
    """One row per response: input, output, gts, score, step, uid, then every key the reward function returned.

    Responses to one prompt are together. A key of the reward that has one of these names does not replace ours;
    `score_error` is added where scoring failed.
    """
    rows = []
    for group in Batch(trajectories).groups():
        for t, text in _with_prompts(group, tokenizer):
            row = _row(step, t, text, tokenizer)
            if t.score_error is not None:
                row["score_error"] = t.score_error
            rows.append(row | {k: v for k, v in (t.fields | t.score_parts).items() if k not in row})
    return rows


def _row(step: int, t: Trajectory, text: str, tokenizer: Any) -> dict[str, Any]:
    """What both kinds of rows have."""
    row = {"input": text, "output": response_text(t, tokenizer), "gts": t.prompt.ground_truth}
    return row | {"score": t.score, "step": step, "uid": t.uid}


def sampled(trajectories: Iterable[Trajectory], limit: int = SAMPLED) -> list[Trajectory]:
    """The first whole groups that fit into `limit` responses; of a first group that is larger, its first `limit`."""
    out: list[Trajectory] = []
    for group in Batch(trajectories).groups():
        if len(out) + len(group) > limit:
            return out or group[:limit]
        out += group
    return out


def report_rows(step: int, trajectories: Sequence[Trajectory], texts: TokenTexts) -> list[dict[str, Any]]:
    """Rows of trajectories/{step}.jsonl, with token-level columns (null where a phase did not fill them).

    log_probs (trainer, start of the step) and rollout_log_probs (sampler) are null on tokens that the policy did not
    write; `advantage` is the mean over the tokens that are trained on. The first row of a group has the prompt's
    images, scaled down, as data URIs, and the tokens of each.
    """
    rows = []
    for group in Batch(trajectories).groups():
        group_rows = [_report_row(step, t, text, texts) for t, text in _with_prompts(group, texts.tokenizer)]
        if (media := group[0].prompt.media) is not None:
            group_rows[0] |= {"images": data_uris(media.small), "image_tokens": media.tokens_of_images}
        rows += group_rows
    return rows


def finished_row(step: int, t: Trajectory, tokenizer: Any) -> dict[str, Any]:
    """The row of a response that has finished and is not trained on yet: texts and dialogue, without tokens."""
    return _shown_row(step, t, prompt_text(t, tokenizer), tokenizer)


def _shown_row(step: int, t: Trajectory, text: str, tokenizer: Any) -> dict[str, Any]:
    return _row(step, t, text, tokenizer) | {
        "index": t.index,
        "data_source": t.prompt.data_source,
        "score_error": t.score_error,
        "parts": dict(t.score_parts),
        "length": t.length if t.length or not t.text else None,  # None: a text that came without tokens
        "finish_reason": t.finish_reason if "agent_loop" not in t.extra else t.status,
        "versions": list(t.versions),
        **_dialogue(t),
        **_tree(t),
    }


def _report_row(step: int, t: Trajectory, text: str, texts: TokenTexts) -> dict[str, Any]:
    mask = np.asarray(t.response_mask, dtype=bool)
    trained = mask if t.loss_mask is None else np.asarray(t.loss_mask, dtype=bool)
    advantage = None
    if t.advantages is not None and trained.any():
        advantage = round(float(np.asarray(t.advantages, dtype=np.float64)[trained].mean()), _DIGITS)
    return _shown_row(step, t, text, texts.tokenizer) | {
        "advantage": advantage,
        "tokens": texts(t.response_ids),
        "mask": mask.astype(int).tolist(),
        "log_probs": _rounded(t.old_log_probs, mask),
        "rollout_log_probs": _rounded(t.rollout_log_probs, mask),
        "advantages": _rounded(t.advantages, None),
    }


def _tree(t: Trajectory) -> dict[str, Any]:
    """`segments`, where there are several: of each [number of the segment that it begins as, or None; tokens shared
    with that; all tokens; tokens that the policy wrote]."""
    if len(t.segments) < 2:
        return {}
    sizes = [
        [s.parent, s.shared, len(s.context_ids) + s.length, int(np.count_nonzero(s.response_mask))] for s in t.segments
    ]
    return {"segments": sizes}


def _dialogue(t: Trajectory) -> dict[str, Any]:
    """`messages` and `turns` of an agent loop's trajectory (see `Session.turns`), and `shown`, the first images of
    tools and environments, in their order; {} for others."""
    messages = t.fields.get("messages") if "agent_loop" in t.extra else None
    if not messages:
        return {}
    of_prompt, small = (() if m is None else m.small for m in (t.prompt.media, t.segments[-1].media))
    small = small[len(of_prompt) :] if small[: len(of_prompt)] == of_prompt else small
    dialogue = {"messages": messages, "turns": t.extra.get("turns", [])}
    return dialogue | {"shown": data_uris(small[:IMAGES_SHOWN])} if small else dialogue


def _rounded(values: np.ndarray | None, mask: np.ndarray | None) -> list[float | None] | None:
    if values is None:
        return None
    numbers = np.round(np.asarray(values, dtype=np.float64), _DIGITS).astype(object)
    if mask is not None:
        numbers[~mask] = None
    return numbers.tolist()


class Dumper:
    """Writes files in a thread of its own. A few files wait in memory; then `submit` waits for the disk.

    A write that fails is an event, not an end: `on_event(kind, **fields)` hears `dump_failed` with path and error.
    """

    def __init__(self, on_event: Callable[..., None]):
        self._on_event = on_event
        self.failed: list[str] = []
        """Paths that could not be written."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verl-dumps")
        self._room = BoundedSemaphore(_BACKLOG)

    def submit(self, path: Path, write: Callable[[Path], None]) -> None:
        """Call `write(path)` later, in the thread; it makes the file appear whole or not at all."""
        self._room.acquire()
        self._thread.submit(self._write, path, write)

    def _write(self, path: Path, write: Callable[[Path], None]) -> None:
        try:
            write(path)
        except Exception as error:
            self.failed.append(str(path))
            problem = f"{type(error).__name__}: {error}"
            message = f"{path} could not be written ({problem}); the run goes on"
            self._on_event("dump_failed", path=str(path), error=problem, message=message)
        finally:
            self._room.release()

    def flush(self) -> None:
        """Wait until everything submitted so far is written or reported."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Write everything and end the thread. May be called twice."""
        self._thread.shutdown()
