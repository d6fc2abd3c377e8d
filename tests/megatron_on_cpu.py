"""Stand-ins that let megatron-core run on a processor over gloo: what it asks of CUDA, answered from host memory.

Named as `actor_rollout_ref.model.external_lib` by the tests of the Megatron engine, so that every process that holds
a model imports it before megatron-core. Nothing of the product knows of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

_FACTORIES = ("zeros", "ones", "empty", "full", "arange", "rand", "randn", "zeros_like", "empty_like")


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if "cuda" in str(options.get("device")):
            options["device"] = "cpu"
        return function(*args, **options)

    return call


class _Torch:
    """torch for one module of megatron-core. (transformers looks at `torch.tensor` itself: it stays.)"""

    tensor = staticmethod(_on_host(torch.tensor))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Stream:
    """A stream of the host: work is done when it is asked for."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def wait_stream(self, _: Any) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


def _type(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
    name = _plain_type(tensor, *args, **options)
    return name.replace("torch.", "torch.cuda.") if isinstance(name, str) else name


def _install() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _on_host(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.Tensor.type = _type  # type: ignore[method-assign]
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.set_device = cuda.manual_seed = cuda.manual_seed_all = lambda *_: None
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.set_rng_state = lambda *_: None
    cuda.synchronize = cuda.empty_cache = lambda *_: None
    cuda.Stream, cuda.default_stream, cuda.current_stream = _Stream, _Stream, _Stream
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.FloatTensor = torch.FloatTensor
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None


def _install_in_megatron() -> None:
    import megatron.core.tensor_parallel.random as random
    from megatron.core.models import backends
    from megatron.core.optimizer import clip_grads, grad_scaler, optimizer
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import token_dispatcher

    class LatentAttention(backends.DotProductAttention):
        """As TransformerEngine's, takes values of another width than queries and keys."""

        def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **options: Any) -> None:
            super().__init__(*args, **options)
            if v_channels:
                self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    backends.DotProductAttention = LatentAttention
    multi_latent_attention.TELinear = type("TELinear", (), {})  # it asks whether a layer is one

    optimizer.torch = grad_scaler.torch = _Torch()  # type: ignore[assignment]
    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    random._set_cuda_rng_state = lambda *_, **__: None
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()

    # Its kernels for lists of tensors are of CUDA; these are the formulas.
    def grad_norm(grads: Any, norm_type: float = 2.0, grad_stats_parallel_group: Any = None) -> float:
        grads = [grads] if isinstance(grads, torch.Tensor) else grads
        total = sum((g.float().pow(2).sum() for g in grads), torch.zeros(()))
        torch.distributed.all_reduce(total, group=grad_stats_parallel_group)
        return float(total.sqrt())

    # Counts that its collectives take are brought to the host where they are of a device; these are there already.
    def on_host(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = on_host
    clip_grads.get_grad_norm_fp32 = optimizer.get_grad_norm_fp32 = grad_norm


if not torch.cuda.is_available() and torch.cuda.current_device.__module__ != __name__:
    _plain_type = torch.Tensor.type
    _install()
    _install_in_megatron()
