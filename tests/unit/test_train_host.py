"""A training rank's answers to its driver, with engines that are not there."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from verl.algorithms.objective import LossDenominators, count_denominators
from verl.engine.training.base import StepResult
from verl.platform import processes
from verl.trajectory import Batch, Prompt, Trajectory
from verl.workers import codec
from verl.workers.worker import Worker


def rows(count: int, length: int = 3) -> list[Trajectory]:
    return [
        Trajectory(
            Prompt(f"0:{i}@0", np.arange(4), messages=None),
            0,
            response_ids=np.arange(length) + i,
            response_mask=np.ones(length, bool),
            loss_mask=np.ones(length, bool),
            advantages=np.zeros(length, np.float32),
        )
        for i in range(count)
    ]


def counts() -> dict[str, Any]:
    return asdict(count_denominators(rows(4), 1.0))


def on_device(*, optimizer: bool = False) -> Any:
    return nullcontext()


@pytest.fixture
def host() -> Worker:
    """Without `__init__`, which asks for a whole configuration."""
    one = Worker.__new__(TrainWorker)
    one.rank, one.world, one.actor = 0, 1, SimpleNamespace(on_device=on_device)  # type: ignore[assignment]
    actor = SimpleNamespace(actor=None, rollout=SimpleNamespace(nnodes=0))
    one.config = SimpleNamespace(  # type: ignore[assignment]
        actor_rollout_ref=actor, algorithm=SimpleNamespace(rollout_correction=None)
    )
    return one


def test_every_mini_batch_brings_the_log_probs_of_its_own_rows(
    host: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may come as several calls; what the first one computed must not hide what the second one does."""

    def update(engine: Any, cfg: Any, given: list[Trajectory], *_: Any) -> StepResult:
        for row in given:
            row.old_log_probs = row.response_ids.astype(np.float32)
            row.entropy = -row.old_log_probs
        return StepResult({}, 1.0, tokens=1)

    monkeypatch.setattr("verl.workers.execute.update", update)
    mine = rows(4)
    columns = ["loss_mask", "advantages"]
    host.take_rows(codec.encode(mine, columns))
    for part in ([0, 1], [2, 3]):
        mini = {"rows": np.array(part), "denominators": counts()}
        response = host.update({}, [mini], 1.0)
        codec.fill(mine, response["columns"])
        for place in part:
            assert np.array_equal(mine[place].old_log_probs, mine[place].response_ids)
            assert np.array_equal(mine[place].entropy, -mine[place].response_ids)
    assert all(row.old_log_probs is not None for row in mine)


def test_a_transfer_that_fails_gathers_to_the_end(host: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathering is a collective: the other ranks would wait for ever, or pair with the next one."""
    gathered: list[str] = []

    def weights() -> Any:
        for name in "abc":
            gathered.append(name)
            yield name, None

    host.actor = SimpleNamespace(  # type: ignore[assignment]
        named_weights=weights, on_device=on_device, release_cached_memory=lambda: None
    )
    engine = SimpleNamespace(update_weights_bucket_megabytes=1, backend="naive")
    host.config.actor_rollout_ref.rollout.checkpoint_engine = engine
    monkeypatch.setattr("verl.workers.build.adapter_moves", lambda config: False)

    def no_room(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("verl.weight_sync.shared_memory.BucketSender.send", no_room)
    with pytest.raises(OSError, match="No space"):
        host.send_weights("channel", [processes.identity()], 1, False)
    assert gathered == ["a", "b", "c"]


def test_columns_of_a_mini_batch_that_was_left_out_are_sent_with_the_next() -> None:
    ray_training = pytest.importorskip("verl.workers.ray.training", reason="Ray is not installed")
    sent: list[list[str]] = []

    def call(method: str, *args: Any, each: Any = None, doing: str = "") -> list[Any]:
        sent.append(sorted(each[0][0]))
        return [{"columns": {}, "results": [{"metrics": {}, "grad_norm": 1.0, "tokens": 1}]}]

    training = SimpleNamespace(
        call=call,
        fill=lambda placed, responses: None,
        each=lambda payloads: [(payload,) for payload in payloads],
        dp_ranks=[0],
        dp_size=1,
        temperature=1.0,
        plan=SimpleNamespace(correction=SimpleNamespace(bypass=False)),
    )
    group = ray_training.ActorGroup(training, "")
    batch = Batch(rows(4))
    placed = ray_training.Placed(batch, [list(batch)], set())
    from verl.workers.plan import MiniBatch

    def mini(some: list[Trajectory], usable: bool) -> MiniBatch:
        return MiniBatch(some, some if usable else [], LossDenominators(**counts()), [None] * len(some))

    assert group._execute([mini(list(batch)[:2], False)], placed)[0][1] is None
    assert not sent and not placed.known
    assert group._execute([mini(list(batch)[2:], True)], placed)[0][1] is not None
    assert sent == [["advantages", "loss_mask"]]
