"""A trajectory of a row with images may ask without them: each context has the images that stand in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from verl.rollout.agent_loop import AgentLoopBase, AgentLoopOutput, register

from tests.integration.test_agent_runs import ROLLOUT, SEES, WORDS
from tests.integration.test_vision_runs import VisionRun, drawn
from tests.runs import records
from tests.tiny import SPECIAL, VISION, tiny_tokenizer
from verl.engine.rollout.base import SamplingParams
from verl.rollout.record import Outcome
from verl.trainer.main_ppo import main


@register("asks_around")
class AsksAround(AgentLoopBase):
    """Asks with no image, with the row's and another, with tokens before the row's, and with another alone."""

    async def run(self, sampling_params: SamplingParams, **row: Any) -> list[AgentLoopOutput]:
        few = {"max_tokens": 4}
        words = [{"role": "user", "content": "No image?"}]
        picture = [{"type": "image", "image": drawn(3)}, {"type": "text", "text": "Another?"}]
        reply = await self.session.chat(words, **few)
        await self.session.chat([*words, reply.message, {"role": "user", "content": picture}], **few)
        reply = await self.session.chat(asked := row["raw_prompt"], **few)
        await self.session.chat([*asked, reply.message, {"role": "user", "content": picture}], **few)
        await self.session.generate([*row["prompt_ids"][-3:], *row["prompt_ids"]], few)
        await self.session.chat([{"role": "user", "content": picture}], **few)
        return Outcome()


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_contexts_with_and_without_the_images_of_the_row(tmp_path: Path, workers: int) -> None:
    seeing = VisionRun(tmp_path / "seeing")
    tiny_tokenizer(seeing.model, template=SEES, special=SPECIAL + VISION)
    words = [word for word in WORDS if "function_tool" not in word and "format" not in word]
    words += [
        f"actor_rollout_ref.model.external_lib={__name__}",
        f"{ROLLOUT}agent.default_agent_loop=asks_around",
        f"{ROLLOUT}agent.num_workers={workers}",
        "data.max_prompt_length=500",
        "trainer.total_training_steps=1",
    ]
    assert main(seeing.overrides(tmp_path / "out", *words)) == 0
    record = records(tmp_path / "out")[1]
    assert record["training/rollout_logprob_abs_diff/max"] < 1e-4 and record["actor/grad_norm"] > 0
    assert record["agent/segments_per_trajectory/mean"] == 6 and record["training/images_dropped"] == 0
    line = (tmp_path / "out/metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(line)["perf/images/encoded_per_image/sampler"] == 1, "those of the row with others, too"
    rows = [json.loads(line) for line in (tmp_path / "out/trajectories/1.jsonl").read_text().splitlines()]
    assert len(rows) == 12 and all(len(row["shown"]) == 1 for row in rows)
