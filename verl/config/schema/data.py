"""`data.`: files, columns, lengths, order."""

from verl.config.schema.base import FilePath, Group, Map, choice, items, key, open_map, same_as, sub


class UserClassConfig(Group):
    """A class of the user's own."""

    path: FilePath | None = None
    """`file.py` or `pkg://module`."""
    name: str | None = None
    """Name of the class in it."""


class SamplerConfig(Group):
    """The user's own order of rows."""

    class_path: FilePath | None = None
    """`file.py` or `pkg://module`."""
    class_name: str | None = None
    """Name of the class in it."""


class FilesConfig(Group):
    """Files of rows: which of them, their media, their order."""

    train_files: list[FilePath] = items("~/data/gsm8k/train.parquet", ours=True)
    """One or several parquet, json or jsonl files; local, `hdfs://`, `s3://` (copied once to `cache_dir`)."""
    val_files: list[FilePath] | None = None
    """The same for validation; null = no validation."""
    image_key: str = "images"
    """Column of the images."""
    video_key: str = "videos"
    """Column of the videos."""
    shuffle: bool = True
    """New order each epoch; order = f(seed, epoch)."""
    seed: int = same_as("trainer.seed")
    """Seed of the order."""
    train_max_samples: int = -1
    """Use at most this many rows (random with `shuffle`, else the first); -1 = all."""
    val_max_samples: int = -1
    """The same for validation."""
    apply_chat_template_kwargs: Map = open_map()
    """Passed to the chat template (`enable_thinking`, …); same for training, validation, filtering."""
    mm_processor_kwargs: Map = open_map()
    """Passed to the processor (`min_pixels`, …)."""
    custom_cls: UserClassConfig = sub(UserClassConfig)
    use_shm: bool = False
    """Copy files to shared memory first."""
    cache_dir: FilePath = "~/.cache/verl/rlhf"
    """Where remote files are kept."""
    max_bad_row_ratio: float = key(0.01, low=0, high=1, ours=True)
    """More unusable rows than this refuse the run."""


class DataConfig(FilesConfig):
    """Prompts: files, columns, lengths, order."""

    val_files: list[FilePath] | None = items("~/data/gsm8k/test.parquet", ours=True)
    train_batch_size: int = key(1024, low=1)
    """Prompts per step; responses per step = this × `rollout.n`."""
    gen_batch_size: int | None = key(None, low=1)
    """Prompts drawn at a time when groups are refilled; null = what is missing."""
    max_prompt_length: int = key(512, low=1)
    """Tokens of a prompt after templating (images counted)."""
    max_response_length: int = key(512, low=1)
    """All tokens after the prompt, tool output included."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than `max_prompt_length`; counted and shown."""
    filter_overlong_prompts_workers: int = key(1, low=1)
    """Processes of the length scan."""
    truncation: str = choice("error", "error", "left", "right", "middle")
    """Prompts that are too long and not filtered: `error`, `left`, `right`, `middle`."""
    prompt_key: str = "prompt"
    """Column of the prompt."""
    audio_key: str = "audios"
    """Column of the audio."""
    reward_fn_key: str = "data_source"
    """Column that selects the reward function."""
    validation_shuffle: bool = False
    """Shuffle the validation rows."""
    image_patch_size: int | None = key(None, low=1, ours=True)
    """null = the processor's own."""
    tokenizer: FilePath | None = same_as("actor_rollout_ref.model.tokenizer_path")
    """Tokenizer of the data; null = the model's."""
    trust_remote_code: bool = False
    """Run code that is shipped with the tokenizer."""
    tool_config_path: FilePath | None = same_as("actor_rollout_ref.rollout.multi_turn.tool_config_path")
    """Tools counted in the prompt length."""
    function_tool_path: FilePath | None = same_as("actor_rollout_ref.rollout.multi_turn.function_tool_path")
    """Function tools counted in the prompt length."""
    sampler: SamplerConfig = sub(SamplerConfig)
    datagen: UserClassConfig = sub(UserClassConfig)
    dataloader_num_workers: int = key(8, low=0)
    """At most this many loading processes."""


class SFTDataConfig(FilesConfig):
    """Rows to learn from."""

    train_batch_size: int = key(256, low=1)
    """Sequences per optimizer step, global."""
    micro_batch_size_per_gpu: int | None = key(None, low=1)
    """Sequences per forward on one device; null = by token budget."""
    use_dynamic_bsz: bool = True
    """Token budget even if a micro-batch size is given."""
    max_token_len_per_gpu: int = key(8192, low=1)
    """Token budget of a micro-batch on one device."""
    max_length: int = key(1024, low=1)
    """Tokens of a sequence."""
    truncation: str = choice("error", "error", "left", "right")
    """Sequences that are too long: `error`, `left`, `right`."""
    messages_key: str = "messages"
    """Column of the dialogue."""
    tools_key: str = "tools"
    """Column of the tools."""
    enable_thinking_key: str = "enable_thinking"
    """Column that switches thinking per row."""
    enable_thinking_default: bool | None = None
    """Rows without that column; null = the template's default."""
    prompt_key: str | None = None
    """Column of the question; set it for question/answer rows."""
    response_key: str | None = None
    """Column of the response."""
    prompt_dict_keys: list[str] | None = None
    """Keys inside a struct column."""
    response_dict_keys: list[str] | None = None
    """Keys inside a struct column."""
    ignore_input_ids_mismatch: bool = False
    """Accept a template that renders turns differently alone and together."""
    tokenizer: FilePath | None = same_as("model.tokenizer_path")
    """Tokenizer of the data; null = the model's."""
    num_workers: int = key(8, low=0)
    """At most this many loading processes."""
    cache_dir: FilePath = "~/.cache/verl/sft"
