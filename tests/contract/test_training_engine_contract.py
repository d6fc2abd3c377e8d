"""What every training engine keeps, whatever lies below it: one suite, in one process and on two ranks, for each
engine.

A test's work is a function of a model's path that runs on every rank and returns what must hold; `on` runs it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import ranks
from tests.contract import engines_of_a_user
from tests.megatron import cases as megatron
from tests.tiny import tiny_model
from tests.unit.engine.training.engine_cases import BOTH, assert_close, reference, rows_of, simple_loss
from tests.unit.engine.training.fsdp_cases import role
from verl.engine.registry import TRAINING_ENGINES
from verl.errors import UserError
from verl.trajectory import Trajectory

GROUPS = [(7, [5, 9, 1, 0, 3]), (4, [6, 2])]
TOTAL = 26
TRAINED = role(
    optim={"lr": 1e-2, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "lr_warmup_steps": 1},
    grad_clip=1.0,
)
AWAY = role(fsdp={"param_offload": True, "optimizer_offload": True}, optim={"lr": 1e-2})
Run = Callable[..., list[Any]]


STRATEGY = "fsdp"
NAMES = ["one process", "two ranks", "an engine of a user"]
NAMES += [pytest.param(f"megatron, {size}", marks=megatron.NEEDS_MEGATRON) for size in ("one rank", "two ranks")]


@pytest.fixture(params=NAMES)
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Run:
    """on(work, path, …) → the results of all ranks."""
    if request.param.startswith("megatron"):
        return lambda work, *args: ranks.run(with_megatron, 1 + ("two" in request.param), work, *args)
    if request.param == "two ranks":
        return lambda work, *args: ranks.run(work, 2, *args)
    if request.param == "an engine of a user":
        monkeypatch.setattr(sys.modules[__name__], "STRATEGY", engines_of_a_user.Trainer.name)
    return lambda work, *args: [work(*args)]


def with_megatron(work: Callable[..., Any], *args: Any) -> Any:
    """On a rank: `work` with the Megatron engine."""
    global STRATEGY
    STRATEGY = "megatron"
    megatron.prepare()
    return work(*args)


def engine(path: Any, role_cfg: dict[str, Any] = TRAINED, **options: Any) -> Any:
    record = TRAINING_ENGINES[STRATEGY]
    if STRATEGY == "megatron":
        role_cfg = role_cfg | {"megatron": role_cfg["fsdp_config"] | {"use_distributed_optimizer": False}}
    placed = record.placement(role_cfg)
    return record.build(path and str(path), role_cfg=role_cfg, placement=placed, device=ranks.DEVICE, **options)


def share(one: Any) -> list[Trajectory]:
    """This rank's rows, more on the first."""
    rows = rows_of(GROUPS)
    return rows if one.dp_size == 1 else (rows[:5], rows[5:])[one.dp_rank]


def learn(one: Any, loss: Any = None) -> Any:
    return one.step(share(one), loss or simple_loss(TOTAL), temperature=1.0)


def state(one: Any) -> dict[str, torch.Tensor]:
    """Copies of weights and optimizer, whole, by name."""
    from verl.engine.training.process_group import whole

    out = {name: tensor.cpu().clone() for name, tensor in one.named_weights()}
    if STRATEGY == "megatron":
        return out | megatron.optimizer_state(one)
    for name, parameter in one._names.items():
        for key, value in one._optimizer.state.get(parameter, {}).items():
            out[f"{name}/{key}"] = whole(torch.as_tensor(value)).cpu().clone()
    return out


def identical(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name].cpu(), b[name].cpu()) for name in a)


def told(work: Callable[[], Any]) -> str:
    """What the user is told, "" for nothing."""
    try:
        work()
    except UserError as error:
        return str(error)
    return ""


# -- outputs and steps --------------------------------------------------------------------------------------


def outputs(path: Path) -> Any:
    one = engine(path, trainable=False)
    everything = one.forward(share(one), (*BOTH, "sum_pi_squared"), temperature=0.7)
    none = one.forward(share(one) if one.dp_rank else rows_of([(4, [0, 0])]), BOTH, temperature=0.7)
    return one.holds_outputs, one.head, everything, none if not one.dp_rank else {}


def test_outputs_are_those_of_a_padded_pass(on: Run, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m", scale=4.0)
    found = on(outputs, path)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for column, expected in zip(BOTH, reference(plain, rows_of(GROUPS), 0.7), strict=True):
        ours = torch.from_numpy(np.concatenate([everything[column] for _, _, everything, _ in found]))
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-5, atol=2e-5)
        assert found[0][3][column].shape == (0,) and found[0][3][column].dtype == np.float32
    for holds, head, everything, none in found:
        assert holds and head == "lm" and set(none) <= set(BOTH)
        squares = everything["sum_pi_squared"]
        assert ((squares > 0) & (squares <= 1)).all() and squares.shape == everything["log_probs"].shape


def stepped(path: Path, clip: float) -> Any:
    from verl.engine.training.process_group import whole

    one = engine(path, role(grad_clip=clip))
    result = one.step(share(one), simple_loss(TOTAL, 0.1), BOTH, temperature=0.7)
    if STRATEGY == "megatron":
        return result, megatron.gradients(one)
    return result, {n: whole(p.grad).cpu().clone() for n, p in one._names.items()}


def test_a_step_has_the_gradient_of_the_loss_over_all_ranks(on: Run, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m", scale=4.0)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rows = rows_of(GROUPS)
    log_probs, entropy = reference(plain, rows, 0.7)
    advantages = torch.from_numpy(np.concatenate([r.advantages for r in rows]))
    value = -(advantages * (log_probs + log_probs**2 / 4)).sum() / TOTAL
    (value - 0.1 * entropy.sum() / TOTAL).backward()
    expected = {n: p.grad for n, p in plain.named_parameters()}
    for result, gradients in on(stepped, path, 0.0):
        assert_close(gradients, expected, 2e-5)
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        assert result.refused == "" and result.grad_norm == pytest.approx(norm, rel=1e-5)
        assert result.metrics["actor/grad_norm"] == result.grad_norm and result.tokens > 0
        # name → (sum, weight): the sum over the weight, the sum without one
        assert result.metrics["mean"] == pytest.approx(float(log_probs.detach().mean()), rel=1e-5)
        assert result.metrics["sum"] == pytest.approx(float(value - 0.1 * entropy.sum() / TOTAL), rel=1e-4)
    for result, clipped in on(stepped, path, 1e-3):
        assert_close(clipped, {n: g * (1e-3 / result.grad_norm) for n, g in gradients.items()}, 2e-3)


def spoiled(path: Path, how: str) -> Any:
    """A loss that goes wrong in the last micro-batch of the last rank."""
    one, good, seen = engine(path), simple_loss(TOTAL), []

    def bad(batch: Any) -> Any:
        value, metrics = good(batch)
        seen.append(len(batch.rows))
        if one.dp_rank == one.dp_size - 1 and sum(seen) == len(share(one)):
            value = value * float("nan") if how == "loss" else value + (batch.log_probs * 0).sqrt().sum()
        return value, metrics

    learn(one)
    before = state(one)
    refused = learn(one, bad)
    unmoved = identical(before, state(one))
    return refused, unmoved, learn(one).refused == "" and not identical(before, state(one))


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_what_is_not_finite_on_one_rank_moves_nothing_on_any(on: Run, tmp_path: Path, how: str) -> None:
    found = on(spoiled, tiny_model(tmp_path / "m"), how)
    for refused, unmoved, goes_on in found:
        assert how in refused.refused and refused.refused == found[0][0].refused
        assert unmoved and goes_on and math.isnan(refused.grad_norm)
        assert ("0:1@0" in refused.refused) == (how == "loss")


def nothing(path: Path) -> Any:
    one = engine(path)
    result = one.step(rows_of([(4, [0, 0])]), lambda b: (b.log_probs.sum(), {}), temperature=1.0)
    return result, one.forward([], temperature=1.0)["log_probs"].shape


def test_rows_without_a_response_change_nothing(on: Run, tmp_path: Path) -> None:
    for result, shape in on(nothing, tiny_model(tmp_path / "m")):
        assert result.refused == "" and result.grad_norm == 0.0 and result.tokens == 0 and shape == (0,)


def frozen(path: Path) -> Any:
    one = engine(path, trainable=False, role="ref")
    held = any(p.requires_grad or p.grad is not None for p in one.module.parameters())
    with pytest.raises(RuntimeError, match="trainable"):
        learn(one)
    with pytest.raises(RuntimeError, match="adapter"):
        one.without_adapter()
    return held, one.adapted, list(one.adapter_weights())


def test_a_reference_holds_weights_alone(on: Run, tmp_path: Path) -> None:
    assert all(found == (False, False, []) for found in on(frozen, tiny_model(tmp_path / "m")))


def moved(path: Path) -> Any:
    ends = []
    for role_cfg in (role(optim={"lr": 1e-2}), AWAY):
        one = engine(path, role_cfg)
        for _ in range(2):
            one.onload()
            before = one.forward(share(one), temperature=1.0)["log_probs"]
            one.offload()
            one.onload(optimizer=True)
            learn(one)
            one.offload()
        ends.append((before, state(one)))
    return np.array_equal(ends[0][0], ends[1][0]) and identical(ends[0][1], ends[1][1])


def test_moving_the_state_away_changes_no_number(on: Run, tmp_path: Path) -> None:
    assert all(on(moved, tiny_model(tmp_path / "m")))


# -- files --------------------------------------------------------------------------------------------------


def resumed(path: Path, folder: Path) -> Any:
    def go(one: Any, steps: int) -> list[float]:
        return [one.advance() for _ in range(steps) if not learn(one).refused]

    one, other = engine(path), engine(path)
    one.schedule(8)
    go(one, 3)
    one.save_weights(folder / "w")
    one.save_optimizer(folder / "o")
    rates = go(one, 3)
    other.schedule(8)
    storage = [p.data_ptr() for p in other.module.parameters()] if one.dp_size == 1 else None
    other.load_weights(folder / "w")
    other.load_optimizer(folder / "o")
    in_place = storage is None or storage == [p.data_ptr() for p in other.module.parameters()]
    return in_place, len(rates) == 3 and go(other, 3) == rates, identical(state(one), state(other))


@pytest.mark.parametrize(("arch", "tied"), [("qwen3", True), ("qwen3", False), ("qwen3_moe", False)])
def test_saved_and_loaded_goes_on_bit_for_bit(on: Run, tmp_path: Path, arch: str, tied: bool) -> None:
    found = on(resumed, tiny_model(tmp_path / "m", arch, tied=tied), tmp_path)
    assert found == [(True, True, True)] * len(found)


def saved(path: Path, folder: Path) -> Any:
    one = engine(path)
    learn(one)
    one.save_weights(folder)
    return {name: tensor.cpu().clone() for name, tensor in one.named_weights()}


def test_what_is_saved_is_a_hugging_face_directory(on: Run, tmp_path: Path) -> None:
    path, to = tiny_model(tmp_path / "m", "qwen3_moe", tied=True), tmp_path / "w"
    found = on(saved, path, to)
    files = list(to.glob("*.safetensors"))
    assert len(files) in (1, len(found)), "every rank writes its part, or they take turns"
    config = json.loads((to / "config.json").read_text())
    assert config["dtype"] == json.loads((path / "config.json").read_text()).get("dtype", "bfloat16")
    assert "verl" not in json.dumps(config) and (to / "generation_config.json").exists()
    loaded, report = AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    again = engine(None, module=loaded, trainable=False)
    assert any(".experts.0." in name for name in found[0])
    assert all(identical(dict(again.named_weights()), weights) for weights in found)
    assert all(tensor.dtype == torch.float32 for tensor in found[0].values())


def refusals(path: Path, folder: Path) -> list[str]:
    """What is said of a folder without state, of weights cut short, and of weights that are not finite."""
    from verl.engine.training.process_group import local

    one = engine(path)
    messages = [told(lambda: one.load_optimizer(folder)), told(lambda: one.load_weights(folder))]
    if one.dp_rank == one.dp_size - 1:
        head = one.module.output_layer if STRATEGY == "megatron" else one.module.get_output_embeddings()
        local(head.weight).data[0, 0] = float("inf")
    return [*messages, told(lambda: one.save_weights(folder / "out"))]


def test_files_that_cannot_be_used_are_named_on_every_rank(on: Run, tmp_path: Path) -> None:
    file = tiny_model(tmp_path / "other") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    for absent, damaged, blown_up in on(refusals, tiny_model(tmp_path / "m"), tmp_path / "other"):
        assert "no optimizer state" in absent and "model.safetensors" in damaged and "blew it up" in blown_up
    assert not (tmp_path / "other/out").exists()


def of_another_model(path: Path, smaller: Path, folder: Path) -> str:
    one = engine(path)
    learn(one)
    one.save_optimizer(folder)
    return told(lambda: engine(smaller).load_optimizer(folder))


def test_optimizer_state_of_another_model_is_refused(on: Run, tmp_path: Path) -> None:
    paths = tiny_model(tmp_path / "m"), tiny_model(tmp_path / "s", num_hidden_layers=1)
    assert all(
        "does not have" in message or "cannot read" in message
        for message in on(of_another_model, *paths, tmp_path / "o")
    )


# -- which engine -------------------------------------------------------------------------------------------


def test_strategies_and_heads_that_are_not_here_are_refused_by_name(tmp_path: Path) -> None:
    assert TRAINING_ENGINES["fsdp"] is TRAINING_ENGINES["fsdp2"]
    with pytest.raises(UserError, match=r"strategy=nothing.*fsdp, fsdp2"):
        TRAINING_ENGINES.named("nothing")
    path = tiny_model(tmp_path / "m")
    with pytest.raises(UserError, match="not a sequence classifier"):
        engine(path, head="score", trainable=False)
    with pytest.raises(KeyError):
        engine(path).forward(rows_of(GROUPS), {"values"}, temperature=1.0)
