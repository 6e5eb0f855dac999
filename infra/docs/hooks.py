"""Hooks of mkdocs: pages from README and code, and links that leave docs/.

Pages link as they do on GitHub, relative to docs/. In the site the README is the first page, files of configs/ are in
the gallery, and what else lies outside docs/ has no page, so its link becomes plain code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from infra.docs.reference import anchor_of, gallery_page, job_file_page

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?:\.\./|(?=examples/))([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    made = {
        "index.md": first_page((ROOT / "README.md").read_text()),
        "changelog.md": site_links((ROOT / "CHANGELOG.md").read_text().replace("](", "](../")),
        "job_file.md": job_file_page(),
        "configs.md": gallery_page(ROOT / "configs"),
    }
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def first_page(readme: str) -> str:
    """The README. Its diagram would be drawn by a script from elsewhere; a picture stands for it."""
    drawn = re.sub(r"```mermaid\n.*?```", "![driver, workers and storage](images/job.svg)", readme, flags=re.DOTALL)
    return site_links(drawn.replace("](", "](../").replace("](../#", "](#").replace("](../images/", "](images/"))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    return site_links(markdown)


def site_links(markdown: str) -> str:
    """Links out of docs/ as links of the site."""

    def translated(match: re.Match[str]) -> str:
        text, path, anchor = match[1], match[2], match[3] or ""
        if path.startswith(("http:", "https:")):
            return f"[{text}]({path}{anchor})"
        if path.startswith("docs/"):
            return f"[{text}]({path.removeprefix('docs/')}{anchor})"
        if path == "README.md":
            return f"[{text}](index.md{anchor})"
        if path == "CHANGELOG.md":
            return f"[{text}](changelog.md{anchor})"
        if path.startswith("configs"):
            return f"[{text}](configs.md{'#' + anchor_of(path) if path.endswith('.yaml') else ''})"
        return text if "`" in text else f"`{text}`" if "/" in text else text

    return _LINK.sub(translated, markdown)
