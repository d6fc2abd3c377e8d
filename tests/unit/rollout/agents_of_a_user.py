"""A tool, environments, an interaction and a loop as a user's module holds them."""

import asyncio
import time

import numpy as np
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.interactions.base import BaseInteraction
from verl.tools.function_tool import function_tool
from verl.utils.profiler import simple_timer

from verl.rollout.environments import Observation, StepResult
from verl.rollout.loops import AgentLoop
from verl.rollout.loops import register as register_loop


@function_tool
def calculate(expression: str) -> str:
    """Works out a product.

    Args:
        expression: Like 3*4.
    """
    a, b = expression.split("*")
    return str(int(a) * int(b)), 0.25, {"products": 1}


@ToolParser.register("bare")
class Bare(ToolParser):
    """The first tool's name, and the expression in JSON."""

    async def extract_tool_calls(self, responses_ids, tools=None):
        text = self.tokenizer.decode(responses_ids)
        name, _, expression = text.removesuffix("<|im_end|>").partition(" ")
        called = name == tools[0].function.name
        return text, [FunctionCall(name, f'{{"expression": {expression}}}')] * called if text != "Hm." else None


class Guess:
    """Guess the row's number: the first step says higher or lower."""

    def __init__(self, steps=2, fail=""):
        self.left, self.fail = steps, fail
        if fail == "open":
            raise RuntimeError("no table")
        if fail == "slow":
            time.sleep(1)

    def reset(self, row):
        if self.fail == "reset":
            raise RuntimeError("no game")
        tool = {"type": "function", "function": {"name": "calculate", "parameters": {}}}
        tools = [tool] if self.fail == "call" else None
        if self.fail == "silent":
            return Observation(None, tools)
        if self.fail == "long":
            return Observation([{"role": "user", "content": "x" * 1300}])
        return Observation([{"role": "user", "content": f"Guess {row['uid']}"}], tools)

    async def step(self, message):
        if self.fail == "tuple":
            return "higher", 0.5, False, False, {}
        if self.fail == "text":
            return StepResult("higher")
        if self.fail == "parts":
            return StepResult([{"role": "user", "content": [{"type": "sound"}]}])
        if self.fail == "hang":
            await asyncio.sleep(60)
        self.left -= 1
        done = self.left == 0
        return StepResult([{"role": "user", "content": "higher"}], 0.5 if done else 0.25, done, {"left": self.left})

    def close(self):
        self.left = -1


class Room:
    """A text environment of gymnasium's interface."""

    def reset(self, *, seed=None, options=None):
        self.turns = 0
        return f"room {seed is not None}", {}

    def step(self, action):
        self.turns += 1
        return (
            f"you {action}",
            float(self.turns),
            False,
            self.turns == 2,
            {"turns": self.turns, "o": object()},
        )

    def close(self):
        pass


class Levers(Room):
    """Two levers with three places each."""

    def reset(self):
        super().reset()
        return np.zeros(2, int), {}

    class action_space:
        shape, dtype = (2,), np.int64

        @staticmethod
        def contains(action):
            return action.shape == (2,) and action.dtype == np.int64 and all(0 <= n < 3 for n in action)


class Nags(BaseInteraction):
    """Says no once."""

    async def generate_response(self, instance_id, messages, **kwargs):
        if kwargs["word"] == "hangs":
            await asyncio.sleep(60)
        said = sum(m["role"] == "assistant" for m in messages)
        return said > 1, kwargs["word"], 0.5 * said, {"said": said}

    async def finalize_interaction(self, instance_id, **kwargs):
        raise RuntimeError("it ends badly")


@register_loop("never_done")
class NeverDone(AgentLoop):
    """Asks again and again, until there is no room."""

    async def run(self, row, session):
        messages = list(row["raw_prompt"])
        while True:
            reply = await session.chat(messages)
            messages += [reply.message, {"role": "user", "content": "Are you sure?"}]


@register("public_loop")
class PublicLoop(AgentLoopBase):
    """Two turns in the public system's words, the second after a message of the user."""

    def __init__(self, *args, greeting="Go on", **kwargs):
        super().__init__(*args, **kwargs)
        self.greeting = greeting
        self.response_length = self.rollout_config.response_length

    async def run(self, sampling_params, **kwargs):
        messages, metrics = list(kwargs["raw_prompt"]), {}
        if "tools_kwargs" in kwargs["extra_info"]:
            assert (kwargs["index"], kwargs["tools_kwargs"]) == (3, {"add": {}}) and kwargs["interaction_kwargs"] == {}
        media = {"image_data": kwargs["extra_info"]["image_data"]} if "image_data" in kwargs["extra_info"] else {}
        prompt_ids = await self.ct_build_initial_tokens(messages)
        ids, mask, log_probs = list(prompt_ids), [], []
        for turn in range(2):
            sampling_params["top_k"] = -1
            with simple_timer("generate_sequences", metrics):
                done = await self.server_manager.generate(
                    request_id="r", prompt_ids=ids, sampling_params=sampling_params, **media
                )
            merged, mask, log_probs = await self.ct_merge_assistant_token(
                ids, done.token_ids, mask, log_probs, done.log_probs
            )
            ids = merged.token_ids
            if turn == 0:
                text = await self.loop.run_in_executor(None, self.tokenizer.decode, done.token_ids)
                said = [*messages, {"role": "assistant", "content": text}]
                merged, mask, log_probs = await self.ct_merge_context_msg(
                    said, [*said, {"role": "user", "content": self.greeting}], ids, mask, log_probs
                )
                ids = merged.token_ids
        response = ids[len(prompt_ids) :]
        if kwargs["extra_info"].get("adds"):
            response, mask, log_probs = [*response, 7], [*mask, 1], [*log_probs, -1.0]
        return AgentLoopOutput(
            prompt_ids=prompt_ids, response_ids=response[: self.response_length], response_mask=mask,
            response_logprobs=log_probs, multi_modal_data={}, num_turns=4, metrics=metrics, extra_fields={"turn_scores": []},
        )  # fmt: skip
