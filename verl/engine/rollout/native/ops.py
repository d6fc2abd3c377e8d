"""The sampler's own operators: `torch.ops.verl_sampler`, computed by Triton on devices that it compiles for.

They are torch operators so that whatever watches torch's operators sees them: profilers, and the pretend device of the
tests, which counts them and computes them with references of its own.
"""

from __future__ import annotations

from functools import cache

import torch

_SCHEMAS = {
    "paged_kernels": (
        "inputs(Tensor step, Tensor tokens) -> (Tensor, Tensor)",
        "store(Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor step) -> ()",
        "partial(Tensor query, Tensor keys, Tensor values, Tensor step, Tensor(a!) out, Tensor(b!) lse, bool prompts, "
        "float scale, float softcap, int window) -> ()",
        "merge(Tensor parts, Tensor lse, Tensor step, Tensor? sinks, ScalarType dtype) -> Tensor",
    ),
    "sampling_kernels": (
        "threshold(Tensor logits, Tensor top_p, Tensor step) -> Tensor",
        "chunk_sums(Tensor logits, Tensor lowest, Tensor step) -> (Tensor, Tensor, Tensor)",
        "draw(Tensor logits, Tensor uniform, Tensor lowest, Tensor step, Tensor largest, Tensor sums, Tensor best, "
        "Tensor(a!) tokens) -> ()",
    ),
    "layer_kernels": (
        "rms_norm(Tensor x, Tensor weight, float eps, float offset) -> Tensor",
        "rotate(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
        "swiglu(Tensor gate, Tensor up) -> Tensor",
    ),
}
_LIBRARY = torch.library.Library("verl_sampler", "DEF")
for _schema in (schema for schemas in _SCHEMAS.values() for schema in schemas):
    _LIBRARY.define(_schema)


@cache
def load(kind: str) -> None:
    """Compute the operators by Triton on devices of a kind. ImportError where Triton is not installed."""
    import importlib

    for module, schemas in _SCHEMAS.items():
        kernels = importlib.import_module(f"verl.engine.rollout.native.{module}")
        for schema in schemas:
            name = schema.partition("(")[0]
            _LIBRARY.impl(name, getattr(kernels, name), kind.upper())
