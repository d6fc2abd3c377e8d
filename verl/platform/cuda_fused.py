"""Operators of NVIDIA devices that read and write each number once, where Triton is installed (torch's CUDA builds
bring it).

Each is one launch of a kernel of `cuda_kernels`, `rms_norm_backward` two.
"""

from __future__ import annotations

from verl.platform.fused import fused_operators
from verl.platform.operators import define, ops

define(
    "verl.platform.cuda_kernels",
    "rms_norm(Tensor x, Tensor weight, float eps, float offset, ScalarType dtype) -> (Tensor, Tensor)",
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, float offset, Tensor inverse) -> (Tensor, Tensor)",
    "swiglu(Tensor gate, Tensor up) -> Tensor",
    "swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor, Tensor)",
    "rotate(Tensor q, Tensor k, Tensor cos, Tensor sin, ScalarType dtype, bool back) -> (Tensor, Tensor)",
    "merge_attention(Tensor(a!) out, Tensor(b!) lse, Tensor other, Tensor other_lse, Tensor index) -> ()",
    "head_forward(Tensor z, Tensor targets, Tensor(a!) state, Tensor(b!) picked, int start, bool entropy, bool squares)"
    " -> ()",
    "head_backward(Tensor(a!) z, Tensor stats, Tensor targets, Tensor grad, Tensor? entropy, Tensor? squares, int "
    "start)"
    " -> ()",
)


FUSED = fused_operators(ops, merge_attention=ops.merge_attention)
