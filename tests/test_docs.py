"""What README and docs/ say is so: commands parse, links lead somewhere, keys exist, messages and examples are real."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from infra.docs.check import dry_runs, static_problems
from infra.docs.keys import known_keys
from infra.docs.pages import Page, all_pages
from infra.docs.reference import job_file_page
from pipeline.config import EngineConfig, JobConfig, ModelConfig, SamplingConfig
from pipeline.decoding_config import AutoregressiveConfig, SuffixConfig

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def problems(text: str) -> list[str]:
    """Of a page at docs/page.md."""
    return [sentence.partition(": ")[2] for sentence in static_problems([Page("docs/page.md", text)])]


def test_all_pages_are_sound() -> None:
    assert list(static_problems(all_pages())) == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("    sevenleague run job.yaml --dryrun", "No such option"),
        ("    sevenleague run", "JOB.yaml is missing"),
        ("```bash\nsevenleague preview a.yaml \\\n    b.yaml\n```", "['b.yaml'] is too much"),
        ("    sevenleague status out --samples 3", "No such option"),
        ("    sevenleague verify out --samples none", "is not a valid integer"),
        ("    sevenleague run job.yaml --set sampling.temp=1", "'sampling.temp', which is no key"),
        ("    sevenleague train my.yaml --output d --set sampling.seed=1", "'sampling.seed', which is no key"),
        ("see `sevenleague fly`", "there is no command 'fly'"),
        ("    make tea", "make has no target 'tea'"),
        ("    sevenleague run configs/none.yaml", "configs/none.yaml is not there"),
        ("see `workers/nothing.py`", "workers/nothing.py is not there"),
        ("[a](nowhere.md)", "nowhere.md leads nowhere"),
        ("[a](cluster.md#nothing)", "names no heading"),
        ("# One\n[a](#two)", "names no heading"),
        ("```yaml\nsampling: {temprature: 1}\n```", "'sampling.temprature' is no key"),
        ("    input:\n      path: a.csv\n      colums: {a: b}", "'input.colums' is no key"),
        ("set `decoding: {strategy: auto, depth: 3}`", "'decoding.depth' is no key"),
        ("set `engine.max_batch: 3`", "'engine.max_batch' is no key"),
        ("```python\nfrom workers.engine import Motor\n```", "workers.engine has no Motor"),
        ("```python\nprint(\n```", "was never closed"),
        (
            "```yaml\nmodel: m\ninput: p\noutput: o\nsampling: {n: 0}\n```",
            "sampling.n must be at least 1, got 0",
        ),
    ],
)
def test_what_is_wrong_on_a_page_is_found(text: str, sentence: str) -> None:
    found = problems(text)
    assert len(found) == 1
    assert sentence in found[0]


@pytest.mark.parametrize(
    "text",
    [
        "    sevenleague run JOB.yaml [--error-type TYPE] --retry-failed    # a comment",
        "    export A=.. && sevenleague nothing",
        "    sevenleague submit job.yaml    # the address comes from a variable",
        "[a](https://elsewhere/x.md#y) and [b](cluster.md#credentials)",
        "```yaml\nsampling: {temperature: 0.7, ..}\n```",
        "    input:\n      path: a.csv\n      columns: {a: b}",
        "`model.safetensors` and `make`",
    ],
)
def test_what_is_right_is_let_alone(text: str) -> None:
    assert problems(text) == []


def test_quickstart_is_run_by_docs_check() -> None:
    run = [block for page in all_pages() for block in page.blocks() if block.runs]
    assert {block.page for block in run} == {"README.md", "docs/quickstart.md"}
    assert any("sevenleague run configs/quickstart.yaml" in block.text for block in run)
    assert ("run", "configs/quickstart.yaml", "--dry-run") in dry_runs(all_pages())


def test_every_page_is_in_the_navigation() -> None:
    names = set(re.findall(r"(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    made = {"index.md", "job_file.md", "configs.md", "changelog.md"}
    assert names - made == {path.name for path in DOCS.glob("*.md")}


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Links, anchors and pages as mkdocs sees them; nothing is fetched to read it."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "job_file.html").read_text()
    assert "<code>sampling.temperature</code>" in page
    assert "configs/quickstart.yaml" in (tmp_path / "configs.html").read_text()
    loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?:[^\s\">]+)", page)
    assert loaded == []


def test_the_reference_of_the_job_file_has_every_key() -> None:
    """The page is made when the site is built."""
    rows = set(re.findall(r"^\| `([\w.]+)` \|", job_file_page(), re.MULTILINE))
    assert rows == {key for key in known_keys(JobConfig) if "." in key} - {"decoding.strategy"}
    assert "| `sampling.top_p` | number | `1.0` | above 0, at most 1 |" in job_file_page()
    unexplained = [line for line in job_file_page().splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert unexplained == []


def test_messages_of_the_troubleshooting_page_are_in_the_code() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    shown = [message for message in messages if " " in message]
    assert len(shown) >= 20
    for message in shown:
        pieces = [piece.strip() for piece in message.split("..") if len(piece.strip()) > 3]
        assert any(all(piece in sentence for piece in pieces) for sentence in sentences_in_code()), message


def test_every_kind_of_failed_row_is_explained() -> None:
    found = re.findall(r"\b(?:RowError|GiveUp)\(\s*\"(\w+)\"|error_type = \"(\w+)\"", "".join(sources()))
    kinds = {kind for pair in found for kind in pair if kind} | {"engine_error", "out_of_memory"}
    page = (DOCS / "troubleshooting.md").read_text()
    assert {kind for kind in kinds if f"`{kind}`" not in page} == set()
    assert "shard_failed" in kinds


def sources() -> list[str]:
    return [file.read_text() for package in ("pipeline", "workers", "jobs") for file in (ROOT / package).rglob("*.py")]


@cache
def sentences_in_code() -> frozenset[str]:
    """Strings of the packages; what is filled in becomes nothing."""
    return frozenset(text for source in sources() for text in strings_of(ast.parse(source)))


def strings_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_figures_of_the_strategies_page_are_in_the_measurements() -> None:
    """No figure is told there that the pages of measurements do not have."""
    measured = "".join((DOCS / name).read_text() for name in ("performance.md", "trials.md", "ptp.md"))
    figures = set(re.findall(r"\b\d\.\d\d\b", (DOCS / "strategies.md").read_text()))
    assert len(figures) > 20
    assert {figure for figure in figures if figure not in measured} == set()


def test_the_changelog_has_the_form_of_keep_a_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## \[?(\w+)", text, re.MULTILINE)[0] == "Unreleased"
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= {
        "Added",
        "Changed",
        "Deprecated",
        "Removed",
        "Fixed",
        "Security",
    }


def example() -> Any:
    spec = importlib.util.spec_from_file_location("bigram_drafter", DOCS / "examples" / "bigram_drafter.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_is_the_one_on_the_page() -> None:
    code = (DOCS / "examples" / "bigram_drafter.py").read_text()
    assert f"```python\n{code}```" in (DOCS / "contributing.md").read_text()
    assert code.count("\n") <= 60


def test_the_example_guesses_what_followed_most_often() -> None:
    from workers.drafters.base import DraftContext

    drafter = example().BigramDrafter()
    context = DraftContext(key=0, group="g", tokens=[1, 2, 3, 1, 2, 4, 1, 2, 3, 9, 1, 2], prompt_length=3)
    drafter.start(context)
    (proposal,) = drafter.propose([context], [3], 0.0)
    assert proposal.draft.tokens[:2] == (3, 1)  # of 3 and 4 the more frequent; after 2 3 came 1 and then 9
    context.tokens += [7, 8]
    drafter.finish(context)
    other = DraftContext(key=1, group="h", tokens=[2, 7], prompt_length=2)
    drafter.start(other)
    assert drafter.propose([other], [1], 0.0)[0].draft.tokens == (8,)  # learned from the finished sample


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_example_gives_the_tokens_of_plain_decoding(
    tiny_model_dir: Callable[[str], Path], temperature: float
) -> None:
    from workers.engine import Engine, Request
    from workers.model_loading import load_model
    from workers.speculation import Speculation
    from workers.windows import build_policy

    loaded = load_model(ModelConfig(id=str(tiny_model_dir("llama")), dtype="float64"))
    sampling = SamplingConfig(temperature=temperature, max_tokens=40, seed=5)
    requests = [Request(f"row-{i}", (5, 6, 7, 5, 6, 7 + i), sampling) for i in range(4)]
    plain = Engine(loaded, EngineConfig(max_sequences=1), AutoregressiveConfig()).generate(requests)
    config = SuffixConfig()
    engine = Engine(loaded, EngineConfig(max_sequences=3), config)
    drafter = example().BigramDrafter()
    engine.speculation = Speculation(drafter, build_policy(config, engine.runner, 64), engine.max_context)
    results = engine.generate(requests)
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    assert engine.stats.num_draft_tokens > 0
    assert set(engine.stats.accepted_by_drafter) <= {"bigram"}
