"""Tests that run on the pretend device (`test_pretend.py` starts them): counts of training."""

from __future__ import annotations

from pathlib import Path

from tests.pretend.device import Counts, counting
from tests.tiny import tiny_model
from tests.unit.engine.training.engine_cases import rows_of, simple_loss
from verl.engine.training.fsdp.engine import FSDPEngine


def trained(folder: Path, layers: int) -> tuple[Counts, Counts, Counts]:
    """Counts of a forward pass, of an update with as many rows and of one with fewer, with layers of Qwen3-0.6B's
    shape."""
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128, "num_attention_heads": 16}
    path = str(tiny_model(folder / f"{layers}", "qwen3", num_hidden_layers=layers, num_key_value_heads=8, **shape))
    role = {"fsdp_config": {"dtype": "bfloat16"}, "optim": {"lr": 1e-6}, "ppo_max_token_len_per_gpu": 100000}
    engine = FSDPEngine(path, role_cfg=role, device="cuda")

    found = []
    for responses in (2, 6, 2):  # the first step makes the optimizer's state
        rows, loss = rows_of([(64, [50] * responses)]), simple_loss(50 * responses)
        with counting() as counts:
            engine.step(rows, loss, ("log_probs",), temperature=1.0)
        found.append(counts)
    with counting() as forward:
        engine.forward(rows_of([(64, [50] * 6)]), temperature=1.0)
    return forward, found[1], found[2]


def test_launches_and_bytes_of_training(tmp_path: Path) -> None:
    one, two = (trained(tmp_path, layers) for layers in (1, 2))
    for a, b, most, most_outside in ((one[0], two[0], 28, 45), (one[1], two[1], 69, 85)):
        layer = b.launches.total() - a.launches.total()
        outside = a.launches.total() - layer
        print(f"launches a layer {layer}, outside {outside}")
        assert layer <= most and outside <= most_outside
    many, few = (two[i].bytes - one[i].bytes for i in (1, 2))
    grown = (many - few) / (49 * 4)
    print(f"KB a token and layer {grown / 1000:.0f}")
    assert grown <= 489e3
