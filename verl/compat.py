"""Import paths that plug-ins of the public system use, served from one table to our modules.

`install()` puts a finder at the end of `sys.meta_path`: real modules always win, and nothing is imported until
a plug-in asks. A path of the table yields either one of our modules as it is, or a module that offers the
listed names; the packages above it exist only for the import. Everything else under those packages is refused
with an ImportError that names the interface to use instead.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_TOOLS = "use verl.rollout.tools (BaseTool, function_tool) and verl.rollout.tools.interactions"
_MODELS = "any Hugging Face architecture is used as it is, through verl.engine.training.base.TrainingEngine"

_BASE = "verl.rollout.tools.base"


def _names(module: str, names: str) -> dict[str, str]:
    return {name: f"{module}:{name}" for name in names.split()}


# Path that plug-ins import → one of our modules (the whole of it), or its names → "module:name" of ours.
SERVED: dict[str, str | dict[str, str]] = {
    "verl.protocol": {
        "DataProto": "verl.data_proto:DataProto",
        "DataProtoItem": "verl.data_proto:DataProtoItem",
    },
    "verl.trainer.ppo.core_algos": "verl.algorithms.core_algos",
    "verl.trainer.ppo.rollout_corr_helper": "verl.algorithms.rollout_corr_helper",
    "verl.experimental.agent_loop.agent_loop": "verl.rollout.agent_loop",
    "verl.experimental.agent_loop": _names(
        "verl.rollout.agent_loop", "AgentLoopBase AgentLoopOutput register"
    ),
    "verl.tools.base_tool": _names(_BASE, "BaseTool OpenAIFunctionToolSchema ToolResponse"),
    "verl.tools.schemas": _names(
        _BASE,
        "OpenAIFunctionParametersSchema OpenAIFunctionPropertySchema OpenAIFunctionSchema "
        "OpenAIFunctionToolSchema ToolResponse",
    ),
    "verl.tools.function_tool": {"function_tool": "verl.rollout.tools.base:function_tool"},
    "verl.interactions.base": {"BaseInteraction": "verl.rollout.tools.interactions:BaseInteraction"},
    "verl.workers.rollout.replica": {"TokenOutput": "verl.rollout.agent_loop:TokenOutput"},
    "verl.utils.rollout_trace": {"rollout_trace_op": "verl.rollout.tools.base:rollout_trace_op"},
    "verl.utils.profiler": {"simple_timer": "verl.rollout.tools.base:simple_timer"},
    "verl.utils.reward_score": {"default_compute_score": "verl.reward:default_compute_score"},
    "verl.utils.import_utils": {"load_extern_object": "verl.data.load_object:load_extern_object"},
    "verl.utils.dataset.rl_dataset": {
        "RLHFDataset": "verl.data.plugins:RLHFDataset",
        "collate_fn": "verl.data.plugins:collate_fn",
    },
    "verl.utils.dataset.multiturn_sft_dataset": {"MultiTurnSFTDataset": "verl.data.sft:SFTDataset"},
    "verl.experimental.dataset.sampler": {
        "AbstractSampler": "verl.data.plugins:AbstractSampler",
        "AbstractCurriculumSampler": "verl.data.plugins:AbstractCurriculumSampler",
    },
    "verl.experimental.dynamic_dataset.dynamicgen_dataset": {
        "AbstractDataGenerator": "verl.data.plugins:AbstractDataGenerator",
    },
    "verl.workers.reward_manager": {
        "register": "verl.reward.managers:register",
        "get_reward_manager_cls": "verl.reward.managers:get_reward_manager_cls",
    },
    "verl.experimental.reward_loop.reward_manager": {
        "register": "verl.reward.managers:register",
        "get_reward_manager_cls": "verl.reward.managers:get_reward_manager_cls",
    },
    "verl.experimental.reward_loop.reward_manager.base": {
        "RewardManagerBase": "verl.reward.managers:RewardManagerBase",
    },
}

# What plug-ins do not reach: path (and all below it) → what there is instead. The longest path that fits counts.
REFUSED: dict[str, str] = {
    "verl.tools": _TOOLS,
    "verl.interactions": _TOOLS,
    "verl.experimental": "use verl.rollout.agent_loop, verl.data or verl.reward",
    "verl.single_controller": "use verl.workers, which places the roles that run beside a device",
    "verl.models": _MODELS,
    "verl.third_party": _MODELS,
    "verl.workers": "use verl.workers (roles), verl.engine (engines) or verl.reward (scoring)",
    "verl.workers.rollout": "use verl.engine.rollout.base.RolloutEngine",
    "verl.utils": "use verl.algorithms, verl.data, verl.reward, verl.tracking or verl.checkpoint",
    "verl.utils.reward_score": "use verl.reward.default_compute_score, which knows every built-in rule",
    "verl.utils.tracking": "use verl.tracking",
    "verl.utils.checkpoint": "use verl.checkpoint",
    "verl.utils.torch_functional": "use verl.algorithms.policy_loss (agg_loss, masked, masked_mean)",
    "verl.trainer.ppo": "use verl.trainer.ppo_trainer (the loop) or verl.algorithms.core_algos",
}


def _parents(path: str) -> list[str]:
    """ "a.b.c" → ["a", "a.b"]."""
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


# Packages made for the import alone: every parent of a served or refused path that is not one of our own.
OWN = {"verl", "verl.trainer", "verl.workers", "verl.models"}
PACKAGES = {parent for path in (*SERVED, *REFUSED) for parent in _parents(path)} - OWN


def reason(path: str) -> str:
    """Why `path` cannot be imported, and what there is instead: the text of the ImportError."""
    family = [*_parents(path), path]
    instead = next((REFUSED[p] for p in reversed(family) if p in REFUSED), "use what verl itself offers")
    near = [p for p in SERVED if p.startswith(".".join(path.split(".")[:2]) + ".")]
    served = f". Import paths of the public system that are served: {', '.join(near)}" if near else ""
    return f"{path} is not offered to plug-ins: {instead}{served}"


def resolve(path: str, name: str, target: str) -> Any:
    """The object behind `name` of the served path. ImportError if this release does not have it yet."""
    module_name, attribute = target.split(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ImportError(f"{path}.{name} is not in this release ({module_name} is not there)") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ImportError(f"{path}.{name} is not in this release ({target} is not there)") from error


class _ServedModule(ModuleType):
    """A module made for the import: offers the names of the table, resolved when first asked for."""

    def __init__(self, path: str, names: dict[str, str]):
        super().__init__(path, f"Served by verl.compat: {', '.join(sorted(names)) or 'a package'}.")
        self.__path__ = []
        self._names = names

    def __getattr__(self, name: str) -> Any:
        # AttributeError, not ImportError: `from package import submodule` asks for the attribute first.
        if name.startswith("_") or name not in self._names:
            raise AttributeError(reason(f"{self.__name__}.{name}"))
        value = resolve(self.__name__, name, self._names[name])
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._names})


class _Alias(Loader):
    """Puts one of our own modules under another path: the same object, so its state is one."""

    def __init__(self, target: str):
        self._target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        sys.modules[module.__spec__.name] = importlib.import_module(self._target)


class _View(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        names = SERVED.get(spec.name, {})
        return _ServedModule(spec.name, names if isinstance(names, dict) else {})

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: names are resolved when asked for."""


class PluginFinder(MetaPathFinder):
    """Asked last. Serves the table and refuses what lies beside it; any other name is none of its business."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("verl."):
            return None
        entry = SERVED.get(fullname)
        if isinstance(entry, str) and fullname not in PACKAGES:
            return ModuleSpec(fullname, _Alias(entry))
        if entry is not None or fullname in PACKAGES:
            return ModuleSpec(fullname, _View(), is_package=True)
        if any(p in REFUSED or p in PACKAGES or p in SERVED for p in [*_parents(fullname), fullname]):
            raise ImportError(reason(fullname), name=fullname)
        return None


def install() -> None:
    """Put the finder at the end of `sys.meta_path`; again is harmless."""
    if not any(isinstance(finder, PluginFinder) for finder in sys.meta_path):
        sys.meta_path.append(PluginFinder())
