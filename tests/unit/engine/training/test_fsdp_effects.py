"""What each key of `fsdp_config` does, seen from the collectives, the parameters and the order of events.

That none of them changes a result is the business of tests/invariant/test_ranks_invariance.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests import ranks
from tests.tiny import tiny_model
from tests.unit.engine.training.engine_cases import simple_loss
from tests.unit.engine.training.fsdp_cases import role, rows, total
from verl.engine.training.fsdp import sharding
from verl.engine.training.fsdp.engine import FSDPEngine

LAYERS = 4
ROWS = 4
BF16 = torch.bfloat16
SENDS = {
    "gather": ("all_gather_single", "all_gather_into_tensor"),
    "scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "reduce": ("all_reduce",),
}
"""What the sharding calls, by torch's names, newest first."""


@dataclass
class Sent:
    """A collective: what it was, the type of the tensors that travelled, elements of the whole."""

    what: str
    dtype: torch.dtype
    elements: int


@contextmanager
def traffic(events: list[Any]) -> Iterator[None]:
    """Add a `Sent` for each collective of the block."""
    kept = {}
    for what, names in SENDS.items():
        name = next(name for name in names if hasattr(dist, name))
        kept[name] = getattr(dist, name)

        def call(*args: Any, what: str = what, own: Any = kept[name], **options: Any) -> Any:
            given = [a for a in (*args, *options.values()) if isinstance(a, torch.Tensor)]
            events.append(Sent(what, given[0].dtype, max(t.numel() for t in given)))
            return own(*args, **options)

        setattr(dist, name, call)
    try:
        yield
    finally:
        for name, own in kept.items():
            setattr(dist, name, own)


def build(path: str, fsdp: dict[str, Any], **more: Any) -> Any:
    from verl.engine.training.fsdp.engine import FSDPEngine

    changes = {"ppo_micro_batch_size_per_gpu": ROWS, **more}
    model_cfg = {"enable_gradient_checkpointing": False}
    return FSDPEngine(path, role_cfg=role(fsdp=fsdp, **changes), model_cfg=model_cfg, device="cpu")


def whole_now(one: Any) -> list[str]:
    """Parts of the model whose weights are whole at this moment: layer numbers, and "rest"."""
    found = {
        name.split(".")[2] if ".layers." in name else "rest"
        for name, parameter in one.module.named_parameters()
        if not isinstance(parameter, DTensor)
    }
    return sorted(found)


def step(one: Any) -> dict[str, Any]:
    """A step: which weights are whole between the passes, bytes of a layer's weight then, what travelled."""
    seen: dict[str, Any] = {}
    sent: list[Sent] = []
    weights: list[torch.UntypedStorage] = []

    def loss(batch: Any) -> Any:
        seen["whole"] = whole_now(one)
        seen["bytes"] = weights[0].nbytes()
        return simple_loss(total())(batch)

    first = one._layers[0].mlp
    hook = first.register_forward_pre_hook(lambda module, _: weights.append(module.up_proj.weight.untyped_storage()))
    with traffic(sent):
        seen["norm"] = one.step(rows()[:ROWS], loss, temperature=1.0).grad_norm
    hook.remove()
    return seen | {what: [s for s in sent if s.what == what] for what in SENDS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("m") / "m", scale=4.0, num_hidden_layers=LAYERS))


# -- when weights are whole ----------------------------------------------------------------------------------


def resharding(path: str) -> dict[bool, dict[str, Any]]:
    sharding._WHOLE_SHARE = 0.0  # as of a model that is large beside the memory
    return {freed: step(build(path, {"reshard_after_forward": freed})) for freed in (True, False)}


def test_reshard_after_forward_decides_whether_layers_stay_whole(model: str) -> None:
    layers = [str(number) for number in range(LAYERS)]
    for found in ranks.run(resharding, 2, model):
        freed, kept = found[True], found[False]
        assert freed["whole"] == ["rest"] and freed["bytes"] == 0
        assert kept["whole"] == [*layers, "rest"] and kept["bytes"] > 0
        # Once for the root; layers once, or once more for the backward pass.
        assert len(freed["gather"]) == 1 + 2 * LAYERS and len(kept["gather"]) == 1 + LAYERS
        assert len(freed["scatter"]) == len(kept["scatter"]) == 1 + LAYERS
        assert freed["norm"] == kept["norm"]


def order(path: str) -> dict[str, tuple[str, bytes]]:
    """Gathers (g) and layers (their number) of a forward pass in their order, and what it computed."""
    out = {}
    for name, fsdp in {
        "plain": {},
        "prefetch": {"forward_prefetch": True},
        "pairs": {"forward_prefetch": True, "wrap_policy": {"min_num_params": 2 * 10**4}},
    }.items():
        one, events = build(path, fsdp), []
        for number, layer in enumerate(one._layers):
            # Inside the layer: on the layer itself FSDP's hook, which gathers, may come after this one.
            layer.mlp.register_forward_pre_hook(lambda *_, number=number, log=events: log.append(number))
        one.forward(rows()[:ROWS], temperature=1.0)
        events.clear()
        with traffic(events):
            values = one.forward(rows()[:ROWS], temperature=1.0)["log_probs"]
        out[name] = "".join("g" if isinstance(e, Sent) else str(e) for e in events), values.tobytes()
    return out


def test_forward_prefetch_gathers_the_next_unit_before_this_one_computes(model: str) -> None:
    for found in ranks.run(order, 2, model):
        assert found["plain"][0] == "gg0g1g2g3"
        assert found["prefetch"][0] == "ggg0g1g23", "the last unit has no next one"
        assert found["pairs"][0] == "ggg0123"
        assert len({values for _, values in found.values()}) == 1


# -- what travels --------------------------------------------------------------------------------------------


PRECISIONS: dict[str, tuple[dict[str, Any], torch.dtype, torch.dtype]] = {
    "float32": ({"dtype": "float32"}, torch.float32, torch.float32),
    "bfloat16": ({"dtype": "bfloat16"}, BF16, torch.float32),
    "by its own key": ({"mixed_precision": {"param_dtype": "bf16"}}, BF16, torch.float32),
    "reduced too": ({"dtype": "bfloat16", "mixed_precision": {"reduce_dtype": "bf16"}}, BF16, BF16),
    "reduced alone": ({"mixed_precision": {"reduce_dtype": "bf16"}}, torch.float32, BF16),
}


def precisions(path: str) -> dict[str, dict[str, Any]]:
    out = {}
    for name, (fsdp, *_) in PRECISIONS.items():
        one = build(path, fsdp)
        out[name] = step(one) | {"gradients": {p.grad.dtype for p in one.module.parameters()}}
    hybrid = build(path, {"fsdp_size": 1, "mixed_precision": {"reduce_dtype": "bf16"}})
    return out | {"hybrid": step(hybrid)}


def test_weights_and_gradients_travel_in_the_types_asked_for(model: str) -> None:
    for found in ranks.run(precisions, 2, model):
        for name, (_, gathered, reduced) in PRECISIONS.items():
            assert {s.dtype for s in found[name]["gather"]} == {gathered}, name
            assert {s.dtype for s in found[name]["scatter"]} == {reduced}, name
            assert found[name]["gradients"] == {torch.float32}
        exact = found["float32"]["norm"]
        assert 0 < abs(found["reduced alone"]["norm"] - exact) < 0.01 * exact
        assert {s.dtype for s in found["hybrid"]["reduce"]} == {BF16} and not found["hybrid"]["scatter"]


def buffers(path: str) -> dict[str, tuple[set[torch.dtype], np.ndarray]]:
    out = {}
    for name, fsdp in {"as they are": {}, "bf16": {"mixed_precision": {"buffer_dtype": "bf16"}}}.items():
        one = build(path, fsdp)
        values = one.forward(rows(), temperature=1.0)["log_probs"]
        out[name] = {b.dtype for b in one.module.buffers()}, values
    return out


def test_buffers_take_the_type_asked_for_and_compute_in_it(model: str) -> None:
    local = FSDPEngine(model, role_cfg=role(), device="cpu", trainable=False)
    exact = local.forward(rows(), temperature=1.0)["log_probs"]
    for buffer in local.module.buffers():
        buffer.data = buffer.data.to(BF16)
    rounded = local.forward(rows(), temperature=1.0)["log_probs"]
    assert np.abs(rounded - exact).max() > 3e-4
    for found in ranks.run(buffers, 2, model):
        assert found["as they are"][0] == {torch.float32} and found["bf16"][0] == {BF16}
        np.testing.assert_allclose(found["as they are"][1], exact, atol=1e-5)
        np.testing.assert_allclose(found["bf16"][1], rounded, atol=1e-5)


# -- units and places ----------------------------------------------------------------------------------------


def units(path: str, least: list[int]) -> list[list[int]]:
    """For each setting the elements of each gather of a pass."""
    out = []
    for size in least:
        one, events = build(path, {"wrap_policy": {"min_num_params": size}}), []
        with traffic(events):
            one.forward(rows()[:ROWS], temperature=1.0)
        out.append([e.elements for e in events])
    return out


def test_units_are_merged_until_they_have_min_num_params(model: str) -> None:
    module = FSDPEngine(model, role_cfg=role(), device="cpu", trainable=False).module
    layer = sum(p.numel() for p in module.model.layers[0].parameters())
    rest = sum(p.numel() for p in module.parameters()) - LAYERS * layer
    expected = {
        0: [rest, *[layer] * 4],
        layer: [rest, *[layer] * 4],
        layer + 1: [rest, 2 * layer, 2 * layer],
        2 * layer + 1: [rest, 3 * layer, layer],
        10**9: [rest, 4 * layer],
    }
    for found in ranks.run(units, 2, model, list(expected)):
        assert found == list(expected.values())


def offloading(path: str) -> dict[bool, tuple[set[str], set[str], int]]:
    """The policies in force, where shards lie, and how many units there are."""
    out = {}
    for on in (False, True):
        one = build(path, {"offload_policy": on})
        parts = [part for part in one._model.head.modules() if isinstance(part, FSDPModule)]
        groups = [part._get_fsdp_state()._fsdp_param_group for part in parts]
        step(one)
        places = {p.to_local().device.type for p in one.module.parameters()}
        places |= {p.grad.to_local().device.type for p in one.module.parameters()}
        policies = {type(group.offload_policy).__name__ for group in groups}
        assert {p.offload_to_cpu for g in groups for p in g.fsdp_params} == {on}
        out[on] = policies, places, len(parts)
    return out


def test_offload_policy_is_in_force_in_every_unit(model: str) -> None:
    for found in ranks.run(offloading, 2, model):
        assert found[False] == ({OffloadPolicy.__name__}, {"cpu"}, LAYERS + 1)
        assert found[True] == ({CPUOffloadPolicy.__name__}, {"cpu"}, LAYERS + 1)


def hybrid(path: str, size: int, whole: bool = True) -> dict[str, Any]:
    if not whole:
        sharding._WHOLE_SHARE = 0.0
    one = build(path, {"fsdp_size": size}, ppo_micro_batch_size_per_gpu=1)
    found = step(one)
    parameter = one.module.model.layers[0].mlp.up_proj.weight
    return {
        "placements": {tuple(p.placements) for p in one.module.parameters()},
        "mesh": parameter.device_mesh.mesh.tolist(),
        "share": parameter.to_local().shape[0] / parameter.shape[0],
        "first": float(parameter.to_local()[0, 0].detach()),
        "count": {what: len(found[what]) for what in SENDS},
        "elements": sum(s.elements for s in found["reduce"]),
        "total": sum(p.numel() for p in one.module.parameters()),
    }


def test_fsdp_size_makes_replicas_of_shards(model: str) -> None:
    found = ranks.run(hybrid, 4, model, 2, False)
    for one in found:
        assert one["placements"] == {(Replicate(), Shard(0))} and one["share"] == 0.5
        assert one["mesh"] == [[0, 1], [2, 3]]
        # Shards are added within a copy for each micro-batch, and over copies once, at the end.
        assert one["count"]["scatter"] == ROWS * (LAYERS + 1) and one["count"]["reduce"] == LAYERS + 1
        assert one["elements"] == one["total"] / 2
    firsts = [one["first"] for one in found]
    assert firsts[0] == firsts[2] != firsts[1] == firsts[3]


@pytest.mark.parametrize("size", [2, 4])
def test_a_small_model_gathers_and_reduces_once_a_step(model: str, size: int) -> None:
    for one in ranks.run(hybrid, 4, model, size):
        assert one["count"]["gather"] == one["count"]["scatter"] == LAYERS + 1
        assert one["count"]["reduce"] == (LAYERS + 1 if size == 2 else 0)


def test_fsdp_size_of_one_keeps_everything_and_of_all_cuts_everything(model: str) -> None:
    for one in ranks.run(hybrid, 2, model, 1):
        assert one["placements"] == {(Replicate(), Shard(0))} and one["share"] == 1
        assert one["mesh"] == [[0], [1]] and one["elements"] == one["total"]
    for one in ranks.run(hybrid, 2, model, 2):
        assert one["placements"] == {(Shard(0),)} and one["share"] == 0.5
        assert one["count"]["reduce"] == 0
