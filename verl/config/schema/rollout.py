"""`actor_rollout_ref.rollout.`: sampling, its engine, tools and agents."""

from verl.config.schema.base import FilePath, Group, Map, choice, items, key, open_map, same_as, sub
from verl.config.schema.misc import RoleProfilerConfig

ENGINES = ("auto", "native", "vllm", "sglang", "hf")
TOOL_FORMATS: tuple[str, ...] = ("hermes", "qwen", "gpt-oss", "qwen3_coder", "glm", "seed", "minimax", "kimi")
TOOL_FORMATS += ("deepseek_v4", "gemma4")


class ValKwargs(Group):
    """Sampling during validation."""

    temperature: float = key(0.0, low=0)
    """0 = greedy."""
    top_p: float = key(1.0, above=0, high=1)
    """Smallest set of tokens with this mass; 1 = off."""
    top_k: int = key(-1, low=-1)
    """Most likely tokens only; -1 or 0 = off."""
    min_p: float = key(0.0, low=0, high=1, ours=True)
    """Tokens with at least this share of the most likely one's probability; 0 = off."""
    repetition_penalty: float = key(1.0, above=0, ours=True)
    """1 = off."""
    n: int = key(1, low=1)
    """Responses per prompt."""
    do_sample: bool | None = key(None, ours=True)
    """null: sample if temperature > 0; False: greedy; True: sample."""
    stop: list[str] = same_as("..stop", ours=True)
    """Strings that end a response; null = as in training."""
    stop_token_ids: list[int] = same_as("..stop_token_ids", ours=True)
    """Tokens that end a response; null = as in training."""


class EngineKwargs(Group):
    """Arguments handed to the engine."""

    vllm: Map = open_map()
    """Passed to vLLM."""
    sglang: Map = open_map()
    """Passed to SGLang."""


class CheckpointEngineConfig(Group):
    """How weights reach the sampler."""

    backend: str = choice("naive", "naive", "nccl", "hccl")
    """`naive` (= chosen: in process, shared memory, device handles, broadcast), `nccl`, `hccl`."""
    update_weights_bucket_megabytes: int = key(2048, low=1)
    """Size of one transfer."""
    engine_kwargs: Map = open_map()
    """Arguments of the backend."""


class MultiTurnConfig(Group):
    """Tools and turns."""

    enable: bool = False
    """Rows without `agent_name` use `tool_agent`."""
    max_assistant_turns: int | None = key(None, low=1)
    """Most turns of the model."""
    max_user_turns: int | None = key(None, low=1)
    """Most turns of tools and users."""
    max_parallel_calls: int = key(1, low=1)
    """Tool calls per turn."""
    max_tool_response_length: int = key(256, low=1)
    """Characters of a tool's response."""
    tool_response_truncate_side: str = choice("middle", "left", "middle", "right")
    """Which part of a longer one is cut."""
    tool_config_path: FilePath | None = None
    """Tools YAML."""
    function_tool_path: FilePath | None = None
    """File of functions that are tools."""
    interaction_config_path: FilePath | None = None
    """Interactions YAML."""
    format: str = choice("hermes", *TOOL_FORMATS, registry="a tool parser in a module of model.external_lib")
    """How the model writes tool calls."""


class AgentConfig(Group):
    """Agent loops."""

    num_workers: int = key(8, low=0)
    """At most this many processes for user-written agent loops; 0: they run in the driver."""
    default_agent_loop: str = "single_turn_agent"
    """Loop of rows without `agent_name`."""
    agent_loop_config_path: FilePath | None = None
    """YAML list of `{name, _target_, …}`."""


class PrometheusConfig(Group):
    """Engine metrics, on loopback."""

    enable: bool = False
    """Serve the engine's metrics."""
    port: int = key(9090, low=1, high=65535)
    """Port of the server."""
    file: FilePath | None = None
    """Its configuration file."""
    served_model_name: str | None = None
    """Name the metrics carry."""


class TraceConfig(Group):
    """Traces of agent loops."""

    backend: str | None = choice(None, "weave", "mlflow")
    """`weave` or `mlflow`."""
    token2text: bool = False
    """Text beside token ids."""
    max_samples_per_step_per_worker: int | None = key(None, low=1)
    """Responses traced per step."""


class RolloutConfig(Group):
    """Sampling and its engine."""

    name: str = choice("auto", *ENGINES, ours=True)
    """`auto` (native in this release), `native`, `vllm`, `sglang`, `hf` (= native)."""
    n: int = key(1, low=1)
    """Responses per prompt (group size)."""
    temperature: float = 1.0
    """Training log-probs are taken at the same temperature."""
    top_p: float = key(1.0, above=0, high=1)
    """Smallest set of tokens with this mass; 1 = off."""
    top_k: int = key(-1, low=-1)
    """Most likely tokens only; -1 or 0 = off."""
    min_p: float = key(0.0, low=0, high=1, ours=True)
    """Tokens with at least this share of the most likely one's probability; 0 = off."""
    do_sample: bool = True
    """False = greedy (refused in training)."""
    ignore_eos: bool = False
    """Go on to `response_length` whatever is sampled."""
    repetition_penalty: float = key(1.0, above=0)
    """1 = off."""
    stop: list[str] = items(ours=True)
    """Strings that end a response."""
    stop_token_ids: list[int] = items(ours=True)
    """Tokens that end a response, beside the model's own."""
    seed: int = same_as("trainer.seed")
    """Per-request seeds are derived from it, the prompt's uid and the response's number."""
    prompt_length: int = same_as("data.max_prompt_length", low=1)
    """Longest prompt."""
    response_length: int = same_as("data.max_response_length", low=1)
    """A response never exceeds it."""
    dtype: str | None = same_as("actor_rollout_ref.actor.fsdp_config.dtype", ours=True)
    """Precision of sampling; null = the trainer's."""
    tensor_model_parallel_size: int | None = key(None, low=1, ours=True)
    """Devices per engine; null = the fewest the model fits in."""
    data_parallel_size: int = key(1, low=1)
    """Copies of the model within an engine."""
    expert_parallel_size: int = key(1, low=1)
    """Devices the experts are split over."""
    pipeline_model_parallel_size: int = key(1, low=1)
    """Devices the layers are split over."""
    gpu_memory_utilization: float = key(0.5, above=0, high=1)
    """Share of the device's memory for weights and cache (vllm), static share (sglang); native: share of free memory
    for the cache."""
    max_num_batched_tokens: int = key(8192, low=1)
    """Tokens of one forward."""
    max_num_seqs: int = key(256, low=1)
    """Responses in flight."""
    max_model_len: int | None = key(None, low=1, ours=True)
    """Longest sequence; null = prompt_length + response_length."""
    enable_chunked_prefill: bool = True
    """Prompts may be cut over several forwards."""
    enable_prefix_caching: bool = True
    """Equal prefixes are computed once."""
    enforce_eager: bool = False
    """No graph capture."""
    cudagraph_capture_sizes: list[int] | None = None
    """Batch sizes that are captured."""
    free_cache_engine: bool = True
    """Release weights and cache while training (colocated)."""
    load_format: str = choice("dummy", "dummy", "auto", "safetensors")
    """`dummy` (weights come from the first sync), `auto`, `safetensors`."""
    calculate_log_probs: bool = True
    """Keep the sampler's log-probs."""
    logprobs_mode: str = choice("processed_logprobs", "processed_logprobs", "raw_logprobs")
    """Of the distribution sampled from, or before temperature and top-p."""
    log_prob_micro_batch_size_per_gpu: int | None = key(None, low=1)
    """Pass that recomputes old log-probs: responses per forward; null = by token budget."""
    log_prob_use_dynamic_bsz: bool | None = same_as("actor_rollout_ref.actor.use_dynamic_bsz")
    """That pass by token budget."""
    log_prob_max_token_len_per_gpu: int = same_as("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", low=1)
    """Its token budget."""
    val_kwargs: ValKwargs = sub(ValKwargs)
    engine_kwargs: EngineKwargs = sub(EngineKwargs)
    limit_images: int | None = key(None, low=0)
    """Images per prompt; null = the data set's maximum."""
    quantization: str | None = None
    """fp8 and the like, if the engine has it."""
    quantization_config_file: FilePath | None = None
    """The quantization's own settings."""
    scheduling_policy: str = "fcfs"
    """Order in which an engine serves requests."""
    disable_log_stats: bool = True
    """No statistics in the engine's log."""
    skip_tokenizer_init: bool = True
    """The engine needs no tokenizer."""
    multi_stage_wake_up: bool = False
    """Wake weights and cache one after the other."""
    checkpoint_engine: CheckpointEngineConfig = sub(CheckpointEngineConfig)
    nnodes: int = key(0, low=0)
    """> 0: a pool of its own for sampling."""
    n_gpus_per_node: int = same_as("trainer.n_gpus_per_node", low=1)
    """Devices per node of that pool."""
    multi_turn: MultiTurnConfig = sub(MultiTurnConfig)
    agent: AgentConfig = sub(AgentConfig)
    prometheus: PrometheusConfig = sub(PrometheusConfig)
    trace: TraceConfig = sub(TraceConfig)
    profiler: RoleProfilerConfig = sub(RoleProfilerConfig)


class RewardRolloutConfig(RolloutConfig):
    """The reward model's engine."""

    name: str = same_as("actor_rollout_ref.rollout.name", options=ENGINES)
    """As `rollout.name`."""
    prompt_length: int = key(2048, low=1)
    response_length: int = key(2048, low=1)
    """Longest response."""
    max_num_seqs: int = key(1024, low=1)
    """Requests in flight."""
    load_format: str = choice("auto", "dummy", "auto", "safetensors")
    """Weights come from disk."""


class GenerationRolloutConfig(RolloutConfig):
    """Sampling without training."""

    n: int = same_as("data.n_samples", low=1)
    """Responses per prompt."""
    prompt_length: int = key(1536, low=1)
    response_length: int = key(512, low=1)
    seed: int = 42
    """Per-request seeds are derived from it."""
    load_format: str = choice("auto", "dummy", "auto", "safetensors")
    """Weights come from disk."""
    n_gpus_per_node: int = same_as("trainer.n_gpus_per_node", low=1)
    """Devices per node."""
