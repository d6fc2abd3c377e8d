"""Learning-rate schedules against their formulas, and the optimizer's construction."""

from __future__ import annotations

import math

import pytest
import torch

from verl.config.schema.training import OptimConfig
from verl.engine.training.fsdp.optimizer_state import load_state, save_state
from verl.engine.training.optimizer import Schedule, build_optimizer, optim_config
from verl.errors import UserError


def rates(total=10, **keys):
    settings = optim_config({"lr": 2.0} | keys)
    optimizer = build_optimizer([torch.nn.Parameter(torch.zeros(1))], settings)
    schedule = Schedule(optimizer, settings, total)
    return [schedule.advance() for _ in range(total + 2)]


def test_constant():
    assert rates() == [2.0] * 12


def test_warmup_from_zero_and_from_the_first_share():
    assert rates(lr_warmup_steps=4)[:6] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates(lr_warmup_steps=4, zero_indexed_step=False)[:6] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_steps_win_over_the_ratio():
    assert rates(lr_warmup_steps=0, lr_warmup_steps_ratio=0.5)[:2] == [2.0, 2.0]
    for steps in (-1, None):
        assert rates(lr_warmup_steps=steps, lr_warmup_steps_ratio=0.25)[:3] == [0.0, 1.0, 2.0]


def test_cosine_falls_to_the_floor_and_stays():
    got = rates(lr_scheduler_type="cosine", lr_warmup_steps=2, min_lr_ratio=0.1)
    for step in range(2, 10):
        x = (step - 2) / 8
        assert got[step] == pytest.approx(2 * (0.1 + 0.9 * (1 + math.cos(math.pi * x)) / 2))
    assert got[10] == got[11] == pytest.approx(0.2)


def test_cosine_with_more_waves():
    got = rates(lr_scheduler_type="cosine", num_cycles=1.0)
    assert got[5] == pytest.approx(0.0) and got[10] == pytest.approx(2.0)


def test_linear():
    got = rates(lr_scheduler_type="linear", min_lr_ratio=0.5)
    assert got == pytest.approx([2 * (0.5 + 0.5 * max(0, 1 - s / 10)) for s in range(12)])


def test_unknown_names_say_what_there_is():
    with pytest.raises(UserError, match="AdamWW"):
        build_optimizer([], OptimConfig(optimizer="AdamWW"))
    with pytest.raises(UserError, match="nesterow"):
        build_optimizer(
            [torch.nn.Parameter(torch.zeros(1))],
            OptimConfig(override_optimizer_config={"nesterow": True}),
        )


def test_another_optimizer_and_its_arguments():
    settings = OptimConfig(optimizer="SGD", override_optimizer_config={"momentum": 0.5})
    optimizer = build_optimizer([torch.nn.Parameter(torch.zeros(1))], settings)
    assert isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["momentum"] == 0.5


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu")])
def test_a_loaded_step_count_lies_where_the_optimizer_reads_it(tmp_path, fused, device):
    here = torch.nn.Parameter(torch.ones(3))
    saved = torch.optim.AdamW([here], fused=True)
    here.grad = torch.ones(3)
    saved.step()
    save_state(tmp_path / "optim", saved, {"w": here}, step=1)
    # "meta" stands for an accelerator
    there = torch.nn.Parameter(torch.ones(3, device="meta"))
    optimizer = torch.optim.AdamW([there])
    optimizer.param_groups[0]["fused"] = fused
    assert load_state(tmp_path / "optim", optimizer, {"w": there}) == 1
    assert optimizer.state[there]["step"].device.type == device
    assert optimizer.state[there]["exp_avg"].device.type == "meta"
