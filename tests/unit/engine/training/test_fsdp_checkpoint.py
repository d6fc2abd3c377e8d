"""What a sharded engine writes is read at any number of ranks and by one device, bit for bit, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from tests import ranks
from tests.tiny import tiny_model
from tests.unit.engine.training.engine_cases import rows_of, simple_loss
from tests.unit.engine.training.fsdp_cases import role
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.engine.training.weight_files import plan_files
from verl.errors import UserError

ROLE = role(
    optim={"lr": 1e-2, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "lr_warmup_steps": 1},
    grad_clip=1.0,
)
GROUPS = [(7, [5, 9, 1]), (4, [6, 2])]


def state(engine: Any) -> dict[str, torch.Tensor]:
    """Weights and optimizer, whole, by name."""
    from verl.engine.training.process_group import whole

    out = {name: tensor.clone() for name, tensor in engine.named_weights()}
    for name, parameter in engine._names.items():
        for key, value in engine._optimizer.state[parameter].items():
            out[f"{name}/{key}"] = whole(value).clone()
    return out | {"schedule": torch.tensor(engine._schedule.step)}


def go(engine: Any, steps: int) -> list[float]:
    rows = rows_of(GROUPS)
    mine = rows[: 3 if engine.dp_size > 1 else None] if engine.dp_rank == 0 else rows[3:]
    rates = []
    for _ in range(steps):
        assert not engine.step(mine, simple_loss(23), temperature=1.0).refused
        rates.append(engine.advance())
    return rates


def save(engine: Any, to: str) -> None:
    engine.save_weights(Path(to) / "w")
    engine.save_optimizer(Path(to) / "o")


def sharded(
    path: str, load: str | None, steps: int, save_to: str | None, more: int = 0, fsdp: Any = None
) -> tuple[Any, Any]:
    """One rank: build, load, train, save, train more → (state at saving, state at the end)."""
    from verl.engine.training.fsdp.engine import FSDPEngine

    engine = FSDPEngine(path, role_cfg=ROLE | {"fsdp_config": ROLE["fsdp_config"] | (fsdp or {})}, device="cpu")
    engine.schedule(8)
    if load:
        # Where the weights were before must not matter.
        engine.forward(rows_of(GROUPS), temperature=1.0)
        engine.load_weights(Path(load) / "w")
        engine.load_optimizer(Path(load) / "o")
    go(engine, steps)
    before = state(engine)
    if save_to:
        save(engine, save_to)
    go(engine, more)
    return before, state(engine)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def check_four_ranks_one_device_and_back(folder: Path, path: str, fsdp: dict[str, Any]) -> None:
    """Ranks that share more than FSDP's cuts: `fsdp` is the layout of four."""
    here, there, local = (str(folder / name) for name in ("here", "there", "local"))
    saved, ended = ranks.run(sharded, 4, path, None, 2, here, 1, fsdp)[0]
    engine = FSDPEngine(path, role_cfg=ROLE, device="cpu")
    engine.schedule(8)
    engine.load_weights(Path(here) / "w")
    engine.load_optimizer(Path(here) / "o")
    same(state(engine), saved)
    save(engine, local)
    again = ranks.run(sharded, 4, path, local, 0, there, 1, fsdp)
    same(again[3][0], saved)
    same(again[3][1], ended)
    assert all(torch.isfinite(tensor).all() for tensor in ended.values())
    same(ranks.run(sharded, 2, path, there, 0, None)[1][0], saved)


@pytest.mark.parametrize(("arch", "tied"), [("qwen3", True), pytest.param("qwen3_moe", False, marks=pytest.mark.long)])
def test_two_ranks_one_rank_one_device_and_back(tmp_path: Path, arch: str, tied: bool) -> None:
    path = str(tiny_model(tmp_path / "m", arch, tied=tied))
    two, one, local = (str(tmp_path / name) for name in ("two", "one", "local"))
    (saved, ended), again = ranks.run(sharded, 2, path, None, 2, two, 2)
    same(saved, again[0])

    on_one = ranks.run(sharded, 1, path, two, 0, one)[0][0]
    same(on_one, saved)

    engine = FSDPEngine(path, role_cfg=ROLE, device="cpu")
    engine.schedule(8)
    engine.load_weights(Path(one) / "w")
    engine.load_optimizer(Path(one) / "o")
    same(state(engine), saved)
    save(engine, local)

    back = ranks.run(sharded, 2, path, local, 0, None, 2)
    same(back[0][0], saved)
    same(back[0][1], ended)
    hybrid = ranks.run(sharded, 2, path, two, 0, None, 0, {"fsdp_size": 1, "offload_policy": True})
    same(hybrid[1][0], saved)


def test_files_are_cut_evenly_and_below_the_limit() -> None:
    sizes = [(str(i), 10) for i in range(12)]
    assert [len(f) for f in plan_files(sizes, 4)] == [3, 3, 3, 3]
    assert [len(f) for f in plan_files(sizes, 1)] == [12]
    assert max(len(f) for f in plan_files(sizes, 2, limit=25)) <= 3
    assert plan_files([("big", 100), ("small", 1)], 2, limit=10) == [["big"], ["small"]]
    assert plan_files([("only", 7)], 4) == [["only"]]
    assert [name for file in plan_files(sizes, 5) for name in file] == [name for name, _ in sizes]


def refusal(work: Callable[[], Any]) -> str:
    """What a rank's user is told, "" for nothing."""
    try:
        work()
    except UserError as error:
        return str(error)
    return ""


def full_disk(path: str, directory: str, error: Exception) -> str:
    """Rank 1 cannot write."""
    import torch.distributed as dist

    from verl.engine.training import weight_files
    from verl.engine.training.fsdp.engine import FSDPEngine

    engine = FSDPEngine(path, role_cfg=ROLE, device="cpu")
    if dist.get_rank() == 1:
        weight_files.write_file = _raising(error)  # type: ignore[assignment]
    try:
        engine.save_weights(Path(directory))
    except Exception as raised:
        engine.save_optimizer(Path(directory))  # the ranks are in step: the next call on_all_ranks works
        return f"{type(raised).__name__}: {raised}"
    return ""


def _raising(error: Exception) -> Any:
    def write(*_: Any) -> None:
        raise error

    return write


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device")],
    ids=["of the system", "of the library"],
)
def test_a_full_disk_on_one_rank_fails_the_save_on_all(tmp_path: Path, error: Exception) -> None:
    messages = ranks.run(full_disk, 2, str(tiny_model(tmp_path / "m")), str(tmp_path / "out"), error)
    assert all("No space left" in message for message in messages)


def test_an_optimizer_that_cannot_be_written_says_how_much_room_there_is(tmp_path: Path, monkeypatch: Any) -> None:
    """torch says "unexpected pos" of a full disk."""
    from torch.distributed.checkpoint.api import CheckpointException

    from verl.engine.training.fsdp import optimizer_state

    refused = CheckpointException("write", {0: (RuntimeError("unexpected pos 704 vs 598"), None)})  # type: ignore[arg-type]
    monkeypatch.setattr(optimizer_state.dcp, "save", lambda *_, **__: _raising(refused)())
    parameter = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(OSError, match=r"cannot be written \([\d,]+ MiB are free there\): rank 0: .*unexpected pos"):
        optimizer_state.save_state(tmp_path, torch.optim.SGD([parameter]), {"w": parameter}, 1)
