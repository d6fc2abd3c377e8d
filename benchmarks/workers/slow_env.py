"""An environment of three turns that answers one step in ten after seconds: what a slow tool does to a run."""

from __future__ import annotations

import asyncio
import hashlib
import os

from verl.rollout.environments import Observation, StepResult

TURNS = 3


class Slow:
    """Which steps are slow follows from the row and the number of the response."""

    def reset(self, row):
        """Begin with the row's own prompt."""
        self.name, self.turn = f"{row['uid']}/{row['sample_index']}", 0
        return Observation()

    async def step(self, message):
        """Answer, mostly at once."""
        self.turn += 1
        digest = hashlib.blake2b(f"{self.name}/{self.turn}".encode(), digest_size=1).digest()
        await asyncio.sleep(float(os.environ["SLOW_STEP_S"]) if digest[0] < 26 else 0.005)
        said = [{"role": "user", "content": "go on"}]
        return StepResult(said, reward=len(message["content"]) / 100, done=self.turn == TURNS)

    def close(self):
        """There is nothing to give up."""
