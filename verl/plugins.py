"""Modules of the user that register estimators, losses and the like, imported in every process of a run; the form in
which plug-ins get a batch."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Sequence
from typing import Any

from verl.errors import UserError

VARIABLE = "VERL_USE_EXTERNAL_MODULES"
"""The environment variable that lists modules beside `model.external_lib`."""
REGISTRIES: dict[str, Any] = {}
"""Registries that plug-in modules add to, by name: the configuration asks them, and imports no algorithm itself."""
BATCH_VIEWS: list[str] = []
"""At most one "module:function" of a `verl.trajectory.Batch`; `verl.compat.paths.install` names `DataProto`'s."""


def batch_view(batch: Any) -> Any:
    """A `verl.trajectory.Batch` as the plug-ins of this process get it: `verl.DataProto`."""
    return pkgutil.resolve_name(BATCH_VIEWS[0])(batch)


def import_modules(external_lib: str | Sequence[str] | None) -> None:
    """Import `model.external_lib` and what VERL_USE_EXTERNAL_MODULES lists. UserError for one that does not import."""
    names = external_lib or []
    modules = [names] if isinstance(names, str) else list(names)
    modules += [m for m in os.environ.get(VARIABLE, "").split(",") if m]
    for module in modules:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise UserError(_problem(module, error)) from error


def _problem(module: str, error: BaseException) -> str:
    import traceback

    prefix = f"the plug-in module {module} (model.external_lib, {VARIABLE}) cannot be imported: "
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return f"{prefix}no module {error.name} is found; install it, or put its folder on PYTHONPATH"
    own_code = "".join(traceback.format_exception(error, limit=-3)).rstrip()
    return f"{prefix}{type(error).__name__}: {error}\n{own_code}"
