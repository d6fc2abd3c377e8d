"""Keys and values drawn from the schema itself: nothing outside a range is accepted, nothing inside ends in a
traceback, and what the check accepts runs two steps, in runs of every kind (tests.kinds). `VERL_DRAWS` and
`VERL_DRAWS_SEED`: how many draws really run, and which; of those that are only checked there are ten times as many.
`VERL_DRAWS_OF`: of these kinds of runs alone, as `critic,LoRA`."""

from __future__ import annotations

import functools
import math
import os
import shlex
import typing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from tests.chaos.fork_server import ForkServer
from tests.kinds import AHEAD, KINDS, Kind
from tests.runs import TinyRun
from verl.config import ConfigError, load
from verl.config.schema.base import Map
from verl.config.schema.entries import PROGRAMS, ROOTS
from verl.config.schema.fields import Field, leaves, limits_of
from verl.preflight.check import check

DRAWS = int(os.environ.get("VERL_DRAWS", "3"))
SEED = int(os.environ.get("VERL_DRAWS_SEED", "1"))
ONLY = list(filter(None, os.environ.get("VERL_DRAWS_OF", "").split(",")))
NOT_RUN = ("nnodes", "n_gpus_per_node", "parallel_size", "trainer.device", "resume", "total_", "rollout.name")
NOT_RUN += (
    "timeout",
    "logprob_diff_limit",
    "max_rpm",
    "max_tpm",
    "on_status",
    "megatron",
    "reward_model.rollout",
)
"""What asks for other machines, for other runs than two steps of seconds, or for one that leaves responses out; what
leads nowhere."""
OF_TOKENS = ("are longer than data.max_", "no trained token")
"""What refuses a run before it starts and after the check, which counts no tokens."""
TEXTS = {
    "rollout_rs": ("token_k1", "seq_mean_k3", "'token_k2,seq_sum_k1'"),
    "rollout_rs_threshold": ("2.0", "0.5_2.0"),
    "rollout_is_threshold": ("0.5_2.0",),
    "target_modules": ("all-linear", "q_proj", "down_proj", "lm_head"),
    "exclude_modules": ("q_proj", "lm_head"),
    "stop": ("a", "bc", "</"),
    "apply_chat_template_kwargs": ("{enable_thinking: False}",),
    "mm_processor_kwargs": ("{max_pixels: 1024}", "{min_pixels: 4096}"),
    "override_config": ("{attention_dropout: 0.1}", "{attn_implementation: eager}"),
} | dict.fromkeys(("dtype", "model_dtype", "param_dtype", "reduce_dtype"), ("float32", "bfloat16", "float16"))
"""Values of keys that take text or a mapping, for runs."""
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "a", "torch", "0.5_2"])


def drawn(count: int, *phases: Phase):
    """So many draws, the same ones in every run; nothing is kept."""
    options = settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=phases or list(Phase),
    )
    return lambda test: options(seed(SEED)(test))


def really_run(test):
    """So many draws; one that fails is not made smaller, which takes hundreds of runs."""
    return pytest.mark.slow(pytest.mark.timeout(120 * (1 + DRAWS))(drawn(DRAWS, Phase.generate)(test)))


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
    """Values of a key as they are written. `cheap`: others than the default, such that a run of a few seconds comes of
    them."""

    usual = known.default() if isinstance(known.default(), (int, float)) else None

    def of(kind: typing.Any) -> st.SearchStrategy:
        if options := known.about.get("options"):
            return st.sampled_from(options)
        if kind is bool:
            return st.booleans()
        if kind in (int, float):
            return numbers(known, kind, 2 * abs(usual or 4) if cheap else math.inf)
        if cheap:
            return st.sampled_from(TEXTS[known.name]) if known.name in TEXTS else st.nothing()
        return st.dictionaries(st.sampled_from(["a", "lr", "seed"]), PLAIN) if kind is Map else st.text()

    found = st.one_of([of(kind).map(str) for kind in kinds(known)])
    if typing.get_origin(known.type) is list and not found.is_empty:
        found = st.lists(found, max_size=3, unique=True).map(lambda items: f"[{','.join(items)}]")
    default = known.default()
    if known.nullable and not (cheap and default is None):
        found = found | st.just("null")
    return found.filter(lambda text: text != str(default)) if cheap else found


@functools.cache
def drawable(entry: str, cheap: bool) -> dict[str, st.SearchStrategy[str]]:
    """The keys of an entry point that have values to draw."""
    paths = [p for p in leaves(ROOTS[entry]) if not (cheap and any(part in p for part in NOT_RUN))]
    found = {path: values(leaves(ROOTS[entry])[path], cheap) for path in paths}
    return {path: known for path, known in found.items() if not known.is_empty}


@st.composite
def overrides(draw: typing.Any, entry: str, steering: tuple[str, ...] = ()) -> list[str]:
    """Some keys of an entry point with values; for a run, more of those that are `steering` it another way."""
    paths = list(known := drawable(entry, cheap=bool(steering)))
    often = [path for path in paths if any(part in path for part in steering)]
    any_path = st.sampled_from(paths) | st.sampled_from(often or paths)
    chosen = draw(st.lists(any_path, min_size=2, max_size=9, unique=True))
    return [f"{path}={draw(known[path])}" for path in chosen]


@st.composite
def runs(draw: typing.Any, kinds_of_run: typing.Sequence[str]) -> tuple[str, list[str]]:
    """A kind of run, and overrides to it."""
    kind = draw(st.sampled_from(kinds_of_run))
    return kind, draw(overrides(KINDS[kind].entry, KINDS[kind].steering))


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
    found = {path: known for path, known in leaves(ROOTS[entry]).items() if kinds(known) in ((int,), (float,))}
    assert set(problems([f"{path}=nan" for path in found], entry)) >= found.keys()
    given = {p: data.draw(beyond(known, kinds(known)[0]), p) for p, known in found.items()}
    said = problems([f"{p}={number}" for p, number in given.items()], entry)
    accepted = {p: number for p, number in given.items() if not any(key.startswith(f"{p}=") for key in said)}
    assert accepted == {}


@pytest.mark.parametrize("entry", list(ROOTS))
@drawn(10 * DRAWS)
@given(data=st.data())
def test_nothing_of_a_keys_type_is_a_traceback(entry, tiny, data):
    words = [f"{key}={tiny.train}" for key in ("data.train_files", "data.path") if key in leaves(ROOTS[entry])]
    words += [f"model.path={tiny.model}"] if "model.path" in leaves(ROOTS[entry]) else []
    words = tiny.overrides(tiny.root / "out") if entry == "ppo" else words
    problems([*words, *data.draw(overrides(entry))], entry)


class Runs:
    """Runs of the kinds of tests.kinds, whose models and data are made when the first one of them is drawn."""

    def __init__(self, fork_server: ForkServer, make_folder: typing.Callable[[str], Path]):
        self.start, self.make_folder, self.made = fork_server.run, make_folder, dict[typing.Any, TinyRun]()

    def agree(self, kind: Kind, words: list[str], **environment: str) -> None:
        """The check refuses these overrides, or two steps of them run."""
        if kind.make not in self.made:
            self.made[kind.make] = kind.make(self.make_folder("made"))
        base, fixed = self.made[kind.make], ["trainer.total_training_steps=2", "trainer.logger=console"]
        words = base.overrides(self.make_folder("run"), *kind.words(base), *fixed, *words)
        assume(not problems(words, kind.entry))
        run = self.start(words, module=PROGRAMS[kind.entry], **environment)
        assume(not (run.status == 2 and any(text in run.stderr for text in OF_TOKENS)))
        said = f"{shlex.join(words)}\n{run.stderr[-3000:]}"
        assert run.status == 0 and "Traceback" not in run.stderr, said


@pytest.fixture(scope="module")
def started(fork_server, tmp_path_factory) -> Runs:
    return Runs(fork_server, tmp_path_factory.mktemp)


@really_run
@given(drawn_run=runs(list(filter(ONLY.__contains__, KINDS)) if ONLY else list(KINDS)))
def test_the_check_and_the_run_agree(started, drawn_run):
    kind, words = drawn_run
    started.agree(KINDS[kind], words)


@pytest.mark.long
@really_run
@given(words=overrides("ppo", AHEAD.steering))
def test_of_asynchronous_runs_they_agree_too(started, ray_address, words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", ray_address)
        started.agree(AHEAD, words, RAY_ADDRESS=ray_address)
