"""megatron-core's optimizer and its schedule of the learning rate, built from a role's `optim.*`, and their state on
disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config, unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from verl.config.schema.base import setting
from verl.config.schema.training import OptimConfig
from verl.engine.training.optimizer import Schedule
from verl.engine.training.process_group import on_all_ranks, this_rank
from verl.errors import UserError

# The state in terms of whole parameters, which another layout reads too.
_RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}
_OWN_KEYS = ("lr_decay_steps", "min_lr", "lr_warmup_init", "lr_wsd_decay_style", "lr_wsd_decay_steps")


def build_optimizer(chunks: Sequence[Any], optim: OptimConfig, megatron: Any, dtype: torch.dtype) -> Any:
    """The optimizer of all chunks. All weights decay, as with the other engines. UserError for settings it lacks."""
    if optim.optimizer.lower() not in ("adamw", "adam", "sgd"):
        raise UserError(f"optim.optimizer={optim.optimizer}: strategy=megatron has AdamW and SGD")
    overrides = {name: value for name, value in dict(optim.override_optimizer_config).items() if value is not None}
    unknown = set(overrides) - {f.name for f in fields(OptimizerConfig)}
    if unknown:
        names = ", ".join(sorted(unknown))
        raise UserError(f"optim.override_optimizer_config: megatron-core's optimizer has no setting {names}")
    settings: dict[str, Any] = {
        "optimizer": "sgd" if optim.optimizer.lower() == "sgd" else "adam",
        "lr": optim.lr,
        "min_lr": optim.min_lr or 0.0,
        "weight_decay": optim.weight_decay,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "clip_grad": 0.0,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "loss_scale": 1.0 if dtype == torch.float16 else None,  # the engine's own comes before it
        "params_dtype": dtype,
        "use_distributed_optimizer": bool(setting(megatron, "use_distributed_optimizer", True)),
        **overrides,
    }
    optimizer = get_megatron_optimizer(OptimizerConfig(**settings), list(chunks), config_overrides={})
    for part in _parts(optimizer):
        _keep_steps(part)
    return optimizer


def _parts(optimizer: Any) -> list[Any]:
    """The optimizers below: experts that are split over ranks have one of their own."""
    return getattr(optimizer, "chained_optimizers", None) or [optimizer]


def scale_gradients(optimizer: Any, factor: float) -> None:
    """Multiply the gradients that the next step takes."""
    for part in _parts(optimizer):
        name = "decoupled_grad" if part.config.use_precision_aware_optimizer else "grad"
        gradients = [getattr(parameter, name, None) for parameter in part.get_parameters()]
        if present := [gradient for gradient in gradients if gradient is not None]:
            torch._foreach_mul_(present, factor)


@torch.no_grad()
def scale_derivative(optimizer: Any, chunk: Any) -> float | None:
    """This rank's share of `TrainStepResult.scale_derivative`: Σ (w + offset) · dL/dw over the last normalisation of
    the last stage's chunk, and of a bias that its head has; None where they are not trained or several ranks hold one
    share. Gradients are added up over ranks and not yet taken by the optimizer."""
    model = unwrap_model(chunk)
    norm, output = getattr(getattr(model, "decoder", None), "final_layernorm", None), model.output_layer
    settings = get_model_config(chunk)
    offset = float(bool(getattr(settings, "layernorm_zero_centered_gamma", False)))
    if norm is None or not norm.weight.requires_grad or chunk.ddp_config.num_distributed_optimizer_instances > 1:
        return None
    weights = [(norm.weight, offset), (getattr(norm, "bias", None), 0.0), (getattr(output, "bias", None), 0.0)]
    if parallel_state.get_tensor_model_parallel_rank() > 0:  # all of them have the same
        return 0.0
    total = 0.0
    for weight, added in weights:
        part = None if weight is None else _held(optimizer, weight)
        if part is not None:
            gradient = weight.main_grad.flatten()[part].double()
            total += float(((weight.flatten()[part] + added) * gradient).sum())
    return total


def _held(optimizer: Any, parameter: torch.nn.Parameter) -> slice | None:
    """The elements of a parameter whose summed gradient this rank holds, among data-parallel ranks it alone; None for
    none of them."""
    parts = _parts(optimizer)
    if not all(part.config.use_distributed_optimizer for part in parts):
        first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        return slice(None) if first else None
    for part in parts:
        if parameter in part.model_param_gbuf_map:
            held = part._get_model_param_range_map(parameter)["param"]
            return slice(held.start, held.end)
    return None


def build_schedule(optimizer: Any, optim: OptimConfig, total: int) -> Schedule | CoreSchedule:
    """The learning rate of each training step: ours, or megatron-core's where a key of its own is set."""
    own = any(getattr(optim, key) is not None for key in _OWN_KEYS)
    return (CoreSchedule if own else Schedule)(optimizer, optim, total)


class CoreSchedule:
    """megatron-core's `OptimizerParamScheduler`, one of its steps for a training step."""

    def __init__(self, optimizer: Any, optim: OptimConfig, total: int):
        warm = optim.lr_warmup_steps
        if warm is None or warm < 0:
            warm = int(optim.lr_warmup_steps_ratio * total)
        decay = optim.lr_decay_steps or total
        style = "WSD" if optim.lr_wsd_decay_steps else optim.lr_scheduler_type
        try:
            self._scheduler = OptimizerParamScheduler(
                optimizer,
                init_lr=optim.lr_warmup_init or 0.0,
                max_lr=optim.lr,
                min_lr=optim.min_lr if optim.min_lr is not None else optim.lr * optim.min_lr_ratio,
                lr_warmup_steps=warm,
                lr_decay_steps=max(decay, warm + 1),
                lr_decay_style=style,
                start_wd=optim.weight_decay,
                end_wd=optim.weight_decay,
                wd_incr_steps=max(total, 1),
                wd_incr_style=optim.weight_decay_incr_style or "constant",
                use_checkpoint_opt_param_scheduler=False,
                override_opt_param_scheduler=True,
                wsd_decay_steps=optim.lr_wsd_decay_steps,
                lr_wsd_decay_style=optim.lr_wsd_decay_style or "exponential",
            )
        except AssertionError as error:
            raise UserError(f"optim: megatron-core refuses this schedule: {error}") from error
        self._optimizer, self.step = optimizer, 0

    def restore(self, step: int) -> None:
        self._scheduler.num_steps = 0
        self._scheduler.step(step)
        self.step = step

    def advance(self) -> float:
        used = float(self._optimizer.param_groups[0]["lr"])
        self._scheduler.step(1)
        self.step += 1
        return used


def _keep_steps(part: Any) -> None:
    """torch's Adam counts steps in the state of each parameter. megatron-core 0.16 gives all of them one tensor when it
    loads a distributed optimizer, which each would then increase, and expects it among a checkpoint's tensors."""
    set_state = getattr(part, "_set_main_param_and_optimizer_states", None)
    if set_state is None:
        return

    def set_with_step(parameter: Any, tensors: dict[str, torch.Tensor]) -> None:
        group, place = part.model_param_group_index_map[parameter]
        state = part.optimizer.state[part.optimizer.param_groups[group]["params"][place]]
        if "step" in state:
            state["step"] = state["step"].clone()
            tensors = tensors | {"step": state["step"]}
        set_state(parameter, tensors)

    part._set_main_param_and_optimizer_states = set_with_step


def _begin(part: Any) -> None:
    """Moments and steps of zero for an optimizer that has taken no step: megatron-core's checkpoints need them."""
    if part.init_state_fn is not None:
        part.init_state_fn(part.optimizer, part.config)
    if isinstance(part.optimizer, torch.optim.Optimizer) and type(part.optimizer).__module__.startswith("torch."):
        for state in part.optimizer.state.values():
            state.setdefault("step", torch.zeros(()))


def _sharded_state(optimizer: Any, chunks: Sequence[Any], *, is_loading: bool) -> dict[str, Any]:
    for part in _parts(optimizer):
        _begin(part)
    model_state: dict[str, Any] = {}
    for number, chunk in enumerate(chunks):
        state = chunk.module.sharded_state_dict() if hasattr(chunk, "module") else chunk.sharded_state_dict()
        model_state |= {f"{number}.{name}": value for name, value in state.items()}
    return {"optimizer": optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=_RESHARDABLE)}


def save_state(directory: Path, optimizer: Any, chunks: Sequence[Any], schedule: Schedule | CoreSchedule) -> None:
    """Write the optimizer's state and the schedule's step. Collective."""
    on_all_ranks(lambda: directory.mkdir(parents=True, exist_ok=True))
    try:
        dist_checkpointing.save(_sharded_state(optimizer, chunks, is_loading=False), str(directory))
    finally:
        filesystem_async._results_queue = None  # else the process behind it outlives a rank that is killed
    if this_rank() == 0:
        (directory / "schedule.json").write_text(json.dumps({"step": schedule.step}), "utf-8")


def load_state(directory: Path, optimizer: Any, chunks: Sequence[Any], schedule: Schedule | CoreSchedule) -> None:
    """Inverse of `save_state`, at this or another layout. Collective. UserError for state that cannot be read."""
    if not (directory / "schedule.json").is_file():
        raise UserError(f"{directory}: no optimizer state")
    try:
        state = dist_checkpointing.load(_sharded_state(optimizer, chunks, is_loading=True), str(directory))
    except (KeyError, CheckpointException, CheckpointingException) as error:
        raise UserError(
            f"{directory}: this model or layout cannot read this optimizer state (it fits one expert parallel size, or "
            f"all of 2 and more): {str(error)[:300]}"
        ) from error
    optimizer.load_state_dict(state["optimizer"])
    schedule.restore(int(json.loads((directory / "schedule.json").read_text("utf-8"))["step"]))
