"""Python that a page shows: it is valid, and what it imports of ours is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from infra.docs.pages import ROOT, Page

OWN = ("pipeline", "workers", "jobs", "sevenleague")


def wrong_python(pages: Sequence[Page]) -> Iterator[str]:
    for page in pages:
        for block in page.blocks():
            if block.language != "python":
                continue
            try:
                tree = ast.parse(block.text)
            except SyntaxError as error:
                yield f"{block.where}: {error.msg} in line {error.lineno} of the block"
                continue
            yield from (f"{block.where}: {sentence}" for sentence in _wrong_imports(tree))


def _wrong_imports(tree: ast.Module) -> Iterator[str]:
    """Names are looked for in the source: to import the modules would load torch and Ray."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OWN:
            source = _source(node.module)
            for alias in node.names:
                if source is None or not re.search(rf"\b{alias.name}\b", source):
                    yield f"{node.module} has no {alias.name}"


def _source(module: str) -> str | None:
    path = ROOT / module.replace(".", "/")
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file.read_text() for file in files if file.exists()), None)
