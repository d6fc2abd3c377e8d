"""Kernels for the host's processor: `cpu_kernels.cpp`, built by its C++ compiler at the first use and kept for later
ones.

Without a compiler, or with VERL_COMPILED_KERNELS=off, torch's own operators do the same, to rounding. What is built is
kept in ~/.cache/verl/kernels under a digest of the source, the compiler, the processor and torch's version. The
functions are those of `cuda_kernels`, and those of the embedded sampler: `decode_attention`, `draw`, packed products.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock
from torch import Tensor

from verl.platform.host_resources import processor

SWITCH = "VERL_COMPILED_KERNELS"
SOURCE = Path(__file__).with_suffix(".cpp")
FOLDER = Path("~/.cache/verl/kernels")
_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC", "-fopenmp")
_NATIVE = ("-mcpu=native",) if os.uname().machine in ("aarch64", "arm64") else ("-march=native",)
_WIDE = ("-mprefer-vector-width=512",)
_SECONDS = 300  # for the compiler
_KINDS = {torch.float32: 0, torch.bfloat16: 1}


class State(NamedTuple):
    """library: None where there are no kernels; `text` says what is used and why."""

    library: ctypes.CDLL | None
    text: str


def state() -> State:
    """What VERL_COMPILED_KERNELS says now: the kernels, built if they are not there, or none."""
    return _state(os.environ.get(SWITCH, "auto"))


@cache
def _state(choice: str) -> State:
    if choice == "off":
        return State(None, "compiled kernels left out (trainer.compiled_kernels=off)")
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None)
    if compiler is None:
        return State(None, "no compiled kernels: no C++ compiler (g++) is here")
    try:
        path = _built(compiler)
        return State(ctypes.CDLL(str(path)), "compiled kernels")
    except (OSError, subprocess.SubprocessError) as error:
        why = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        problem = why[0] if why else type(error).__name__
        return State(None, f"no compiled kernels: {compiler} cannot build them ({problem})")


def _built(compiler: str) -> Path:
    """The shared library, from the cache or the compiler."""
    native = [*_NATIVE, *(_WIDE if "avx512f" in processor()[1] else ())]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    name, features = processor()
    identity = repr((version, _FLAGS, native, name, sorted(features), torch.__version__))
    digest = hashlib.sha256(SOURCE.read_bytes() + identity.encode()).hexdigest()[:12]
    folder = FOLDER.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{digest}.so"
    with FileLock(folder / f"{digest}.lock"):
        if not path.exists():
            print("verl: compiling kernels for this processor, once (some 10 s)", file=sys.stderr, flush=True)
            part = path.with_suffix(f".{os.getpid()}")
            command = [compiler, *_FLAGS, *native, "-o", str(part), str(SOURCE)]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS)
            part.replace(path)
    return path


def _call(name: str, *arguments: Any) -> None:
    """A kernel with tensors as pointers, then the number of threads; an event for a profiler."""
    function = getattr(_state("auto").library, name)
    if function.argtypes is None:  # declared once, ctypes converts in C what would take microseconds here
        function.argtypes = [*map(_c_type, arguments), ctypes.c_int]
        function.restype = None
    values = [
        value.data_ptr() if isinstance(value, Tensor) else _KINDS[value] if isinstance(value, torch.dtype) else value
        for value in arguments
    ]
    watched: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined, unused-ignore]
    event: Any = torch.profiler.record_function(f"verl::{name}") if watched else nullcontext()
    with event:
        function(*values, torch.get_num_threads())


def _c_type(value: Any) -> Any:
    """The type of a parameter, which every call gives an argument of the same kind."""
    if value is None or isinstance(value, Tensor):
        return ctypes.c_void_p
    kinds: Any = {torch.dtype: ctypes.c_int, int: ctypes.c_int64, float: ctypes.c_float, bool: ctypes.c_int}
    return kinds[type(value)]


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `cuda_kernels.rms_norm`."""
    rows, kind = _rows(x), _kind(dtype)
    y, inverse = torch.empty(x.shape, dtype=kind), torch.empty(rows.shape[0] * rows.shape[1])
    sizes = len(inverse), rows.shape[1], *rows.stride()[:2], x.shape[-1]
    _call("rms_norm", rows, weight.float(), y, inverse, *sizes, eps, float(offset), rows.dtype, kind)
    return y.to(dtype), inverse


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, offset: float, inverse: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `cuda_kernels.rms_norm_backward`."""
    rows, grad, width = _rows(x), _readable(grad).contiguous(), x.shape[-1]
    blocks = max(1, min(64, len(inverse) // 16))
    dx, dw = torch.empty(x.shape, dtype=rows.dtype), torch.zeros(blocks, width)
    sizes = len(inverse), rows.shape[1], *rows.stride()[:2], width, float(offset), blocks
    _call("rms_norm_backward", grad, rows, weight.float(), inverse, dx, dw, *sizes, rows.dtype, grad.dtype)
    return dx.to(x.dtype), dw.sum(0)


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """x + delta [..., D], of the type of x, and its norm (see `rms_norm`), of the type of delta."""
    x, delta = x.contiguous(), delta.contiguous()
    total, y = torch.empty_like(x), torch.empty_like(delta)
    sizes = x.numel() // x.shape[-1], x.shape[-1]
    _call("add_norm", x, delta, total, weight.float(), y, *sizes, eps, float(offset), x.dtype, y.dtype)
    return total, y


def add(x: Tensor, delta: Tensor) -> Tensor:
    """x [..., D], contiguous, to which delta was added in place."""
    sizes = x.numel() // x.shape[-1], x.shape[-1]
    _call("add_norm", x, delta.contiguous(), x, None, None, *sizes, 0.0, 0.0, x.dtype, delta.dtype)
    return x


def norm_rotate(
    x: Tensor, weights: list[Tensor | None], eps: float, offset: float,
    cos: Tensor, sin: Tensor, queries: int, keys: int,
) -> None:  # fmt: skip
    """Norm the heads of queries and then of keys that each row of x [1, S, ≥ (queries + keys)·D] begins with, by a
    weight [D] for each of the two (None: no norm), and rotate them, in place. cos, sin [1, S, D]."""
    first, second = (None if weight is None else weight.float() for weight in weights)
    sizes = x.shape[1], x.shape[2], queries, queries + keys, cos.shape[-1] // 2
    positions = cos.float().contiguous(), sin.float().contiguous()
    _call("norm_rotate", x, first, second, *positions, *sizes, eps, float(offset), x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See `cuda_kernels.swiglu`."""
    width = gate.shape[-1]
    gates, ups = (_readable(x).reshape(-1, width) for x in (gate, up))
    out = torch.empty(gate.shape, dtype=gates.dtype)
    _call("swiglu", gates, ups, out, len(gates), gates.stride(0), ups.stride(0), width, gates.dtype)
    return out.to(gate.dtype)


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `cuda_kernels.swiglu_backward`."""
    inputs = [_readable(x).contiguous() for x in (grad, gate, up)]
    out, dgate, dup = (torch.empty_like(inputs[1]) for _ in range(3))
    sizes = gate.numel() // gate.shape[-1], gate.shape[-1]
    _call("swiglu_backward", *inputs, out, dgate, dup, *sizes, inputs[1].dtype)
    return out.to(gate.dtype), dgate.to(gate.dtype), dup.to(gate.dtype)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, back: bool) -> tuple[Tensor, Tensor]:
    """See `cuda_kernels.rotate`."""
    cos, sin, rotated = cos.float().contiguous(), sin.float().contiguous(), []
    for x in map(_readable, (q, k)):
        _, heads, tokens, width = x.shape
        out = torch.empty(tokens, heads, width, dtype=_kind(dtype))
        sizes = tokens, heads, width // 2, x.stride(1), x.stride(2)
        _call("rotate", x, cos, sin, out, *sizes, back, x.dtype, out.dtype)
        rotated.append(out.to(dtype).transpose(0, 1)[None])
    return rotated[0], rotated[1]


def head_forward(
    z: Tensor, targets: Tensor, state: Tensor, picked: Tensor, start: int, entropy: bool, squares: bool
) -> None:
    """See `cuda_kernels.head_forward`."""
    z, sizes = _readable(z), (*z.shape, start, targets.shape[1])
    _call("head_forward", z, targets, state, picked, *sizes, entropy, squares, z.dtype)


def head_backward(
    z: Tensor, stats: Tensor, targets: Tensor, grad: Tensor, entropy: Tensor | None, squares: Tensor | None, start: int
) -> None:
    """See `cuda_kernels.head_backward`."""
    wide, sizes = _readable(z), (*z.shape, start, targets.shape[1])
    _call("head_backward", wide, stats, stats.stride(0), targets, grad, entropy, squares, *sizes, wide.dtype)
    if wide is not z:
        z.copy_(wide)


def draw(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """A token of each row of logits float32 [N, V] by uniform numbers float64 [N], the most likely one where that is
    below 0: tokens int64 [N] and their log-probs [N], not a number where the logits are not finite."""
    tokens, log_probs = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
    _call("draw", logits.contiguous(), uniform, tokens, log_probs, *logits.shape)
    return tokens, log_probs


def packs(weight: Tensor) -> bool:
    """Whether `pack_weight` takes this matrix, and products by it are faster than oneDNN's: in bfloat16 where the
    processor multiplies pairs of them and has no matrix unit (AMX), in float32 with AVX2 but not with AVX512, where
    those of a few rows are faster, but not those of hundreds."""
    library = state().library
    if library is None or weight.shape[0] % (width := library.vector_width()):
        return False
    if weight.dtype == torch.bfloat16:
        return weight.shape[1] % 2 == 0 and library.multiplies_pairs() and "amx_bf16" not in processor()[1]
    return weight.dtype == torch.float32 and width == 8


def pack_weight(weight: Tensor) -> Tensor:
    """A matrix [out, in] as `packed_product` takes it: [out / w, in, w], of a vector of w numbers; bfloat16 as pairs in
    int32, [out / w, in / 2, w]."""
    weight, width = weight.contiguous(), _state("auto").library.vector_width()  # type: ignore[union-attr]
    rows = weight.view(torch.int32) if weight.dtype == torch.bfloat16 else weight
    packed = rows.new_empty(len(rows) // width, rows.shape[1], width)
    _call("pack_weight", rows, packed, *rows.shape)
    return packed


def unpack_weight(packed: Tensor) -> Tensor:
    """The matrix [out, in] that `pack_weight` was given."""
    rows = packed.transpose(1, 2).flatten(0, 1).contiguous()
    return rows.view(torch.bfloat16) if rows.dtype == torch.int32 else rows


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] by a packed weight of its type: [..., out]. The other rows of x do not change the result of a row."""
    panels, depth, width = packed.shape
    out = x.new_empty(*x.shape[:-1], panels * width)
    rows = out.numel() // out.shape[-1]
    _call("packed_product", x.contiguous(), packed, bias, out, rows, depth, out.shape[-1], x.dtype)
    return out


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None,
    tables: tuple[Tensor, ...], scale: float, softcap: float, window: int,
) -> Tensor:  # fmt: skip
    """Store the new key and value [1, Hkv, B, D] and attend: query [1, Hq, B, D] → [1, B, Hq, Dv].

    keys, values: the cache, [sequences of blocks, Hkv, cols, D]. tables, int32: rows by prompt [B]; of each tile its
    first place there and its rows; of each row the length [B] and the prompt's; blocks of rows [B, n], of tiles'
    prompts. softcap, window: 0 for none.
    """
    query, key, value = map(_readable, (query, key, value))
    heads, cols, width = keys.shape[1:]
    out = torch.empty(1, query.shape[2], query.shape[1], values.shape[-1], dtype=query.dtype)
    sizes = len(tables[1]), tables[5].shape[1], tables[6].shape[1]
    sizes = *sizes, heads, query.shape[1] // heads, cols, width, values.shape[-1]
    steps = (step for x in (query, key, value) for step in (x.stride(2), x.stride(1)))
    sinks = None if sinks is None else sinks.float()
    numbers = *sizes, *steps, float(scale), float(softcap), window
    _call("decode_attention", query, key, value, keys, values, sinks, out, *tables, *numbers, query.dtype)
    return out


def pack_attention(
    query: Tensor, key: Tensor, value: Tensor, spans: tuple[Tensor, ...], scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """query [1, Hq, S, D], key and value [1, Hkv, S, D] of a pack → output [1, S, Hq, D], log-normalisers [Hq, S].

    spans, int64: starts and ends of the spans [n], the first of each one's prefixes [n + 1], and their starts and ends.
    """
    query, key, value = map(_readable, (query, key, value))
    _, heads, tokens, width = query.shape
    out, lse = torch.empty(1, tokens, heads, width, dtype=query.dtype), torch.empty(heads, tokens)
    numbers = _pack_numbers(query, key, value, spans, scale)
    _call("pack_attention", query, key, value, out, lse, *spans, *numbers)
    return out, lse


def pack_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, spans: tuple[Tensor, ...],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value, of their shapes."""
    grad, query, key, value = (_readable(x) for x in (grad.to(query.dtype).contiguous(), query, key, value))
    shapes = [(x.shape[2], x.shape[1], x.shape[3]) for x in (query, key, value)]
    gradients = [torch.empty(shape, dtype=query.dtype) for shape in shapes]
    numbers = _pack_numbers(query, key, value, spans, scale)
    _call("pack_attention_backward", grad, query, key, value, out, lse, *gradients, *spans, *numbers)
    dq, dk, dv = (x.transpose(0, 1)[None] for x in gradients)
    return dq, dk, dv


def _pack_numbers(
    query: Tensor, key: Tensor, value: Tensor, spans: tuple[Tensor, ...], scale: float
) -> tuple[Any, ...]:
    _, heads, tokens, width = query.shape
    steps = (step for x in (query, key, value) for step in x.stride()[1:3])
    return len(spans[0]), key.shape[1], tokens, heads // key.shape[1], width, *steps, float(scale), query.dtype


def _kind(dtype: torch.dtype) -> torch.dtype:
    """What the kernels write for results of this type."""
    return dtype if dtype in _KINDS else torch.float32


def _readable(x: Tensor) -> Tensor:
    """x as the kernels read it, the numbers of a row side by side."""
    x = x.to(_kind(x.dtype))
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows(x: Tensor) -> Tensor:
    """[..., width] as [n, parts, width]: a view where x is rows of any stride, heads side by side."""
    return _readable(x).reshape(-1, x.shape[-2] if x.ndim > 3 else 1, x.shape[-1])
