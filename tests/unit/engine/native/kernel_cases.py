"""The sampler's Triton kernels, by Triton's interpreter, against the sampler's plain torch code; `test_native_kernels`
runs this file.

The interpreter multiplies no bfloat16: float16 stands for it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from verl.engine.rollout.base import SamplingParams
from verl.engine.rollout.native import paged_kernels, sampling_kernels
from verl.engine.rollout.native import step as step_rows
from verl.engine.rollout.native.cache import KVBlockPool, KVCacheLayout, KVSlotTable
from verl.engine.rollout.native.decode_plan import DecodePlan
from verl.engine.rollout.native.sampling import Rows, sample
from verl.models.attention import AttentionOptions
from verl.models.sampling_mask import decode_row


def request(group: Any = None, slot: int = 0, tokens: int = 1, **sampling: Any) -> Any:
    params = SamplingParams(max_tokens=9, **sampling)
    count = {"tokens": [3] * tokens, "length": tokens, "in_flight": 0, "written": tokens}
    return SimpleNamespace(group=group, slot=slot, sampling=params, **count)


def matrix(rows: int) -> np.ndarray:
    return np.zeros((step_rows.most_rows(256, 16), rows), np.int32)


@pytest.mark.parametrize(
    ("dtype", "heads", "widths", "options", "splits"),
    [
        (torch.float32, (6, 2), (64, 64), {"sliding_window": 20}, 2),
        (torch.float32, (2, 2), (24, 16), {"softcap": 5.0, "sinks": torch.tensor([0.5, -1.0])}, 1),
        (torch.float16, (5, 1), (80, 80), {"sliding_window": 20, "sinks": torch.linspace(-1, 1, 5)}, 2),
        (torch.float32, (20, 1), (96, 96), {}, 1),  # more than a program takes
        (torch.float32, (1, 1), (192, 128), {}, 4),
    ],
)
def test_paged_attention_is_that_of_the_decode_plan(
    dtype: Any, heads: Any, widths: Any, options: Any, splits: int
) -> None:
    """Groups of 9, 1 and 2 responses: more than a tile holds, alone, and a row that stands for no response."""
    torch.manual_seed(0)
    pool = KVBlockPool(KVCacheLayout(1, 16, 96), torch.device("cpu"), dtype, dtype)
    prompts, responses = KVSlotTable(pool, 4, from_end=True), KVSlotTable(pool, 16)
    stores = pool.layer(0, heads[1], *widths)
    for tensor in stores:
        tensor.normal_()
    groups = [SimpleNamespace(prompt=np.zeros(n), slot=prompts.acquire(n), shift=0) for n in (37, 5, 64)]
    requests = []
    for number, length in enumerate([1, 40, 17, 16, 3, 9, 33, 2, 20, 48, 1, 30]):
        group = groups[0 if number < 9 else number - 8 if number < 11 else 2]
        requests.append(request(group, responses.acquire(length), length))
    step = matrix(16)
    used = step_rows.fill_places(step, requests, {}, (prompts, responses))
    plan, device_step = DecodePlan(prompts, responses), torch.from_numpy(step[:used].copy())
    slots, lengths = np.array([(r.slot, len(r.tokens)) for r in requests]).T
    plan.prepare(slots, lengths, *np.array([(r.group.slot, len(r.group.prompt)) for r in requests]).T)
    q, k, v = (torch.randn(1, h, 16, d).to(dtype) for h, d in ((heads[0], widths[0]), *((heads[1], w) for w in widths)))
    settings = AttentionOptions(0.3, **options)
    pool.calls.start()
    expected = plan.attend(torch.nn.Identity(), *(x[:, :, :12] for x in (q, k, v)), settings)
    stored = [tensor.clone() for tensor in stores]
    for tensor in stores:
        tensor.nan_to_num_(0.0)
        tensor[pool._free] = torch.nan  # no kernel reads a block that no table names
        tensor[[b for row in responses.blocks for b in row[-1:]], 0, :, 15] = 7.0
    paged_kernels.store(k.transpose(1, 2).contiguous().transpose(1, 2), v, *stores, device_step)
    rows, columns = responses.token_rows(slots, lengths - 1)
    for tensor, before in zip(stores, stored, strict=True):
        assert torch.equal(tensor[rows, 0, :, columns], before[rows, 0, :, columns])
        tensor.copy_(before)
    parts = torch.full((16, heads[0], splits, 2, widths[1]), torch.nan)
    lse = torch.full((16, heads[0], splits, 2), torch.nan)
    numbers = 0.3, settings.softcap or 0.0, settings.sliding_window or 0
    for which in (True, False):
        paged_kernels.partial(q, *stores, device_step, parts, lse, which, *numbers)
    found = paged_kernels.merge(parts, lse, device_step, settings.sinks, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found[:, :12], expected, atol=tolerance, rtol=tolerance)
    assert (found[:, 12:] == 0).all()


DRAWS = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.5},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "top_p": 0.9999, "min_p": 0.3},
    {"temperature": 3.0, "min_p": 0.05},  # leaves many
]


def test_draws_are_those_of_the_torch_code() -> None:
    torch.manual_seed(0)
    requests = [request(seed=i, record_mask=True, **settings) for i, settings in enumerate(DRAWS * 2)]
    logits = torch.randn(len(requests), 2500) * 3
    logits[:, ::7] = -torch.inf
    logits[3, 100] = logits[3].amax()  # a tie
    rows = Rows.of([r.sampling for r in requests], [r.written for r in requests])
    tokens, log_probs, expected = sample(logits.clone(), rows)
    count = len(requests) + 1  # and a row that stands for no response
    step = matrix(count)
    step_rows.fill_draws(step, requests)
    wide = torch.from_numpy(step[:4].reshape(2, -1).view(np.float64).copy())
    device_step = torch.from_numpy(step)
    padded = torch.cat((logits, torch.zeros(1, 2500)))
    padded[-1, 5] = torch.nan
    lowest = sampling_kernels.threshold(padded, wide[1], device_step)
    sums = sampling_kernels.chunk_sums(padded, lowest, device_step)
    out = torch.zeros(2, 40, dtype=torch.int32)
    sampling_kernels.draw(padded, wide[0], lowest, device_step, *sums, out)
    assert out[0, : len(tokens)].tolist() == tokens.tolist()
    torch.testing.assert_close(out[1, : len(tokens)].view(torch.float32), log_probs, atol=1e-5, rtol=1e-5)
    assert out[1, count - 1].view(torch.float32).isnan()
    sets = torch.full((count, 1 + 79), -7, dtype=torch.int32)
    sampling_kernels.encode(padded, lowest, device_step, sets)
    truncated = [row for row, r in enumerate(requests) if r.sampling.truncated]
    assert [decode_row(sets[row].numpy(), 2500) for row in truncated] == [expected[row] for row in truncated]
    assert {expected[row][:1] for row in truncated} == {b"\0", b"\1"}, "ids and bits, both"


def test_ids_come_from_the_host_or_from_the_step_before() -> None:
    step = matrix(4)
    step[step_rows.TOKEN], step[step_rows.POSITION] = [7, -1, 9, -3], [5, 6, 7, 8]
    step[step_rows.LENGTH], step[step_rows.TABLES + 2] = [1, 0, 18, 17], [5, 6, 0, 3]
    step[step_rows.TABLES] = 2
    seen = torch.zeros(6, 16, dtype=torch.int32)
    ids, positions = paged_kernels.inputs(torch.from_numpy(step), torch.tensor([11, 12, 13], dtype=torch.int32), seen)
    assert ids.tolist() == [7, 11, 9, 13] and positions.tolist() == [5, 6, 7, 8]
    assert seen.to_sparse().indices().T.tolist() == [[0, 1], [2, 0], [3, 0]] and seen.sum() == 9 + 7 + 13


def test_penalties_are_of_prompts_and_responses() -> None:
    """Three responses of a prompt of 20 tokens, one of them without a penalty; tokens come twice."""
    torch.manual_seed(0)
    pool = KVBlockPool(KVCacheLayout(1, 16, 12), torch.device("cpu"), torch.float32, torch.float32)
    prompts, responses = KVSlotTable(pool, 4, from_end=True), KVSlotTable(pool, 4)
    group, seen = (
        SimpleNamespace(prompt=np.zeros(20), slot=prompts.acquire(20), shift=0),
        torch.randint(0, 30, (12, 16)),
    )
    requests = [
        request(group, responses.acquire(n), n, repetition_penalty=by) for n, by in ((3, 1.5), (17, 1.0), (30, 0.8))
    ]
    step, logits = matrix(4), torch.randn(4, 40)
    step_rows.fill_draws(step, requests)
    step_rows.fill_places(step, requests, {}, (prompts, responses))
    found = sampling_kernels.penalise(logits, seen.int(), torch.from_numpy(step))
    for row, r in enumerate(requests):
        parts = ((prompts, group.slot, 20), (responses, r.slot, len(r.tokens)))
        ids = torch.cat([seen[table.blocks[slot]].flatten()[:n] for table, slot, n in parts]).unique()
        by = r.sampling.repetition_penalty
        expected = logits[row].scatter(
            0, ids, torch.where(logits[row, ids] > 0, logits[row, ids] / by, logits[row, ids] * by)
        )
        torch.testing.assert_close(found[row], expected)
    assert torch.equal(found[3], logits[3])
