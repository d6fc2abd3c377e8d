"""`actor_rollout_ref.rollout.`: sampling, its engine, tools and agents."""

from verl.config.schema.base import SEEDS, FilePath, Group, Map, choice, items, key, open_map, same_as, sub
from verl.config.schema.misc import RoleProfilerConfig
from verl.config.schema.training import LogProbConfig

ENGINES = ("auto", "native", "vllm", "sglang", "hf")
TOOL_FORMATS: tuple[str, ...] = ("hermes", "qwen", "gpt-oss", "qwen3_coder", "glm", "seed", "minimax", "kimi")
TOOL_FORMATS += ("deepseek", "deepseek_v4", "gemma4", "llama3_json")
ENVIRONMENTS = ("custom", "gym", "command", "verifiers", "openenv", "nemo_gym", "harbor")
POLICIES = ("score", "mask", "drop", "resample")
MOST_RESPONSES = 2**16
"""To one prompt."""


class SamplingConfig(Group):
    """What is cut from the distribution that is sampled from.

    Attributes:
        top_p: Smallest set of tokens with this mass; 1 = off.
        top_k: Most likely tokens only; -1 or 0 = off.
        min_p: Tokens with at least this share of the most likely one's probability; 0 = off.
        repetition_penalty: 1 = off.
    """

    top_p: float = key(1.0, above=0, high=1)
    top_k: int = key(-1, low=-1)
    min_p: float = key(0.0, low=0, high=1, ours=True)
    repetition_penalty: float = key(1.0, low=0.01)


class ValKwargs(SamplingConfig):
    """Sampling during validation.

    Attributes:
        temperature: 0 = greedy.
        n: Responses per prompt.
        do_sample: null: sample if temperature > 0; False: greedy; True: sample.
        stop: Strings that end a response; null = as in training.
        stop_token_ids: Tokens that end a response; null = as in training.
    """

    temperature: float = key(0.0, low=0.01, high=100, also=0)
    repetition_penalty: float = key(1.0, low=0.01, ours=True)
    n: int = key(1, low=1, high=MOST_RESPONSES)
    do_sample: bool | None = key(None, ours=True)
    stop: list[str] = same_as("..stop", ours=True)
    stop_token_ids: list[int] = same_as("..stop_token_ids", low=0, ours=True)


class EngineKwargs(Group):
    """Arguments handed to the engine.

    Attributes:
        vllm: Passed to vLLM.
        sglang: Passed to SGLang.
    """

    vllm: Map = open_map()
    sglang: Map = open_map()


class CheckpointEngineConfig(Group):
    """How weights reach the sampler.

    Attributes:
        backend: How nodes that sample and do not train get weights: `naive` (over gloo), `nccl`, `hccl`, or `delta_sharded`:
            over gloo, of each weight what changed since the last transfer; sender and receiving nodes keep a copy of the
            weights in host memory.
        update_weights_bucket_megabytes: Size of one transfer.
        engine_kwargs: Arguments of the backend.
    """

    backend: str = choice("naive", "naive", "nccl", "hccl", "delta_sharded")
    update_weights_bucket_megabytes: int = key(2048, low=1)
    engine_kwargs: Map = open_map()


class MultiTurnConfig(Group):
    """Tools and turns.

    Attributes:
        enable: Rows without `agent_name` use `tool_agent`.
        max_assistant_turns: Most turns of the model.
        max_user_turns: Most turns of tools and users.
        max_parallel_calls: Tool calls of a turn that run at once.
        max_tool_response_length: Characters of a tool's response.
        tool_response_truncate_side: Which part of a longer one is cut.
        tool_config_path: Tools YAML.
        function_tool_path: File of functions that are tools.
        interaction_config_path: Interactions YAML.
        use_inference_chat_template: Each turn sees the dialogue as the template writes it (many drop earlier
            thinking), in a segment of its own where that differs from the tokens so far; false: the tokens stay as
            they were sampled.
        format: How the model writes tool calls.
    """

    enable: bool = False
    max_assistant_turns: int | None = key(None, low=1)
    max_user_turns: int | None = key(None, low=1)
    max_parallel_calls: int = key(1, low=1)
    max_tool_response_length: int = key(256, low=1)
    tool_response_truncate_side: str = choice("middle", "left", "middle", "right")
    tool_config_path: FilePath | None = None
    function_tool_path: FilePath | None = None
    interaction_config_path: FilePath | None = None
    use_inference_chat_template: bool = False
    format: str = choice("hermes", *TOOL_FORMATS, registry="@ToolParser.register in model.external_lib")


class EnvironmentConfig(Group):
    """What the policy acts in; a row's column `environment` (the same mapping) overrides it.

    Attributes:
        name: Which adapter.
        path: Class or factory (`file.py:Class`, `pkg.module:Class`), a program's command line, the Python that has
            `verifiers`, the URL of an OpenEnv or NeMo Gym server, or the folder of tasks, as the adapter needs.
        kwargs: Handed over as they are.
    """

    name: str | None = choice(None, *ENVIRONMENTS)
    path: str | None = None
    kwargs: Map = open_map()


class OnStatusConfig(Group):
    """What becomes of a trajectory by its status: scored; scored without gradient; left out; sampled again.

    Attributes:
        completed: The policy ended it.
        length: No token was left.
        max_turns: `max_assistant_turns` or `max_user_turns` ended it.
        max_calls: `max_calls` ended it.
        invalid_calls: Calls that cannot be read, several turns in a row.
        timeout: Past `trajectory_timeout`.
        environment_error: Its environment failed.
        aborted: The sampler gave up a request.
    """

    completed: str = choice("score", *POLICIES)
    length: str = choice("score", *POLICIES)
    max_turns: str = choice("score", *POLICIES)
    max_calls: str = choice("score", *POLICIES)
    invalid_calls: str = choice("score", *POLICIES)
    timeout: str = choice("resample", *POLICIES)
    environment_error: str = choice("resample", *POLICIES)
    aborted: str = choice("resample", *POLICIES)


class AgentConfig(Group):
    """Agent loops.

    Attributes:
        num_workers: At most this many processes for user-written agent loops, tools and environments; 0: they run in
            the driver.
        default_agent_loop: Loop of rows without `agent_name`; not given: `environment_agent` with an environment,
            `tool_agent` with `multi_turn.enable`.
        agent_loop_config_path: YAML list of `{name, _target_, …}`.
        step_rewards: Rewards of an environment's turns: added to the score, or on the last token of the turn that
            earned them.
        tool_timeout: Seconds of a tool call or a step of the environment; null = no limit.
        trajectory_timeout: Seconds of a trajectory; null = no limit.
        max_calls: Most tool calls of a trajectory.
        count_shared: A sampled token on which several segments go on is in the loss `once`, in the segment in which it
            was sampled, or in `every_segment` that has it.
        max_resamples: How often a trajectory is sampled again before its group does without it.
        http_host: Address on which sessions are served, and which their URLs name. Any but loopback lets other machines
            in, by the token in the URL alone.
        http_port: Port of all sessions, for which one process then runs the agent loops; 0: a free one in each process.
    """

    num_workers: int = key(8, low=0)
    default_agent_loop: str = "single_turn_agent"
    agent_loop_config_path: FilePath | None = None
    environment: EnvironmentConfig = sub(EnvironmentConfig)
    step_rewards: str = choice("sum", "sum", "tokens")
    tool_timeout: float | None = key(60.0, above=0, inf=True)
    trajectory_timeout: float | None = key(None, above=0, inf=True)
    max_calls: int | None = key(None, low=1)
    count_shared: str = choice("once", "once", "every_segment")
    max_resamples: int = key(3, low=0)
    http_host: str = "127.0.0.1"
    http_port: int = key(0, low=0, high=65535)
    on_status: OnStatusConfig = sub(OnStatusConfig)


class PrometheusConfig(Group):
    """Engine metrics, on loopback.

    Attributes:
        enable: Serve the engine's metrics.
        port: Port of the server.
        file: Its configuration file.
        served_model_name: Name the metrics carry.
    """

    enable: bool = False
    port: int = key(9090, low=1, high=65535)
    file: FilePath | None = None
    served_model_name: str | None = None


class TraceConfig(Group):
    """Traces of agent loops.

    Attributes:
        backend: `weave` or `mlflow`.
        token2text: Text beside token ids.
        max_samples_per_step_per_worker: Responses traced per step.
    """

    backend: str | None = choice(None, "weave", "mlflow")
    token2text: bool = False
    max_samples_per_step_per_worker: int | None = key(None, low=1)


class RolloutConfig(LogProbConfig, SamplingConfig):
    """Sampling and its engine.

    Attributes:
        name: `auto` (native in this release), `native`, `vllm`, `sglang`, `hf` (= native).
        n: Responses per prompt (group size).
        temperature: Training log-probs are taken at the same temperature.
        do_sample: False = greedy (refused in training).
        ignore_eos: Go on to `response_length` whatever is sampled.
        stop: Strings that end a response.
        stop_token_ids: Tokens that end a response, beside the model's own.
        seed: Per-request seeds are derived from it, the prompt's uid and the response's number.
        prompt_length: Longest prompt.
        response_length: A response never exceeds it.
        single_turn_response_length: Most tokens of one turn of the model in a dialogue; null = what the response may
            still have.
        dtype: Precision of sampling; null = the trainer's.
        tensor_model_parallel_size: Devices per engine; null = the fewest the model fits in. vllm: more than a node has, in
            whole nodes.
        data_parallel_size: Copies of the model. Each is an engine of its own, unless `expert_parallel_size` > 1: then they
            are one engine, and share the experts.
        expert_parallel_size: Devices over which whole experts are spread: tensor × data parallel size, or 1 (each device
            has a part of every expert).
        pipeline_model_parallel_size: Devices the layers are split over.
        gpu_memory_utilization: Share of the device's memory for weights and cache (vllm), static share (sglang);
            native: share of the memory that the trainer leaves, for the cache, on a CPU of half the machine's.
        max_num_batched_tokens: Tokens of one forward.
        max_num_seqs: Responses in flight.
        max_model_len: Longest sequence; null = prompt_length + response_length.
        enable_chunked_prefill: Prompts may be cut over several forwards.
        enable_prefix_caching: Equal prefixes are computed once.
        enforce_eager: No graph capture.
        cudagraph_capture_sizes: Batch sizes that are captured.
        free_cache_engine: Release weights and cache while training (colocated).
        load_format: `dummy` (weights come from the first sync), `auto`, `safetensors`.
        calculate_log_probs: Keep the sampler's log-probs.
        enable_rollout_routing_replay: Keep the experts that the sampler's tokens went to, for
            `actor.router_replay.mode=R3`.
        replay_sampling_mask: The trainer normalises over the tokens that top_p, top_k and min_p left of a draw, as the
            sampler does, in all log-probs and the entropy. Native and SGLang return them; for vLLM the trainer finds
            them with its own logits before the first update.
        logprobs_mode: Of the distribution sampled from, or before temperature and top-p.
        limit_images: Most images of a prompt; more are a bad row. null = any number (vLLM: its own 999).
        quantization: fp8 and the like, if the engine has it.
        quantization_config_file: The quantization's own settings.
        scheduling_policy: Order in which an engine serves requests.
        disable_log_stats: No statistics in the engine's log.
        skip_tokenizer_init: The engine needs no tokenizer.
        multi_stage_wake_up: Wake weights and cache one after the other.
        nnodes: > 0: a pool of its own for sampling.
        n_gpus_per_node: Devices per node of that pool.
        trainer_memory_utilization: With nnodes > 0, more samplers on the trainers' devices, with that share of their memory
            (as gpu_memory_utilization): they sample while the trainers wait, and what they have begun goes on in the pool
            when these compute. 0: none.
    """

    name: str = choice("auto", *ENGINES, ours=True)
    n: int = key(1, low=1, high=MOST_RESPONSES)
    temperature: float = key(1.0, low=0.01, high=100, also=0)
    do_sample: bool = True
    ignore_eos: bool = False
    stop: list[str] = items(ours=True)
    stop_token_ids: list[int] = items(low=0, ours=True)
    seed: int = same_as("trainer.seed", low=0, high=SEEDS)
    prompt_length: int = same_as("data.max_prompt_length", low=1)
    response_length: int = same_as("data.max_response_length", low=1)
    single_turn_response_length: int | None = key(None, low=1)
    dtype: str | None = same_as("actor_rollout_ref.actor.fsdp_config.dtype", ours=True)
    tensor_model_parallel_size: int | None = key(None, low=1, ours=True)
    data_parallel_size: int = key(1, low=1)
    expert_parallel_size: int = key(1, low=1)
    pipeline_model_parallel_size: int = key(1, low=1)
    gpu_memory_utilization: float = key(0.5, above=0, high=1)
    max_num_batched_tokens: int = key(8192, low=1)
    max_num_seqs: int = key(256, low=1, high=2**20)
    max_model_len: int | None = key(None, low=1, ours=True)
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    cudagraph_capture_sizes: list[int] | None = None
    free_cache_engine: bool = True
    load_format: str = choice("dummy", "dummy", "auto", "safetensors")
    calculate_log_probs: bool = True
    enable_rollout_routing_replay: bool = False
    replay_sampling_mask: bool = key(True, ours=True)
    logprobs_mode: str = choice("processed_logprobs", "processed_logprobs", "raw_logprobs")
    val_kwargs: ValKwargs = sub(ValKwargs)
    engine_kwargs: EngineKwargs = sub(EngineKwargs)
    limit_images: int | None = key(None, low=0)
    quantization: str | None = None
    quantization_config_file: FilePath | None = None
    scheduling_policy: str = "fcfs"
    disable_log_stats: bool = True
    skip_tokenizer_init: bool = True
    multi_stage_wake_up: bool = False
    checkpoint_engine: CheckpointEngineConfig = sub(CheckpointEngineConfig)
    nnodes: int = key(0, low=0, high=100_000)
    n_gpus_per_node: int = same_as("trainer.n_gpus_per_node", low=1, high=1024)
    trainer_memory_utilization: float = key(0.0, low=0, high=1, ours=True)
    multi_turn: MultiTurnConfig = sub(MultiTurnConfig)
    agent: AgentConfig = sub(AgentConfig)
    prometheus: PrometheusConfig = sub(PrometheusConfig)
    trace: TraceConfig = sub(TraceConfig)
    profiler: RoleProfilerConfig = sub(RoleProfilerConfig)


class RewardRolloutConfig(RolloutConfig):
    """The reward model's engine.

    Attributes:
        name: As `rollout.name`.
        response_length: Longest response.
        max_num_seqs: Requests in flight.
        load_format: Weights come from disk.
    """

    name: str = same_as("actor_rollout_ref.rollout.name", options=ENGINES)
    prompt_length: int = key(2048, low=1)
    response_length: int = key(2048, low=1)
    max_num_seqs: int = key(1024, low=1, high=2**20)
    load_format: str = choice("auto", "dummy", "auto", "safetensors")


class GenerationRolloutConfig(RolloutConfig):
    """Sampling without training.

    Attributes:
        n: Responses per prompt.
        seed: Per-request seeds are derived from it.
        load_format: Weights come from disk.
        n_gpus_per_node: Devices per node.
    """

    n: int = same_as("data.n_samples", low=1, high=MOST_RESPONSES)
    prompt_length: int = key(1536, low=1)
    response_length: int = key(512, low=1)
    seed: int = key(42, low=0, high=SEEDS)
    load_format: str = choice("auto", "dummy", "auto", "safetensors")
    n_gpus_per_node: int = same_as("trainer.n_gpus_per_node", low=1, high=1024)
