"""What a reward function returned, in one form: a finite score and its named parts, or a failure, which is never turned
into a number. The exceptions of rewards are here, too."""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.errors import UserError
from verl.platform.child_process import NotPlain, encode, to_plain

TRACEBACK_CHARACTERS = 6000
LARGEST_RESULT = 16 * 2**20
"""Bytes of what a call may return: it travels to the run, is kept until the step ends and is dumped."""
INVALID = "[INVALID]"
"""`pred` of a response that holds no answer (math_dapo)."""
ABSTAINED = "abstained"
"""`Outcome.kind` of a function that returned a reason under `abstain` instead of a score: no failure, no number."""
MOST_PARTS = 1000
"""Keys of a result: each number among them is a metric of the step."""
_LARGEST_SCORE = 1e30  # squares of what comes of it are float32


class RewardError(Exception):
    """Base of all errors of this package."""


class RewardLoadError(UserError, RewardError, ValueError):
    """The reward function cannot be used as configured: no such file, no such name, wrong arguments."""


class BadScore(RewardError, ValueError):
    """A reward function returned something that is not a score."""


class UnknownSource(RewardError, ValueError):
    """No built-in rule for a data_source."""


class VerifyFailed(RewardError, RuntimeError):
    """math-verify could not decide because of the ground truth, or does not work: the response is failed, not wrong."""


class SandboxFailed(RewardError, RuntimeError):
    """The sandbox, not the program in it, did not work: the response is failed, not wrong."""


class ServiceFailed(RewardError, RuntimeError):
    """A service over the network gave no usable answer: the response is failed, not wrong."""


class JudgeFailed(RewardError, RuntimeError):
    """A judge answered without a verdict: the response is failed, not wrong."""


class RewardPrecheckError(UserError, RewardError, ValueError):
    """The reward function failed on the first rows, before the run."""


class RewardErrorLimit(RewardError, UserError, RuntimeError):
    """More responses of a step failed to score than `reward_model.max_error_ratio` allows."""


@dataclass
class Outcome:
    """Result of scoring one response. `error` is None on success; else `score` is None and `kind` names the failure: an
    "exception", a "timeout", a "crash" of its process, a "value" that is no score, "load" if it could not be loaded;
    or ABSTAINED.

    `bare` is True if the function returned a number alone. `seconds` is the time the function took. `undecided`:
    comparisons that math-verify could not make because of the response, which count as wrong answers. `scored`: the
    `text_digest` of the response that the scoring process was given, None where it did not say.
    """

    score: float | None = None
    parts: dict[str, Any] = field(default_factory=dict)
    bare: bool = False
    seconds: float = 0.0
    kind: str = ""
    error: str | None = None
    traceback: str = ""
    undecided: int = 0
    scored: int | None = None


def text_digest(text: str) -> int:
    """A checksum that tells responses apart."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def texts_of_call(arguments: Mapping[str, Any]) -> list[str]:
    """The responses of a call, by its arguments."""
    if "rows" in arguments:
        return [row["response"]["text"] for row in arguments["rows"]]
    return [arguments["solution_str"]] if "solution_str" in arguments else list(arguments.get("solution_strs", ()))


def failed(kind: str, error: str, trace: str = "", seconds: float = 0.0) -> Outcome:
    """An outcome without a score."""
    return Outcome(kind=kind, error=error, traceback=trace, seconds=seconds)


def raised(error: BaseException, seconds: float, caller: str) -> Outcome:
    """The outcome of a call that raised; the traceback starts below the frames of the file `caller`."""
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename == caller:
        inner = inner.tb_next
    trace = "".join(traceback.format_exception(type(error), error, inner))[-TRACEBACK_CHARACTERS:]
    return failed("exception", f"it raised {text_of(error)}", trace, seconds)


def text_of(error: BaseException) -> str:
    """Type and text of an exception."""
    try:
        return f"{type(error).__name__}: {error}"[:2000]
    except Exception:  # an exception whose own text raises must not end the process
        return type(error).__name__


def outcome_of(value: Any, seconds: float) -> Outcome:
    """The outcome of a call that returned `value`."""
    if isinstance(value, Exception):  # of a batch function, for one response
        return raised(value, seconds, "")
    try:
        if isinstance(value, Mapping) and value.get("abstain"):
            parts = {str(k): _part(v) for k, v in value.items() if k not in ("score", "abstain")}
            return Outcome(None, parts, False, seconds, ABSTAINED, str(value["abstain"])[:2000])
        score, parts, bare = normalise(value)
        if parts and (size := len(encode(parts))) > LARGEST_RESULT:
            raise BadScore(f"it returned {size} bytes, at most {LARGEST_RESULT} are kept; return less")
    except Exception as error:
        return failed("value", text_of(error).partition(": ")[2] or text_of(error), seconds=seconds)
    return Outcome(score, parts, bare, seconds)


def normalise(value: Any) -> tuple[float, dict[str, Any], bool]:
    """(score, parts, bare) of what a function returned. BadScore says what is wrong with anything else.

    A number or bool is a score; a tuple counts by its first element; a dict by its `score`, its other keys
    are parts (numbers and bools stay numbers; what cannot travel becomes text).
    """
    if isinstance(value, Mapping):
        if "score" not in value:
            keys = ", ".join(map(repr, list(value)[:20])) or "none"
            raise BadScore(f"the dict it returned has no 'score' (keys: {keys})")
        if len(value) > MOST_PARTS:
            raise BadScore(
                f"the dict it returned has {len(value)} keys, at most {MOST_PARTS} are allowed; return fewer"
            )
        parts = {str(k): _part(v) for k, v in value.items() if k != "score"}
        return _number(value["score"], "its 'score'"), parts, False
    if isinstance(value, tuple):
        if not value:
            raise BadScore("it returned an empty tuple")
        return _number(value[0], "the first element of the tuple it returned"), {}, True
    return _number(value, "what it returned"), {}, True


def _number(value: Any, label: str) -> float:
    if value is None:
        raise BadScore(f"{label} is None; return a number, or a dict with 'score'")
    if isinstance(value, str):
        raise BadScore(f"{label} is the text {value[:60]!r}, not a number; return float(...) of it")
    try:
        value = value.item() if _is_array(value) else value
        number = float(value) if hasattr(value, "__float__") else None
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BadScore(f"{label} cannot be read as a number: {type(error).__name__}: {error}") from error
    if number is None:
        raise BadScore(f"{label} is a {type(value).__name__}, no number; return one, or a dict with 'score'")
    if not abs(number) <= _LARGEST_SCORE:
        raise BadScore(f"{label} is {number}; a score must be finite, and at most {_LARGEST_SCORE:g}")
    return number


def _is_array(value: Any) -> bool:
    """True for a numpy scalar, and for an array of numpy or torch, of which `item` gives the only element."""
    return callable(getattr(value, "item", None))


def _part(value: Any) -> Any:
    """A part as plain data: 0-dimensional arrays as numbers, what cannot travel as its text."""
    if _is_array(value) and getattr(value, "ndim", None) == 0:
        value = value.item()
    try:
        to_plain(value)
    except (NotPlain, TypeError, ValueError):
        return str(value)[:1000]
    return value
