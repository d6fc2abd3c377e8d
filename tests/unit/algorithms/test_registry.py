"""Names under which estimators and losses are found, and what happens to names that are not there."""

from __future__ import annotations

import importlib.util
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from verl.algorithms.registry import ESTIMATORS, LOSSES
from verl.compat import core_algos, rollout_corr_helper


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registrations of a test go into copies."""
    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", dict(core_algos.ADV_ESTIMATOR_REGISTRY))
    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", dict(core_algos.POLICY_LOSS_REGISTRY))


def double(x: float) -> float:
    return 2 * x


@pytest.mark.parametrize(
    ("register", "get"),
    [
        (core_algos.register_adv_est, core_algos.get_adv_estimator_fn),
        (core_algos.register_policy_loss, core_algos.get_policy_loss_fn),
    ],
)
def test_registering_and_finding(tables: None, register: Any, get: Any) -> None:
    class Names(Enum):
        MINE = "mine"

    assert register("mine")(double) is double
    assert register(Names.MINE)(double) is double
    assert get("mine") is get(Names.MINE) is double
    with pytest.raises(ValueError, match=r"'mine' is already registered by .*double"):
        register("mine")(lambda x: x)
    with pytest.raises(ValueError, match="simply: Mine"):
        get("Mine")


def test_built_in_names() -> None:
    grpo = core_algos.get_adv_estimator_fn("grpo")
    assert grpo is core_algos.compute_grpo_outcome_advantage
    assert core_algos.get_adv_estimator_fn(core_algos.AdvantageEstimator.GRPO_VECTORIZED) is grpo
    assert core_algos.get_policy_loss_fn("vanilla") is core_algos.compute_policy_loss_vanilla


def test_ours_are_there_when_a_plug_in_emptied_the_table(tables: None) -> None:
    core_algos.ADV_ESTIMATOR_REGISTRY.clear()
    assert core_algos.get_adv_estimator_fn("grpo") is core_algos.compute_grpo_outcome_advantage
    core_algos.register_adv_est("grpo")(double)
    assert core_algos.get_adv_estimator_fn("grpo") is double


def test_unknown_names_list_what_is_there() -> None:
    with pytest.raises(ValueError, match=r"Unknown advantage estimator simply: gprpo\. There are: .*grpo, grpo_passk"):
        core_algos.get_adv_estimator_fn("gprpo")
    with pytest.raises(ValueError, match=r"Unknown policy loss simply: ppo\. There are: .*vanilla"):
        core_algos.get_policy_loss_fn("ppo")


def test_every_public_name_can_be_imported() -> None:
    losses = "vanilla gspo sapo gpg clip_cov kl_cov geo_mean cispo dppo_tv dppo_kl dro bypass_mode reinforce"
    estimators = "grpo grpo_vectorized grpo_passk gdpo reinforce_plus_plus reinforce_plus_plus_baseline"
    estimators += " rloo rloo_vectorized opo remax gpg"
    names = [f"compute_policy_loss_{n}" for n in losses.split()]
    names += [f"compute_{n}_outcome_advantage" for n in estimators.split()]
    names += [
        "compute_gae_advantage_return",
        "compute_optimal_token_baseline_advantage",
        "compute_value_loss",
    ]
    names += ["agg_loss", "kl_penalty", "AdaptiveKLController", "FixedKLController", "get_kl_controller"]
    assert all(callable(getattr(core_algos, name)) for name in names)
    for name in ("correction_and_rejection_mask", "correction_weights", "rejection_mask"):
        assert callable(getattr(rollout_corr_helper, f"compute_rollout_{name}"))
    for module in (core_algos, rollout_corr_helper):
        with pytest.raises(AttributeError, match="compute_nothing"):
            getattr(module, "compute_nothing")  # noqa: B009


def test_the_tables_of_the_docs_are_those_of_the_registries() -> None:
    """`python3 docs/write_algorithm_tables.py` writes them."""
    path = Path(__file__).parents[3] / "docs" / "write_algorithm_tables.py"
    spec = importlib.util.spec_from_file_location("write_algorithm_tables", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.page() == module.PAGE.read_text("utf-8")
    for registry in (ESTIMATORS, LOSSES):
        for name in registry.functions:
            if registry.functions[name].__module__.startswith("verl.algorithms."):
                assert f"`{name}`" in module.page()
