"""The order in which prompts are drawn, and the position in it (docs/data.md, "Order").

Without a custom sampler the order is a function of (seed, epoch) alone, and a position is two integers:
(epoch, offset). A resumed run draws exactly the prompts that the uninterrupted one would have drawn.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from verl.data.files import DataError, notice
from verl.data.rows import BadRow
from verl.trajectory import Prompt

if TYPE_CHECKING:
    from verl.config.schema.entries import Config


class PromptStream:
    """Draws prompts of a dataset (`PromptDataset`, or any with its `len`, `order` and `prompt`), epoch after epoch.

    A step takes `batch_size` prompts with `take()`. Rows that are left at the end of an epoch, fewer than
    asked for, are not used in that epoch, unless `take(n, cross=True)` (refills) lets a draw run on into the
    next one. A row that fails when it is drawn is skipped, replaced by the next in the order, and recorded
    in `skipped`; more than `max_bad_ratio` of the rows in one epoch are a DataError.
    `sampler` is a custom sampler (its order replaces the seeded one); with an `update` it `learns` from batches.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool,
        sampler: Any = None,
        max_bad_ratio: float = 1.0,
    ):
        self.dataset = dataset
        self.batch_size = batch_size
        seeded = sampler is None
        self._order: Any = _Seeded(dataset, seed, shuffle) if seeded else _Sampled(sampler, len(dataset))
        self._sampler = sampler
        self.learns = hasattr(sampler, "update")
        if self.learns and not hasattr(sampler, "state_dict"):
            notice(
                f"data.sampler: {type(sampler).__name__} learns (update) and has no state_dict: a resumed run starts "
                "with a new one, in another order (docs/data.md)"
            )
        self.epoch = 0
        self.offset = 0
        self.skipped: list[dict[str, Any]] = []
        self._max_bad_ratio = max_bad_ratio
        self._failed: Counter[int] = Counter()  # by epoch
        if self.rows_per_epoch < batch_size:
            todo = "lower the batch size or add data"
            rows = f"{self.rows_per_epoch} usable rows"
            raise DataError(f"{rows} are fewer than data.train_batch_size={batch_size}: {todo}")

    @property
    def rows_per_epoch(self) -> int:
        """Prompts that an epoch offers."""
        return len(self._sampler if hasattr(self._sampler, "__len__") else self.dataset)

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in an epoch."""
        return self.rows_per_epoch // self.batch_size

    @property
    def unused_per_epoch(self) -> int:
        """Rows left over at the end of every epoch."""
        return self.rows_per_epoch % self.batch_size

    def take(self, n: int | None = None, *, cross: bool = False) -> list[Prompt]:
        """The next n prompts (default: a batch). Raises DataError if n exceeds an epoch without `cross`."""
        n = self.batch_size if n is None else n
        if not cross and n > self.rows_per_epoch:
            raise DataError(f"{n} prompts are asked for at once, an epoch has {self.rows_per_epoch}")
        if not cross and self.rows_per_epoch - self.offset < n:
            self.epoch, self.offset = self.epoch + 1, 0
        out: list[Prompt] = []
        failed = 0
        while len(out) < n:
            row = self._next_row()
            try:
                prompt = self.dataset.prompt(row, self.epoch)
            except BadRow as bad:
                failed += 1
                self._skip(row, bad, failed)
                continue
            failed, prompt.number = 0, row
            if self._sampler is not None:
                # A sampler may give a row twice in an epoch; the place in the order keeps the groups apart.
                prompt.uid = f"{prompt.uid}+{self.offset - 1}"
            out.append(prompt)
        return out

    def _skip(self, row: int, bad: BadRow, in_a_row: int) -> None:
        """Record a row that failed when it was drawn.

        DataError if too many of the epoch's rows failed, or as many in a row as an epoch has.
        """
        record = {"row": row, "epoch": self.epoch, "problem": bad.problem, "detail": bad.detail}
        self.skipped.append(record)
        notice(f"prompt {row} of epoch {self.epoch} is skipped: {bad}")
        self._failed[self.epoch] += 1
        failed, rows = self._failed[self.epoch], self.rows_per_epoch
        if in_a_row >= rows:
            raise DataError(f"{in_a_row} rows in a row failed when they were drawn; the last: {bad}")
        if failed > self._max_bad_ratio * rows:
            raise DataError(
                f"{failed} of {rows} rows of epoch {self.epoch} failed when they were drawn, which "
                f"data.max_bad_row_ratio={self._max_bad_ratio} does not allow; the last: {bad}. "
                "Repair the rows, or raise it"
            )

    def _next_row(self) -> int:
        while (row := self._order.at(self.epoch, self.offset)) is None:
            if self.offset == 0:
                raise DataError("the custom sampler gives no row at all (data.sampler.class_path)")
            self.epoch, self.offset = self.epoch + 1, 0
        self.offset += 1
        return row

    def update(self, batch: Any) -> None:
        """End of a training step: a curriculum sampler learns from the batch; nothing otherwise."""
        if self.learns:
            self._sampler.update(batch=batch)

    def state(self) -> dict[str, Any]:
        """The position: {"epoch", "offset"}; with a custom sampler also what it gave and its own state."""
        return {"epoch": self.epoch, "offset": self.offset} | self._order.state()

    def row_at(self, state: Mapping[str, Any]) -> int | None:
        """The row that comes next at a position; None at the end of an epoch, and with a custom sampler."""
        return self._order.at(state["epoch"], state["offset"]) if isinstance(self._order, _Seeded) else None

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to a position that `state` gave."""
        self.epoch, self.offset = int(state["epoch"]), int(state["offset"])
        self._order.load(state)


class _Seeded:
    """Order of an epoch = f(seed, epoch)."""

    def __init__(self, dataset: Any, seed: int, shuffle: bool):
        self._of = lru_cache(1)(partial(dataset.order, seed=seed, shuffle=shuffle))

    def at(self, epoch: int, offset: int) -> int | None:
        order = self._of(epoch=epoch)
        return int(order[offset]) if offset < len(order) else None

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Nothing to restore: the position is all."""


class _Sampled:
    """Rows as a custom sampler gives them, one by one and only as they are needed.

    A sampler with `state_dict`/`load_state_dict` is put back by those, and must go on from there when it is
    iterated again. Any other must be deterministic from its start on: a resumed run draws again what was drawn before.
    It need not give the same order when it is iterated once more, so rows that it gave to this process are kept, for
    those that go back to the stream.
    """

    def __init__(self, sampler: Any, rows: int):
        self._sampler, self._rows = sampler, rows
        self._has_state = hasattr(sampler, "state_dict")
        self._drawn: list[int] = []  # by epoch, how many rows were taken
        self._given: list[array[int]] = []  # by epoch, what the sampler gave; empty for one that has a state
        self._iterator: Iterator[Any] = iter(())

    def at(self, epoch: int, offset: int) -> int | None:
        if epoch >= len(self._drawn):
            self._drawn.append(0)
        if epoch >= len(self._given):
            self._start(epoch)
        rows, place = self._given[epoch], self._drawn[epoch]
        row = rows[place] if place < len(rows) else None
        if row is None and epoch == len(self._given) - 1:
            row = self._next()
        self._drawn[epoch] += row is not None
        return row

    def _next(self) -> int | None:
        """What the sampler gives in its newest epoch; None at its end."""
        try:
            row = int(next(self._iterator))
        except StopIteration:
            return None
        if not 0 <= row < self._rows:
            raise DataError(f"the custom sampler gives row {row}, the data has rows 0 to {self._rows - 1}")
        if not self._has_state:
            self._given[-1].append(row)
        return row

    def _start(self, epoch: int) -> None:
        self._given += [array("q") for _ in range(epoch + 1 - len(self._given))]
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        self._iterator = iter(self._sampler)

    def state(self) -> dict[str, Any]:
        return {"drawn": list(self._drawn)} | ({"sampler": self._sampler.state_dict()} if self._has_state else {})

    def load(self, state: dict[str, Any]) -> None:
        self._drawn = list(state["drawn"])
        if "sampler" in state:
            self._sampler.load_state_dict(state["sampler"])
            self._given = []
            if self._drawn:
                self._start(len(self._drawn) - 1)
            return
        for epoch, count in enumerate(self._drawn):
            if epoch >= len(self._given):
                self._start(epoch)
            while len(self._given[epoch]) < count and self._next() is not None:
                pass


def open_stream(dataset: Any, config: Config) -> PromptStream:
    """The training stream of a configuration: seeded order, or data.sampler's class."""
    data = config.data
    sampler = None
    if data.sampler.class_path:
        from verl.data.load_object import load_extern_object

        cls = load_extern_object(data.sampler.class_path, str(data.sampler.class_name))
        sampler = cls(data_source=dataset, data_config=data)
    seed = int(data.seed if data.seed is not None else config.trainer.seed)
    size = data.train_batch_size
    stream = PromptStream(
        dataset,
        batch_size=size,
        seed=seed,
        shuffle=data.shuffle,
        sampler=sampler,
        max_bad_ratio=data.max_bad_row_ratio,
    )
    if stream.unused_per_epoch:
        leftover = f"rows are left over at the end of each epoch (fewer than data.train_batch_size={size})"
        notice(f"{stream.unused_per_epoch} of {stream.rows_per_epoch} {leftover} and not used in it")
    return stream
