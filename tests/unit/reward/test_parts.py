"""Small parts of the reward package: results made uniform, loading, what travels, rate limits, settings."""

from __future__ import annotations

import datetime
import functools
import math
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl.compat import spellings
from verl.platform import child_process as codec
from verl.reward import user_function
from verl.reward.outcome import LARGEST_RESULT, BadScore, RewardLoadError, normalise, outcome_of
from verl.reward.pool import RateGate
from verl.reward.settings import Overlong, RewardSettings
from verl.reward.user_function import get_reward_manager_cls, register

# ---------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (1, 1.0),
        (True, 1.0),
        (-0.5, -0.5),
        (np.float32(0.25), 0.25),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (np.array([0.5]), 0.5),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 2), 0.5),
        ((0.75, "why"), 0.75),
        ({"score": 2}, 2.0),
    ],
)
def test_results_that_are_scores(value: Any, score: float) -> None:
    found = normalise(value)[0]
    assert found == score and type(found) is float


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "is None"),
        (math.nan, "is nan"),
        (-math.inf, "is -inf"),
        (np.float32("inf"), "is inf"),
        ("1.0", "the text '1.0'"),
        ([1.0], "is a list"),
        ((), "empty tuple"),
        (("1",), "the text '1'"),
        ({}, r"no 'score' \(keys: none\)"),
        ({"reward": 1}, r"no 'score' \(keys: 'reward'\)"),
        ({"score": None}, "its 'score' is None"),
        ({"score": math.nan}, "its 'score' is nan"),
        ({"score": {"score": 1}}, "is a dict"),
        (1 + 2j, "is a complex"),
        (np.array([1.0, 2.0]), "cannot be read as a number"),
        (10**400, "cannot be read as a number"),
        ({"score": 1, **dict.fromkeys(range(1000))}, "has 1001 keys, at most 1000 are allowed"),
        (-1e39, r"is -1e\+39; a score must be finite, and at most 1e\+30"),
    ],
)
def test_results_that_are_not(value: Any, message: str) -> None:
    with pytest.raises(BadScore, match=message):
        normalise(value)


@pytest.mark.parametrize("much", ["a" * LARGEST_RESULT, list(range(3_000_000))], ids=["text", "list"])
def test_a_result_that_is_too_large_to_keep_is_no_score(much: Any) -> None:
    found = outcome_of({"score": 1, "much": much}, 0.1)
    assert (found.score, found.kind, found.parts) == (None, "value", {}) and "bytes, at most" in str(found.error)


def test_parts_keep_numbers_and_hashables_and_turn_the_rest_into_text() -> None:
    value = {"score": 1, "acc": True, "f": np.float64(0.5), "pred": ("a", 1), "note": "x", "odd": object}
    value["n"] = math.nan
    score, parts, bare = normalise(value)
    assert (score, bare) == (1.0, False) and "score" not in parts
    assert parts["acc"] is True and parts["f"] == 0.5 and parts["pred"] == ("a", 1) and parts["note"] == "x"
    assert parts["odd"] == "<class 'object'>" and math.isnan(parts["n"])
    assert normalise(1.0)[2] and normalise((1.0, 2.0))[2]


# ---------------------------------------------------------------------------------------------- travel


def test_values_arrive_as_they_were_in_one_line() -> None:
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5, 6)
    plain = [None, True, -(2**70), 0.1, math.inf, "é\n\u2028\ud800", b"\0\n\xff", Decimal("0.1"), moment]
    plain.append(moment.date())
    value = {"plain": plain, "$type": "mine", 3: (1, ("a", [])), (1, 2): {"$type": {"x": ()}}}
    line = codec.encode(value)
    restored = codec.decode(line)
    assert line.count(b"\n") == 1 and restored == value
    assert [type(v) for v in restored["plain"]] == [type(v) for v in plain] and type(restored[3]) is tuple


def test_arrays_travel_as_lists_and_objects_are_refused_by_place() -> None:
    row = {"a": np.arange(2), "b": np.float32(0.5), "c": datetime.time(1, 2)}
    assert codec.decode(codec.encode(row)) == {"a": [0, 1], "b": 0.5, "c": datetime.time(1, 2)}
    with pytest.raises(codec.NotPlain, match=r"the row\.extra_info\.image\[1\] is a builtins\.object"):
        codec.encode({"extra_info": {"image": [1, object()]}}, "the row")


# ---------------------------------------------------------------------------------------------- loading

FILE = """
import helper_beside
CONSTANT = 3
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs): return 1.0
def short(data_source, solution_str, ground_truth): return 1.0
def renamed(source, answer, truth, info): return 1.0
def moved(solution_str, ground_truth, extra_info): return 1.0
def many(data_sources, solution_strs, ground_truths, extra_infos): return [1.0]
async def later(data_source, solution_str, ground_truth, extra_info=None): return 1.0
class Callable:
    async def __call__(self, **kwargs): return 1.0
an_object = Callable()
"""


@pytest.fixture()
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "helper_beside.py").write_text("X = 1\n")
    (tmp_path / "my_reward.py").write_text(FILE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "helper_beside", raising=False)
    return str(tmp_path / "my_reward.py")


def test_a_missing_file_a_directory_and_a_missing_module_are_named(user_file: str, tmp_path: Path) -> None:
    with pytest.raises(RewardLoadError, match=r"my_rewrd\.py: no such file .*in that folder: my_reward\.py"):
        user_function.load_function(str(tmp_path / "my_rewrd.py"), "compute_score")
    with pytest.raises(RewardLoadError, match="a directory"):
        user_function.load_function(str(tmp_path), "compute_score")
    with pytest.raises(RewardLoadError, match="no module 'no_such_module_here'"):
        user_function.load_function("pkg://no_such_module_here.rewards", "compute_score")
    assert user_function.load_function("pkg://verl.reward.rules.gsm8k", "compute_score")("#### 1", "1") == 1.0
    assert user_function.load_function(user_file, "compute_score")(1, 2, 3) == 1.0, "its folder is importable"


def test_a_missing_name_lists_the_functions_there(user_file: str) -> None:
    with pytest.raises(RewardLoadError, match="defines no 'compute'; nearest: compute_score"):
        user_function.load_function(user_file, "compute")
    with pytest.raises(RewardLoadError, match="this is a int, not a function"):
        user_function.load_function(user_file, "CONSTANT")


def test_calling_styles(user_file: str) -> None:
    def style(name: str, batch: bool = False, positional: int = 0, **kwargs: Any) -> int:
        function = user_function.load_function(user_file, name)
        return user_function.calling_style(function, kwargs, batch=batch, positional=positional)

    assert style("compute_score", extra=1) == 0
    assert style("many", batch=True) == 0
    assert style("renamed", positional=4) == 4 and style("short", positional=3) == 3
    for arguments, message in (
        (("short",), "extra_info"),
        (("renamed",), "cannot be called as renamed"),
        (("short", False, 4), "too many positional"),
    ):
        with pytest.raises(RewardLoadError, match=message):
            style(*arguments)
    with pytest.raises(RewardLoadError, match="by position it would get data_source, solution_str, ground_truth"):
        style("moved", positional=3)
    with pytest.raises(RewardLoadError, match=r"with reward_kwargs colour: .*colour"):
        style("later", colour=1)
    with pytest.raises(RewardLoadError, match="reward_manager=batch"):
        style("many")
    with pytest.raises(RewardLoadError, match="reward_manager=naive"):
        style("later", batch=True)


def test_async_is_seen_through_partials_wrappers_and_objects(user_file: str) -> None:
    later = user_function.load_function(user_file, "later")

    @functools.wraps(later)
    def wrapped(**kwargs: Any) -> Any:
        return later(**kwargs)

    an_object = user_function.load_function(user_file, "an_object")
    for function in (later, functools.partial(later, data_source=1), wrapped, an_object):
        assert user_function.is_async(function)
    assert not user_function.is_async(user_function.load_function(user_file, "compute_score"))


# ---------------------------------------------------------------------------------------------- rates


def test_calls_at_once() -> None:
    gate = RateGate(2)
    assert [gate.try_start(0.0) for _ in range(3)] == [0.0, 0.0, None]
    gate.finish()
    assert gate.try_start(0.0) == 0.0


@pytest.mark.parametrize("limits", [(None, 2), (None, 9, 2500, 1000)], ids=["calls", "tokens"])
def test_no_minute_holds_too_many(limits: tuple[Any, ...]) -> None:
    gate = RateGate(*limits)
    assert [gate.try_start(now) for now in (0.0, 10.0)] == [0.0, 0.0]
    assert gate.try_start(20.0) == pytest.approx(40.0) and gate.try_start(59.0) == pytest.approx(1.0)
    assert gate.try_start(60.1) == 0.0 and gate.try_start(61.0) == pytest.approx(9.0)


def test_a_limit_that_no_call_can_meet_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tpm=1000 is below estimated_tokens_per_request=2000"):
        RateGate(1, None, 1000)


# ---------------------------------------------------------------------------------------------- settings


def settings(*words: str) -> RewardSettings:
    needed = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.model.path=m", "trainer.device=cpu")
    return RewardSettings.from_config(spellings.load([*needed, *words]))


def test_settings() -> None:
    plain = settings()
    assert plain.function.path is None and plain.rate is None and plain.overlong is None
    custom, manager = "custom_reward_function.path=x.py", "reward_model.reward_manager="
    assert not settings(manager + "batch").function.batch
    assert settings(manager + "batch", custom).function.batch
    assert settings(manager + "prime", custom).function.positional
    gdpo = settings(manager + "gdpo", "algorithm.gdpo_reward_keys=[format]")
    assert gdpo.required_parts == ("format",)
    groups = "algorithm.filter_groups."
    for metric, wanted in (("reward", ()), ("format", ("format",))):
        assert settings(groups + "enable=True", groups + f"metric={metric}").groups_metric == wanted
    assert settings(groups + "metric=format").groups_metric == ()
    assert settings(manager + "limited").rate is not None
    with pytest.raises(RewardLoadError, match=r"importlib needs reward_manager\.module\.path=FILE\.py"):
        settings("reward_manager.source=importlib")


def test_overlong_penalty() -> None:
    key = "reward_model.reward_kwargs"
    buffer = f"{key}.overlong_buffer_cfg={{enable:True,len:20,penalty_factor:2,log:True}}"
    overlong = settings(buffer, f"{key}.max_resp_len=60").overlong
    assert overlong == Overlong(20, 2.0, 60, True)
    assert [overlong.penalty(n) for n in (0, 40, 41, 50, 60)] == [0.0, 0.0, -0.1, -1.0, -2.0]


def test_manager_registry() -> None:
    @register("a_manager_of_a_test")
    class Mine: ...

    assert get_reward_manager_cls("a_manager_of_a_test") is Mine
    with pytest.raises(ValueError, match="already registered"):
        register("a_manager_of_a_test")(type("Other", (), {}))
    with pytest.raises(ValueError, match="Unknown reward manager: nope"):
        get_reward_manager_cls("nope")
