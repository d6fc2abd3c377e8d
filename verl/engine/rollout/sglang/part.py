"""A SGLang over several nodes: on each but the first a process holds the schedulers of its node, which the first
calls."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from verl.config import Config
from verl.engine.rollout.hosted import end
from verl.engine.rollout.settings import trainer_dtype
from verl.engine.rollout.sglang.arguments import EngineSettings, engine_arguments, engine_settings
from verl.engine.rollout.sglang.launch import start
from verl.models.pretrained import load_config
from verl.platform import Platform
from verl.platform.processes import alive


class SGLangPart:
    """The schedulers of this node. Made while the engine on the first node starts; it waits for that. The weights come
    with that engine's calls. UserError as `SGLangEngine`."""

    weights_dtype = None

    def __init__(self, config: Config, platform: Platform):
        self.readers: list[str] = []
        values = engine_settings(config, trainer_dtype(config, platform))
        settings = EngineSettings(**{name: value for name, value in values.items() if name != "bucket_bytes"})
        cpu, model = platform.device().type == "cpu", config.actor_rollout_ref.model
        vocabulary = int(load_config(model.path, model).get_text_config().vocab_size)
        arguments = engine_arguments(settings, vocabulary=vocabulary, cpu=cpu)
        # This thread has the loop of an actor. The schedulers end with the thread that started them, so it stays.
        self._thread = ThreadPoolExecutor(1)
        self._engine, self._processes = self._thread.submit(asyncio.run, start(arguments, cpu)).result()

    @property
    def dead(self) -> bool:
        """See `RolloutEngine.dead`."""
        return not all(alive(*process) for process in self._processes)

    def close(self) -> None:
        """End the schedulers."""
        end(self._processes, patience=0.0)
        self._thread.shutdown()
