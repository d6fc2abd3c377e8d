"""A vLLM over several nodes: on each but the first a process holds the workers of its node, which the first one
calls."""

from __future__ import annotations

from tempfile import TemporaryDirectory

from verl.config import Config
from verl.engine.rollout.settings import trainer_dtype
from verl.engine.rollout.vllm import launch
from verl.engine.rollout.vllm.arguments import EngineSettings, cache_bytes, engine_arguments, engine_settings
from verl.engine.rollout.vllm.kwargs import vllm_arguments
from verl.platform import Platform
from verl.platform.host_resources import available_memory


class VLLMPart:
    """The workers of this node. Made while the engine on the first node starts; it waits for that. UserError and
    RuntimeError as `VLLMEngine`."""

    weights_dtype = None

    def __init__(self, config: Config, platform: Platform):
        values = engine_settings(config, trainer_dtype(config, platform))
        path = values.pop("model_path")
        settings = EngineSettings(path, **{k: v for k, v in values.items() if k not in ("bucket_bytes", "notice")})
        cpu, sleeps = launch.platform()
        launch.check_main_script()
        self._folder = TemporaryDirectory(prefix="verl-")
        model = launch.model_config(settings, self._folder.name)
        kind = launch.model_kind(model)
        arguments = engine_arguments(settings, vllm_arguments(), cpu=cpu, sleeps=sleeps, **kind)
        if settings.override_config:
            arguments["hf_config_path"] = self._folder.name
        if cpu:
            arguments.setdefault("kv_cache_memory_bytes", cache_bytes(model, settings, available_memory()))
        ranks, eager = settings.ranks // int(arguments["nnodes"]), bool(arguments.get("enforce_eager"))
        with launch.environment(cpu, ranks, self._folder.name, eager=eager):
            self._workers = launch.start(arguments)
        self.readers = [""] * len(self._workers.workers)

    @property
    def dead(self) -> bool:
        """See `RolloutEngine.dead`."""
        return bool(self._workers.is_failed)

    def close(self) -> None:
        """End the workers."""
        self._workers.shutdown()
        self._folder.cleanup()
