"""What a rank of the Megatron engine's tests does: outputs, steps, files, offload, all in one process that starts
once."""

from __future__ import annotations

import importlib.util
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.unit.engine.training.engine_cases import BOTH, simple_loss
from tests.unit.engine.training.fsdp_cases import TOPK, rows, shares, total
from verl.engine.training.log_prob import CANDIDATE_OUTPUTS
from verl.models.sampling_mask import encode_sets
from verl.trajectory import Trajectory

INSTALLED = None not in (importlib.util.find_spec("megatron"), importlib.util.find_spec("mbridge"))
NEEDS_MEGATRON = pytest.mark.skipif(
    not INSTALLED, reason="megatron-core or mbridge is not installed: make test-megatron"
)
if INSTALLED:
    ranks.PRELOAD += ["tests.megatron_on_cpu", "verl.engine.training.megatron.engine"]
STEPS = 3
ROLE = {
    "fsdp_config": {"dtype": "float32"},
    "grad_clip": 1.0,
    "ppo_max_token_len_per_gpu": 40,
}
OPTIM = {"lr": 1e-2, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "lr_warmup_steps": 1}
EPS = 1e-5  # far above the rounding of gradients, which Adam would turn into steps of the size of the learning rate
OFFLOAD = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}


def mine(engine: Any) -> tuple[list[int], list[Any]]:
    """Numbers of this rank's rows, and the rows."""
    numbers = shares("even", engine.dp_size)[engine.dp_rank]
    return numbers, [rows()[number] for number in numbers]


def learn(engine: Any, loss: Any = None) -> Any:
    result = engine.step(
        mine(engine)[1], loss or simple_loss(total(), 0.1), (*BOTH, *CANDIDATE_OUTPUTS), temperature=0.8
    )
    if not result.refused:
        engine.advance()
    return result


def outputs(engine: Any) -> dict[str, Any]:
    return engine.forward(mine(engine)[1], (*BOTH, "sum_pi_squared", *TOPK), temperature=0.8)


def copied(engine: Any) -> dict[str, torch.Tensor]:
    named = [(name, tensor.clone()) for name, tensor in engine.named_weights()]
    assert len(dict(named)) == len(named), "each once"
    return dict(named)


def identical(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def prepare() -> None:
    """For a rank that builds an engine."""
    import tests.megatron_on_cpu  # noqa: F401 — before megatron-core

    multiprocessing.current_process()._config["daemon"] = False  # megatron-core's checkpoints are written by children


def optimizer_state(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of this rank's share, by number."""
    parts = getattr(engine._optimizer, "chained_optimizers", None) or [engine._optimizer]
    groups = [(part.optimizer.state, group["params"]) for part in parts for group in part.optimizer.param_groups]
    states = [state[parameter] for state, parameters in groups for parameter in parameters]
    return {f"{n}/{k}": torch.as_tensor(v).clone() for n, state in enumerate(states) for k, v in state.items()}


def gradients(engine: Any) -> dict[str, torch.Tensor]:
    """Copies under Hugging Face names; not with the distributed optimizer on several data-parallel ranks."""
    parameters = [p for chunk in engine._model.chunks for p in chunk.parameters()]
    weights = [p.data for p in parameters]
    for parameter in parameters:
        parameter.data = parameter.main_grad
    exported = copied(engine)
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data = weight
    return exported


def _build(path: Path, sizes: dict[str, Any], *, model_cfg: Any = None, role: Any = None, **more: Any) -> Any:
    prepare()
    from verl.engine.training.megatron.engine import MegatronEngine

    optim = OPTIM | {"override_optimizer_config": {"adam_eps": EPS}}
    role = ROLE | {"optim": optim, "megatron": {"dtype": "float32", **sizes, **more}} | (role or {})
    engine = MegatronEngine(path, model_cfg=model_cfg, role_cfg=role, device="cpu", topk=4)
    engine.schedule(STEPS)
    return engine


def _spoiled(engine: Any) -> Any:
    """A loss that is not finite on the last data-parallel rank alone."""
    good = simple_loss(total(), 0.1)

    def bad(batch: Any) -> Any:
        value, metrics = good(batch)
        return value * (float("nan") if engine.dp_rank == engine.dp_size - 1 else 1.0), metrics

    return bad


def drive(path: Path, sizes: dict[str, Any], folder: Path) -> dict[str, Any]:
    """All that is compared of one layout. The state before the last step is left in `folder`."""
    engine = _build(path, sizes)
    numbers, _ = mine(engine)
    seen: dict[str, Any] = {"start": copied(engine), "rows": numbers, "holds": engine.holds_outputs}
    seen["outputs"] = outputs(engine)
    engine.save_weights(folder / "start")
    results = [learn(engine) for _ in range(STEPS - 1)]
    before = copied(engine)
    seen["refused"] = learn(engine, _spoiled(engine)).refused, identical(before, copied(engine))
    engine.save_weights(folder / "weights")
    engine.save_optimizer(folder / "optimizer")
    results.append(learn(engine))
    seen["metrics"], seen["norms"] = [r.metrics for r in results], [r.grad_norm for r in results]
    seen["derivatives"] = [r.scale_derivative for r in results]
    seen["tokens"] = [r.tokens for r in results]
    seen["weights"] = copied(engine)
    seen["resumed"] = identical(seen["weights"], resume(path, sizes, folder))
    return seen | {"offloaded": identical(seen["weights"], _offloaded(path, sizes))}


def resume(path: Path, sizes: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """The weights after the last step, from what `drive` left."""
    engine = _build(path, sizes)
    engine.load_weights(folder / "weights")
    engine.load_optimizer(folder / "optimizer")
    learn(engine)
    return copied(engine)


def _offloaded(path: Path, sizes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights after all steps, where the state leaves the device between them."""
    engine = _build(path, sizes, **OFFLOAD)
    for _ in range(STEPS):
        engine.offload()
        engine.onload()
        outputs(engine)
        engine.offload()
        engine.onload(optimizer=True)
        learn(engine)
    return copied(engine)


def _fsdp(path: Path, *, model_cfg: Any = None, role: Any = None) -> Any:
    """The FSDP engine with the same settings."""
    from verl.engine.training.fsdp.engine import FSDPEngine

    optim = OPTIM | {"override_optimizer_config": {"eps": EPS}}
    role = ROLE | {"optim": optim} | (role or {})
    engine = FSDPEngine(path, model_cfg=model_cfg, role_cfg=role, device="cpu", topk=4)
    engine.schedule(STEPS)
    return engine


def with_fsdp(path: Path) -> dict[str, Any]:
    """The FSDP engine's outputs and steps, on one rank without stand-ins."""
    engine = _fsdp(path)
    seen = {"start": copied(engine), "outputs": outputs(engine)}
    results = [learn(engine) for _ in range(STEPS)]
    seen["metrics"], seen["norms"] = [r.metrics for r in results], [r.grad_norm for r in results]
    seen["derivatives"] = [r.scale_derivative for r in results]
    return seen | {"weights": copied(engine)}


def in_half(path: Path, dtype: str, total: int, folder: Path) -> tuple[dict[str, Any], float, bool]:
    """Outputs, the gradient norm of a step over a loss of so many tokens, and whether a resume after it is exact."""
    engine, other, loss = _build(path, {}, dtype=dtype), _build(path, {}, dtype=dtype), simple_loss(total, 0.1)
    seen, norm = outputs(engine), learn(engine, loss).grad_norm
    engine.save_weights(folder / "weights")
    engine.save_optimizer(folder / "optimizer")
    other.load_weights(folder / "weights")
    other.load_optimizer(folder / "optimizer")
    assert not learn(engine, loss).refused and not learn(other, loss).refused
    return seen, norm, identical(copied(engine), copied(other))


def distributed(path: Path, sizes: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """The weights, which are left in `folder` as megatron-core's distributed checkpoint."""
    from megatron.core import dist_checkpointing

    engine = _build(path, sizes)
    folder.mkdir(exist_ok=True)
    state = {str(n): chunk.module.sharded_state_dict() for n, chunk in enumerate(engine._model.chunks)}
    dist_checkpointing.save(state, str(folder))
    return copied(engine)


def from_distributed(path: Path, sizes: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """The weights of an engine that starts with those in `folder`."""
    return copied(_build(path, sizes, use_dist_checkpointing=True, dist_checkpointing_path=str(folder)))


# -- images --------------------------------------------------------------------------------------------------


def seeing_rows(path: Path) -> list[Any]:
    """Two responses to each of four prompts, of none to three images."""
    from tests.invariant.test_vision import make_prompts

    rng, out = np.random.default_rng(3), []
    for prompt in make_prompts(path):
        for index, size in enumerate((5, 9)):
            advantages = rng.standard_normal(size).astype(np.float32)
            ids, mask = rng.integers(0, 250, size), np.ones(size, bool)
            out += Trajectory(prompt, index, ids, mask, advantages=advantages).segments
    return out


def see(
    path: Path, strategy: str, sizes: dict[str, Any], folder: Path, lora: dict[str, Any] | None = None, **role: Any
) -> dict[str, Any]:
    """What is compared of a model that sees images. Files are left in `folder`."""

    def build() -> Any:
        options = {"role": role | {"ppo_max_token_len_per_gpu": 160}, "model_cfg": lora}
        return _fsdp(path, **options) if strategy == "fsdp" else _build(path, sizes, **options)

    engine, rows = build(), seeing_rows(path)
    mine, count = rows[engine.dp_rank :: engine.dp_size], sum(row.length for row in rows)
    seen: dict[str, Any] = {"start": copied(engine), "holds": engine.holds_outputs}
    seen |= {"rows": range(len(rows))[engine.dp_rank :: engine.dp_size], "lengths": [row.length for row in rows]}
    seen["outputs"] = engine.forward(mine, BOTH, temperature=0.8)
    seen["images"] = engine.images()
    engine.save_weights(folder / "start")

    def step(engine: Any) -> Any:
        result = engine.step(mine, simple_loss(count, 0.1), BOTH, temperature=0.8)
        engine.advance()
        return result

    results = [step(engine) for _ in range(STEPS - 1)]
    engine.save_weights(folder / "weights")
    engine.save_optimizer(folder / "optimizer")
    results.append(step(engine))
    seen |= {"norms": [r.grad_norm for r in results], "weights": copied(engine)}
    other = build()
    other.load_weights(folder / "weights")
    other.load_optimizer(folder / "optimizer")
    step(other)
    return seen | {"resumed": identical(seen["weights"], copied(other))}


# -- adapters ------------------------------------------------------------------------------------------------


def _disturb(engine: Any) -> None:
    """Give B values, where an adapter does nothing, the same in all layouts and both engines."""
    from verl.models.adapters import PlainView

    parts: list[tuple[str, Any]] = list(PlainView(engine.module).adapter_state().items())
    for chunk in getattr(engine._model, "chunks", []):
        parts += chunk.module.adapters.named()
    size = engine.sizes.tensor if hasattr(engine, "sizes") else 1
    rank = dist.get_rank() if size > 1 else 0
    for name, weight in parts:
        if ".lora_B." in name:
            rows = weight.shape[0] * (size if getattr(weight, "tensor_model_parallel", False) else 1)
            generator = torch.Generator().manual_seed(sum(name.encode()))
            full = torch.randn(rows, weight.shape[1], generator=generator) * 0.2
            weight.data.copy_(full.chunk(size)[rank] if rows > len(weight) else full)


def adapt(path: Path, strategy: str, sizes: dict[str, Any], lora: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What is compared of an engine with an adapter."""

    def build() -> Any:
        return _fsdp(path, model_cfg=lora) if strategy == "fsdp" else _build(path, sizes, model_cfg=lora)

    engine = build()
    seen: dict[str, Any] = {"adapter": {n: t.clone() for n, t in engine.adapter_weights()}}
    _disturb(engine)
    if strategy == "megatron":
        engine._optimizer.reload_model_params()
    seen |= {"rows": mine(engine)[0], "holds": engine.holds_outputs, "outputs": outputs(engine)}
    with engine.without_adapter():
        seen["base"] = outputs(engine)
    results = [learn(engine) for _ in range(STEPS - 1)]
    engine.save_weights(folder / "actor")
    engine.save_optimizer(folder / "optimizer")
    results.append(learn(engine))
    other = build()
    other.load_weights(folder / "actor")
    other.load_optimizer(folder / "optimizer")
    learn(other)
    seen["resumed"] = identical(copied(engine), copied(other))
    return seen | {"norms": [r.grad_norm for r in results], "weights": copied(engine)}


# -- router replay -------------------------------------------------------------------------------------------


def replay(path: Path, strategy: str, sizes: dict[str, Any], recompute: bool) -> dict[str, Any]:
    """A pass and steps that follow given experts, then the experts that a pass of the engine's own records."""
    from tests.invariant.test_router_replay import routed_rows

    role = {"router_replay": {"mode": "R3"}, "ppo_micro_batch_size_per_gpu": 2}
    model_cfg = {"enable_gradient_checkpointing": recompute}
    build = _fsdp if strategy == "fsdp" else _build
    engine = build(path, **({} if strategy == "fsdp" else {"sizes": sizes}), model_cfg=model_cfg, role=role)
    rows = routed_rows()[engine.dp_rank :: engine.dp_size]
    seen: dict[str, Any] = {"holds": engine.holds_outputs, "outputs": engine.forward(rows, temperature=0.8)}
    results = [engine.step(rows, simple_loss(34), temperature=0.8) for _ in range(2)]
    assert not any(result.refused for result in results)
    seen |= {"metrics": [r.metrics for r in results], "weights": copied(engine)}
    recorded = engine.forward(rows, ("log_probs", "routed_experts"), temperature=0.8)
    seen["recorded"] = recorded, [(row.routed_experts, row.context_columns["routed_experts"]) for row in rows]
    return seen


def truncated(path: Path, strategy: str, sizes: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """A pass and a step over rows of which all but the first have sets that their tokens were drawn from."""
    engine = _fsdp(path) if strategy == "fsdp" else _build(path, sizes)
    masked = rows()
    allowed = torch.rand(total(), 300, generator=torch.Generator().manual_seed(0)) < 0.1
    for row, part in list(zip(masked, allowed.split([row.length for row in masked]), strict=True))[1:]:
        part.scatter_(1, torch.from_numpy(row.response_ids)[:, None], True)
        row.sampling_mask = np.array(encode_sets(part), object)
    outputs = engine.forward(masked, BOTH, temperature=0.8)
    return outputs, engine.step(masked, simple_loss(total(), 0.1), BOTH, temperature=0.8).grad_norm
