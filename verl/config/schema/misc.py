"""Profiling, Ray, replay of recorded samples."""

from verl.config.schema.base import FilePath, Group, Map, choice, items, key, open_map, sub

PROFILERS = ("torch", "torch_memory", "nsys", "npu")


class RoleProfilerConfig(Group):
    """Profiling of one role."""

    enable: bool = False
    """Profile this role."""
    all_ranks: bool = False
    """On every rank."""
    ranks: list[int] = items()
    """On these ranks."""
    tool_config: Map = open_map()
    """Arguments of the tool, by the tool's name."""


class TorchMemoryConfig(Group):
    """Memory snapshots."""

    trace_alloc_max_entries: int = key(100000, low=1)
    """Allocations kept."""
    stack_depth: int = key(32, low=1)
    """Frames kept per allocation."""


class GlobalToolConfig(Group):
    """Arguments of the profiling tools."""

    torch_memory: TorchMemoryConfig = sub(TorchMemoryConfig)
    nsys: Map = open_map()
    """Arguments of nsys."""


class GlobalProfilerConfig(Group):
    """Which tool profiles which steps."""

    tool: str | None = choice(None, *PROFILERS)
    """`torch`, `torch_memory`, `nsys`, `npu`."""
    steps: list[int] | None = None
    """Steps to profile."""
    profile_continuous_steps: bool = False
    """One profile over neighbouring steps."""
    save_path: FilePath = "outputs/profile"
    """Folder of the profiles."""
    global_tool_config: GlobalToolConfig = sub(GlobalToolConfig)


class RayConfig(Group):
    """Ray; started only for more than one device or when an address is given."""

    ray_init: Map = open_map(num_cpus=None)
    """Passed to `ray.init`."""
    timeline_json_file: FilePath | None = None
    """Where Ray's timeline is written at the end."""


class SkipRolloutConfig(Group):
    """Record sampled batches and replay them."""

    enable: bool = False
    """Record, and replay what is recorded."""
    dump_dir: FilePath = "~/.verl/rollout_dump"
    """Where batches are kept."""
    steps: list[int] = items()
    """Only these steps; empty = all."""
    action: str = "cache"
    """`cache`: use a recorded batch if there is one."""


class SkipConfig(Group):
    """Parts of a step that are replayed."""

    rollout: SkipRolloutConfig = sub(SkipRolloutConfig)
