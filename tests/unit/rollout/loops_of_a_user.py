"""Agent loops as a user's module holds them, for processes of their own."""

import asyncio
import os
import time

import numpy as np
from verl.rollout.agent_loop import AgentLoopBase, AgentLoopOutput, register


def output(ids, done, **more):
    return AgentLoopOutput(ids, done.token_ids, np.ones(len(done.token_ids), bool), done.log_probs, **more)


@register("forgets")
class Forgets(AgentLoopBase):
    """Two turns, two segments; what it saw of its row and of the run comes back in its fields."""

    async def run(self, sampling_params, **row):
        first = await self.generate(row["prompt_ids"], sampling_params)
        context = np.concatenate([[7], np.asarray(first.token_ids[-2:], np.int64)])
        second = await self.generate(context, sampling_params)
        seen = {
            "columns": sorted(row["columns"]),
            "level": row["level"],
            "dtype": str(row["prompt_ids"].dtype),
            "end": self.tokenizer.eos_token,
            "model": self.config.actor_rollout_ref.model.path,
        }
        return [
            output(row["prompt_ids"], first, extra_fields=seen | {"pid": os.getpid()}),
            output(context, second, num_turns=4, reward_score=0.5, metrics={"calls": 2}),
        ]


@register("blocks")
class Blocks(AgentLoopBase):
    """Holds its interpreter for a second between two calls."""

    async def run(self, sampling_params, **row):
        await self.generate(row["prompt_ids"], sampling_params)
        time.sleep(1.0)
        return output(row["prompt_ids"], await self.generate(row["prompt_ids"], sampling_params))


@register("fails")
class Fails(AgentLoopBase):
    """Fails as its row says."""

    async def run(self, sampling_params, **row):
        done = await self.generate(row["prompt_ids"], sampling_params)
        match row["how"]:
            case "raises":
                raise KeyError("no such tool")
            case "ends its process":
                os._exit(3)
            case "returns text":
                return "done"
            case "cancels itself":
                asyncio.current_task().cancel()
                await asyncio.sleep(0)
            case "waits for ever":
                await asyncio.sleep(3600)
        return output(row["prompt_ids"], done)
