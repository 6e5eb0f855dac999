"""`make docs-check`: what README and docs/ show is true. Commands parse, files, links and keys exist; cheap ones run.

python -m infra.docs.check          # parse and look up only, as the tests do
python -m infra.docs.check --run    # also help, dry runs, doctor, and the blocks that are marked to be run
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from infra.docs.commands import Command, commands_of, make_targets, missing_files, wrong_commands
from infra.docs.keys import wrong_keys
from infra.docs.links import broken_links
from infra.docs.pages import ROOT, Page, all_pages
from infra.docs.python_blocks import wrong_python
from jobs.cli import cli

BINARIES = Path(sys.executable).parent
LIMIT_S = 600


def main(arguments: Sequence[str]) -> int:
    pages = all_pages()
    wrong = list(static_problems(pages))
    if "--run" in arguments and not wrong:
        wrong += _run_problems(pages)
    print(*wrong, sep="\n")
    count = sum(1 for page in pages for command in commands_of(page) if command.is_ours)
    print(f"{len(pages)} pages, {count} commands of sevenleague, {len(wrong)} problems")
    return 1 if wrong else 0


def static_problems(pages: Sequence[Page]) -> Iterator[str]:
    """One sentence for each thing that is wrong, with its place."""
    yield from broken_links(pages)
    yield from wrong_commands(pages, make_targets())
    yield from missing_files(pages)
    yield from wrong_keys(list(pages))
    yield from wrong_python(pages)


def dry_runs(pages: Sequence[Page]) -> list[tuple[str, ...]]:
    """The `run`, `preview` and `submit` commands over job files of this repository, as dry runs."""
    found: dict[tuple[str, ...], None] = {}
    for page in pages:
        for command in filter(_is_job, commands_of(page)):
            found[("run", command.words[2], "--dry-run")] = None
    return list(found)


def _is_job(command: Command) -> bool:
    words = command.words
    return (
        command.is_ours
        and len(words) > 2
        and words[1] in ("run", "preview", "submit")
        and words[2].startswith("configs/")
        and _reads_committed_prompts(words[2])
    )


def _reads_committed_prompts(job_file: str) -> bool:
    """Other inputs are made by an earlier step, or are in a bucket."""
    return "configs/data/quickstart.parquet" in (ROOT / job_file).read_text()


def _run_problems(pages: Sequence[Page]) -> list[str]:
    """Commands that fail, with the end of what they said."""
    wrong: list[str] = []
    lines = [f"sevenleague {name} --help" for name in sorted(cli.commands)]
    lines += [" ".join(("sevenleague", *words)) for words in dry_runs(pages)]
    lines += ["sevenleague doctor"]
    for line in dict.fromkeys(lines):
        wrong += _tried(line, line, ROOT)
    with tempfile.TemporaryDirectory() as folder:  # outputs of one block are inputs of the next
        Path(folder, "configs").symlink_to(ROOT / "configs")
        for page in pages:
            for block in page.blocks():
                if block.runs:
                    wrong += _tried(block.where, block.text, Path(folder), block.language)
    return wrong


def _tried(name: str, script: str, folder: Path, language: str = "") -> list[str]:
    print(f"runs {name}", flush=True)
    interpreter = [sys.executable] if language == "python" else ["bash", "-euo", "pipefail"]
    environment = {**os.environ, "PATH": f"{BINARIES}:{os.environ['PATH']}"}
    done = subprocess.run(
        [*interpreter, "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    said = (done.stderr or done.stdout).strip()[-500:]
    return [f"{name} ended with {done.returncode}: {said}"] if done.returncode else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
