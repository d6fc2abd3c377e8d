"""What is added to vLLM's own workers: they fetch weights from shared memory and put them into their model.

The class is mixed into vLLM's worker (`worker_extension_cls`), so its names must not be the worker's own. What would go
wrong without a word is looked after here (the prefix cache by the engine):

- linear weights were packed when they were first loaded: every load goes through vLLM's layer-wise reload;
- a tied output matrix has a packed copy of its own on a CPU: it is packed again, whatever the names of its weights are;
- expert layers keep their packed kernel: it is dropped, so that it is built from the new weights. On a device the kernel
  stays: it reads the weights where they are, and captured graphs hold on to what it has;
- some models copy weights by themselves, past the reload, and say that they loaded them: nothing would change, so that
  is an error.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_HEAD = "lm_head.weight"


class WeightReceiver:
    """Methods that the engine calls in every worker by `collective_rpc`."""

    def verl_begin(self, driver: int, started: str) -> dict[str, Any]:
        """End with the process `driver` (that started at `started`), however it ends. Returns "processes": this one and
        its parent, each as (pid, start time); "device": the id of this worker's; "shared": see `remove_shared`."""
        from verl.platform import platform_of

        worker: Any = self
        threading.Thread(
            target=_end_with, args=(driver, started), name="verl-driver-watch", daemon=True
        ).start()
        return {
            "processes": [(pid, start_time(pid)) for pid in (os.getpid(), os.getppid())],
            "device": platform_of(worker.device).memory_id(worker.device),
            "shared": _shared(),
        }

    def verl_try_channel(self, places: list[tuple[str, int]], timeout: float) -> str:
        """See `RolloutEngine.try_channel`."""
        from verl.weight_sync.trial import attempt

        worker: Any = self
        return attempt(*places[worker.rank], timeout)

    def verl_load_weights(
        self, places: list[tuple[str, int]], version: int, timeout: float, checksums: bool
    ) -> dict[str, Any]:
        """Load every weight that comes to this worker's place (channel, number of the reader); returns what was received.

        Raises ValueError for names that the model does not have, and for weights of it that did not come.
        """
        from verl.weight_sync.shared_memory import receive

        worker: Any = self
        arrived = _Arrived(worker.model_runner.get_model(), checksums)
        stream: Any = receive(*places[worker.rank], timeout=timeout, version=version)
        with contextlib.closing(stream):  # left early, it tells the sender
            first = next(stream, None)  # from here on the sender knows of this reader
            _reload(worker, arrived.watch(itertools.chain([first] if first else [], stream)))
        worker._verl_checksums = arrived.checksums
        return {"weights": arrived.count, "bytes": arrived.bytes}

    def verl_checksums(self) -> dict[str, str]:
        """Checksums by name of the tensors that the last load received and handed to the model."""
        return dict(getattr(self, "_verl_checksums", {}))


class _Arrived:
    """Counts what comes, and copies it out of the bucket."""

    def __init__(self, model: Any, checksums: bool):
        self._model = model
        self._headless = not _has_head(model)
        self._wanted = checksums
        self.checksums: dict[str, str] = {}
        self.count = self.bytes = 0

    def watch(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The same weights, each in memory of its own: the reload keeps some until their layer is complete. Without the
        tied output matrix for a model that has none besides its embedding; ValueError for one of its own then."""
        for name, view in weights:
            tensor = view.clone()
            self.count += 1
            self.bytes += tensor.numel() * tensor.element_size()
            if self._wanted:
                from verl.weight_sync.verify import checksums

                self.checksums |= checksums([(name, tensor)])
            if not (self._headless and name.endswith(_HEAD)):
                yield name, tensor
            elif not _tied(self._model):
                raise ValueError(
                    f"load_weights: vLLM's {type(self._model).__name__} always computes logits with its embedding, and this "
                    "model has an output matrix of its own (tie_word_embeddings=False): set rollout.name=native"
                )


def _reload(worker: Any, weights: Iterable[tuple[str, Any]]) -> None:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    from verl.platform import platform_of

    runner, model = worker.model_runner, worker.model_runner.get_model()
    for module in model.modules() if platform_of(worker.device).on_host else ():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None
    with torch.no_grad(), torch.device(worker.device), set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model)
        # What a model derives from its weights once they are there (MLA's matrices) is not among these.
        wanted = {name for name, _ in model.named_parameters()}
        try:
            loaded = model.load_weights(weights)
        except KeyError as error:
            raise ValueError(
                f"load_weights: vLLM's {type(model).__name__} has no place for the weight {error}; it builds the model from "
                "config.json in a different way than the trainer"
            ) from error
        incomplete, past = _incomplete(model), _past_the_reload(model, loaded or set())
        finalize_layerwise_reload(model, worker.model_config)
        _pack_tied(model)
    _require(model, wanted, loaded, incomplete, past)
    for name in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
        if callable(getattr(runner, name, None)):
            getattr(runner, name)()


def _incomplete(model: Any) -> list[str]:
    """Layers that got a part of their elements only. Vocabulary layers are padded, so they are never full."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import layerwise

    out = []
    for name, layer in model.named_modules():
        info: Any = layerwise.get_layerwise_info(layer)
        total, got = getattr(info, "load_numel_total", 0) or 0, getattr(info, "load_numel", 0)
        if info.can_load() and 0 < got < total and not isinstance(layer, VocabParallelEmbedding):
            out.append(f"{name} ({got} of {total} elements)")
    return out


def _past_the_reload(model: Any, loaded: set[str]) -> list[str]:
    """Weights that the model says it loaded, of layers that the reload saw nothing for: they were copied into stand-ins
    without memory, and the old values come back. Before `finalize_layerwise_reload`."""
    from vllm.model_executor.model_loader.reload import layerwise

    out = []
    for name, layer in model.named_modules():
        info: Any = layerwise.get_layerwise_info(layer)
        if info.can_load() and not getattr(info, "load_numel", 0):
            own = (f"{name}.{key}" for key, _ in layer.named_parameters(recurse=False))
            out += [weight for weight in own if weight in loaded]
    return out


def _require(
    model: Any, wanted: set[str], loaded: set[str] | None, incomplete: list[str], past: list[str]
) -> None:
    if past:
        raise ValueError(
            f"load_weights: vLLM's {type(model).__name__} copies {len(past)} weights by itself, past the reload of this vLLM, "
            f"among them {past[:3]}: it would go on with the old ones. Set rollout.name=native"
        )
    missing = incomplete
    if loaded is not None:
        known = {name for name, _ in model.named_parameters() if name in wanted}
        missing = missing + sorted(known - loaded)
    if missing:
        raise ValueError(
            f"load_weights: no value came for {len(missing)} of vLLM's weights, among them {missing[:3]}"
        )


def _pack_tied(model: Any) -> None:
    """Pack again what several vocabulary layers share: only those that were loaded under their own name have been."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    sharing: dict[int, list[Any]] = {}
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            sharing.setdefault(id(module.weight), []).append(module)
    for modules in sharing.values():
        for module in modules if len(modules) > 1 else ():
            module.quant_method.process_weights_after_loading(module)


def _has_head(model: Any) -> bool:
    """Whether the model has a module for its output matrix, tied or not, under whatever name."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return any(isinstance(m, ParallelLMHead) for m in model.modules()) or any(
        name.endswith(_HEAD) for name in names
    )


def _tied(model: Any) -> bool:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(text, "tie_word_embeddings", False) or getattr(config, "tie_word_embeddings", False))


def start_time(pid: int) -> str:
    """When a process started, in the kernel's ticks: with the pid it names one process. "" if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in ("Z", "X") else fields[19]


def _shared() -> str:
    """How the names begin of what the ranks of one engine share on a CPU, "" where they share nothing."""
    return os.environ.get("VLLM_DIST_IDENT", "")


def remove_shared(prefix: str) -> None:
    """Remove what the ranks of an engine have shared: vLLM leaves it, however it ends."""
    for left in Path("/dev/shm").glob(f"{prefix}*") if prefix else ():
        left.unlink(missing_ok=True)


def _end_with(driver: int, started: str) -> None:
    import signal

    while start_time(driver) == started:
        time.sleep(1.0)
    remove_shared(_shared())
    os.kill(os.getpid(), signal.SIGKILL)
