"""Keys and values drawn from the schema itself: nothing outside a range is accepted, nothing inside ends in a traceback, and what the
check accepts runs two steps. `VERL_DRAWS` and `VERL_DRAWS_SEED`: how many draws really run, and which; of those that are only
checked there are ten times as many."""

from __future__ import annotations

import functools
import math
import os
import typing

import pytest
from hypothesis import HealthCheck, assume, given, seed, settings
from hypothesis import strategies as st

from verl.config import ConfigError, load
from verl.config.check import check
from verl.config.fields import Field, leaves, limits_of
from verl.config.schema.base import Map
from verl.config.schema.entries import ROOTS

DRAWS = int(os.environ.get("VERL_DRAWS", "3"))
SEED = int(os.environ.get("VERL_DRAWS_SEED", "1"))
NOT_RUN = ("nnodes", "n_gpus_per_node", "parallel_size", "trainer.device", "resume", "total_", "rollout.name")
NOT_RUN += ("timeout", "on_status", "megatron", "reward_model.rollout")
"""What asks for other machines, for another run than two steps, or for one that leaves responses out; what leads nowhere."""
STEERING = (
    *("adv_estimator", "kl", "filter_groups", "pf_ppo", "rollout_correction", "loss_", "lora_rank", "enable"),
    *("reward_manager", "multi_turn", "rollout.agent", "max_staleness", "save_contents", "async_save"),
    *(
        "offload",
        "dynamic_bsz",
        "batch_size",
        "optim.",
        "val_kwargs",
        "shuffle",
        "use_fused",
        "checkpointing",
    ),
)
"""Parts of keys that lead a run another way, which are drawn more often."""
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "a", "torch", "0.5_2"])


def drawn(count: int):
    """So many draws, the same ones in every run; nothing is kept."""
    options = settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    return lambda test: options(seed(SEED)(test))


def kinds(known: Field) -> tuple:
    """The types of a key, or of an item of it where it is a list."""
    if isinstance(known.type, tuple):
        return known.type
    return typing.get_args(known.type)[:1] if typing.get_origin(known.type) is list else (known.type,)


def numbers(known: Field, kind: type, most: float = math.inf) -> st.SearchStrategy:
    """In the range of a key, up to `most`."""
    limits = limits_of(known, kind)
    low, high = max(limits.low, limits.above), min(limits.high, most)
    more = [n for n in (limits.also, math.inf if limits.inf else None) if n is not None]
    plain = st.integers(low, int(high)) if kind is int else st.floats(low, high)
    return (plain.filter(limits.hold) | st.sampled_from(more)) if more else plain.filter(limits.hold)


def beyond(known: Field, kind: type) -> st.SearchStrategy:
    """Outside the range of a key."""
    limits = limits_of(known, kind)
    draw = st.integers if kind is int else st.floats
    low, high = max(limits.low, limits.above), limits.high
    return (draw(max_value=low) | draw(min_value=high)).filter(lambda number: not limits.hold(number))


def values(known: Field, cheap: bool) -> st.SearchStrategy[str]:
    """Values of a key as they are written. `cheap`: such that a run of a few seconds comes of it."""

    usual = known.default() if isinstance(known.default(), (int, float)) else None

    def of(kind: typing.Any) -> st.SearchStrategy:
        if options := known.about.get("options"):
            return st.sampled_from(options)
        if kind is bool:
            return st.booleans()
        if kind in (int, float):
            return numbers(known, kind, 2 * abs(usual or 4) if cheap else math.inf)
        if cheap:
            return st.nothing()
        return st.dictionaries(st.sampled_from(["a", "lr", "seed"]), PLAIN) if kind is Map else st.text()

    found = st.one_of([of(kind).map(str) for kind in kinds(known)])
    if typing.get_origin(known.type) is list and not found.is_empty:
        found = st.lists(found, max_size=3, unique=True).map(lambda items: f"[{','.join(items)}]")
    return found | st.just("null") if known.nullable else found


@functools.cache
def drawable(entry: str, cheap: bool) -> dict[str, st.SearchStrategy[str]]:
    """The keys of an entry point that have values to draw."""
    paths = [p for p in leaves(ROOTS[entry]) if not (cheap and any(part in p for part in NOT_RUN))]
    found = {path: values(leaves(ROOTS[entry])[path], cheap) for path in paths}
    return {path: known for path, known in found.items() if not known.is_empty}


@st.composite
def overrides(draw: typing.Any, entry: str, cheap: bool = False) -> list[str]:
    """Some keys of an entry point with values."""
    paths = list(known := drawable(entry, cheap))
    steering = [path for path in paths if any(part in path for part in STEERING)]
    chosen = draw(
        st.lists(st.sampled_from(paths) | st.sampled_from(steering or paths), min_size=1, max_size=8)
    )
    return [f"{path}={draw(known[path])}" for path in chosen]


def problems(words: list[str], entry: str) -> list[str]:
    """Of the configuration: the keys that are refused."""
    try:
        return [p.key for p in check(load(words, entry=entry)).problems]
    except ConfigError as error:
        return [p.key for p in error.problems]


@pytest.mark.parametrize("entry", list(ROOTS))
@drawn(DRAWS)
@given(data=st.data())
def test_every_number_is_refused_outside_its_range(entry, data):
    """All of an entry point at once."""
    found = {
        path: known for path, known in leaves(ROOTS[entry]).items() if kinds(known) in ((int,), (float,))
    }
    assert set(problems([f"{path}=nan" for path in found], entry)) >= found.keys()
    given = {p: data.draw(beyond(known, kinds(known)[0]), p) for p, known in found.items()}
    said = problems([f"{p}={number}" for p, number in given.items()], entry)
    accepted = {p: number for p, number in given.items() if not any(key.startswith(f"{p}=") for key in said)}
    assert accepted == {}


@pytest.mark.parametrize("entry", list(ROOTS))
@drawn(10 * DRAWS)
@given(data=st.data())
def test_nothing_of_a_keys_type_is_a_traceback(entry, tiny, data):
    words = [
        f"{key}={tiny.train}" for key in ("data.train_files", "data.path") if key in leaves(ROOTS[entry])
    ]
    words += [f"model.path={tiny.model}"] if "model.path" in leaves(ROOTS[entry]) else []
    words = tiny.overrides(tiny.root / "out") if entry == "ppo" else words
    problems([*words, *data.draw(overrides(entry))], entry)


@pytest.mark.slow
@drawn(DRAWS)
@given(words=overrides("ppo", cheap=True))
def test_the_check_and_the_run_agree(tiny, fork_server, tmp_path_factory, words):
    fixed = ["trainer.total_training_steps=2", "trainer.logger=console"]
    words = tiny.overrides(tmp_path_factory.mktemp("run"), *fixed, *words)
    assume(not problems(words, "ppo"))
    run = fork_server.run(words)
    assert run.status == 0 and "Traceback" not in run.stderr, run.stderr[-3000:]
