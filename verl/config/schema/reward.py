"""`custom_reward_function.`, `reward_model.`, `reward_manager.`: how responses are scored."""

from typing import ClassVar

from verl.config.schema.base import FilePath, Group, Map, choice, key, open_map, same_as, sub
from verl.config.schema.rollout import RewardRolloutConfig

MANAGERS = ("naive", "batch", "dapo", "prime", "rate_limited", "limited", "gdpo", "remote")


class CustomRewardFunctionConfig(Group):
    """The user's own reward function."""

    path: FilePath | None = None
    """`file.py` or `pkg://module`."""
    name: str = "compute_score"
    """Name of the function in it."""
    reward_kwargs: Map = open_map()
    """Keyword arguments of the function, and of built-in ones by name (`method=flexible`)."""


class OverlongBufferConfig(Group):
    """Penalty on responses close to the length limit (DAPO)."""

    enable: bool = False
    """Charge the penalty."""
    len: int = 0
    """Tokens before the limit in which it grows."""
    penalty_factor: float = 1.0
    """Penalty at the limit."""
    log: bool = False
    """Log it beside the score."""


class RewardKwargsConfig(Group):
    """Arguments of the reward manager; further keys are passed to it."""

    open_keys: ClassVar[bool] = True
    overlong_buffer_cfg: OverlongBufferConfig = sub(OverlongBufferConfig)
    max_resp_len: int = same_as("data.max_response_length", low=1)
    """Length limit of the overlong penalty."""


class SandboxConfig(Group):
    """Where code in responses is run."""

    url: str | None = None
    """A remote sandbox; null = a local sandbox process."""
    max_concurrent: int = key(64, low=1)
    """Programs at a time."""
    memory_limit_mb: int = key(1024, low=1)
    """Memory of one program."""


class RewardModelModelConfig(Group):
    """The reward model's weights."""

    path: FilePath | None = None
    """Hugging Face id or directory."""
    trust_remote_code: bool = False
    """Run code that is shipped with the model."""


class RewardModelConfig(Group):
    """The manager, its processes, and the reward model."""

    reward_manager: str = choice("naive", *MANAGERS, registry="verl.workers.reward_manager.register")
    """What is called for a response, or the name of a registered manager; `limited` = `rate_limited`."""
    reward_kwargs: RewardKwargsConfig = sub(RewardKwargsConfig)
    num_workers: int = key(8, low=1)
    """Scoring processes."""
    timeout: float = key(300.0, above=0, ours=True)
    """Seconds per response."""
    max_error_ratio: float = key(0.1, low=0, high=1, ours=True)
    """Share of failed scores in a step that stops the run."""
    max_concurrent: int = key(1, low=1)
    """rate_limited: calls at a time."""
    max_rpm: int | None = key(None, low=1)
    """rate_limited: calls a minute."""
    max_tpm: int | None = key(None, low=1)
    """rate_limited: tokens a minute."""
    estimated_tokens_per_request: int = key(2000, low=1)
    """rate_limited: tokens one call is counted as."""
    sandbox_fusion: SandboxConfig = sub(SandboxConfig)
    enable: bool = False
    """Score with a model."""
    model: RewardModelModelConfig = sub(RewardModelModelConfig)
    rollout: RewardRolloutConfig = sub(RewardRolloutConfig)
    enable_resource_pool: bool = False
    """Devices of its own."""
    nnodes: int = key(0, low=0)
    """Nodes of that pool."""
    n_gpus_per_node: int = key(8, low=1)
    """Devices per node of that pool."""


class EvalRewardConfig(Group):
    """The processes that score in an evaluation."""

    num_workers: int = key(8, low=1)
    """Scoring processes."""
    timeout: float = key(300.0, above=0)
    """Seconds per response."""


class RewardManagerModuleConfig(Group):
    """Module of a manager class."""

    path: FilePath | None = None
    """`file.py` or `pkg://module`."""


class RewardManagerConfig(Group):
    """A manager class of the user's own."""

    source: str = choice("register", "register", "importlib")
    """`register`: a registered name; `importlib`: class `name` in `module.path`."""
    name: str = "naive"
    """Name of the manager or class."""
    module: RewardManagerModuleConfig = sub(RewardManagerModuleConfig)
