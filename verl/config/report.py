"""The answer of a check: problems in two classes, notices, the plan of batches."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl.config.problems import Problem

EXIT_OK, EXIT_CONFIGURATION, EXIT_MACHINE = 0, 2, 3


@dataclass
class Report:
    """All that a check found. `downloads` are models and files that a run would fetch first; `check_only` are
    notices that the run gives itself."""

    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    check_only: list[str] = field(default_factory=list)
    downloads: list[Problem] = field(default_factory=list)
    plan: list[str] = field(default_factory=list)

    def of(self, kind: str) -> list[Problem]:
        """The problems of a class: "configuration" or "machine"."""
        return [p for p in self.problems if p.kind == kind]

    @property
    def exit_code(self) -> int:
        """0; 2 if the configuration is wrong; 3 if only this machine lacks something."""
        if self.of("configuration"):
            return EXIT_CONFIGURATION
        return EXIT_MACHINE if self.problems else EXIT_OK

    def allow_downloads(self) -> None:
        """A run may fetch what is not on disk: those problems become notices."""
        for problem in self.downloads:
            self.problems.remove(problem)
            self.notices.append(f"{problem.key}: not on this disk, fetched at the start")
        self.downloads.clear()

    def problem_text(self) -> str:
        """All problems, by class, or ""."""
        lines: list[str] = []
        for kind, head in (("configuration", "the configuration"), ("machine", "this machine lacks")):
            found = self.of(kind)
            if found:
                count = f"{len(found)} problem{'s' if len(found) > 1 else ''}"
                lines.append(f"{head} ({count}):")
                lines += [f"  - {problem}" for problem in found]
        return "\n".join(lines)
