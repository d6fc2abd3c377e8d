"""Write the tables of docs/algorithms.md from the registries: `python3 docs/write_algorithm_tables.py`.

What stands in a table is what the function's docstring and its registration say.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

PAGE = Path(__file__).parent / "algorithms.md"
_SOURCE = re.compile(r"\s*Sources?: (.*?)\.?\s*$", re.S)
_AT_HAND = {"token_rewards", "response_mask"}


def table(kind: str) -> str:
    """The rows of ESTIMATORS or LOSSES as Markdown."""
    from verl.algorithms import advantage, entropy_losses, policy_loss, step_credit  # noqa: F401  (they fill the registries)
    from verl.algorithms import registry as registries

    registry = getattr(registries, kind)
    names: dict[object, list[str]] = {}
    for name, function in registry.functions.items():
        if function.__module__.startswith("verl.algorithms."):
            names.setdefault(function, []).append(name)
    lines = ["| name | per token | source | needs | reads |", "|---|---|---|---|---|"]
    for function, own in names.items():
        declared = registry.declared(own[0])
        needs = sorted(registry.needs(own[0]) - _AT_HAND)
        cells = (_code(sorted(own)), *_docs(function), _code(needs), _code(declared.keys))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines[:2], *sorted(lines[2:])])


def _docs(function: object) -> tuple[str, str]:
    """(formula, source): the first paragraph of the docstring, and what its end (or the module's) names as source."""
    text = inspect.getdoc(function) or ""
    found = _SOURCE.search(text) or _SOURCE.search(sys.modules[function.__module__].__doc__ or "")
    formula = _SOURCE.sub("", text.split("\n\n")[0]).replace("\n", " ").replace("|", "\\|")
    return formula, " ".join(found[1].split()) if found else ""


def _code(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def page() -> str:
    """The page with its tables as they should be."""
    text = PAGE.read_text("utf-8")
    for kind in ("ESTIMATORS", "LOSSES"):
        begin, end = f"<!-- {kind} -->", f"<!-- end of {kind} -->"
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{table(kind)}\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
