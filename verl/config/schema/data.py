"""`data.`: files, columns, lengths, order."""

from verl.config.schema.base import SEEDS, FilePath, Group, Map, choice, items, key, open_map, same_as, sub


class UserClassConfig(Group):
    """A class of the user's own.

    Attributes:
        path: `file.py` or `pkg://module`.
        name: Name of the class in it.
    """

    path: FilePath | None = None
    name: str | None = None


class SamplerConfig(Group):
    """The user's own order of rows.

    Attributes:
        class_path: `file.py` or `pkg://module`.
        class_name: Name of the class in it.
    """

    class_path: FilePath | None = None
    class_name: str | None = None


class AugmentationConfig(Group):
    """Images of training rows changed by chance, drawn anew in every epoch.

    Attributes:
        rotate: Turned by up to so many degrees either way; 0 = not.
        crop: A window of at least this share of each side, scaled to the image's size; 1 = the whole image.
        color_jitter: Brightness, contrast and colour changed by up to this share; 0 = not.
        path: `file.py` or `pkg://module` with a function of your own, `augment(image, rng) -> image`.
        name: Name of the function in it.
    """

    rotate: float = key(0.0, low=0, high=180, ours=True)
    crop: float = key(1.0, above=0, high=1, ours=True)
    color_jitter: float = key(0.0, low=0, high=1, ours=True)
    path: FilePath | None = key(None, ours=True)
    name: str = key("augment", ours=True)


class FilesConfig(Group):
    """Files of rows: which of them, their media, their order.

    Attributes:
        train_files: One or several parquet, json or jsonl files; local, `hdfs://`, `s3://` (copied once to
            `cache_dir`).
        val_files: The same for validation; null = no validation.
        image_key: Column of the images.
        video_key: Column of the videos.
        shuffle: New order each epoch; order = f(seed, epoch).
        seed: Seed of the order.
        train_max_samples: Use at most this many rows (random with `shuffle`, else the first); -1 = all.
        val_max_samples: The same for validation.
        apply_chat_template_kwargs: Passed to the chat template (`enable_thinking`, …); same for training, validation,
            filtering.
        mm_processor_kwargs: Passed to the processor (`min_pixels`, …).
        allow_image_urls: Fetch images that the data names by http URL.
        trust_remote_code: Run code that is shipped with the tokenizer, and with the model.
        use_shm: Copy files to shared memory first.
        cache_dir: Where remote files are kept.
        max_bad_row_ratio: More unusable rows than this refuse the run.
    """

    train_files: list[FilePath] = items("~/data/gsm8k/train.parquet", ours=True)
    val_files: list[FilePath] | None = None
    image_key: str = "images"
    video_key: str = "videos"
    shuffle: bool = True
    seed: int = same_as("trainer.seed", low=0, high=SEEDS)
    train_max_samples: int = key(-1, low=1, also=-1)
    val_max_samples: int = key(-1, low=1, also=-1)
    apply_chat_template_kwargs: Map = open_map()
    mm_processor_kwargs: Map = open_map()
    allow_image_urls: bool = key(False, ours=True)
    custom_cls: UserClassConfig = sub(UserClassConfig)
    trust_remote_code: bool = False
    use_shm: bool = False
    cache_dir: FilePath = "~/.cache/verl/rlhf"
    max_bad_row_ratio: float = key(0.01, low=0, high=1, ours=True)


class DataConfig(FilesConfig):
    """Prompts: files, columns, lengths, order.

    Attributes:
        train_batch_size: Prompts per step; responses per step = this × `rollout.n`.
        gen_batch_size: Prompts drawn at a time when groups are refilled; null = what is missing.
        max_prompt_length: Tokens of a prompt after templating (images counted).
        max_response_length: All tokens after the prompt, tool output included.
        filter_overlong_prompts: Drop prompts longer than `max_prompt_length`; counted and shown.
        filter_overlong_prompts_workers: Processes of the length scan.
        truncation: Prompts that are too long and not filtered: `error`, `left`, `right`, `middle`.
        prompt_key: Column of the prompt.
        audio_key: Column of the audio.
        reward_fn_key: Column that selects the reward function.
        validation_shuffle: Shuffle the validation rows.
        image_patch_size: null = the processor's own.
        tokenizer: Tokenizer of the data; null = the model's.
        tool_config_path: Tools counted in the prompt length.
        function_tool_path: Function tools counted in the prompt length.
        dataloader_num_workers: At most this many loading processes.
    """

    augmentation: AugmentationConfig = sub(AugmentationConfig)
    val_files: list[FilePath] | None = items("~/data/gsm8k/test.parquet", ours=True)
    train_batch_size: int = key(1024, low=1)
    gen_batch_size: int | None = key(None, low=1)
    max_prompt_length: int = key(512, low=1)
    max_response_length: int = key(512, low=1)
    filter_overlong_prompts: bool = False
    filter_overlong_prompts_workers: int = key(1, low=1)
    truncation: str = choice("error", "error", "left", "right", "middle")
    prompt_key: str = "prompt"
    audio_key: str = "audios"
    reward_fn_key: str = "data_source"
    validation_shuffle: bool = False
    image_patch_size: int | None = key(None, low=1, ours=True)
    tokenizer: FilePath | None = same_as("actor_rollout_ref.model.tokenizer_path")
    tool_config_path: FilePath | None = same_as("actor_rollout_ref.rollout.multi_turn.tool_config_path")
    function_tool_path: FilePath | None = same_as("actor_rollout_ref.rollout.multi_turn.function_tool_path")
    sampler: SamplerConfig = sub(SamplerConfig)
    datagen: UserClassConfig = sub(UserClassConfig)
    dataloader_num_workers: int = key(8, low=0)


class SFTDataConfig(FilesConfig):
    """Rows to learn from.

    Attributes:
        train_batch_size: Sequences per optimizer step, global.
        micro_batch_size_per_gpu: Sequences per forward on one device; null = by token budget.
        use_dynamic_bsz: Token budget even if a micro-batch size is given.
        max_token_len_per_gpu: Token budget of a micro-batch on one device.
        max_length: Tokens of a sequence.
        truncation: Sequences that are too long: `error`, `left`, `right`.
        messages_key: Column of the dialogue.
        tools_key: Column of the tools.
        enable_thinking_key: Column that switches thinking per row.
        enable_thinking_default: Rows without that column; null = the template's default.
        prompt_key: Column of the question; set it for question/answer rows.
        response_key: Column of the response.
        prompt_dict_keys: Keys inside a struct column.
        response_dict_keys: Keys inside a struct column.
        chosen_key: Column of the preferred response, for `preference.loss`.
        rejected_key: Column of the other response.
        margin_key: Column of the difference between their rewards, for `preference.loss=reward`.
        ignore_input_ids_mismatch: Accept a template that renders turns differently alone and together.
        tokenizer: Tokenizer of the data; null = the model's.
        num_workers: At most this many loading processes.
    """

    train_batch_size: int = key(256, low=1)
    micro_batch_size_per_gpu: int | None = key(None, low=1)
    use_dynamic_bsz: bool = True
    max_token_len_per_gpu: int = key(8192, low=1)
    max_length: int = key(1024, low=1)
    truncation: str = choice("error", "error", "left", "right")
    messages_key: str = "messages"
    tools_key: str = "tools"
    enable_thinking_key: str = "enable_thinking"
    enable_thinking_default: bool | None = None
    prompt_key: str | None = None
    response_key: str | None = None
    prompt_dict_keys: list[str] | None = None
    response_dict_keys: list[str] | None = None
    chosen_key: str = key("chosen", ours=True)
    rejected_key: str = key("rejected", ours=True)
    margin_key: str = key("margin", ours=True)
    ignore_input_ids_mismatch: bool = False
    tokenizer: FilePath | None = same_as("model.tokenizer_path")
    num_workers: int = key(8, low=0)
    cache_dir: FilePath = "~/.cache/verl/sft"
