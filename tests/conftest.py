"""Loaded by pytest first; being in the package `tests` it makes `from tests.tiny import ...` work."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.chaos.fork_server import ForkServer
from tests.ray_cluster import shared
from tests.runs import TinyRun, write_pages_here

# A token in the home directory, where any Ray of a run's own leaves one, would be asked for by whatever starts next.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
# One choice for all tests, whatever the machine has; those of the compiled kernels make theirs.
os.environ.setdefault("VERL_COMPILED_KERNELS", "off")
write_pages_here()
# A busy machine is no failure.
settings.register_profile("verl", deadline=None)
settings.load_profile("verl")
gc.disable()  # what is imported and collected stays: to look through it again and again takes seconds


def pytest_collection_finish() -> None:
    """Tests' own garbage is collected, without a look at what came before them, neither after a run, which would let go
    of it: the next one would begin with 0.4 s of looking through all of it."""
    gc.freeze()
    gc.enable()
    gc.unfreeze = lambda: None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first: two workers that share the rest out among them then end together. Before them those on the
    shared Ray cluster: one worker has all of them while the other one begins at the other end, so nobody waits for the
    cluster; and behind them, for that worker has imported it, those with vLLM, and those on the pretend device, the
    longest ones, which would be the last."""

    def place(item: pytest.Item) -> tuple[bool, bool, bool]:
        slow = item.get_closest_marker("slow") is not None
        early = "vllm" in item.nodeid or "tests/pretend" in item.nodeid
        return "ray_address" not in item.fixturenames, not slow, not early

    items.sort(key=place)


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Starts commands without paying for the imports each time; made when the first test asks for it."""
    with ForkServer(tmp_path_factory.mktemp("fork_server")) as helper:
        yield helper


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """Model, data and reward of small runs."""
    return TinyRun(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def ray_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the test run's simulated Ray cluster of four nodes with a core and two NPUs each; this module's alone."""
    pytest.importorskip("ray", reason="Ray is not installed")
    base = tmp_path_factory.getbasetemp()
    with shared(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) as address:
        yield address


@pytest.fixture(scope="module")
def ray_driver(ray_address: str) -> Iterator[str]:
    """This process as a driver on that cluster."""
    import ray

    ray.init(address=ray_address, namespace="verl", logging_level="ERROR", log_to_driver=False)
    yield ray_address
    ray.shutdown()
