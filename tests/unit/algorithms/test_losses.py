"""Every policy loss against its slow reference, value and gradient; and in the trainer, for any split into
micro-batches and segments."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests import algorithm_references as slow
from tests.algorithms_rows import actor, run_objective
from verl.algorithms.entropy_losses import SURPRISAL_WEIGHTS, TO_ZERO
from verl.algorithms.flat_tokens import MODES
from verl.algorithms.registry import MiniBatchTokens
from verl.algorithms.source_losses import LossNumbers
from verl.compat import core_algos
from verl.compat.core_algos import agg_loss
from verl.config.schema.actor import LOSS_AGG_MODES
from verl.trajectory import Batch, Prompt, Segment, Trajectory
from verl.workers.update_plan import UpdatePlan

NAMES = sorted([*slow.LOSSES, "geo_mean"])
OF_THE_MINI_BATCH = ("clip_cov", "kl_cov", "real", "stare")
OF_THE_RESPONSE = ("gspo", "luspo", "geo_mean", "vespo", "fipo")
PUBLIC = [name for name in NAMES if name not in ("real", "stare")]
H = 9.0


def constants(**more: Any) -> SimpleNamespace:
    defaults = {
        "low": 0.2, "high": 0.3, "cap": 3.0, "tau_pos": 1.0, "tau_neg": 1.3, "beta": 0.7, "lb": 0.1, "ub": 1.5,
        "clip_ratio": 0.3, "kl_ratio": 0.3, "coef": 0.4, "zeroed": set(),
        "k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0,
        "decay_rate": 2.0, "clip_low": 0.1, "clip_high": 0.4, "safety": 1.5, "real_tau": 0.5, "beta1": 0.6, "beta2": 1.2,
        "share": 0.4, "amplified": 1.5, "attenuated": 0.6, "target": 1.5,
    }  # fmt: skip
    return SimpleNamespace(**(defaults | more))


def config_of(name: str, c: SimpleNamespace, mode: str = "token-mean", **more: Any) -> SimpleNamespace:
    cfg = actor(
        clip_ratio_low=c.low,
        clip_ratio_high=c.high,
        clip_ratio_c=c.cap,
        loss_agg_mode=mode,
        loss_mode=name,
        **more,
    )
    cfg.policy_loss = SimpleNamespace(
        loss_mode=name, clip_cov_ratio=c.clip_ratio, clip_cov_lb=c.lb, clip_cov_ub=c.ub, kl_cov_ratio=c.kl_ratio,
        ppo_kl_coef=c.coef, dro_beta=c.beta, tau_pos=c.tau_pos, tau_neg=c.tau_neg,
        vespo_k_pos=c.k_pos, vespo_lambda_pos=c.lambda_pos, vespo_k_neg=c.k_neg, vespo_lambda_neg=c.lambda_neg,
        fipo_decay_rate=c.decay_rate, fipo_clip_low=c.clip_low, fipo_clip_high=c.clip_high,
        fipo_safety_threshold=c.safety, real_tau=c.real_tau, gppo_beta1=c.beta1, gppo_beta2=c.beta2,
        stare_top_p_ratio=c.share, stare_reweight_w=c.amplified, stare_reweight_m=c.attenuated,
        stare_target_entropy=c.target,
    )  # fmt: skip
    return cfg


def random_responses(seed: int, weighted: bool = False) -> list[slow.Response]:
    """Log ratios small and large, advantages of 0, tokens out of the loss, a response without any."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(int(rng.integers(2, 6))):
        length = int(rng.integers(1, 7))
        new = -rng.exponential(1.5, length) - 0.01
        old = np.minimum(new + rng.normal(0, rng.choice([0.0, 0.2, 2.0]), length), -1e-3)
        a = np.where(rng.random(length) < 0.1, 0.0, rng.normal(size=length))
        m = (rng.random(length) < 0.8) & (i != 1)
        weights = rng.uniform(0.2, 2, length).tolist() if weighted else None
        entropy = (-new[::-1]).tolist()
        out.append(slow.Response(new.tolist(), old.tolist(), a.tolist(), m.astype(int).tolist(), weights, entropy))
    out[0].m[0] = 1
    return out


def padded(batch: list[slow.Response], of: Any, filling: float = 0.0) -> torch.Tensor:
    out = torch.full((len(batch), max(len(r.new) for r in batch)), filling, dtype=torch.float64)
    for tensor, r in zip(out, batch, strict=True):
        tensor[: len(r.new)] = torch.tensor(of(r), dtype=torch.float64)
    return out


def check(found: slow.Found, expected: slow.Found, rel: float = 1e-7) -> None:
    assert found[0] == pytest.approx(expected[0], rel=rel, abs=1e-9)
    for a, b in zip(found[1], expected[1], strict=True):
        assert a == pytest.approx(b, rel=rel, abs=1e-8)
    for name, value in expected[2].items():
        assert found[2][f"actor/{name}"] == pytest.approx(value, rel=1e-6, abs=1e-7), name


def public(name: str, batch: list[slow.Response], cfg: Any, mode: str) -> slow.Found:
    log_prob = padded(batch, lambda r: r.new).requires_grad_()
    loss, metrics = core_algos.get_policy_loss_fn(name)(
        padded(batch, lambda r: r.old),
        log_prob,
        padded(batch, lambda r: r.a),
        padded(batch, lambda r: r.m),
        mode,
        cfg,
        padded(batch, lambda r: r.w) if batch[0].w is not None else None,
    )
    loss.backward()
    slopes = [row[: len(r.new)].tolist() for row, r in zip(log_prob.grad, batch, strict=True)]
    return loss.item(), slopes, metrics


def with_zeroed(c: SimpleNamespace, batch: list[slow.Response], cfg: Any, mode: str) -> SimpleNamespace:
    """clip_cov draws: what it drew (rows whose gradient is 0 for no other reason) has to be candidates, of the right
    number."""

    def flat(of: Any) -> np.ndarray:
        return padded(batch, of).numpy().ravel()

    width = max(len(r.new) for r in batch)
    owner = np.repeat(np.arange(len(batch)), width)
    tokens = MiniBatchTokens(
        *map(flat, (lambda r: r.new, lambda r: r.old, lambda r: r.a)), flat(lambda r: r.m) > 0, owner
    )
    drawn = {(int(i) // width, int(i) % width) for i in np.flatnonzero(TO_ZERO.compute(tokens, cfg))}
    candidates = {(i, t) for i, r in enumerate(batch) for t in r.kept if slow.clip_cov_candidate(r, t, c, batch)}
    count = max(1, int(c.clip_ratio * sum(len(r.kept) for r in batch)))
    assert drawn <= candidates and len(drawn) == min(count, len(candidates))
    c.zeroed = drawn
    return c


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", PUBLIC)
def test_the_public_form_equals_the_loop(name: str, seed: int) -> None:
    c, mode = constants(), MODES[seed % len(MODES)]
    batch = random_responses(seed, weighted=seed % 3 == 1)
    cfg = config_of(name, c)
    cfg.global_batch_info = {"loss_scale_factor": H}
    if name == "clip_cov":
        with_zeroed(c, batch, cfg, mode)
    check(public(name, batch, cfg, mode), slow.loss(name, batch, c, mode, H))


@pytest.mark.parametrize("name", PUBLIC)
def test_nothing_in_the_loss_is_zero(name: str) -> None:
    batch = [slow.Response([-1.0, -2.0], [-1.5, -1.0], [1.0, -1.0], [0, 0]) for _ in range(2)]
    value, slopes, metrics = public(name, batch, config_of(name, constants()), "seq-mean-token-mean")
    assert value == 0 and not any(map(any, slopes)) and all(np.isfinite(list(metrics.values())))


def segments(batch: list[slow.Response], cut: bool) -> list[Trajectory]:
    out = []
    for i, r in enumerate(batch):
        length = len(r.new)
        ends = [0, *([length // 2] if cut and length > 1 else []), length]
        parts = []
        for start, end in itertools.pairwise(ends):
            columns = {"old_log_probs": r.old, "advantages": r.a, "is_weights": r.w, "entropy": r.h}
            given = {name: np.array(v[start:end], np.float64) for name, v in columns.items() if v is not None}
            given["loss_mask"] = np.array(r.m[start:end], bool)
            parts.append(Segment(np.arange(3 + start), np.arange(end - start), np.ones(end - start, bool), **given))
        out.append(
            Trajectory(Prompt(uid=f"g{i // 2}", ids=np.arange(3), messages=[]), i % 2, segments=parts, score=0.0)
        )
    return out


def trained(
    name: str, batch: list[slow.Response], cfg: Any, cut: bool, micro_batches: int, by_source: Any = None
) -> tuple[slow.Found, np.ndarray | None]:
    """Through the plan and the objective of the trainer, in several micro-batches of segments. With `by_source` every
    second group is of the data source code."""
    rows = segments(batch, cut)
    for i, row in enumerate(rows):
        row.prompt.data_source = ("maths", "code")[i // 2 % 2]
    if by_source is not None:
        LossNumbers(by_source)(Batch(rows), 1)
    now: dict[int, np.ndarray] = {}
    for row, r in zip(rows, batch, strict=True):
        start = 0
        for s in row.segments:
            now[id(s)] = np.array(r.new[start : start + s.length])
            start += s.length
    plan = UpdatePlan(cfg, max_response_length=H, batch_prompts=1, by_source=by_source)
    mini = plan._mini_batch(rows)
    passed = plan.needs_pass(mini)
    if by_source is None:
        assert passed == (name in OF_THE_MINI_BATCH or (cut and name in OF_THE_RESPONSE))
    if passed:
        mini = plan.corrected(mini, lambda found: np.concatenate([now[id(s)] for s in found]), step=3, number=1)
    usable = mini.usable
    flat = torch.from_numpy(np.concatenate([now[id(s)] for s in usable]))
    parts = [i % micro_batches for i in range(len(usable))]
    total, gradient, _, told = run_objective(cfg, usable, flat, flat, parts, H, by_source=by_source)
    slope_of = dict(zip(map(id, usable), torch.split(gradient, [s.length for s in usable]), strict=True))
    slopes = [torch.cat([slope_of.get(id(s), torch.zeros(s.length)) for s in row.segments]).tolist() for row in rows]
    column = [row.mini_batch_values for row in rows]
    drawn = None if any(v is None for v in column) else np.concatenate(column)
    return (total, slopes, told), drawn


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_trainer_computes_the_loop_for_any_batching_and_segments(name: str, cut: bool, micro_batches: int) -> None:
    for seed, mode in zip(range(20, 25), MODES, strict=True):
        c, batch = constants(), random_responses(seed, weighted=seed == 21)
        batch = [r for r in batch if r.kept]
        cfg = config_of(name, c, mode, data_loader_seed=1, ppo_mini_batch_size=8, ppo_epochs=1, shuffle=False)
        found, drawn = trained(name, batch, cfg, cut, micro_batches)
        if name == "clip_cov":
            ends = np.cumsum([0, *(len(r.new) for r in batch)])
            places = [
                (i, int(t - ends[i])) for t in np.flatnonzero(drawn) for i in [np.searchsorted(ends, t, "right") - 1]
            ]
            c.zeroed = set(places)
            assert all(slow.clip_cov_candidate(batch[i], t, c, batch) for i, t in places)
        check(found, slow.loss(name, batch, c, mode, H), rel=1e-6)


MIXED = [("vanilla", "gspo"), ("real", "cispo"), ("gspo", "kl_cov"), ("kl_cov", "real"), ("sapo", "stare")]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("names", MIXED)
def test_the_losses_of_data_sources_add_up(names: tuple[str, str], cut: bool, micro_batches: int) -> None:
    """The run's loss, and for every second group another one with bounds, constants and an aggregation of its own."""
    for seed, mode in zip(range(40, 45), MODES, strict=True):
        other = MODES[seed % 3]
        c, own = constants(), constants(low=0.05, high=0.1, coef=0.9, real_tau=0.3)
        batch = [r for s in range(seed, seed + 3) for r in random_responses(s) if r.kept]
        changes = {"loss_mode": names[1], "clip_ratio": 0.1, "clip_ratio_low": 0.05, "loss_agg_mode": other}
        changes |= {"ppo_kl_coef": 0.9, "real_tau": 0.3}
        by_source = {"maths": {"weight": 2.0}, "code": {"policy_loss": changes}}
        cfg = config_of(names[0], c, mode, data_loader_seed=1, ppo_mini_batch_size=99, ppo_epochs=1, shuffle=False)
        found, _ = trained(names[0], batch, cfg, cut, micro_batches, by_source)
        source_of = [i // 2 % 2 for i in range(len(batch))]
        losses = [(names[0], c, mode), (names[1], own, other)]
        check(found, (*slow.losses_of_sources(batch, source_of, losses, H), {}), rel=1e-6)
        tokens = [sum(len(r.kept) for r, s in zip(batch, source_of, strict=True) if s == one) for one in (0, 1)]
        moved = -sum(r.d(t) for r in batch for t in r.kept) / sum(tokens)
        if "kl_cov" not in names:
            assert found[2]["actor/ppo_kl"] == pytest.approx(moved, rel=1e-6)


def test_ce_gppo_far_from_the_old_policy() -> None:
    """Beyond the limit of log ratios gradients stay bounded and are not lost; without weights they are vanilla's."""
    batch = [*random_responses(50), slow.Response([-1.0, -25.0], [-25.0, -1.0], [1.0, -1.0], [1, 1])]
    c, none = constants(), constants(beta1=0.0, beta2=0.0)
    check(
        public("ce_gppo", batch, config_of("ce_gppo", c), "token-mean"), slow.loss("ce_gppo", batch, c, "token-mean", H)
    )
    gradients = [public(name, batch, config_of(name, none), "token-mean")[1] for name in ("ce_gppo", "vanilla")]
    for mine, other in zip(*gradients, strict=True):
        assert mine == pytest.approx(other, rel=1e-9, abs=1e-12)


def test_stare_weighs_tokens_below_the_target_alone() -> None:
    """Above it, and with weights of 1, the loss is vanilla's; without entropies it says what is missing."""
    for seed in range(60, 64):
        batch = [r for r in random_responses(seed) if r.kept]
        found = []
        for name, c in (
            ("stare", constants(target=9.0)),
            ("stare", constants(target=0.0)),
            ("stare", constants(target=9.0, amplified=1.0, attenuated=1.0)),
            ("vanilla", constants()),
        ):
            cfg = config_of(name, c, data_loader_seed=1, ppo_mini_batch_size=8, ppo_epochs=1)
            found.append(trained(name, batch, cfg, False, 1)[0][0])
        assert found[0] != pytest.approx(found[3]) and found[1:3] == pytest.approx([found[3]] * 2)
    one = np.ones(2)
    with pytest.raises(ValueError, match="stare needs the entropy"):
        SURPRISAL_WEIGHTS.compute(MiniBatchTokens(-one, -one, one, one > 0, np.arange(2)), cfg)


def test_luspo_is_the_mean_of_gspo_times_the_length() -> None:
    batch = [slow.Response([-1.0] * n, [-1.0 - move] * n, [a] * n, [1] * n) for n, move, a in
             ((3, 0.1, 1.0), (1, 0.5, 1.0), (5, 0.4, -2.0))]  # fmt: skip
    c = constants()
    found = public("luspo", batch, config_of("luspo", c), LOSS_AGG_MODES["luspo"])[0]
    expected = 0.0
    for r in batch:
        s = math.exp(r.d(0))
        expected -= min(s * r.a[0], slow.clip(s, 1 - c.low, 1 + c.high) * r.a[0]) * len(r.new) / len(batch)
    assert found == pytest.approx(expected)


def test_before_the_first_update_old_log_probs_are_the_current_ones() -> None:
    """No pass is run, even where a trajectory has several segments and old log-probs are not known yet."""
    batch = random_responses(3)
    for known in (True, False):
        rows = segments([r for r in batch if r.kept], cut=True)
        if not known:
            for row in rows:
                row.old_log_probs = None
        plan = UpdatePlan(
            config_of("gspo", constants(), ppo_mini_batch_size=8, ppo_epochs=1),
            max_response_length=H,
            batch_prompts=1,
        )

        def never(found: list[Segment]) -> np.ndarray:
            raise AssertionError("a pass")

        mini = plan.corrected(plan._mini_batch(rows), never, step=1, number=0)
        assert mini.metrics == {} and not any(s.mini_batch_values.any() for s in mini.usable)


def test_the_draw_of_clip_cov_follows_the_step() -> None:
    c = constants(lb=-100.0, ub=100.0)
    batch = random_responses(30) + random_responses(31)
    rows = segments([r for r in batch if r.kept], cut=False)
    cfg = config_of("clip_cov", c, data_loader_seed=1, ppo_mini_batch_size=8, ppo_epochs=1)
    plan = UpdatePlan(cfg, max_response_length=H, batch_prompts=1)
    drawn = []
    for step, number in ((1, 0), (1, 0), (1, 1), (2, 0)):
        plan.corrected(
            plan._mini_batch(rows),
            lambda found: np.concatenate([s.old_log_probs for s in found]),
            step,
            number,
        )
        drawn.append(np.concatenate([row.mini_batch_values for row in rows]).tolist())
    assert drawn[0] == drawn[1] and drawn[0] != drawn[2] and drawn[0] != drawn[3]


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("dro", {"dro_beta": None}, "dro_beta must be greater than 0"),
        ("dro", {"dro_beta": 0.0}, "dro_beta must be greater than 0"),
        ("sapo", {"tau_pos": 0.0}, "tau_pos and tau_neg must be greater than 0"),
        ("vanilla", {"clip_ratio_c": 1.0}, "clip_ratio_c"),
        ("ce_gppo", {"clip_ratio_c": 1.0}, "clip_ratio_c"),
        ("vanilla", {"clip_ratio_low": -0.1}, "negative"),
    ],
)
def test_constants_that_cannot_be(name: str, settings: dict[str, Any], said: str) -> None:
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=said):
        core_algos.get_policy_loss_fn(name)(one, one, one, one, config={"policy_loss": settings, **settings})


@pytest.mark.parametrize(("name", "cap"), [("dppo_tv", 20.0), ("vanilla", 3.0)])
def test_without_a_config_the_constants_are_the_defaults(name: str, cap: float) -> None:
    batch = random_responses(5)
    expected = slow.loss(name, batch, constants(low=0.2, high=0.2, cap=cap), "token-mean", H)
    check(public(name, batch, None, "token-mean"), expected)


# -- vanilla, by hand ----------------------------------------------------------------------------------------


def vanilla(d: float, a: float, **settings: Any) -> tuple[float, dict[str, float]]:
    loss, metrics = core_algos.compute_policy_loss_vanilla(
        torch.zeros(1, 1, dtype=torch.float64),
        torch.full((1, 1), d, dtype=torch.float64),
        torch.full((1, 1), a, dtype=torch.float64),
        torch.ones(1, 1, dtype=torch.float64),
        config=actor(**settings),
    )
    return loss.item(), metrics


def test_clip_higher_dual_clip_and_the_limit_of_the_ratio_by_hand() -> None:
    assert vanilla(30.0, -1.0, clip_ratio_c=1e99)[0] == pytest.approx(math.exp(20))
    assert vanilla(-30.0, 1.0)[0] == pytest.approx(-math.exp(-20))
    assert vanilla(math.log(1.25), 1.0, clip_ratio_high=0.28)[0] == pytest.approx(-1.25)
    assert vanilla(math.log(1.25), 1.0)[0] == pytest.approx(-1.2)
    assert vanilla(math.log(0.5), -1.0)[0] == pytest.approx(0.8)
    value, metrics = vanilla(math.log(5.0), -1.0)
    assert value == pytest.approx(3.0)
    assert metrics["actor/pg_clipfrac_lower"] == 1.0
    value, metrics = vanilla(math.log(5.0), -1.0, clip_ratio_c=10.0)
    assert value == pytest.approx(5.0)
    assert metrics["actor/pg_clipfrac_lower"] == 0.0


@pytest.mark.parametrize("mode", MODES)
def test_garbage_under_the_mask_reaches_neither_value_nor_gradient(mode: str) -> None:
    log_prob = torch.tensor([[-1.0, float("nan")]], requires_grad=True)
    old = torch.tensor([[-1.5, float("inf")]])
    advantages = torch.tensor([[1.0, float("nan")]])
    loss, metrics = core_algos.compute_policy_loss_vanilla(old, log_prob, advantages, torch.tensor([[1.0, 0.0]]), mode)
    loss.backward()
    assert torch.isfinite(loss)
    assert log_prob.grad[0, 1].item() == 0
    assert all(math.isfinite(v) for v in metrics.values())


# -- aggregation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_aggregate_is_zero(mode: str) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    loss = agg_loss(x, torch.zeros(2, 3), mode, batch_num_tokens=0, global_batch_size=0)
    loss.backward()
    assert loss.item() == 0
    assert (x.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16])
def test_masks_of_any_type_count_alike(dtype: torch.dtype) -> None:
    terms, mask = torch.rand(2, 600), (torch.rand(2, 600) < 0.9).float()
    for mode in MODES:
        assert agg_loss(terms, mask.to(dtype), mode) == pytest.approx(agg_loss(terms, mask, mode).item(), rel=1e-2)
    first, second = (
        core_algos.compute_policy_loss_gspo(-terms, -terms.flip(1), terms, m)[0] for m in (mask, mask.to(dtype))
    )
    assert second.item() == pytest.approx(first.item(), rel=1e-2)
    assert agg_loss(terms, mask[:, :1].to(dtype), "token-sum") == pytest.approx(
        agg_loss(terms, mask[:, :1].expand_as(terms), "token-sum").item()
    )


def test_dp_size_multiplies_and_needs_the_counts() -> None:
    x, m = torch.ones(2, 2), torch.ones(2, 2)
    assert agg_loss(x, m, "token-mean", dp_size=4, batch_num_tokens=16).item() == 1.0
    assert agg_loss(x, m, "token-sum", dp_size=2).item() == 8.0
    with pytest.raises(ValueError, match="batch_num_tokens is required when dp_size is 2"):
        agg_loss(x, m, "token-mean", dp_size=2, global_batch_size=2)
    for mode in MODES[2:]:
        with pytest.raises(ValueError, match="global_batch_size is required"):
            agg_loss(x, m, mode, dp_size=2, batch_num_tokens=4)


def test_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="unknown loss_agg_mode 'mean'; there are: token-mean"):
        agg_loss(torch.ones(1, 1), torch.ones(1, 1), "mean")
    with pytest.raises(ValueError, match="loss_scale_factor must be greater than 0"):
        agg_loss(torch.ones(1, 1), torch.ones(1, 1), "seq-mean-token-sum-norm", loss_scale_factor=0)
