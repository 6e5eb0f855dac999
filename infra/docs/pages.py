"""What the checks read in Markdown: code blocks, code within text, links, headings."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN_MARK = "<!-- docs-check: run -->"
"""On the line before a block: `make docs-check` runs its commands."""

_FENCE = re.compile(r"^\s*```(\w*)")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_INLINE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code: of a fence, or indented by four spaces or more."""

    page: str
    line: int
    language: str
    text: str
    runs: bool

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True, slots=True)
class Page:
    """A Markdown file; `name` is its path from the root of the repository."""

    name: str
    text: str

    @property
    def prose(self) -> str:
        """The text without its blocks of code, line by line as before."""
        lines = self.text.splitlines()
        for first, last, _, _ in _spans(lines):
            lines[first:last] = [""] * (last - first)
        return "\n".join(lines)

    def blocks(self) -> Iterator[Block]:
        lines = self.text.splitlines()
        for first, _, language, text in _spans(lines):
            before = next((line for line in reversed(lines[:first]) if line.strip()), "")
            yield Block(self.name, first + 1, language, text, before.strip() == RUN_MARK)

    def inline_code(self) -> Iterator[tuple[str, str]]:
        """(place, code) of code within text."""
        yield from self._found(_INLINE, self.prose)

    def links(self) -> Iterator[tuple[str, str]]:
        """(place, target) of all links and images."""
        yield from self._found(_LINK, _INLINE.sub("", self.prose))

    def anchors(self) -> set[str]:
        """Names of the headings, as GitHub makes them."""
        found: set[str] = set()
        for title in re.findall(r"^#+ (.+)$", self.prose, re.MULTILINE):
            slug = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
            count = sum(name == slug or re.fullmatch(re.escape(slug) + r"-\d+", name) is not None for name in found)
            found.add(slug if count == 0 else f"{slug}-{count}")
        return found

    def _found(self, pattern: re.Pattern[str], text: str) -> Iterator[tuple[str, str]]:
        for number, line in enumerate(text.splitlines(), start=1):
            for match in pattern.finditer(line):
                yield f"{self.name}:{number}", match[1]


def all_pages() -> list[Page]:
    """README, CHANGELOG and docs/."""
    files = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [Page(str(file.relative_to(ROOT)), file.read_text()) for file in files if file.exists()]


def _spans(lines: Sequence[str]) -> Iterator[tuple[int, int, str, str]]:
    """(first line, line after the last, language, text) of each block."""
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        first = number
        if fence is not None:
            number += 1
            while number < len(lines) and not _FENCE.match(lines[number]):
                number += 1
            yield first, number + 1, fence[1], textwrap.dedent("\n".join(lines[first + 1 : number]))
            number += 1
        elif _begins_indented(lines, number):
            while number < len(lines) and (lines[number].startswith("    ") or not lines[number].strip()):
                number += 1
            yield first, number, "", textwrap.dedent("\n".join(lines[first:number]))
        else:
            number += 1


def _begins_indented(lines: Sequence[str], number: int) -> bool:
    """Four spaces after an empty line. In a list they may be a paragraph of an item, which does no harm here."""
    return lines[number].startswith("    ") and (number == 0 or not lines[number - 1].strip())
