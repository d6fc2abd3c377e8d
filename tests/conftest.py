"""Loaded by pytest first; being in the package `tests` it makes `from tests.tiny import ...` work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.fork_server import ForkServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first: two workers that share the rest out among them then end together."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Starts commands without paying for the imports each time; made when the first test asks for it."""
    with ForkServer(tmp_path_factory.mktemp("fork_server")) as helper:
        yield helper
