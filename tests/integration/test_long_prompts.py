"""Prompts of 16 thousand tokens, of text and of images, through the command line: two steps in minutes, sampler and
trainer agree."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.runs import TinyRun
from tests.tiny import tiny_model, tiny_vision_model

TOKENS = 16_000


def noise(side: int, seed: int) -> bytes:
    """A PNG of `side` pixels each way; coarse, so that it is small."""
    cells = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(cells).resize((side, side), Image.Resampling.NEAREST).save(out, "PNG")
    return out.getvalue()


def row(i: int, sides: list[int], text: str) -> dict[str, Any]:
    images = [{"bytes": noise(side, 100 * i + n), "path": None} for n, side in enumerate(sides)]
    return ({"images": images} if images else {}) | {
        "data_source": "test/long",
        "prompt": [{"role": "user", "content": "<image>" * len(sides) + text}],
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"index": i},
    }


class LongRun(TinyRun):
    """A `TinyRun` whose prompts have 16 thousand tokens: of text, or those of images of these sides, one for each 8 × 8
    pixels."""

    def __init__(self, root: Path, sides: list[int]):
        super().__init__(root, rows=1)
        self.seeing = bool(sides)
        if sides:
            self.model = tiny_vision_model(root / "vision")
            config = json.loads((self.model / "config.json").read_text())
            config["text_config"]["max_position_embeddings"] = 32_768
            (self.model / "config.json").write_text(json.dumps(config))
        else:
            tiny_model(self.model, max_position_embeddings=32_768)
        rows = [row(i, sides, "" if sides else f"{i} cd. " * (TOKENS // 6)) for i in range(2)]
        pq.write_table(pa.Table.from_pylist(rows), self.train)
        self.val = self.train
        self.reward.write_text(
            "def compute_score(data_source, solution_str, **_): return sum(map(ord, solution_str)) % 97 / 97"
        )

    def overrides(self, out: Path, *more: str) -> list[str]:
        sizes = ["data.max_prompt_length=16600", "data.train_batch_size=1", "actor_rollout_ref.rollout.n=2"]
        steps = ["trainer.total_training_steps=2", "trainer.test_freq=0", "trainer.val_before_train=False"]
        images = ["data.image_key=images", "data.mm_processor_kwargs.max_pixels=1048576"] if self.seeing else []
        # A budget that holds a group: beyond it each response computes the prompt again.
        actor = "actor_rollout_ref.actor."
        batch = [f"{actor}ppo_mini_batch_size=1", f"{actor}ppo_max_token_len_per_gpu=17000"]
        return super().overrides(out, *sizes, *batch, *steps, *images, "trainer.save_freq=0", *more)


@pytest.mark.long
@pytest.mark.timeout(900)  # a minute or two, where nothing else runs
@pytest.mark.parametrize("sides", [[], [256] * 16], ids=["text", "16 images"])
def test_prompts_of_sixteen_thousand_tokens(sides: list[int], fork_server: Any, tmp_path: Path) -> None:
    run = LongRun(tmp_path / "given", sides)
    done = fork_server.run(run.overrides(tmp_path / "out"), timeout=800)
    assert done.status == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "actor/grad_norm" in line]
    assert len(steps) == 2
    for step in steps:
        assert step["prompt_length/mean"] > 0.96 * TOKENS and step["actor/grad_norm"] > 0
        assert step["training/rollout_logprob_abs_diff/max"] < 1e-4
        if sides:
            assert step["prompt_length/image_tokens/max"] == 16_384
            assert step["perf/images/encoded_per_image/sampler"] == 1
