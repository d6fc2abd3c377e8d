"""Paths in the configuration that workers get: they may start in another folder than the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import tiny_model
from verl.config import Map, load
from verl.config.fields import for_elsewhere, leaves
from verl.config.schema.base import select

MODEL = "actor_rollout_ref.model"


def test_what_exists_here_is_absolute_whatever_key_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_model(tmp_path / "model", "qwen3")
    for name in ("t.parquet", "template.jinja"):
        (tmp_path / name).touch()
    words = [f"{MODEL}.path=./model", "data.train_files=[t.parquet,other.parquet]", "data.val_files=null"]
    words += [f"{MODEL}.custom_chat_template=template.jinja"]
    config = load(words)
    plain = for_elsewhere(config)
    absolute = str(tmp_path / "model")
    model = plain["actor_rollout_ref"]["model"]
    assert model["path"] == model["hf_config_path"] == model["tokenizer_path"] == absolute
    assert plain["data"]["tokenizer"] == absolute
    assert plain["actor_rollout_ref"]["ref"]["model"]["path"] is None
    assert model["custom_chat_template"] == str(tmp_path / "template.jinja")
    assert plain["data"]["train_files"] == [str(tmp_path / "t.parquet"), "other.parquet"]
    assert plain["data"]["val_files"] is None
    assert plain["global_profiler"]["save_path"] == str(tmp_path / "outputs/profile"), (
        "a folder that workers make"
    )
    # Nothing else is changed, and no relative path of something that is here is left.
    there, here = Map.of(plain), config.to_dict()
    for path, known in leaves(type(config)).items():
        if not known.is_path:
            assert select(there, path) == select(Map.of(here), path), path


def test_names_and_texts_that_are_no_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    template = "{{ messages }}" + "x" * 5000
    words = [
        f"{MODEL}.path=Qwen/Qwen3-0.6B",
        f"{MODEL}.custom_chat_template='{template}'",
        "data.train_files=t.parquet",
    ]
    model = for_elsewhere(load(words))["actor_rollout_ref"]["model"]
    assert model["path"] == model["hf_config_path"] == "Qwen/Qwen3-0.6B"
    assert model["custom_chat_template"] == template
