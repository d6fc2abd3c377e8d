"""Dynamic sampling in virtual time: which groups a step trains on, against a loop that samples one prompt after the
other."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace as Space

import numpy as np
import pytest

from tests.unit.rollout.test_rollout_async import BATCH, Rows, Run, lengths
from tests.virtual import TimedEngine
from verl.data.stream import PromptStream
from verl.errors import UserError
from verl.rollout.schedule import metric_values

ON = "algorithm.filter_groups.enable=True"


def score(uid: str, index: int, kept: float = 0.6) -> float:
    """Both responses score 0 or both 1 for the other groups; a function of the group alone."""
    draw = int.from_bytes(hashlib.blake2b(uid.encode(), digest_size=4).digest(), "little") / 2**32
    return float(index) if draw < kept else float(draw > (1 + kept) / 2)


class Filtered(Run):
    kept = 0.6

    async def _score(self, trajectory) -> None:
        await super()._score(trajectory)
        trajectory.score = score(trajectory.uid, trajectory.index, self.kept)
        trajectory.score_parts = {"acc": trajectory.score, "format": 1.0}


def expected(steps: int, kept: float = 0.6) -> list[list[str]]:
    """The oracle: draw prompts one by one, keep those whose two scores differ, cut into batches."""
    stream = PromptStream(Rows(), batch_size=BATCH, seed=1, shuffle=True)
    found: list[str] = []
    while len(found) < steps * BATCH:
        (prompt,) = stream.take(1, cross=True)
        if score(prompt.uid, 0, kept) != score(prompt.uid, 1, kept):
            found.append(prompt.uid)
    return [found[i : i + BATCH] for i in range(0, steps * BATCH, BATCH)]


def uids(run: Run) -> list[list[str]]:
    return [[t.uid for t in batch if t.index == 0] for batch in run.batches]


@pytest.mark.parametrize(("staleness", "inflight"), [(0, 1), (0, 3), (1, 1), (3, 2)])
def test_the_batch_is_the_first_groups_with_signal_in_draw_order(tmp_path, staleness, inflight) -> None:
    words = [ON, f"algorithm.filter_groups.max_inflight_gen_batches={inflight}"]
    run = Filtered(tmp_path, staleness, TimedEngine(lengths), *words, steps=8).go()
    assert uids(run) == expected(8)
    most = max(len({uid.split("#")[0] for uid in batch}) for batch in uids(run))
    assert most == BATCH
    for step, batch in enumerate(run.batches, 1):
        oldest = min(t.versions[0] for t in batch)
        assert oldest >= step - 1 - staleness, "no response is older than allowed"


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_resumed_run_goes_on_with_the_same_groups(tmp_path, staleness) -> None:
    run = Filtered(tmp_path, staleness, TimedEngine(lengths), ON, steps=6).go()
    for step in range(1, 6):
        again = Filtered(tmp_path, staleness, TimedEngine(lengths), ON, steps=6)
        again.stream.load_state(run.quiet.positions[step])
        again.quiet.resume = lambda step=step: step
        again.go()
        assert uids(again) == uids(run)[step:], f"after step {step}"


def test_what_happened_is_counted(tmp_path) -> None:
    run = Filtered(tmp_path, 0, TimedEngine(lengths), ON, steps=4).go()
    drawn = evicted = 0
    for record in run.quiet.records.values():
        found = {name: record[f"training/filter_groups/{name}"] for name in (
            "gen_prompts", "evicted_samples", "discarded_surplus_samples", "all_max_ratio", "all_min_ratio"
        )}  # fmt: skip
        assert found["gen_prompts"] >= BATCH + found["evicted_samples"]
        assert 0 <= found["all_max_ratio"] + found["all_min_ratio"] <= 1
        drawn, evicted = drawn + found["gen_prompts"], evicted + found["evicted_samples"]
    stream = PromptStream(Rows(), batch_size=BATCH, seed=1, shuffle=True)
    count, last = 0, expected(4)[-1][-1]
    while stream.take(1, cross=True)[0].uid != last:
        count += 1
    assert evicted == count + 1 - 4 * BATCH and drawn >= count + 1


def test_nothing_more_is_sampled_where_every_group_has_signal(tmp_path) -> None:
    class All(Filtered):
        kept = 1.0

    run = All(tmp_path, 0, TimedEngine(lengths), ON, steps=4).go()
    assert [r["training/filter_groups/gen_prompts"] for r in run.quiet.records.values()] == [BATCH] * 4
    plain = Run(tmp_path, 0, TimedEngine(lengths), steps=4).go()
    assert uids(run) == uids(plain) and run.ended == plain.ended, "it costs no time either"


@pytest.mark.parametrize("words", [["algorithm.filter_groups.max_num_gen_batches=2"], []])
def test_data_without_signal_stop_the_run_with_the_shares(tmp_path, words) -> None:
    class Hopeless(Filtered):
        kept = 0.0

    with pytest.raises(UserError) as caught:
        Hopeless(tmp_path, 0, TimedEngine(lengths), ON, *words, steps=4).go()
    text = str(caught.value)
    assert "kept 0 of the 4 it needs" in text and "all at 0" in text and "all at 1" in text
    assert ("judged 8 groups" if words else "judged 4") in text


def test_a_metric_that_is_missing_names_those_there_are(tmp_path) -> None:
    run = Filtered(tmp_path, 0, TimedEngine(lengths), ON, "algorithm.filter_groups.metric=acc", steps=3).go()
    assert uids(run) == expected(3)
    assert metric_values("acc", [Space(score=0.5, score_parts={})]) == [0.5], "a number is accuracy, too"
    with pytest.raises(UserError, match="it returned: acc, format, reward"):
        Filtered(tmp_path, 0, TimedEngine(lengths), ON, "algorithm.filter_groups.metric=nope", steps=3).go()


def test_failed_scores_stop_the_run_and_do_not_draw_for_ever(tmp_path) -> None:
    class Failing(Filtered):
        async def _score(self, trajectory) -> None:
            trajectory.score_error = "no"

    run = Failing(tmp_path, 0, TimedEngine(lengths), ON, steps=2)

    def check(batch) -> None:
        raise RuntimeError(f"{np.mean([t.score is None for t in batch]):.0%} failed")

    run.trainer.schedule._check = check
    with pytest.raises(RuntimeError, match="100% failed"):
        run.go()
