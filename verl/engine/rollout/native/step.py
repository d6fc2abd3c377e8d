"""A decode step as one int32 matrix, with a column for each row of the batch: all that a device needs to know of it.

A row stands for a running response; rows past the last response fill the batch up to its bucket and have length 0. A
tile is a prompt and at most TILE rows whose responses share it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl.engine.rollout.native.cache import KVSlotTable
from verl.engine.rollout.native.sampling import Rows, uniforms
from verl.engine.rollout.native.scheduler import Request

TILE = 8

UNIFORM = 0  # float64, two rows: the draw
TOP_P = 2  # float64, two rows
TEMPERATURE = 4  # float32; 0: greedy
LOG_MIN_P = 5  # float32; -inf: none
PENALTY = 6  # float32, of tokens of the prompt and the response; 1: none
TOP_K = 7  # 0: all
TOKEN = 8  # the newest token, or -1 - the row of the step before that draws it
LENGTH = 9  # of the response, its newest token included
PROMPT_LENGTH = 10
POSITION = 11  # of the newest token, as the model counts
ORDER = 12  # rows by prompt
START = 13  # of a tile: its first place in ORDER
COUNT = 14  # of a tile: its rows
TABLES = 15  # then, in turn, the k-th block of each row's response and of each tile's prompt


def bucket(rows: int) -> int:
    """The batch size that is used for so many rows: a power of two, or an eighth of one, at least 16, times a whole
    number."""
    if rows <= 16:
        return 1 << (rows - 1).bit_length()
    unit = max(16, (1 << (rows - 1).bit_length()) // 8)
    return -(-rows // unit) * unit


def most_rows(max_model_len: int, cols: int) -> int:
    """Rows of the matrix for the longest sequences."""
    return TABLES + 2 * -(-max_model_len // cols)


def fill_draws(step: np.ndarray, requests: Sequence[Request]) -> None:
    """Write how each request's next token is drawn into a matrix [.., batch size]."""
    rows = Rows.of(
        [r.sampling for r in requests], [r.sampling.start + r.written + r.in_flight for r in requests]
    )  # fmt: skip
    count = len(requests)
    step[:TOKEN] = 0
    wide = step[UNIFORM : TOP_P + 2].reshape(2, -1).view(np.float64)
    wide[0, :count], wide[1, :count] = uniforms(rows.seed, rows.call, rows.position), rows.top_p
    narrow = step[TEMPERATURE : PENALTY + 1].view(np.float32)
    with np.errstate(divide="ignore"):
        narrow[:, :count] = rows.temperature, np.log(rows.min_p), rows.penalty
    step[TOP_K, :count] = np.minimum(rows.top_k, np.iinfo(np.int32).max).clip(0)


def fill_places(
    step: np.ndarray, requests: Sequence[Request], drawing: dict[Request, int], tables: tuple[KVSlotTable, KVSlotTable]
) -> int:
    """Write where each request stands and where its keys lie. drawing: the rows of the step before, of requests whose
    newest token is not known here yet. tables: of prompts and of responses. Returns the rows of the matrix in use."""
    prompts, responses = tables
    step[TOKEN:TABLES] = 0
    places: dict[int, list[int]] = {}
    for row, request in enumerate(requests):
        group, length = request.group, request.length
        assert group is not None
        token = -1 - drawing[request] if request.in_flight else request.tokens[-1] if request.tokens else 0
        prompt = len(group.prompt)
        step[TOKEN : POSITION + 1, row] = token, length, prompt, prompt + length - 1 + group.shift
        places.setdefault(group.slot, []).append(row)
    step[ORDER, : len(requests)] = [row for members in places.values() for row in members]
    starts = {slot: range(0, len(members), TILE) for slot, members in places.items()}
    tiles = [(slot, start) for slot, members in starts.items() for start in members]
    counts = [min(TILE, len(places[slot]) - start) for slot, start in tiles]
    step[START, : len(tiles)] = np.cumsum([0, *counts[:-1]])
    step[COUNT, : len(tiles)] = counts
    longest = 0
    for column, blocks in enumerate(responses.blocks[r.slot] for r in requests):
        step[TABLES : TABLES + 2 * len(blocks) : 2, column] = blocks
        longest = max(longest, len(blocks))
    for column, (slot, _) in enumerate(tiles):
        blocks = prompts.blocks[slot]
        step[TABLES + 1 : TABLES + 1 + 2 * len(blocks) : 2, column] = blocks
        longest = max(longest, len(blocks))
    return TABLES + 2 * longest
