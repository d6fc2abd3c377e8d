"""The built-in reward managers of the public system as classes, for plug-ins that derive from them.

Those of `verl.workers.reward_manager` are called with a batch and return a reward tensor; those of the reward loop
score one response at a time (`run_single`). A run that names a built-in manager uses none of them
(`verl.reward.runner`).
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from verl.compat.data_proto import DataProto, DataProtoItem
from verl.reward.managers import RewardManagerBase
from verl.reward.rules import default_compute_score
from verl.reward.settings import Overlong
from verl.reward.user_function import get_reward_manager_cls as get_reward_manager_cls
from verl.reward.user_function import is_async
from verl.reward.user_function import register as register

Score = Callable[..., Any]


def _arguments(row: DataProtoItem, tokenizer: Any, reward_fn_key: str) -> tuple[dict[str, Any], int]:
    """(keywords of a reward function, tokens of the response) of a row."""
    columns = row.non_tensor_batch
    responses = row.batch["responses"]
    length = int(row.batch["attention_mask"][-len(responses) :].sum())
    extra = {
        **(columns.get("extra_info") or {}),
        "num_turns": columns.get("__num_turns__"),
        "rollout_reward_scores": columns.get("reward_scores") or {},
    }
    return {
        "data_source": columns[reward_fn_key],
        "solution_str": tokenizer.decode(responses[:length], skip_special_tokens=True),
        "ground_truth": columns["reward_model"].get("ground_truth"),
        "extra_info": extra,
    }, length


class AbstractRewardManager(ABC):
    """Base of managers that score a batch."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Score | None = None,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ):
        self.tokenizer, self.num_examine, self.reward_fn_key = tokenizer, num_examine, reward_fn_key
        self.compute_score: Score = compute_score or default_compute_score
        self.reward_kwargs = kwargs

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        """Rewards [N, L], on the last token of each response; with return_dict `{"reward_tensor",
        "reward_extra_info"}`, the second name → a value a row."""

    def _extract_reward_from_rm_scores(self, data: DataProto, return_dict: bool = False) -> Any:
        """The scores that the batch already has (`rm_scores`), None if it has none."""
        if "rm_scores" not in data.batch:
            return None
        names = data.meta_info.get("reward_extra_keys", [])
        extra = {name: data.non_tensor_batch[name] for name in names}
        scores = data.batch["rm_scores"]
        return {"reward_tensor": scores, "reward_extra_info": extra} if return_dict else scores


class NaiveRewardManager(AbstractRewardManager):
    """Row by row by `compute_score`; the first `num_examine` of each source are printed."""

    def _results(self, rows: list[dict[str, Any]]) -> list[Any]:
        return [self.compute_score(**row, **self.reward_kwargs) for row in rows]

    def _charged(self, reward: float, length: int, extra: dict[str, Any]) -> float:
        return reward

    def verify(self, data: DataProto) -> list[float]:
        """The score of each row."""
        rows = [_arguments(row, self.tokenizer, self.reward_fn_key)[0] for row in data]
        return [_number(result) for result in self._results(rows)]

    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        """See `AbstractRewardManager`."""
        if (ready := self._extract_reward_from_rm_scores(data, return_dict)) is not None:
            return ready
        pairs = [_arguments(row, self.tokenizer, self.reward_fn_key) for row in data]
        rewards = torch.zeros(data.batch["responses"].shape, dtype=torch.float32)
        extras, printed = [], dict[Any, int]()
        for number, result in enumerate(self._results([row for row, _ in pairs])):
            row, length = pairs[number]
            extra = dict(result) if isinstance(result, Mapping) else {}
            rewards[number, length - 1] = self._charged(_number(result), length, extra)
            extras.append(extra)
            source = row["data_source"]
            printed[source] = printed.get(source, 0) + 1
            if printed[source] <= self.num_examine:
                print(f"[response] {row['solution_str']}\n[ground_truth] {row['ground_truth']}\n[score] {result}")
        if not return_dict:
            return rewards
        names = dict.fromkeys(name for extra in extras for name in extra)
        columns = {name: [extra.get(name) for extra in extras] for name in names}
        return {"reward_tensor": rewards, "reward_extra_info": columns}


class BatchRewardManager(NaiveRewardManager):
    """One call of `compute_score` with lists: data_sources, solution_strs, ground_truths, extra_infos."""

    def _results(self, rows: list[dict[str, Any]]) -> list[Any]:
        lists = {f"{name}s": [row[name] for row in rows] for name in (rows[0] if rows else ())}
        return list(self.compute_score(**lists, **self.reward_kwargs)) if rows else []


class PrimeRewardManager(NaiveRewardManager):
    """As naive, with the four arguments of `compute_score` by position."""

    def _results(self, rows: list[dict[str, Any]]) -> list[Any]:
        return [self.compute_score(*row.values()) for row in rows]


class DAPORewardManager(NaiveRewardManager):
    """As naive, minus the penalty on responses in the last `overlong_buffer_cfg.len` tokens before `max_resp_len`.
    ValueError for a buffer without `max_resp_len`."""

    charges_overlong: ClassVar[bool] = True

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Score | None = None,
        reward_fn_key: str = "data_source",
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Any = None,
    ):
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.max_resp_len, self.overlong_buffer_cfg = max_resp_len, overlong_buffer_cfg
        if overlong_buffer_cfg is not None and overlong_buffer_cfg.enable and not max_resp_len:
            raise ValueError("overlong_buffer_cfg.enable=True needs max_resp_len, the length limit of a response")

    def _charged(self, reward: float, length: int, extra: dict[str, Any]) -> float:
        buffer = self.overlong_buffer_cfg
        if buffer is None or not buffer.enable:
            return reward
        assert self.max_resp_len is not None
        penalty = Overlong(buffer.len, buffer.penalty_factor, self.max_resp_len, buffer.log).penalty(length)
        if buffer.log:
            extra |= {"overlong_reward": penalty, "overlong": penalty < 0}
        return reward + penalty


class LoopRewardManager(RewardManagerBase):
    """The reward loop's managers: `compute_score`, async or in a thread, of one row."""

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """See `RewardManagerBase`. With a reward model a function that names them gets `reward_router_address` and
        `reward_model_tokenizer`."""
        row, _ = _arguments(data[0], self.tokenizer, self.config.data.get("reward_fn_key", "data_source"))
        score: Score = self.compute_score or default_compute_score
        offered = {name: self.options.get(name) for name in ("reward_router_address", "reward_model_tokenizer")}
        if offered["reward_router_address"] is not None:
            row |= {name: value for name, value in offered.items() if name in inspect.signature(score).parameters}
        result = await (score(**row) if is_async(score) else asyncio.to_thread(score, **row))
        extra = dict(result) if isinstance(result, Mapping) else {"acc": result}
        return {"reward_score": _number(result), "reward_extra_info": extra}


class RateLimitedRewardManager(LoopRewardManager):
    """The same within `reward_model.{max_concurrent, max_rpm, max_tpm}`, which the run watches over."""

    rate_limited: ClassVar[bool] = True


def _number(result: Any) -> float:
    """The score of what a reward function returned."""
    if isinstance(result, Mapping):
        return float(result["score"])
    return float(result[0] if isinstance(result, tuple) else result)
