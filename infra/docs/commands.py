"""Commands that a page shows: they parse, their files are there, and `make` has their targets. Nothing is run here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from infra.docs.keys import wrong_override
from infra.docs.pages import ROOT, Block, Page
from jobs.cli import cli
from pipeline.config import JobConfig
from pipeline.train_config import TrainConfig

SHELLS = ("", "sh", "bash", "shell", "console")
FOLDERS = ("configs", "docs", "infra", "jobs", "pipeline", "tests", "workers")
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_0-9]*(?:\|[A-Za-z_.]+)*|.*\.\..*")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*")


@dataclass(frozen=True, slots=True)
class Command:
    """One command line of a block; `whole` unless it is a mention within text, which may leave arguments out."""

    where: str
    words: tuple[str, ...]
    whole: bool = True

    @property
    def is_ours(self) -> bool:
        return self.words[0].rsplit("/", 1)[-1] == "sevenleague"


def commands_of(page: Page) -> Iterator[Command]:
    for block in page.blocks():
        if block.language in SHELLS:
            yield from block_commands(block)
    for where, code in page.inline_code():
        if code.startswith(("sevenleague ", "make ")):
            yield from _parsed(where, code, whole=False)


def block_commands(block: Block) -> Iterator[Command]:
    """The lines of a block as commands; what only looks like one has an unknown first word and is let alone."""
    for line in block.text.replace("\\\n", " ").splitlines():
        yield from _parsed(block.where, line.strip().removeprefix("$ "), whole=True)


def wrong_commands(pages: Sequence[Page], targets: frozenset[str]) -> Iterator[str]:
    for page in pages:
        for command in commands_of(page):
            for sentence in _wrong(command, targets):
                yield f"{command.where}: {sentence} in `{' '.join(command.words)}`"


def make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def missing_files(pages: Sequence[Page]) -> Iterator[str]:
    """Paths of this repository that text or commands name must exist."""
    for page in pages:
        words = [(where, word) for where, code in page.inline_code() for word in code.split()]
        words += [(command.where, word) for command in commands_of(page) for word in command.words]
        for where, word in words:
            path = word.removeprefix("./").rstrip("/,;:")
            named = re.fullmatch(rf"(?:{'|'.join(FOLDERS)})/[\w./*-]+", path)
            if named is None or re.search(r"/[A-Z]+\b", path):  # NAME stands for any
                continue
            if not any(ROOT.glob(path)) and not any((ROOT / f"{path}{end}").exists() for end in ("", ".py")):
                yield f"{where}: {path} is not there"


def _parsed(where: str, line: str, *, whole: bool) -> Iterator[Command]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a quote in prose
        return
    words = [word for word in words if word not in ("[", "]")]
    while words and _ASSIGNMENT.fullmatch(words[0]):
        words.pop(0)
    for end, word in enumerate(words):
        if word in ("&&", "|", ";", ">", "&"):
            words = words[:end]
            break
    if words:
        yield Command(where, tuple(words), whole)


def _wrong(command: Command, targets: frozenset[str]) -> Iterator[str]:
    if command.is_ours:
        yield from _wrong_call([word.strip("[]") for word in command.words[1:]], command.whole)
    elif command.words[0] == "make":
        names = [word for word in command.words[1:] if re.fullmatch(r"[a-z-]+", word) and not word.startswith("-")]
        yield from (f"make has no target {name!r}" for name in names if name not in targets)


def _wrong_call(words: list[str], whole: bool) -> Iterator[str]:
    if not words or words[0].startswith("-"):
        return
    name, *arguments = words
    command = cli.get_command(click.Context(cli), name)
    if command is None:
        yield f"there is no command {name!r}"
        return
    context = click.Context(command, info_name=name)
    try:
        values, rest, _ = command.make_parser(context).parse_args(arguments)
    except click.UsageError as error:
        if whole or isinstance(error, click.NoSuchOption):
            yield error.format_message()
        return
    if rest:
        yield f"{rest} is too much"
    root = TrainConfig if name == "train" else JobConfig
    for param in command.params:
        yield from _wrong_value(param, context, values.get(param.name or ""), whole)
        if param.name in ("set_values", "overrides"):
            yield from filter(None, (wrong_override(text, root) for text in values.get(param.name) or ()))


def _wrong_value(param: click.Parameter, context: click.Context, value: object, whole: bool) -> Iterator[str]:
    given = [text for text in (value if isinstance(value, list | tuple) else [value]) if isinstance(text, str)]
    if not given and param.required and whole and not getattr(param, "envvar", None):
        yield f"{param.human_readable_name} is missing"
    for text in given:
        if not _PLACEHOLDER.fullmatch(text):
            try:
                param.type.convert(text, param, context)
            except click.UsageError as error:
                yield error.format_message()
