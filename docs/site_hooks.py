"""What mkdocs does beside its configuration: pages of the repository's root, links that leave the site, and the lists
in docstrings.

README.md is the front page. A link to a file of the repository that is no page becomes the file's name.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parents[1]
PAGES = {
    "index.md": "README.md",
    **{name: name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")},
}
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s:]+)(#[^)]*)?\)")
_ENTRY = re.compile(r"^(\w+(?:, \w+)*)  +(\S.*)$")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root."""
    from mkdocs.structure.files import File

    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page with its links as the site has them."""
    at_root = page.file.src_uri in PAGES
    if at_root:
        markdown = re.sub(r"(!\[[^\]]*\]\()docs/", r"\1", markdown)

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        path = posixpath.normpath(
            f"{'' if at_root else 'docs/'}{posixpath.dirname(page.file.src_uri)}/{target}".lstrip("/")
        )
        name = "index.md" if path == "README.md" else path.removeprefix("docs/")
        if files.get_file_from_path(name):
            start = posixpath.dirname(page.file.src_uri) or "."
            return f"[{text}]({posixpath.relpath(name, start)}{anchor or ''})"
        return text if text in (path, posixpath.basename(path)) else f"{text} (`{path}`)"

    return _LINK.sub(link, markdown)


class DocstringLists(griffe.Extension):
    """Lines of a docstring of the form `name    text` as a list."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each object that is documented."""
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)


def listed(text: str) -> str:
    """The text with a Markdown list in place of aligned lines; a longer indentation continues an entry."""
    lines, inside = [], False
    for line in text.splitlines():
        if entry := _ENTRY.match(line):
            lines += ([] if inside else [""]) + [f"- `{entry[1]}`: {entry[2]}"]
            inside = True
        else:
            inside = inside and line.startswith("  ")
            lines.append(line)
    return "\n".join(lines)
