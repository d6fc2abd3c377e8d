"""Import paths that plug-ins of the public system use, served from one table to our modules.

`install()` puts a finder at the end of `sys.meta_path`: real modules always win, and nothing is imported until
a plug-in asks. A path of the table yields either one of our modules as it is, or a module that holds the
listed names; the packages above it exist only for the import. Everything else under those packages is refused
with an ImportError that names the interface to use instead. The entry points that users start with `python3 -m` are
paths of the table too.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from verl import plugins
from verl.errors import REFUSED_NAMES

_TOOLS = "use verl.rollout.tools (BaseTool, function_tool) and verl.rollout.tools.interactions"
_MODELS = "any Hugging Face architecture is used as it is, through verl.engine.training.base.TrainingEngine"

_PPO = "verl.trainer.main_ppo"
# Path that users start → the program, and the configuration that is its default ("": it has none).
ENTRY_POINTS: dict[str, tuple[str, str]] = {
    "verl.experimental.fully_async_policy.fully_async_main": (_PPO, "fully_async_ppo_trainer"),
    "verl.experimental.one_step_off_policy.main_ppo": (_PPO, "one_step_off_ppo_trainer"),
    "verl.trainer.main_ppo_sync": (_PPO, "ppo_trainer"),
    "verl.trainer.main_generation_server": ("verl.trainer.main_generation", "generation"),
    "verl.trainer.fsdp_sft_trainer": ("verl.trainer.sft_trainer", "sft_trainer"),
    "verl.model_merger": ("verl.compat.model_merger", ""),
}


_CLASSES = "verl.compat.reward_managers"
_MANAGERS = f"{_CLASSES}: register get_reward_manager_cls"
_BATCH_MANAGERS = ("NaiveRewardManager", "BatchRewardManager", "PrimeRewardManager", "DAPORewardManager")
_LOOP = "verl.experimental.reward_loop.reward_manager"
# Class of the reward loop, and the module below `_LOOP` that has it → the class here.
_LOOP_MANAGERS = {
    ("NaiveRewardManager", "naive"): "LoopRewardManager",
    ("DAPORewardManager", "dapo"): "LoopRewardManager",
    ("GDPORewardManager", "gdpo"): "LoopRewardManager",
    ("PrimeRewardManager", "prime"): "LoopRewardManager",
    ("RemoteRewardManager", "remote"): "LoopRewardManager",
    ("RateLimitedRewardManager", "limited"): "RateLimitedRewardManager",
}
_HDFS = "verl.compat.files: exists makedirs copy"
_FS = "verl.compat.files: copy_to_local copy_local_path_from_hdfs=copy_to_local is_non_local local_mkdir_safe"
_TOKENIZERS = "verl.compat.helpers: hf_tokenizer hf_processor normalize_token_ids"
_MATH = (
    "verl.compat.reward_scores: compute_score is_equiv strip_string remove_boxed last_boxed_only_string fix_fracs "
    "fix_a_slash_b fix_sqrt remove_right_units"
)
_SEARCH_QA = (
    "verl.reward.rules.search_qa: compute_score compute_score_subem em_check subem_check normalize_answer "
    "extract_solution count_answer_tags"
)
_DAPO = "is_correct_minerva is_correct_strict_box verify compute_score"
# Module of the public `verl.utils.reward_score` → as in `_TABLE`.
_SCORES = {
    "gsm8k": "verl.reward.rules.gsm8k: compute_score extract_solution",
    "geo3k": "verl.compat.reward_scores: compute_score=geo3k_score format_reward acc_reward",
    "math": _MATH,
    "math_reward": _MATH,
    "math_batch": "verl.compat.reward_scores: compute_score_batched",
    "math_dapo": f"verl.reward.rules.math_dapo: normalize_final_answer {_DAPO} remove_boxed last_boxed_only_string",
    "math_verify": "verl.compat.reward_scores: compute_score=verified_score",
    "prime_math": (
        "verl.compat.reward_scores: compute_score=prime_math_score grade_answer match_answer math_equal remove_boxed"
    ),
    "prime_math.grader": "verl.compat.reward_scores: math_equal",
    "prime_math.math_normalize": "verl.reward.rules.boxed: normalize_answer=normalise",
    "prime_code": "verl.compat.reward_scores: compute_score=prime_code_score",
    "sandbox_fusion": "verl.compat.reward_scores: compute_score=sandbox_score",
    "search_r1_like_qa_em": _SEARCH_QA,
}
_TOOLS_BASE = "verl.rollout.tools.tool"
_TOOLBOX = "verl.rollout.tools.toolbox: load_all_tools initialize_tools_from_config=load_all_tools"
_SCHEMAS = (
    "OpenAIFunctionParametersSchema OpenAIFunctionPropertySchema OpenAIFunctionSchema OpenAIFunctionToolSchema "
    "ToolResponse"
)
# Path that plug-ins import → one of our modules (the whole of it), or "module: names", a name of ours behind "=".
_TABLE = {
    **{path: target for path, (target, _) in ENTRY_POINTS.items()},
    "verl.base_config": "verl.compat.config_groups: BaseConfig",
    "verl.protocol": "verl.compat.data_proto: DataProto DataProtoItem pad_dataproto_to_divisor unpad_dataproto",
    "verl.trainer.config": "verl.compat.config_groups: AlgoConfig RolloutCorrectionConfig CheckpointConfig",
    "verl.trainer.config.algorithm": "verl.compat.config_groups: AlgoConfig RolloutCorrectionConfig",
    "verl.trainer.ppo.core_algos": "verl.compat.core_algos",
    "verl.trainer.ppo.metric_utils": "verl.compat.metric_utils",
    "verl.trainer.ppo.ray_trainer": "verl.compat.batches: compute_advantage",
    "verl.trainer.ppo.rollout_corr_helper": "verl.compat.rollout_corr_helper",
    "verl.trainer.ppo.trainer_utils": "verl.compat.batches: compute_advantage",
    "verl.trainer.ppo.v1.utils": "verl.compat.batches",
    "verl.experimental.agent_loop.agent_loop": "verl.compat.agent_loop",
    "verl.rollout.agent_loop": "verl.compat.agent_loop",
    "verl.experimental.agent_loop": (
        "verl.compat.agent_loop: AgentLoopBase AgentLoopOutput AsyncLLMServerManager register "
        "SingleTurnAgentLoop=SingleTurnAgent"
    ),
    "verl.experimental.agent_loop.single_turn_agent_loop": (
        "verl.compat.agent_loop: SingleTurnAgentLoop=SingleTurnAgent"
    ),
    "verl.experimental.agent_loop.tool_agent_loop": "verl.compat.tool_agent_loop",
    "verl.experimental.agent_loop.utils": (
        "verl.compat.helpers: build_gpt_oss_tool_response_text format_gpt_oss_tool_response_manually "
        "add_generation_prompt_for_gpt_oss"
    ),
    "verl.experimental.agent_loop.tool_parser": "verl.compat.tool_parsers",
    "verl.tools.base_tool": f"{_TOOLS_BASE}: BaseTool OpenAIFunctionToolSchema ToolResponse",
    "verl.tools.schemas": f"{_TOOLS_BASE}: {_SCHEMAS}",
    "verl.tools.mcp_base_tool": "verl.rollout.tools.mcp_servers: MCPBaseTool=McpTool",
    "verl.tools.sandbox_fusion_tools": "verl.compat.sandbox_fusion_tools",
    "verl.tools.function_tool": "verl.rollout.tools.tool",
    "verl.tools.tool_registry": _TOOLBOX,
    "verl.tools.utils.tool_registry": _TOOLBOX,
    "verl.interactions.base": "verl.rollout.tools.interactions: BaseInteraction",
    "verl.interactions.utils.interaction_registry": (
        "verl.rollout.tools.interactions: initialize_interactions_from_config=load_interactions"
    ),
    "verl.utils": f"{_TOKENIZERS} omega_conf_to_dataclass",
    "verl.utils.config": "verl.compat.helpers: omega_conf_to_dataclass",
    "verl.utils.fs": _FS,
    "verl.utils.hdfs_io": _HDFS,
    "verl.utils.import_utils": "verl.compat.helpers: load_extern_object load_extern_type import_external_libs",
    "verl.utils.model": "verl.compat.helpers: compute_position_id_with_mask",
    "verl.utils.tokenizer": _TOKENIZERS,
    "verl.utils.tokenizer.tokenizer": _TOKENIZERS,
    "verl.utils.tracking": "verl.compat.helpers: Tracking",
    "verl.utils.metric": "verl.compat.metric_utils: AggregationType Metric reduce_metrics",
    "verl.utils.metric.utils": "verl.compat.metric_utils",
    "verl.utils.profiler": "verl.compat.metric_utils: simple_timer",
    "verl.utils.profiler.performance": "verl.compat.metric_utils: simple_timer",
    "verl.utils.py_functional": "verl.compat.metric_utils: append_to_dict",
    "verl.utils.rollout_trace": "verl.compat.agent_loop: rollout_trace_op",
    "verl.utils.reward_score": "verl.reward: default_compute_score _default_compute_score=default_compute_score",
    **{f"verl.utils.reward_score.{name}": target for name, target in _SCORES.items()},
    "verl.utils.torch_functional": "verl.compat.torch_functional",
    "verl.utils.dataset": "verl.data.plugins: RLHFDataset",
    "verl.utils.dataset.rl_dataset": "verl.data.plugins: RLHFDataset collate_fn",
    "verl.utils.dataset.multiturn_sft_dataset": "verl.data.sft: MultiTurnSFTDataset=SFTDataset",
    "verl.experimental.dataset.sampler": "verl.data.plugins: AbstractSampler AbstractCurriculumSampler",
    "verl.experimental.dynamic_dataset.dynamicgen_dataset": "verl.data.plugins: AbstractDataGenerator",
    "verl.workers.config": "verl.compat.config_groups: ActorConfig CriticConfig PolicyLossConfig",
    "verl.workers.config.actor": "verl.compat.config_groups: ActorConfig PolicyLossConfig",
    "verl.workers.rollout.replica": "verl.compat.agent_loop: TokenOutput",
    "verl.workers.reward_manager": f"{_MANAGERS} {' '.join(_BATCH_MANAGERS)}",
    "verl.workers.reward_manager.registry": "verl.reward.user_function",
    "verl.workers.reward_manager.abstract": f"{_CLASSES}: AbstractRewardManager",
    **{
        f"verl.workers.reward_manager.{name.removesuffix('RewardManager').lower()}": f"{_CLASSES}: {name}"
        for name in _BATCH_MANAGERS
    },
    _LOOP: " ".join((_MANAGERS, *(f"{name}={ours}" for (name, _), ours in _LOOP_MANAGERS.items()))),
    f"{_LOOP}.registry": "verl.reward.user_function",
    f"{_LOOP}.base": "verl.reward.managers: RewardManagerBase",
    **{f"{_LOOP}.{module}": f"{_CLASSES}: {name}={ours}" for (name, module), ours in _LOOP_MANAGERS.items()},
}


def _entry(target: str) -> str | dict[str, str]:
    """Our module, or the names of a line of `_TABLE`: "module: a b=c" has a as a, b as c."""
    module, _, names = target.partition(": ")
    pairs = (name.partition("=") for name in names.split())
    return {name: f"{module}:{original or name}" for name, _, original in pairs} or module


# Path → our module, or its names → "module:name" of ours.
SERVED: dict[str, str | dict[str, str]] = {path: _entry(target) for path, target in _TABLE.items()}

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
    "verl.utils.checkpoint": "use verl.checkpoint",
    "verl.trainer.ppo": "use verl.trainer.ppo_trainer (the loop) or verl.algorithms",
}


def _parents(path: str) -> list[str]:
    """ "a.b.c" → ["a", "a.b"]."""
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


# Packages made for the import alone: every parent of a served or refused path that is not one of our own.
OWN = {"verl", "verl.trainer", "verl.workers", "verl.models", "verl.rollout"}
PACKAGES = {parent for path in (*SERVED, *REFUSED) for parent in _parents(path)} - OWN


def reason(path: str) -> str:
    """Why `path` cannot be imported, and what there is instead: the text of the ImportError."""
    family = [*_parents(path), path]
    instead = next((REFUSED[p] for p in reversed(family) if p in REFUSED), "use what verl itself offers")
    parent = path.rpartition(".")[0]
    if isinstance(names := SERVED.get(parent), dict):
        return f"{path} is not offered to plug-ins: {instead}. {parent} has: {', '.join(names)}"
    near = [p for p in SERVED if p.startswith(".".join(path.split(".")[:2]) + ".")]
    served = f". Import paths of the public system that are served: {', '.join(near)}" if near else ""
    return f"{path} is not offered to plug-ins: {instead}{served}"


def _refuse(path: str) -> str:
    """The reason, which is kept."""
    REFUSED_NAMES.append(text := reason(path))
    return text


def _missing_names(path: str) -> Callable[[str], Any]:
    """`__getattr__` of the module that is served as `path`."""

    def absent(name: str) -> Any:
        full = f"{path}.{name}"
        if full in SERVED or full in PACKAGES:
            return importlib.import_module(full)
        # The import system, pickle and inspect look names up in every module.
        asker = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
        probes = name.startswith("__") or asker in sys.stdlib_module_names
        # AttributeError, not ImportError: `from package import submodule` asks for the attribute first.
        raise AttributeError((reason if probes else _refuse)(full))

    return absent


class _Alias(Loader):
    """Puts one of our own modules under another path: the same object, so its state is one."""

    def __init__(self, target: str):
        self._target = target

    def get_code(self, name: str) -> CodeType:
        """What `python3 -m name` runs: the program, with the default configuration of that name."""
        _, default = ENTRY_POINTS.get(name, ("", ""))
        first = [f"--config-name={default}"] if default else []
        run = f"sys.exit(program.main([*{first}, *sys.argv[1:]]))" if name in ENTRY_POINTS else ""
        return compile(f"import sys, {self._target} as program\n{run}", self._target, "exec")

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        name = module.__spec__.name
        sys.modules[name] = served = importlib.import_module(self._target)
        vars(served).setdefault("__getattr__", _missing_names(name))


class _View(Loader):
    """Fills a module made for the import with the names of the table; whoever asks it for another one is told why
    not."""

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _missing_names(module.__name__)  # type: ignore[method-assign]
        names: Any = SERVED.get(module.__name__, {})
        for name, target in names.items():
            setattr(module, name, pkgutil.resolve_name(target))


class PluginFinder(MetaPathFinder):
    """Asked last. Serves the table and refuses what lies beside it; any other name is none of its business."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("verl."):
            return None
        entry = SERVED.get(fullname)
        if isinstance(entry, str):
            return ModuleSpec(fullname, _Alias(entry), origin=entry)
        if entry is not None or fullname in PACKAGES:
            return ModuleSpec(fullname, _View(), is_package=True)
        if any(p in REFUSED or p in PACKAGES or p in SERVED for p in [*_parents(fullname), fullname]):
            raise ImportError(_refuse(fullname), name=fullname)
        return None


def install() -> None:
    """Put the finder at the end of `sys.meta_path` and name the form of batches for plug-ins; again is harmless."""
    if not any(isinstance(finder, PluginFinder) for finder in sys.meta_path):
        sys.meta_path.append(PluginFinder())
    plugins.BATCH_VIEWS[:] = ["verl.compat.data_proto:DataProto.from_trajectories"]
