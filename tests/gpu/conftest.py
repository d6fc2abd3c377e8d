"""What all tests of a device share. They skip where there is none; results with figures go to $OUT if it is set.

    VERL_TEST_DEVICE=cpu python -m pytest tests/gpu      # the tests' own code, on a processor

A test says what it measured with `record_property`; the figures are in the JUnit file and in $OUT/gpu_tests.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

KIND = os.environ.get("VERL_TEST_DEVICE", "cuda")
# Deterministic mode wants it; torch looks once, at the first product.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
_FOUND: list[dict[str, Any]] = []


def _missing() -> str | None:
    """Why no test can run here."""
    from verl.errors import UserError
    from verl.platform import detect

    try:
        detect(KIND)
    except UserError as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    mine = [item for item in items if here in item.path.parents]
    why = _missing() if mine else None
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))
        elif KIND == "cpu" and item.get_closest_marker("needs_cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # the process that started the workers gets all reports
        return
    if report.when == "call" or report.outcome != "passed":
        entry: dict[str, Any] = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        if report.user_properties:
            entry["figures"] = dict(report.user_properties)
        if report.failed:
            entry["why"] = str(report.longrepr)[-3000:]
        _FOUND.append(entry)
        _keep()


def _keep() -> None:
    """After every test: a lent device may go before the last."""
    out = os.environ.get("OUT")
    if out:
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / "gpu_tests.json").write_text(json.dumps(_FOUND, indent=1) + "\n")


@pytest.fixture(scope="session")
def platform() -> Any:
    from verl.platform import detect

    found = detect(KIND)
    found.prepare()
    return found


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3 whose heads have 64 elements, as flash attention wants them, with weights that make logits differ."""
    from tests.tiny import tiny_model

    folder = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
    return str(tiny_model(folder / "qwen3", "qwen3", scale=4.0, **shape))


@pytest.fixture(autouse=True)
def give_memory_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """What one test leaves is not in the way of the next one's figures."""
    yield
    if _missing() is None:
        import gc

        gc.collect()
        request.getfixturevalue("platform").empty_cache()
