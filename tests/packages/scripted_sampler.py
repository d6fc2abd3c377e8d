"""A sampler that says the texts of the file VERL_SCRIPT, turn by turn of every trajectory, with the log-probs that
transformers computes on the trainer's model: a trained row that is not exactly what was sampled shows in them."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.engine.registry import register_rollout_engine
from verl.engine.rollout.base import Completion
from verl.engine.rollout.native import Native
from verl.engine.rollout.native.build import on_tensors
from verl.engine.rollout.native.engine import NativeEngine


class ScriptedSampler(NativeEngine):
    async def generate(self, prompt_ids, sampling, *, request_id, on_tokens=None, **_: Any) -> Completion:
        texts = json.loads(Path(os.environ["VERL_SCRIPT"]).read_text())
        text = texts[min(sampling.call, len(texts) - 1)] + "<|im_end|>"
        ids = self._stopper._tokenizer(text)["input_ids"]
        cut, prompt = ids[: sampling.max_tokens], np.asarray(prompt_ids)
        for token in cut if on_tokens is not None else ():
            on_tokens([token])
            await asyncio.sleep(0)
        sequence = torch.tensor([[*prompt.tolist(), *cut]])
        with torch.no_grad():
            logits = self._plain_model()(input_ids=sequence).logits[0, len(prompt) - 1 : -1].float()
        values = logits.log_softmax(-1).gather(1, sequence[0, len(prompt) :, None])[:, 0].numpy()
        reason = "stop" if len(cut) == len(ids) else "length"
        return Completion(np.array(cut), values, reason, versions=(self.version,))

    def _plain_model(self) -> Any:
        """transformers' own model with the weights of now."""
        from transformers import AutoConfig, AutoModelForCausalLM

        if getattr(self, "_plain", None) is None:
            config = AutoConfig.for_model(**self._runner.model.config.to_dict())
            self._plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
            self._plain_version = None
        if self._plain_version != self.version:
            missing = self._plain.load_state_dict(dict(self.named_weights()), strict=False).missing_keys
            assert not missing or self._plain.config.tie_word_embeddings, missing
            self._plain_version = self.version
        return self._plain


class Scripted(Native):
    name = "scripted"
    capabilities = replace(Native.capabilities, grammars=False)

    def attach(self, config: Any, tokenizer: Any, trainer: Any) -> Any:
        engine = on_tensors(config, tokenizer, trainer.module, str(trainer.compute_dtype))
        engine.__class__ = ScriptedSampler
        return engine


register_rollout_engine(Scripted())
