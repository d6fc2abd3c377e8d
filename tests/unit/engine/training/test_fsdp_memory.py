"""What a rank holds at most while a sharded model is built and while its weights are gathered.

Counted from the operations that make tensors, not measured from the process: the numbers are the same every time.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import ranks
from tests.tiny import tiny_model
from tests.unit.engine.training.fsdp_cases import role
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.engine.training.weight_files import FileSource, RankZeroSource, WeightSource
from verl.platform import detect

SHAPE = {"num_hidden_layers": 12, "hidden_size": 64, "intermediate_size": 256}


class Held(TorchDispatchMode):
    """Bytes of the storages that this thread's operations made in the block and that still exist."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, StorageWeakRef] = {}
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        self.most = max(self.most, self.now())
        return out

    def add(self, tensor: torch.Tensor) -> None:
        """Count this one too, whoever made it."""
        if isinstance(tensor, DTensor) or tensor.is_meta:
            return
        reference = StorageWeakRef(tensor.untyped_storage())
        self._known[reference.cdata] = reference

    def now(self) -> int:
        """Bytes at this moment. FSDP empties a storage that it will fill again."""
        total = 0
        for key, reference in list(self._known.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._known[key]
            else:
                total += storage.nbytes()
        return total


class Counted(WeightSource):
    """A source whose tensors are held."""

    def __init__(self, source: WeightSource, held: Held):
        self._source, self._held = source, held
        for tensor in getattr(source, "_loaded", {}).values():
            held.add(tensor)

    def read(self, name: str, like: torch.Tensor) -> torch.Tensor:
        tensor = self._source.read(name, like)
        self._held.add(tensor)
        return tensor


def building(path: str, fsdp: dict[str, Any], model_cfg: dict[str, Any]) -> dict[str, Any]:
    """Bytes: at most while the engine was built, at the end; and where the weights came from."""
    from verl.engine.training.fsdp import model

    detect("cpu").prepare()  # looks at the processor once, with matrices of its own
    held, used = Held(), []

    def watched(*args: Any) -> WeightSource:
        source = opened(*args)
        used.append(type(source).__name__)
        return Counted(source, held)

    opened, model.open_source = model.open_source, watched
    with held:
        options = {"role_cfg": role(fsdp=fsdp), "model_cfg": model_cfg}
        engine = FSDPEngine(path, device="cpu", **options)
        end = held.now()
    del engine
    return {"most": held.most, "end": end, "source": used}


def sizes(path: str) -> tuple[int, int, int]:
    """Bytes of the whole model, of its largest unit, of its largest tensor."""
    module = FSDPEngine(path, role_cfg=role(), device="cpu", trainable=False).module
    whole = sum(p.numel() * 4 for p in module.parameters())
    layer = sum(p.numel() * 4 for p in module.model.layers[0].parameters())
    rest = whole - SHAPE["num_hidden_layers"] * layer
    return whole, max(layer, rest), max(p.numel() * 4 for p in module.parameters())


PLAIN = {"use_fused_kernels": False}
"""Without the probe that compares the head with the model, which is a forward pass."""


def made_like(tmp_path: Path, arch: str) -> str:
    more = {"moe_intermediate_size": 64} if arch == "qwen3_moe" else {}
    return str(tiny_model(tmp_path / arch, arch, **SHAPE, **more))


@pytest.mark.parametrize("arch", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def test_building_holds_a_share_and_a_unit_or_two(tmp_path: Path, arch: str) -> None:
    path = made_like(tmp_path, arch)
    whole, unit, _ = sizes(path)
    assert 10 * unit < whole, "or the bounds say nothing"
    for found in ranks.run(building, 2, path, {}, PLAIN):
        assert found["source"] == [FileSource.__name__]
        assert abs(found["end"] - whole / 2) < 0.01 * whole
        assert found["most"] <= whole / 2 + 2 * unit
    for found in ranks.run(building, 2, path, {}, {}):
        assert found["most"] <= whole / 2 + 4 * unit, "the probe has the root and up to two units, twice"
    for found in ranks.run(building, 2, path, {"fsdp_size": 1}, PLAIN):
        assert found["most"] <= whole + 2 * unit


def test_a_model_that_rank_0_must_load_is_there_once_beside_its_share(tmp_path: Path) -> None:
    path = made_like(tmp_path, "qwen3")
    whole, unit, _ = sizes(path)
    as_pickle(Path(path))
    first, second = ranks.run(building, 2, path, {}, PLAIN)
    assert first["source"] == second["source"] == [RankZeroSource.__name__]
    assert 1.4 * whole < first["most"] <= 1.5 * whole + 2 * unit and second["most"] <= whole / 2 + 2 * unit
    assert first["end"] < 0.51 * whole, "what was loaded is given back"


def as_pickle(path: Path) -> None:
    from safetensors.torch import load_file

    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


BUCKET = 200_000


def gathering(path: str, channel: str) -> dict[str, Any]:
    """Most bytes beside the shards: while nobody takes the tensors, and while a slow reader does (rank 0)."""
    from verl.engine.training.fsdp.engine import FSDPEngine
    from verl.weight_sync.channel import BucketSender, receive

    engine = FSDPEngine(path, role_cfg=role(), device="cpu")
    out: dict[str, Any] = {"alive": 0}
    seen, count = Held(), 0
    with Held() as held:
        for _, tensor in engine.named_weights():
            seen.add(tensor)
            count += 1
            out["alive"] = max(out["alive"], seen.now())
    out |= {"most": held.most, "tensors": count}
    if dist.get_rank() == 0:
        slow = threading.Thread(target=lambda: [time.sleep(0.005) for _ in receive(channel, 0)])
        slow.start()
    with Held() as held:
        if dist.get_rank() == 0:
            BucketSender(channel, 1, BUCKET).send(engine.named_weights(), 1)
            slow.join()
        else:
            for _ in engine.named_weights():
                continue
    return out | {"sending": held.most, "after": held.now()}


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_gathering_holds_a_tensor_or_two_and_sending_a_bucket_more(tmp_path: Path, arch: str) -> None:
    path = made_like(tmp_path, arch)
    whole, _, largest = sizes(path)
    for found in ranks.run(gathering, 2, path, f"memory-{arch}-{tmp_path.name[-20:]}-{time.time_ns()}"):
        assert found["tensors"] > 100 and found["alive"] <= 2 * largest
        assert found["most"] <= 4 * largest < whole / 5
        assert found["sending"] <= 4 * largest + BUCKET + largest
        assert found["after"] <= largest
