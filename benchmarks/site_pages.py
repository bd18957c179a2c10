"""A hook of mkdocs: the pages of the repository's root join those of docs/, README.md first.

Try: make site
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = {
    "README.md": "index.md",
    **{name: name for name in ("AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")},
}


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for source, page in ROOT_PAGES.items():
        text = moved_links((ROOT / source).read_text("utf-8"))
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links of docs/ to the pages beside it."""
    return re.sub(r"\]\(\.\./([A-Z]+\.md)", lambda match: f"]({ROOT_PAGES[match[1]]}", markdown)


def moved_links(text: str) -> str:
    """Links of a page in the root, as they are from docs/."""
    return re.sub(r"\]\((?:docs/)?([^)]*)\)", lambda match: f"]({ROOT_PAGES.get(match[1], match[1])})", text)
