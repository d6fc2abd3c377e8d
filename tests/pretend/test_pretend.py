"""The path on CUDA devices, on the pretend one (`tests.pretend`): the device's own tests, its counts, whole steps."""

from __future__ import annotations

import shutil

import pytest

from tests.device_tensors import run_tests

FILES = [f"tests/gpu/test_{name}.py" for name in ("kernels", "engine_flash", "training", "sampler", "loop")]
FILES += ["tests/pretend/cases.py", "tests/unit/engine/native/decode_counts.py"]
# Left out: sharded offload, for which these tensors lack storages; runs in processes of their own; repeats, also of
# test_native_kernels.py.
LEFT_OUT = (
    "kernels_give or sharded and offload or trains or deterministic or float32 and (graphs or agree) "
    "or sleeping and False"
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("c++") is None, reason="the pretend device needs a C++ compiler")
def test_the_path_on_cuda() -> None:
    run_tests("tests.pretend", *FILES, "-k", f"not ({LEFT_OUT})")
