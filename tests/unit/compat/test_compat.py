"""Import paths that plug-ins of the public system use: served, refused with a reason, and at no cost."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

import verl
from tests.algorithms_rows import response
from verl.algorithms.registry import ESTIMATORS
from verl.compat.paths import OWN, PACKAGES, SERVED
from verl.trajectory import Batch


def test_importing_verl_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, verl; assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_registry_tables_under_the_public_path_are_those_that_the_trainer_reads(monkeypatch) -> None:
    from verl.trainer.ppo import core_algos

    import verl.compat.core_algos

    assert core_algos is verl.compat.core_algos
    assert core_algos.__name__ == core_algos.__spec__.name == "verl.compat.core_algos"
    monkeypatch.setitem(core_algos.ADV_ESTIMATOR_REGISTRY, "gae", lambda x: 2 * x)
    assert core_algos.get_adv_estimator_fn("gae")(5) == ESTIMATORS.get("gae")(5) == 10
    core_algos.register_adv_est("new")(abs)
    assert core_algos.ADV_ESTIMATOR_REGISTRY.pop("new") is abs


@pytest.mark.parametrize("path", sorted(SERVED))
def test_every_served_path_imports_and_every_name_resolves(path: str) -> None:
    entry = SERVED[path]
    if isinstance(entry, str):
        assert importlib.import_module(path) is importlib.import_module(entry)
        return
    module = importlib.import_module(path)
    for name, target in entry.items():
        assert name in dir(module)
        where, attribute = target.split(":")
        assert getattr(module, name) is getattr(importlib.import_module(where), attribute)


def import_from(module: str, name: str | None) -> None:
    """`import module`, or `from module import name`."""
    found = __import__(module, fromlist=[name] if name else [])
    if name:
        getattr(found, name)


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        ("verl.tools.search_tool", "SearchTool", "verl.rollout.tools"),
        ("verl.interactions.gsm8k_interaction", None, "verl.rollout.tools.interactions"),
        ("verl.single_controller.ray", None, "verl.workers"),
        ("verl.trainer.ppo.ray_trainer", "RayPPOTrainer", "verl.trainer.ppo_trainer"),
        ("verl.utils.seqlen_balancing", None, "verl.algorithms"),
        ("verl.utils.reward_score", "rlla", "verl.reward.default_compute_score"),
        ("verl.workers.reward_manager", "fast", "verl.workers.reward_manager.fast is not offered"),
        ("verl.utils.nothing", None, "verl.utils.nothing is not offered"),
    ],
)
def test_what_is_not_served_is_refused_with_advice(module: str, name: str | None, words: str) -> None:
    with pytest.raises(ImportError, match=words) as error:
        import_from(module, name)
    assert "plug-ins" in str(error.value)


def test_everything_else_is_left_to_python() -> None:
    for package in PACKAGES - OWN:
        spec = importlib.import_module(package).__spec__
        assert spec is not None and spec.origin is None, f"{package} exists: take it out of verl/compat/paths.py"
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'verl\.no_such_module'"):
        import_from("verl.no_such_module", None)
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'verl\.trainer\.no_such_module'"):
        import_from("verl.trainer.no_such_module", None)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(verl, "nothing")  # noqa: B009
    assert not hasattr(importlib.import_module("verl.utils"), "nothing")


# --------------------------------------------------------------------------------------------------- DataProto


@pytest.fixture
def batch() -> Batch:
    rows = [
        response("a", [1, 1, 0], 1.0, 0, advantages=[1, 1, 0], score_parts={"acc": True}),
        response("a", [1], 0.5, 1, advantages=[-1]),
        response("b", [], 0.0, 0, advantages=[]),
    ]
    rows[1].prompt.ids = rows[1].segments[0].context_ids = np.array([7])
    rows[0].prompt.ground_truth = "72"
    rows[0].fields, rows[0].extra = (
        {"tool_metrics": [{"hits": 1}]},
        {"reward_scores": {"tool_rewards": [2.0]}},
    )
    return Batch(rows, {"temperature": 0.5})


def test_data_proto_is_a_padded_view(batch: Batch) -> None:
    from verl.protocol import DataProto

    view = DataProto.from_trajectories(batch)
    assert verl.DataProto is DataProto
    assert len(view) == 3
    assert view.meta_info["temperature"] == 0.5
    assert view.batch["prompts"].tolist() == [[0, 1, 2], [0, 0, 7], [0, 1, 2]]
    assert view.batch["responses"].tolist() == [[0, 1, 2], [0, 0, 0], [0, 0, 0]]
    assert view.batch["attention_mask"].tolist() == [[1] * 6, [0, 0, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]]
    assert view.batch["position_ids"][1].tolist()[:4] == [0, 0, 0, 1]
    assert view.batch["response_mask"].tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 0]]
    assert view.batch["token_level_scores"].tolist() == [[0, 1, 0], [0.5, 0, 0], [0, 0, 0]]
    assert view.batch["advantages"].dtype == torch.float32
    assert "values" not in view.batch
    assert view.non_tensor_batch["reward_model"][0]["ground_truth"] == "72"
    assert list(view.non_tensor_batch["uid"]) == ["a", "a", "b"]
    assert list(view.non_tensor_batch["acc"]) == [True, None, None]
    assert list(view.non_tensor_batch["tool_metrics"]) == [[{"hits": 1}], None, None]
    for name in ("reward_scores", "rollout_reward_scores"):
        assert list(view.non_tensor_batch[name]) == [{"tool_rewards": [2.0]}, {}, {}]


def test_a_view_of_empty_responses_has_a_column() -> None:
    view = verl.DataProto.from_trajectories(Batch([response("a", [], 0.5, 0)]))
    lengths = view.batch["attention_mask"][:, view.batch["prompts"].shape[-1] :].sum(-1)
    rewards = torch.zeros_like(view.batch["responses"], dtype=torch.float32)
    rewards[0, lengths[0] - 1] = 0.5
    assert rewards.sum(-1).tolist() == [0.5] and lengths.tolist() == [0]


def test_data_proto_indexing(batch: Batch) -> None:
    view = verl.DataProto.from_trajectories(batch)
    item = view[-1]
    assert item.batch["responses"].shape == (3,)
    assert item.non_tensor_batch["uid"] == "b"
    assert [len(view[rows]) for rows in (slice(1, None), [0, 2], np.array([True, False, False]))] == [2, 2, 1]
    assert list(view[torch.tensor([2, 0])].non_tensor_batch["uid"]) == ["b", "a"]
    assert [item.non_tensor_batch["uid"] for item in view] == ["a", "a", "b"]
    with pytest.raises(IndexError, match="row 3 of a DataProto with 3 rows"):
        view[3]


def test_data_proto_is_written_to_as_plug_ins_do() -> None:
    from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto

    data = DataProto.from_single_dict(
        {"x": torch.arange(4.0)[:, None], "uid": np.array(list("aabb"), object)}, {"step": 1}
    )
    data.batch["y"], data.non_tensor_batch["n"], data.meta_info["k"] = data.batch["x"] * 2, np.arange(4), 3
    part = data.select(["y"], ["uid"], ["step"])
    assert part.batch.keys() == {"y"} and part.meta_info == {"step": 1} and part.batch.batch_size[0] == 4
    assert part.union(DataProto.from_dict({"z": torch.zeros(4)})) is part and "z" in part.batch
    gaps = DataProto.from_dict({"w": torch.tensor([1.0, math.nan, 2.0, 3.0])}, {"v": np.array([math.nan, 1, 2, 3])})
    part.union(gaps).union(gaps)
    with pytest.raises(ValueError, match="'y' has different values"):
        part.union(DataProto.from_dict({"y": torch.zeros(4, 1)}))
    assert data.pop(["y"], ["n"], ["k"]).batch["y"][3] == 6 and list(data.batch) == ["x"] and "k" not in data.meta_info
    assert list(data.repeat(2).non_tensor_batch["uid"]) == list("aaaabbbb")
    assert data.repeat(2, interleave=False).batch["x"].flatten().tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    halves = data.chunk(2)
    assert [len(half) for half in halves] == [2, 2] and len(data.split(3)[1]) == 1
    assert torch.equal(DataProto.concat(halves[::-1]).batch["x"].flatten(), torch.tensor([2.0, 3, 0, 1]))
    with pytest.raises(ValueError, match="cannot be divided"):
        data.chunk(3)
    data.rename("x", "w").reorder(torch.tensor([3, 2, 1, 0]))
    assert data.batch["w"][0] == 3 and data.non_tensor_batch["uid"][0] == "b"
    padded, added = pad_dataproto_to_divisor(data, 3)
    assert (len(padded), added, len(unpad_dataproto(padded, added))) == (6, 2, 4)
    with pytest.raises(ValueError, match="different lengths"):
        verl.DataProto.from_dict({"x": torch.zeros(2)}, {"uid": ["a"]})
    assert len(verl.DataProto()) == 0
