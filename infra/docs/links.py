"""Links within the repository lead to a file, and to a heading where they name one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from infra.docs.pages import ROOT, Page


def broken_links(pages: Sequence[Page]) -> Iterator[str]:
    known = {page.name: page for page in pages}
    for page in pages:
        for where, target in page.links():
            if "://" in target or target.startswith("mailto:"):
                continue
            path, _, anchor = target.partition("#")
            name = os.path.normpath(os.path.join(os.path.dirname(page.name), path)) if path else page.name
            if name not in known and not (ROOT / name).exists():
                yield f"{where}: {target} leads nowhere"
            elif anchor and name.endswith(".md") and anchor not in _page(name, known).anchors():
                yield f"{where}: {target} names no heading of {name}"


def _page(name: str, known: Mapping[str, Page]) -> Page:
    return known[name] if name in known else Page(name, (ROOT / name).read_text())
