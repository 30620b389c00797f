"""mkdocs hook: the start page is README.md, and links to files outside docs/ become their names.

A link to a file that is not there ends the build, as links within docs/ do by themselves.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds README.md as index.md: its links are relative to the root, those of docs/ to docs/."""
    text = (ROOT / "README.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=_without_outside(text, ROOT)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave docs/, as text."""
    return markdown if page.file.src_uri == "index.md" else _without_outside(markdown, ROOT / "docs")


def _without_outside(markdown: str, folder: Path) -> str:
    def replaced(match: re.Match[str]) -> str:
        text, target, _anchor = match.groups()
        outside = target.startswith("../") or (folder == ROOT and not (ROOT / "docs" / target).exists())
        if not outside or "://" in target:
            return match[0]
        if not (folder / target).exists():
            raise PluginError(f"a link to {target}, which is not there")
        return f"{text}" if "`" in text or target in text else f"{text} (`{target.removeprefix('../')}`)"

    return _LINK.sub(replaced, markdown)
