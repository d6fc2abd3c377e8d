"""A version 1 environment of `verifiers`: two turns on a product, played by a harness in the server's own process."""

import itertools
import os

import httpx
import verifiers.v1 as vf
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ProductHarness", "ProductTaskset"]


class ProductData(vf.TaskData):
    answer: str = ""
    fail: str = ""


class ProductTask(vf.Task[ProductData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns


class ProductTaskset(vf.Taskset[ProductTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for a in itertools.count(3):
            yield ProductTask(ProductData(prompt=f"{a}*4?", answer=str(a * 4)), self.config.task)


class ProductHarness(Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        if data.fail == "die":
            os._exit(3)
        if data.fail == "raise":
            raise RuntimeError("no game")
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=60) as client:
            for _ in range(2):
                answer = await client.post(
                    f"{endpoint}/chat/completions",
                    headers={"Authorization": f"Bearer {secret}"},
                    json={"model": ctx.model, "messages": messages},
                )
                answer.raise_for_status()
                said = answer.json()["choices"][0]["message"]
                messages += [
                    {"role": "assistant", "content": said["content"]},
                    {"role": "user", "content": "Sure?"},
                ]
        return ProgramResult(exit_code=0, stdout="", stderr="")
