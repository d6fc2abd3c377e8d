"""MindSpeed beside the Megatron engine, with a package that stands in for it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from verl.engine import registry
from verl.engine.training import megatron
from verl.engine.training.megatron import mindspeed

ADAPTOR = """
import sys
words = list(sys.argv)
options = []
def repatch(given):
    options.append(given)
"""


def test_it_is_imported_before_the_engine_and_gets_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mindspeed").mkdir()
    (tmp_path / "mindspeed/__init__.py").touch()
    (tmp_path / "mindspeed/megatron_adaptor.py").write_text(ADAPTOR)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program", "--of=ours"])

    def builder(name: str) -> Any:
        return lambda path, **options: (path, sys.modules["mindspeed.megatron_adaptor"])

    monkeypatch.setattr(registry, "resolve_name", builder)
    group = {"context_parallel_size": 2, "override_transformer_config": {"num_layers_in_first_pipeline_stage": 3}}
    role = {"megatron": group | {"mindspeed": {"swap_optimizer": True}}}
    try:
        path, adaptor = megatron.ENGINE.build("model", role_cfg=role, placement=megatron.ENGINE.placement(role))
    finally:
        for name in ("mindspeed.megatron_adaptor", "mindspeed"):
            sys.modules.pop(name, None)
    assert path == "model" and adaptor.words == ["program"] and sys.argv == ["program", "--of=ours"]
    (options,) = adaptor.options
    assert options == {
        "use_flash_attn": True,
        "context_parallel_size": 2,
        "num_layers_in_first_pipeline_stage": 3,
        "swap_optimizer": True,
    }


def test_without_it_nothing_happens() -> None:
    assert not mindspeed.is_installed()
    mindspeed.adapt({"mindspeed": {"swap_optimizer": True}})
    assert "mindspeed" not in sys.modules


def test_modules_that_it_puts_in_place_of_transformer_engine_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    assert not megatron.has_transformer_engine()
