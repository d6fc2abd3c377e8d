"""What is added to vLLM's own workers: they fetch weights from shared memory and put them into their model.

The class is mixed into vLLM's worker (`worker_extension_cls`), so its names must not be the worker's own. What would go
wrong without a word is looked after here (the prefix cache by the engine):

- linear weights were packed when they were first loaded: every load goes through vLLM's layer-wise reload;
- a tied output matrix has a packed copy of its own on a CPU: it is packed again, whatever the names of its weights are;
- expert layers keep their packed kernel: it is dropped, so that it is built from the new weights. On a device the
  kernel stays: it reads the weights where they are, and captured graphs hold on to what it has;
- some models copy weights by themselves, past the reload, and say that they loaded them: nothing would change, so that
  is an error.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from verl.models.mtp import is_extra
from verl.platform import platform_of
from verl.platform.processes import alive, process_start_time
from verl.weight_sync.channel import attempt, receive
from verl.weight_sync.verify import digesting

_HEAD = "lm_head.weight"
# vLLM's variable for how the names begin of what the ranks of one engine share on a CPU.
_SHARED = "VLLM_DIST_IDENT"


class WorkerWeights:
    """Methods that the engine calls in every worker by `collective_rpc`."""

    def verl_begin(self, driver: int, started: int, folder: str) -> dict[str, Any]:
        """End with the process `driver` (that started at `started`), however it ends, and remove its `folder` then.
        Returns "processes": this one and its parent, each as (pid, start time); "device": the id of this worker's;
        "shared": see `remove_shared`; "routed": the numbers of the layers with experts. On another node than the
        engine's it ends with its parent, and has no processes to tell of."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        worker: Any = self
        modules = worker.model_runner.get_model().modules()
        processes = [(pid, process_start_time(pid)) for pid in (os.getpid(), os.getppid())]
        if worker.vllm_config.parallel_config.node_rank:
            (_, (driver, started)), folder, processes = processes, "", []
        threading.Thread(
            target=_end_with, args=(driver, started, folder), name="verl-driver-watch", daemon=True
        ).start()
        return {
            "processes": processes,
            "device": platform_of(worker.device).memory_id(worker.device),
            "shared": os.environ.get(_SHARED, ""),
            "routed": sorted(module.layer_id for module in modules if isinstance(module, MoERunner)),
        }

    def verl_try_channel(self, places: list[tuple[str, int]], timeout: float) -> str:
        """See `WeightReceiver.try_channel`."""
        worker: Any = self
        channel, number = places[_number(worker)]
        return attempt(channel, number, timeout)

    def verl_load_weights(
        self, places: list[tuple[str, int]], version: int, timeout: float, verify: str
    ) -> dict[str, str]:
        """Load every weight that arrives at this worker's place (channel, number of the reader). With `verify` returns
        checksums of what was received and handed to the model.

        Raises ValueError for names that the model does not have, and for weights of it that did not come.
        """
        worker: Any = self
        sums: dict[str, str] = {}
        stream: Any = receive(*places[_number(worker)], timeout=timeout, version=version)
        with contextlib.closing(stream):  # left early, it tells the sender
            first = list(itertools.islice(stream, 1))  # from here on the sender knows of this reader
            owned = ((name, view.clone()) for name, view in itertools.chain(first, stream))
            weights = digesting(owned, sums, verify) if verify else owned
            drafting = _drafting_model(worker)
            further: list[tuple[str, torch.Tensor]] = []
            if drafting is not None:
                weights = _setting_aside(weights, further, worker.model_config.hf_text_config.num_hidden_layers)
            _reload(worker, _without_tied_head(worker.model_runner.get_model(), weights))
            if drafting is not None:
                _reload_drafting(worker, drafting, further)
        return sums


def _number(worker: Any) -> int:
    """Of a worker among all of the engine: its own rank counts within its copy of the model."""
    parallel = worker.vllm_config.parallel_config
    return int(parallel.data_parallel_rank * parallel.world_size + worker.rank)


def _without_tied_head(model: Any, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The same weights without the tied output matrix, if the model has none besides its embedding; ValueError if its
    weights are untied then."""
    headless = not _has_head(model)
    for name, tensor in weights:
        if not (headless and name.endswith(_HEAD)):
            yield name, tensor
        elif not _tied(model):
            raise ValueError(
                f"load_weights: vLLM's {type(model).__name__} always computes logits with its embedding, and this "
                "model has an output matrix of its own (tie_word_embeddings=False): set rollout.name=native"
            )


def _reload(worker: Any, weights: Iterable[tuple[str, Any]]) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    runner, model = worker.model_runner, worker.model_runner.get_model()
    _drop_expert_kernels(worker, model)
    with torch.no_grad(), torch.device(worker.device), set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model)
        # What a model derives from its weights once they are there (MLA's matrices) is not among these.
        parameters = {name for name, _ in model.named_parameters()}
        try:
            loaded = model.load_weights(weights)
        except KeyError as error:
            raise ValueError(
                f"load_weights: vLLM's {type(model).__name__} has no place for the weight {error}; it builds the "
                "model from config.json in a different way than the trainer"
            ) from error
        incomplete, past = _gaps(model, loaded or set())
        finalize_layerwise_reload(model, worker.model_config)
        _pack_tied(model)
    if past:
        raise ValueError(
            f"load_weights: vLLM's {type(model).__name__} copies {len(past)} weights by itself, past the reload of "
            f"this vLLM, among them {past[:3]}: it would go on with the old ones. Set rollout.name=native"
        )
    remaining = {name for name, _ in model.named_parameters()} & parameters
    if missing := incomplete + (sorted(remaining - loaded) if loaded is not None else []):
        some = f"{len(missing)} of vLLM's weights, among them {missing[:3]}"
        raise ValueError(f"load_weights: no value came for {some}")
    for reset in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):  # not every runner has each
        getattr(runner, reset, lambda: None)()


def _drop_expert_kernels(worker: Any, model: Any) -> None:
    """On a CPU: it holds packed weights, and is built anew where there is none."""
    for module in model.modules() if platform_of(worker.device).on_host else ():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None


def _drafting_model(worker: Any) -> Any:
    """What drafts tokens with a layer of the checkpoint (`verl.models.mtp`), None where nothing does."""
    method = getattr(worker.vllm_config.speculative_config, "method", None)
    return worker.model_runner.drafter.model if method == "mtp" else None


def _setting_aside(
    weights: Iterable[tuple[str, Any]], further: list[tuple[str, torch.Tensor]], layers: int
) -> Iterator[tuple[str, Any]]:
    """The weights of the main model; those of layers that predict further tokens go to `further`."""
    for name, tensor in weights:
        if is_extra(name, layers):
            further.append((name, tensor))
        else:
            yield name, tensor


def _reload_drafting(worker: Any, model: Any, further: list[tuple[str, torch.Tensor]]) -> None:
    """Embedding and head are the main model's modules."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    if not further:
        raise ValueError("load_weights: no weights came for the layer that vLLM drafts with: set model.mtp.enable=True")
    _drop_expert_kernels(worker, model)
    with torch.no_grad(), torch.device(worker.device), set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model)
        model.load_weights(iter(further))
        incomplete, _ = _gaps(model, set())
        finalize_layerwise_reload(model, worker.model_runner.drafter.draft_model_config)
    if incomplete:
        raise ValueError(f"load_weights: of the layer that vLLM drafts with no value came for {incomplete[:3]}")


def _gaps(model: Any, loaded: set[str]) -> tuple[list[str], list[str]]:
    """(layers that got a part of their elements only, weights that the model copied past the reload), before
    `finalize_layerwise_reload`. What is copied past it goes into stand-ins without memory, and the old values come
    back. Vocabulary layers are padded, so they are never full."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import layerwise

    incomplete, past = [], []
    for name, layer in model.named_modules():
        info: Any = layerwise.get_layerwise_info(layer)
        if not info.can_load():
            continue
        if 0 < info.load_numel < info.load_numel_total and not isinstance(layer, VocabParallelEmbedding):
            incomplete.append(f"{name} ({info.load_numel} of {info.load_numel_total} elements)")
        if not info.load_numel:
            names = (f"{name}.{key}" for key, _ in layer.named_parameters(recurse=False))
            past += [weight for weight in names if weight in loaded]
    return incomplete, past


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
    return any(isinstance(m, ParallelLMHead) for m in model.modules()) or any(name.endswith(_HEAD) for name in names)


def _tied(model: Any) -> bool:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(text, "tie_word_embeddings", False) or getattr(config, "tie_word_embeddings", False))


def remove_shared(prefix: str) -> None:
    """Remove what the ranks of an engine have shared: vLLM leaves it, however it ends."""
    for path in Path("/dev/shm").glob(f"{prefix}*") if prefix else ():
        path.unlink(missing_ok=True)


def _end_with(driver: int, started: int, folder: str) -> None:
    while alive(driver, started):
        time.sleep(1.0)
    shutil.rmtree(folder, ignore_errors=True)
    remove_shared(os.environ.get(_SHARED, ""))
    os.kill(os.getpid(), signal.SIGKILL)
