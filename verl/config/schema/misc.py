"""Profiling, Ray, replay of recorded samples."""

from verl.config.schema.base import FilePath, Group, Map, choice, items, key, open_map, sub

PROFILERS = ("torch", "torch_memory", "nsys", "npu")


class RoleProfilerConfig(Group):
    """Profiling of one role.

    Attributes:
        enable: Profile this role.
        all_ranks: On every rank.
        ranks: On these ranks.
        tool_config: Arguments of the tool, by the tool's name.
    """

    enable: bool = False
    all_ranks: bool = False
    ranks: list[int] = items(low=0)
    tool_config: Map = open_map()


class TorchMemoryConfig(Group):
    """Memory snapshots.

    Attributes:
        trace_alloc_max_entries: Allocations kept.
        stack_depth: Frames kept per allocation.
    """

    trace_alloc_max_entries: int = key(100000, low=1)
    stack_depth: int = key(32, low=1)


class GlobalToolConfig(Group):
    """Arguments of the profiling tools.

    Attributes:
        nsys: Arguments of nsys.
    """

    torch_memory: TorchMemoryConfig = sub(TorchMemoryConfig)
    nsys: Map = open_map()


class GlobalProfilerConfig(Group):
    """Which tool profiles which steps.

    Attributes:
        tool: `torch`, `torch_memory`, `nsys`, `npu`.
        steps: Steps to profile.
        profile_continuous_steps: One profile over neighbouring steps.
        save_path: Folder of the profiles.
        finish_hook_cmd: Shell command that runs once after the last profiled step, with VERL_PROFILE_SAVE_PATH, _TOOL,
            _RANK, _PID and _ROLE in its environment. One that fails is told, and the run goes on.
        finish_hook_all_ranks: On every rank that is profiled, whatever `finish_hook_ranks` names.
        finish_hook_ranks: On these of the ranks that are profiled; empty = on all of them.
    """

    tool: str | None = choice(None, *PROFILERS)
    steps: list[int] | None = None
    profile_continuous_steps: bool = False
    save_path: FilePath = "outputs/profile"
    finish_hook_cmd: str | None = None
    finish_hook_all_ranks: bool = False
    finish_hook_ranks: list[int] = items(low=0)
    global_tool_config: GlobalToolConfig = sub(GlobalToolConfig)


class RayConfig(Group):
    """Ray; started only for more than one device or when an address is given.

    Attributes:
        ray_init: Passed to `ray.init`.
        timeline_json_file: Where Ray's timeline is written at the end.
    """

    ray_init: Map = open_map(num_cpus=None)
    timeline_json_file: FilePath | None = None


class SkipRolloutConfig(Group):
    """Record sampled batches and replay them.

    Attributes:
        enable: Record the trajectories of each step, and use recorded ones instead of sampling; scores are computed anew.
        dump_dir: Where they are kept, below project and experiment.
        steps: Only these steps; empty = all.
        action: `cache`: those of the same step; `repeat`: the latest ones up to the step.
    """

    enable: bool = False
    dump_dir: FilePath = "~/.verl/rollout_dump"
    steps: list[int] = items(low=0)
    action: str = choice("cache", "cache", "repeat")


class SkipConfig(Group):
    """Parts of a step that are replayed."""

    rollout: SkipRolloutConfig = sub(SkipRolloutConfig)
