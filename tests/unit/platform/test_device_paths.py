"""What is done otherwise on an accelerator, as far as a machine without one can tell: on tensors that only have shapes,
and on stand-ins for a device's answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from verl.engine.rollout.native import decode_plan, prefill_plan, sampling
from verl.engine.rollout.native.prefill_plan import PrefillPlan
from verl.engine.training import log_prob
from verl.errors import UserError
from verl.models import flash_attention
from verl.models.attention import AttentionOptions
from verl.platform import cuda, platform_of
from verl.versions import satisfies

CUDA = "cuda:0"


@pytest.fixture
def shapes_only() -> Iterator[None]:
    """Tensors without values, which may be on devices that are not here."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=CUDA)


# -- memory


class Trainer:
    """A training engine without weights that says what it is asked."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def release_cached_memory(self) -> None:
        self.said.append("give back")

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.said.append("send")
        yield from ()


def test_a_sampler_of_another_process_finds_the_memory_that_the_trainer_does_not_need() -> None:
    """Before its weights wake, and again before its cache does."""
    from verl.weight_sync.sender import StreamedSync

    trainer: Any = Trainer()

    def load(weights: Any, version: int, *, verify: str) -> dict[str, str]:
        assert not list(weights)
        return {}

    sampler: Any = SimpleNamespace(weights_dtype=None, load_weights=load)
    StreamedSync(trainer, sampler).push(1)
    assert trainer.said == ["give back", "send", "give back"]


@pytest.mark.parametrize(("own_pool", "expected"), [(0, ["give back", "send", "give back"]), (1, ["send"])])
def test_a_rank_gives_back_what_samplers_of_its_device_take(own_pool: int, expected: list[str]) -> None:
    from verl.workers.training_worker import Worker

    rollout = SimpleNamespace(nnodes=own_pool, name="native", temperature=1.0, trainer_memory_utilization=0.0)
    model = SimpleNamespace(path="", lora_rank=0, lora_adapter_path=None)
    host: Any = object.__new__(Worker)
    host.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout, model=model))
    trainer = Trainer()
    host.engines, host.rank, host.profiler = {"actor": trainer}, 0, None
    Worker.send_weights(host, None, [], 1, "")
    assert trainer.said == expected


@pytest.mark.parametrize(("device", "times"), [("cuda", 1), ("cpu", 0)])
def test_a_processor_keeps_its_heap(device: str, times: int) -> None:
    from verl.engine.training.fsdp.engine import FSDPEngine

    engine: Any = object.__new__(FSDPEngine)
    emptied: list[int] = []
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad, engine._parameters, engine._watched = torch.ones(3), [weight], {}
    engine.platform = SimpleNamespace(on_host=device == "cpu", empty_cache=lambda: emptied.append(1))
    engine.release_cached_memory()
    assert len(emptied) == times and (weight.grad is None) == bool(times)


@pytest.mark.parametrize(
    ("share", "trained", "dtype", "taken"),
    [(0.5, False, "float32", 0), (0.25, True, "float32", 12), (0.5, True, "bfloat16", 14)],
)
def test_the_cache_is_a_share_of_what_the_trainer_leaves(
    share: float, trained: bool, dtype: str, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.engine.rollout.native import architecture, cache

    model = torch.nn.Linear(100, 10, bias=False).requires_grad_(trained)
    assert architecture.bytes_to_come(model, getattr(torch, dtype)) == taken * 1000
    device = SimpleNamespace(on_host=False, room=lambda index: 100_000)
    monkeypatch.setattr(cache, "platform_of", lambda _: device)
    given = {"share": share, "taken_later": taken * 1000}
    tokens = cache.default_cache_tokens(10, torch.device("cuda"), 256, 512, **given)
    assert tokens == int((100_000 - taken * 1000) * share) // 10
    with pytest.raises(UserError, match="raise rollout"):
        cache.KVCacheLayout.fit(tokens, 20_000, 256)


def test_buckets_on_a_device_leave_room() -> None:
    """The default asks for two of 2 GiB."""
    from verl.weight_sync.channel import BucketSender

    sizes = [BucketSender("small", 1, size, device=torch.device(CUDA)).bucket_bytes for size in (2 << 30, 1000)]
    assert sizes == [256 << 20, 1024]


# -- attention


@pytest.mark.parametrize(
    ("width", "capability", "fits"),
    [(64, (9, 0), True), (20, (9, 0), False), (264, (9, 0), False), (64, (7, 5), False)],
)
def test_the_flash_kernel_gets_what_it_can_do(
    shapes_only: None, monkeypatch: pytest.MonkeyPatch, width: int, capability: tuple[int, int], fits: bool
) -> None:
    cuda._has_flash.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    q, v = empty(1, 4, 8, width), empty(1, 2, 8, width)
    kernel = platform_of(q.device).flash_kernel(q.device)
    assert (kernel is not None and flash_attention.fits(q, v, AttentionOptions(1.0))) == fits
    cuda._has_flash.cache_clear()


def test_a_pack_for_the_flash_kernel_makes_no_masks() -> None:
    from verl.models.attention import TokenSpan
    from verl.models.packed_attention import PackedPlan

    plan = PackedPlan([TokenSpan(0, 4), TokenSpan(4, 7), TokenSpan(7, 9)], torch.arange(9), 4)
    assert plan.flash_parts
    assert "tiles" not in plan.__dict__
    assert plan.tiles and plan.tiles is plan.tiles


@pytest.mark.parametrize(
    ("new", "total", "dtype", "repeated"),
    [(8, 8, torch.bfloat16, False), (2, 8, torch.bfloat16, True), (8, 8, torch.float32, True)],
)
def test_prefill_never_asks_for_grouped_heads_where_that_means_all_scores(
    shapes_only: None,
    monkeypatch: pytest.MonkeyPatch,
    new: int,
    total: int,
    dtype: torch.dtype,
    repeated: bool,
) -> None:
    asked = {}

    def attention(query: Any, key: Any, value: Any, mask: Any, **options: Any) -> torch.Tensor:
        asked.update(options, mask=mask, heads=(query.shape[1], key.shape[1], value.shape[1]))
        return query

    monkeypatch.setattr(prefill_plan, "F", SimpleNamespace(scaled_dot_product_attention=attention), raising=True)
    monkeypatch.setattr(PrefillPlan, "_mask", lambda *_: "mask")
    plan = object.__new__(PrefillPlan)
    query, key = empty(1, 8, new, 16, dtype=dtype), empty(1, 2, total, 16, dtype=dtype)
    plan._one(query, key, key, AttentionOptions(0.25))
    assert asked["heads"] == ((8, 8, 8) if repeated else (8, 2, 2))
    assert asked["enable_gqa"] == (not repeated)
    assert asked["is_causal"] == (new == total) and (asked["mask"] is None) == (new == total)


@pytest.mark.skipif(satisfies(torch.__version__, "<2.12"), reason="torch 2.11 knows no shapes of this product")
def test_scores_on_a_device_are_float32(shapes_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_has_widening_product", lambda: True)
    made: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made.append(str(func))
            return func(*args, **(kwargs or {}))

    a, b, out = empty(6, 4, 16), empty(6, 16, 3), empty(6, 4, 3, dtype=torch.float32)
    with Watch():
        decode_plan._product(a, b, 0.5, out)
    assert [name for name in made if name.startswith("aten")] == ["aten.bmm.dtype_out", "aten.mul_.Tensor"]


# -- sampling


@pytest.mark.parametrize("rows", [1, 3])
def test_running_sums_are_had_in_deterministic_mode(shapes_only: None, rows: int) -> None:
    class Cuda(TorchDispatchMode):
        """A CUDA device's cumsum of floats."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.name == "aten::cumsum":
                if torch.are_deterministic_algorithms_enabled():
                    raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
                assert len(args[0]) > 1, "a single row is summed in an order that varies"
            return func(*args, **(kwargs or {}))

    torch.use_deterministic_algorithms(True)
    try:
        with Cuda():
            found = sampling._running(empty(rows, 5, dtype=torch.float64))
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.shape == (rows, 5)


# -- training


def test_a_device_gets_few_large_blocks_of_logits() -> None:
    rows, columns = 8192, 151936
    height, width = log_prob._blocks(rows, columns, torch.device(CUDA))
    assert -(-rows // height) * -(-columns // width) <= 64
    assert height * width * 4 <= 128 << 20
    assert log_prob._blocks(rows, columns, torch.device("cpu")) == (512, 4096)


# -- vLLM


def packages(monkeypatch: pytest.MonkeyPatch, **parts: Any) -> None:
    """The parts of vLLM that a load of weights takes, without vLLM."""
    from contextlib import nullcontext

    reload = {"initialize_layerwise_reload": lambda model: None, "finalize_layerwise_reload": lambda *_: None}
    layerwise = SimpleNamespace(get_layerwise_info=lambda layer: SimpleNamespace(can_load=lambda: False))
    found = {
        "vllm": {},
        "vllm.config": {"set_current_vllm_config": lambda config: nullcontext()},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.vocab_parallel_embedding": {"VocabParallelEmbedding": type("V", (), {})},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": reload | {"layerwise": layerwise},
    }
    for name, content in found.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(("device", "kept"), [("cpu", False), ("cuda", True)])
def test_expert_kernels_stay_on_a_device(monkeypatch: pytest.MonkeyPatch, device: str, kept: bool) -> None:
    """There captured graphs hold on to what a kernel has, and it reads the weights where they are."""
    from verl.engine.rollout.vllm import worker

    packages(monkeypatch)
    model = torch.nn.Linear(1, 1, bias=False)
    model.quant_method = SimpleNamespace(moe_kernel="packed")
    model.load_weights = lambda weights: {name for name, _ in weights}
    own = SimpleNamespace(
        device=torch.device(device),
        model_runner=SimpleNamespace(get_model=lambda: model),
        vllm_config=None,
        model_config=None,
    )
    worker._reload(own, iter([("weight", None)]))
    assert (model.quant_method.moe_kernel == "packed") == kept


@pytest.mark.parametrize(
    ("kind", "own", "expected"),
    [("cpu", False, False), ("cuda", False, True), ("npu", False, True), ("cuda", True, False)],
)
def test_samplers_wait_for_trainers_of_the_same_devices(kind: str, own: bool, expected: bool) -> None:
    pytest.importorskip("ray")
    from verl.workers.ray import build

    assert build._take_turns(kind, own) == expected


def test_cuda_lets_go_of_shared_buckets_and_of_the_workspaces_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.platform.cuda import PLATFORM

    calls: list[Any] = []
    for name in ("ipc_collect", "empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *which, name=name: calls.append((name, *which)))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: calls.append("workspaces"), raising=False)
    PLATFORM.empty_cache()
    PLATFORM.synchronize(torch.device("cuda", 1))
    assert calls == [("ipc_collect",), ("empty_cache",), ("synchronize", torch.device("cuda", 1))]
    recorder = PLATFORM.graph_recorder()
    recorder.forget()
    assert "workspaces" not in calls
    recorder._pool = object()
    recorder.forget()
    assert calls[-1] == "workspaces" and recorder._pool is None


def test_products_that_write_float32_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor has none, as torch's first CUDA versions of them had no float32 sums."""
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device, **kind: ones(*size, **kind))
    assert not cuda._has_widening_product.__wrapped__()
