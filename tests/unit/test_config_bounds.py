"""Keys and values drawn from the schema itself: nothing outside a range is accepted, nothing inside ends in a traceback, and what the
check accepts runs a step. `VERL_DRAWS` and `VERL_DRAWS_SEED`: how many draws really run, and which."""

from __future__ import annotations

import math
import os
import random
import typing

import pytest

from verl.config import ConfigError, load
from verl.config.check import check
from verl.config.fields import Field, leaves, limits_of
from verl.config.schema.entries import ROOTS

DRAWS = int(os.environ.get("VERL_DRAWS", "3"))
SEED = os.environ.get("VERL_DRAWS_SEED", "1")


def number_kind(known: Field) -> type | None:
    """int or float where a key is a number or a list of numbers."""
    item = typing.get_args(known.type)[0] if typing.get_origin(known.type) is list else known.type
    return item if item in (int, float) else None


def outside(known: Field, kind: type) -> list[str]:
    """Numbers just outside a key's range, and far outside."""
    limits = limits_of(known, kind)
    near = [
        limits.low - 1,
        limits.high + max(1, abs(limits.high) * 0.01),
        limits.above,
        -1e300,
        1e300,
        math.inf,
    ]
    whole = [int(n) if kind is int else float(n) for n in near if math.isfinite(n) or kind is float]
    return [str(n) for n in whole if not limits.hold(n)]


@pytest.mark.parametrize("entry", list(ROOTS))
def test_every_number_is_refused_outside_its_range(entry):
    """All keys at once, again and again with other numbers, until each of each was there."""
    found = {
        path: (known, kind) for path, known in leaves(ROOTS[entry]).items() if (kind := number_kind(known))
    }
    values = {path: outside(*what) for path, what in found.items()}
    assert all(values.values()), "every number has a finite range"
    for turn in range(max(map(len, values.values()))):
        given = {path: texts[turn % len(texts)] for path, texts in values.items()}
        said = [p.key for p in check(load([f"{k}={v}" for k, v in given.items()], entry=entry)).problems]
        accepted = [path for path in given if not any(key.startswith(f"{path}=") for key in said)]
        assert not accepted, {path: given[path] for path in accepted}
    for path in found:
        with pytest.raises(ConfigError, match=path):
            load([f"{path}=nan"], entry=entry)


def inside(known: Field, rng: random.Random) -> str | None:
    """A value in a key's range that is cheap to run, as text; None for a key that takes any text or mapping."""
    default, item = known.default(), known.type
    many = typing.get_origin(item) is list
    if options := known.about.get("options"):
        return f"[{','.join(rng.sample(options, rng.randint(0, 2)))}]" if many else rng.choice(options)
    if item is bool:
        return rng.choice(["True", "False"])
    if many or not (kind := number_kind(known)):
        return "null" if known.nullable else None
    limits = limits_of(known, kind)
    near = [default or 1, 2 * (default or 1), 1, 2, 3, limits.low, limits.high, limits.above + 1]
    if kind is float:
        near += [0.5, 1e-3, math.inf]
    cheap = [n for n in near if limits.hold(n) and (n <= 2 * abs(default or 4) or n == math.inf)]
    return str(kind(rng.choice(cheap)))


NOT_DRAWN = (
    "nnodes",
    "n_gpus_per_node",
    "parallel_size",
    "trainer.device",
    "resume",
    "total_training_steps",
    "rollout.name",
)
"""What asks for other machines, or for another run than one step."""


def draws(rng: random.Random) -> list[str]:
    """One to five overrides of main_ppo."""
    known = leaves(ROOTS["ppo"])
    paths = [path for path in known if not any(part in path for part in NOT_DRAWN)]
    chosen = {path: inside(known[path], rng) for path in rng.sample(paths, rng.randint(1, 5))}
    return [f"{path}={value}" for path, value in chosen.items() if value is not None]


@pytest.mark.slow
def test_the_check_and_the_run_agree(tiny, fork_server, tmp_path):
    """Draws that the check accepts run one step; a draw is never a traceback."""
    rng, ran = random.Random(SEED), 0
    fixed = ["trainer.total_training_steps=1", "trainer.save_freq=-1", "trainer.logger=console"]
    while ran < DRAWS:
        words = tiny.overrides(tmp_path / str(ran), *fixed, *draws(rng))
        try:
            refused = bool(check(load(words)).problems)
        except ConfigError:
            refused = True
        if refused:
            continue
        run = fork_server.run(words)
        story = f"VERL_DRAWS_SEED={SEED}, draw {ran}: {words[-6:]}\n{run.stderr[-3000:]}"
        assert run.status == 0 and "Traceback" not in run.stderr, story
        ran += 1
