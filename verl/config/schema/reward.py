"""`custom_reward_function.`, `reward_model.`, `reward_manager.`: how responses are scored."""

from typing import ClassVar

from verl.config.schema.base import FilePath, Group, Map, choice, key, open_map, same_as, sub
from verl.config.schema.rollout import RewardRolloutConfig

MANAGERS = ("naive", "batch", "dapo", "prime", "rate_limited", "limited", "gdpo", "remote")


class CustomRewardFunctionConfig(Group):
    """The user's own reward function.

    Attributes:
        path: `file.py` or `pkg://module`.
        name: Name of the function in it; null = compute_score.
        reward_kwargs: Keyword arguments of the function, and of built-in ones by name (`method=flexible`).
    """

    path: FilePath | None = None
    name: str = "compute_score"
    reward_kwargs: Map = open_map()


class OverlongBufferConfig(Group):
    """Penalty on responses close to the length limit (DAPO).

    Attributes:
        enable: Charge the penalty.
        len: Tokens before the limit in which it grows.
        penalty_factor: Penalty at the limit.
        log: Log it beside the score.
    """

    enable: bool = False
    len: int = key(0, low=0)
    penalty_factor: float = key(1.0, low=0)
    log: bool = False


class ScoringKwargsConfig(Group):
    """Arguments of the reward manager.

    Attributes:
        max_resp_len: Length limit of the overlong penalty: what the run had as `data.max_response_length`.
    """

    open_keys: ClassVar[bool] = True
    overlong_buffer_cfg: OverlongBufferConfig = sub(OverlongBufferConfig)
    max_resp_len: int | None = key(None, low=1)


class RewardKwargsConfig(ScoringKwargsConfig):
    """Arguments of the reward manager; further keys are passed to it.

    Attributes:
        max_resp_len: Length limit of the overlong penalty.
    """

    max_resp_len: int = same_as("data.max_response_length", low=1)


class SandboxConfig(Group):
    """Where code in responses is run.

    Attributes:
        url: A remote sandbox; null = a local sandbox process.
        max_concurrent: Programs at a time.
        memory_limit_mb: Memory of one program.
    """

    url: str | None = None
    max_concurrent: int = key(64, low=1)
    memory_limit_mb: int = key(1024, low=1)


class RewardModelModelConfig(Group):
    """The reward model's weights.

    Attributes:
        path: Hugging Face id or directory.
        trust_remote_code: Run code that is shipped with the model.
    """

    path: FilePath | None = None
    trust_remote_code: bool = False


class ScoringConfig(Group):
    """How responses are scored, in an evaluation as in training.

    Attributes:
        reward_manager: What is called for a response; `limited` = `rate_limited`.
        num_workers: Scoring processes.
        timeout: Seconds per response.
        max_concurrent: rate_limited: calls at a time.
        max_rpm: rate_limited: calls a minute.
        max_tpm: rate_limited: tokens a minute.
        estimated_tokens_per_request: rate_limited: tokens one call is counted as.
        images: The judge sees the row's images, another function has them as data URIs in `extra_info.images`.
    """

    reward_manager: str = choice("naive", *MANAGERS)
    reward_kwargs: ScoringKwargsConfig = sub(ScoringKwargsConfig)
    num_workers: int = key(8, low=1)
    timeout: float = key(300.0, above=0, inf=True)
    max_concurrent: int = key(1, low=1)
    max_rpm: int | None = key(None, low=1)
    max_tpm: int | None = key(None, low=1)
    estimated_tokens_per_request: int = key(2000, low=1)
    sandbox_fusion: SandboxConfig = sub(SandboxConfig)
    images: bool = False


class RewardModelConfig(ScoringConfig):
    """The manager, its processes, and the reward model.

    Attributes:
        reward_manager: What is called for a response, or the name of a registered manager; `limited` = `rate_limited`.
        timeout: Seconds per response.
        max_error_ratio: Share of failed scores in a step that stops the run.
        images: What scores gets the prompt's images: the judge and the reward model see them, another function has
            them as data URIs in `extra_info.images`, and those that tools showed in `extra_info.shown_images`.
        enable: Score with a model: a sequence classifier, or a judge that `custom_reward_function` asks.
        weights: The score is the sum of these rewards, each times its weight: `function` (the custom or the built-in
            one), `model` (the sequence classifier), and keys that the function returns. Empty: one of the two alone.
        enable_resource_pool: Devices of its own, for a sequence classifier or a served judge (on several devices a
            judge needs it).
        nnodes: Nodes of that pool.
        n_gpus_per_node: Devices per node of that pool.
    """

    reward_manager: str = choice("naive", *MANAGERS, registry="verl.workers.reward_manager.register")
    reward_kwargs: RewardKwargsConfig = sub(RewardKwargsConfig)
    timeout: float = key(300.0, above=0, inf=True, ours=True)
    max_error_ratio: float = key(0.1, low=0, high=1, ours=True)
    images: bool = key(False, ours=True)
    enable: bool = False
    weights: Map = open_map()
    model: RewardModelModelConfig = sub(RewardModelModelConfig)
    rollout: RewardRolloutConfig = sub(RewardRolloutConfig)
    enable_resource_pool: bool = False
    nnodes: int = key(0, low=0, high=100_000)
    n_gpus_per_node: int = key(8, low=1, high=1024)


class RewardManagerModuleConfig(Group):
    """Module of a manager class.

    Attributes:
        path: `file.py` or `pkg://module`.
    """

    path: FilePath | None = None


class RewardManagerConfig(Group):
    """A manager class of the user's own.

    Attributes:
        source: `register`: a registered name; `importlib`: class `name` in `module.path`.
        name: Name of the manager or class.
    """

    source: str = choice("register", "register", "importlib")
    name: str = "naive"
    module: RewardManagerModuleConfig = sub(RewardManagerModuleConfig)
