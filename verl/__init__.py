"""verl: reinforcement-learning post-training for language models.

Importing the package loads no torch: it installs the table of plug-in import paths and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.compat.paths import install

if TYPE_CHECKING:
    from verl.compat.data_proto import DataProto

__version__ = "0.1.0"
__all__ = ["DataProto", "__version__"]

install()


def __getattr__(name: str) -> Any:
    if name == "DataProto":
        from verl.compat.data_proto import DataProto

        return DataProto
    raise AttributeError(f"module 'verl' has no attribute {name!r}")
