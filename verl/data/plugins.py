"""What users' own datasets and samplers derive from (docs/data.md, "Order"), and how their datasets are read."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data.files import DataError, Paths, RowFiles, UnreadableRow, local_path
from verl.data.load_object import load_extern_object
from verl.data.rows import BadRow, as_messages, check_readable

if TYPE_CHECKING:
    from verl.config.schema.data import DataConfig
    from verl.config.schema.entries import Config


_ATTRIBUTES: dict[str, Any] = {
    "prompt_key": "prompt",
    "image_key": "images",
    "video_key": "videos",
    "audio_key": "audios",
    "max_prompt_length": 1024,
    "truncation": "error",
    "cache_dir": None,
    "shuffle": False,
    "seed": None,
    "filter_overlong_prompts": True,
    "apply_chat_template_kwargs": {},
    "mm_processor_kwargs": {},
    "image_patch_size": None,
    "tool_config_path": None,
    "function_tool_path": None,
    "use_shm": False,
    "need_tools_kwargs": False,
    "filter_prompts": True,
    "return_raw_chat": True,
    "return_full_prompt": False,
    "return_multi_modal_inputs": True,
    "num_workers": 1,
    "serialize_dataset": False,
    "chat_template_func": None,
}
"""Attributes of `RLHFDataset` that subclasses read: the key of the `data` group, and its value where there is none."""


class RLHFDataset:
    """Rows of data files as dicts: the columns, `raw_prompt` (messages) and `index`. Derive to change rows.

    data_files: path or list; config: the `data` group; max_samples: the first so many rows, −1 all.
    Override `__getitem__`, `_build_messages(row) -> messages`, or `_read_files_and_tokenize`, which may set `dataframe`
    to any sequence of dicts. Checks, templating, the length filter and the order are done by the system on what
    `__getitem__` returns. Keys of the `data` group are attributes.
    """

    dataframe: Any = None
    prompt_key: str
    cache_dir: str | None

    def __init__(
        self,
        data_files: Paths,
        tokenizer: Any,
        config: DataConfig,
        processor: Any = None,
        max_samples: int = -1,
    ):
        for name, default in _ATTRIBUTES.items():
            setattr(self, name, config.get(name, default))
        self.data_files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.original_data_files = list(self.data_files)
        self.tokenizer = tokenizer
        self.processor = processor
        self.config = config
        self.max_samples = max_samples
        self.tool_schemas: list[Any] | None = None
        self._download()
        self._read_files_and_tokenize()

    def _download(self, use_origin_parquet: bool = False) -> None:
        """Make `data_files` local files."""
        self.data_files = [str(local_path(path, self.cache_dir)) for path in self.original_data_files]

    def _read_files_and_tokenize(self) -> None:
        """Open the files."""
        self.dataframe = RowFiles(self.data_files)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """`dataframe` as it is: the system filters by `data.filter_overlong_prompts`."""
        return dataframe

    def __len__(self) -> int:
        total = len(self.dataframe)
        return total if self.max_samples < 0 else min(total, self.max_samples)

    def _build_messages(self, example: dict[str, Any], key: str | None = None) -> list[dict[str, Any]]:
        """The row's messages, of the column `key` (None: `data.prompt_key`)."""
        key = key or self.prompt_key
        return as_messages(example.get(key), key, images=self.processor is not None)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = dict(self.dataframe[item])
        check_readable(row)
        extra = row.get("extra_info") or {}
        return row | {
            "raw_prompt": self._build_messages(row, *((self.prompt_key,) if self._takes_key else ())),
            "index": extra.get("index", item),
            "tools_kwargs": extra.get("tools_kwargs", {}),
            "interaction_kwargs": extra.get("interaction_kwargs", {}),
        }

    @property
    def _takes_key(self) -> bool:
        return len(inspect.signature(self._build_messages).parameters) > 1


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows to columns: tensors are stacked, everything else becomes an object array [rows]."""
    out: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in data_list for name in row):
        values = [row[name] for row in data_list if name in row]
        if all(type(value).__module__ == "torch" and hasattr(value, "stride") for value in values):
            import torch

            out[name] = torch.stack(values)
        else:
            array = np.empty(len(values), dtype=object)
            array[:] = values
            out[name] = array
    return out


class AbstractSampler(ABC):
    """Order of the training rows: an iterable of row numbers. Named by data.sampler.{class_path, class_name}.

    Must be deterministic, or have `state_dict`/`load_state_dict` with JSON values.
    """

    @abstractmethod
    def __init__(self, data_source: Any, data_config: DataConfig):
        """data_source: the data set (len, rows as dicts); data_config: the `data` group."""

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """Row numbers of one epoch."""


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that learns: prompts are drawn only as needed, and `update` runs after each step."""

    @abstractmethod
    def update(self, batch: Any) -> None:
        """Look at the batch that was just trained on."""


class AbstractDataGenerator(ABC):
    """Makes new rows from the data set after each step (data.datagen)."""

    def __init__(self, config: DataConfig):
        self.config = config

    @abstractmethod
    def generate(self, dataset: Any) -> Any:
        """Rows to append to the data set."""


class CustomRows:
    """A user's data set object seen as numbered rows. What it raises for a row makes that a bad row."""

    def __init__(self, dataset: Any, name: str):
        self.dataset = dataset
        self.paths = [name]

    @classmethod
    def load(cls, files: Paths, config: Config, tokenizer: Any, split: str, processor: Any = None) -> CustomRows:
        """Build `data.custom_cls` over the files of a split. processor: of a model that sees images."""
        data = config.data
        path, name = data.custom_cls.path, data.custom_cls.name
        if not name:
            raise DataError(f"data.custom_cls.path={path} needs data.custom_cls.name=CLASS")
        about = {"data_files": files, "tokenizer": tokenizer, "config": data, "processor": processor}
        kind = load_extern_object(str(path), name)
        try:
            # data.{train,val}_max_samples is applied later, to the rows that can be used
            dataset = kind(**about, max_samples=-1)
        except (TypeError, AttributeError) as error:
            takes = f"{', '.join(about)} and max_samples"
            raise DataError(f"data.custom_cls: {path}: {name}, given {takes}: {error}") from error
        for method in ("__len__", "__getitem__"):
            if not hasattr(dataset, method):
                raise DataError(f"{path}: {name} has no {method}")
        return cls(dataset, f"{path}:{name}")

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def sizes(self) -> list[int]:
        """Rows of each file: it is one."""
        return [len(self)]

    def locate(self, index: int) -> tuple[int, int]:
        """(0, index): a custom data set is one file."""
        return 0, index

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Rows start..stop−1; UnreadableRow for one that raised."""
        return [self.row(index) for index in range(start, stop)]

    def row(self, index: int) -> dict[str, Any]:
        """Row `index`."""
        try:
            row = dict(self.dataset[index])
        except BadRow as bad:
            return UnreadableRow(bad.problem, bad.detail)
        except Exception as error:  # user code
            return UnreadableRow("custom dataset failed", f"{type(error).__name__}: {error}")
        raw = row.get("raw_prompt")
        return row | {"raw_prompt": raw.tolist()} if isinstance(raw, np.ndarray) else row
