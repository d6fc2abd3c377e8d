"""A rank that does not come: every group of the engine gives up after `nccl_timeout`, and says what it was doing."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests import ranks
from tests.tiny import tiny_model
from tests.unit.engine.training.engine_cases import simple_loss
from tests.unit.engine.training.fsdp_cases import role, rows
from verl.engine.registry import Placement
from verl.engine.training import process_group
from verl.engine.training.fsdp.sharding import Layout, layout
from verl.platform import detect

LIMIT = 1.5
ENGINE_LIMIT = 3.0  # more, because a slow machine must build one meanwhile
NEVER = 37.0
SIZES = [(-1, 1, 1), (2, 1, 1), (1, 2, 1), (-1, 2, 1), (2, 2, 2), (-1, 1, 2), (2, 4, 1)]
"""(fsdp_size, sequence_size, tensor_size) on 8 ranks."""


def meet_again(port: int, limit: float) -> None:
    """With another limit, now that all ranks have started."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    process_group.init_process_group(rank, size, "127.0.0.1", port, detect("cpu"), limit)


def groups_of(found: Layout) -> dict[str, dist.ProcessGroup]:
    out = {name: found.mesh.get_group(name) for name in found.mesh.mesh_dim_names or ()}
    out |= {} if found.tensor is None else {"tensor": found.tensor.get_group()}
    return out | ({} if found.sequence is None else {"sequence": found.sequence})


def as_torch_does(cut: int, sequence: int, tensor: int) -> dict[str, list[int]]:
    """Name of the group → its ranks, by torch's own meshes."""
    size = dist.get_world_size()
    shard = size // tensor if cut < 0 else cut
    shape, names = (size // tensor // shard, shard, tensor), ("replicate", "shard", "tensor")
    rows_shape, rows_names = (size // sequence // tensor, sequence, tensor), ("data", "sequence", "neighbour")
    out = {}
    for mesh in (
        init_device_mesh("cpu", shape, mesh_dim_names=names),
        init_device_mesh("cpu", rows_shape, mesh_dim_names=rows_names),
    ):
        for name in mesh.mesh_dim_names or ():
            out[name] = dist.get_process_group_ranks(mesh.get_group(name))
    return out


def placed(shard: int, sequence: int, tensor: int = 1) -> Layout:
    return layout("cpu", Placement(shard=shard, sequence=sequence, tensor=tensor))


def made(port: int) -> list[str]:
    """What is wrong with the groups of each layout."""
    meet_again(port, NEVER)
    wrong, expected = [], []
    for sizes in SIZES:
        here = groups_of(placed(*sizes))
        expected.append((sizes, {name: dist.get_process_group_ranks(group) for name, group in here.items()}))
    for group in dist.distributed_c10d._world.pg_map:
        limit = group._get_backend(torch.device("cpu")).options._timeout
        if limit != timedelta(seconds=NEVER):
            wrong.append(f"{group.group_desc}: {limit}")
    for sizes, here in expected:
        theirs = as_torch_does(*sizes)
        wrong += [f"{sizes}: {name} {r}, not {theirs[name]}" for name, r in here.items() if r != theirs[name]]
    return wrong


def test_groups_have_the_ranks_of_torchs_meshes_and_the_limit() -> None:
    assert ranks.run(made, 8, ranks.free_port()) == [[]] * 8


def alone(port: int, flag: str) -> dict[str, tuple[float, str]]:
    """Rank 0 enters a collective of each of its groups, which the others never do: seconds, message."""
    meet_again(port, LIMIT)
    found = groups_of(placed(2, 1, 2)) | groups_of(placed(2, 2))
    out: dict[str, tuple[float, str]] = {}
    for name, group in found.items() if dist.get_rank() == 0 else ():
        started = time.monotonic()
        try:
            with process_group.waiting(f"a test of {name}"):
                dist.all_reduce(torch.zeros(1), group=group)
        except process_group.RanksApart as error:
            out[name] = time.monotonic() - started, str(error)
    end_together(flag)
    return out


def end_together(flag: str) -> None:
    """Ranks stay until rank 0 has made its experience: a connection that closes is another error."""
    if dist.get_rank() == 0:
        Path(flag).touch()
    while not Path(flag).exists():
        time.sleep(0.05)
    dist.destroy_process_group()


@pytest.mark.long
def test_a_sub_group_gives_up_in_time(tmp_path: Path) -> None:
    found = ranks.run(alone, 4, ranks.free_port(), str(tmp_path / "flag"))[0]
    assert found.keys() == {"replicate", "shard", "sequence", "tensor"}
    for name, (seconds, message) in found.items():
        assert LIMIT * 0.9 <= seconds < NEVER, name
        assert f"rank 0 of 4 waited 1.5 s (actor_rollout_ref.nccl_timeout) in a test of {name}" in message


def stuck(path: str, port: int, flag: str, where: str) -> tuple[float, str]:
    """Rank 1 never comes to a step, or only to its beginning."""
    from verl.engine.training.fsdp.engine import FSDPEngine

    meet_again(port, ENGINE_LIMIT)
    engine = FSDPEngine(path, role_cfg=role(ulysses_sequence_parallel_size=2), device="cpu")
    seconds, message = 0.0, ""
    started = time.monotonic()
    if dist.get_rank() == 0 or where == "passes":
        try:
            engine.step(rows(), loss(Path(flag)), temperature=1.0)
        except RuntimeError as error:
            seconds, message = time.monotonic() - started, f"{type(error).__name__}: {error}"
    end_together(flag)
    return seconds, message


def loss(flag: Path) -> Any:
    def work(batch: Any) -> Any:
        while dist.get_rank() == 1 and not flag.exists():  # between its forward and its backward pass
            time.sleep(0.05)
        return simple_loss(10)(batch)

    return work


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("start", "in a gather of what all ranks must agree on for other ranks"),
        ("passes", "in the passes of a step for other ranks"),
    ],
    ids=["start", "passes"],
)
def test_an_engine_says_what_it_waited_for(tmp_path: Path, where: str, words: str) -> None:
    path = str(tiny_model(tmp_path / "m"))
    (seconds, message), _ = ranks.run(stuck, 2, path, ranks.free_port(), str(tmp_path / "flag"), where)
    assert message.startswith("RanksApart: training rank 0 of 2 waited 3 s") and words in message
    assert seconds < NEVER


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^no memory$"), process_group.waiting("anything"):
        raise RuntimeError("no memory")


def alone_under_torchrun(flag: str) -> str:
    process_group.init_from_environment(detect("cpu"), LIMIT)
    message = ""
    if dist.get_rank() == 0:
        try:
            with process_group.waiting("a test"):
                dist.all_reduce(torch.zeros(1))
        except process_group.RanksApart as error:
            message = str(error)
    end_together(flag)
    return message


def test_ranks_of_torchrun_name_no_key_that_they_do_not_have(tmp_path: Path) -> None:
    message = ranks.run(alone_under_torchrun, 2, str(tmp_path / "flag"), join=False)[0]
    assert message.startswith("training rank 0 of 2 waited 1.5 s in a test for other ranks")
    assert "nccl_timeout" not in message and "raise the limit" not in message
