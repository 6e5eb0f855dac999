"""The page in a browser: it loads nothing, draws its charts, filters 10,000 rows at once, and fits a phone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.chromium import CHROMIUM, FLAGS
from jobs.reporting.contents import report
from tests.jobs.made_job import HOSTILE, failed_row, make_output, row

CHARTS = 9
NUM_ROWS = 10_000

playwright_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="needs Chromium")

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of 10,000 rows compared with another output, one of hostile rows, and one of a job that has just begun."""
    folder = tmp_path_factory.mktemp("pages")
    words = "seven leagues at one step and the tokens of it "
    rows = [row(i, generation=f"Answer {i}: {words * 20}") for i in range(NUM_ROWS)]
    rows[1000] = row(1000, generation="The needle.", latency_s=9.0)
    rows[2000] = failed_row(2000)
    make_output(folder / "large", rows, rows_per_shard=500)
    make_output(folder / "other", [row(i) for i in range(100)], rows_per_shard=50, decoding="suffix")
    hostile = [
        row(1, id=HOSTILE, prompt=HOSTILE, generation=f"🥾 {HOSTILE}", passthrough={"task": HOSTILE}, draft_spans=()),
        failed_row(2, HOSTILE, error=HOSTILE, passthrough={"task": HOSTILE}),
    ]
    make_output(folder / "hostile", hostile)
    make_output(folder / "begun", [row(i) for i in range(8)], committed=0, finish=False)
    against = {"large": "other", "hostile": "hostile", "begun": None}
    files = {name: folder / f"{name}.html" for name in against}
    for name, other in against.items():
        files[name].write_text(report(str(folder / name), str(folder / other) if other else None))
    assert files["large"].stat().st_size < 25e6
    return files


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any, pages: dict[str, Path]) -> Iterator[Open]:
    """Opens a page and waits until its samples are there. After the test nothing may have gone wrong in it, and nothing
    but the page itself may have been asked for."""
    contexts, wrong, asked = [], [], []

    def open_it(name: str, width: int = 1280, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 850}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: (wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(pages[name].as_uri())
        page.wait_for_selector("body[data-ready=samples]")
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert wrong == []
    assert set(asked) <= {file.as_uri() for file in pages.values()}
    assert len(asked) == len(contexts)


def drawn_charts(page: Any) -> list[str]:
    """Names of the charts that hold marks in their own colours, not just axes."""
    return list(
        page.evaluate(
            """() => [...document.querySelectorAll("[data-chart]")].filter((card) =>
              [...card.querySelectorAll(".plot svg path")].some((path) =>
                path.getBoundingClientRect().height > 3 && ![null, "none"].includes(path.getAttribute("fill")))
            ).map((card) => card.dataset.chart)"""
        )
    )


def in_sight(page: Any) -> list[str]:
    return list(page.locator("#list .row .what").all_inner_texts())


def test_charts_are_drawn_in_both_themes(open_page: Open) -> None:
    page = open_page("large")
    assert len(drawn_charts(page)) == CHARTS
    look = """() => [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,
      document.querySelector("[data-chart=occupancy] svg").outerHTML]"""
    light = page.evaluate(look)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(
        "(old) => document.querySelector('[data-chart=occupancy] svg').outerHTML !== old", arg=light[2]
    )
    assert len(drawn_charts(page)) == CHARTS
    dark = page.evaluate(look)
    assert all(a != b for a, b in zip(light, dark, strict=True))


def test_ten_thousand_rows_stay_fluid(open_page: Open) -> None:
    page = open_page("large")
    # Milliseconds of each of 100 jumps through the list and of each key of a search, whatever has to be laid out too.
    scrolls, keys, most_nodes = page.evaluate(
        """async () => {
          const [list, search] = [document.getElementById("list"), document.getElementById("search")];
          const frame = () => new Promise(requestAnimationFrame);
          const [scrolls, keys] = [[], []];
          let nodes = 0;
          for (let i = 0; i < 100; i++) {
            const began = performance.now();
            list.scrollTop = (i * 7919 * 58) % list.scrollHeight;
            list.dispatchEvent(new Event("scroll"));
            list.getBoundingClientRect();
            scrolls.push(performance.now() - began);
            nodes = Math.max(nodes, list.querySelectorAll(".row").length);
            if (i % 10 === 0) await frame();
          }
          for (const text of ["a", "an", "answer", "answer 7", "leagues 77", ""]) {
            const began = performance.now();
            search.value = text;
            search.dispatchEvent(new Event("input"));
            list.getBoundingClientRect();
            keys.push(performance.now() - began);
          }
          return [scrolls.sort((a, b) => a - b), keys.sort((a, b) => a - b), nodes];
        }"""
    )
    assert most_nodes <= 30
    assert scrolls[50] < 16, scrolls
    assert keys[3] < 200, keys
    assert keys[-1] < 1000, keys  # the first key also prepares the texts


def test_filters_and_order(open_page: Open) -> None:
    page = open_page("large")
    page.fill("#search", "NEEDLE the")
    assert in_sight(page) == ["The needle."]
    page.locator("#list .row").click()
    assert page.locator("#detail .generation").inner_text() == "The needle."
    marks = page.locator("#detail mark").evaluate_all("marks => marks.map((mark) => [mark.textContent, mark.title])")
    assert marks == [["The ne", "suffix"], [".", "recycling"]]
    page.fill("#search", "")
    page.select_option("#finish", "error")
    assert in_sight(page) == ["prompt_too_long: the prompt is longer than the context"]
    page.select_option("#finish", "")
    page.select_option("#error", "prompt_too_long")
    assert len(in_sight(page)) == 1
    page.select_option("#error", "")
    page.fill("#least", "2.6")
    assert page.locator("#count").inner_text() == "0 of 10,000 samples match"
    page.fill("#least", "2.5")
    assert page.locator("#count").inner_text() == "9,999 of 10,000 samples match"  # the failed one has no steps
    page.select_option("#order", "-s")
    assert in_sight(page)[0] == "The needle."
    page.fill("#least", "")
    page.select_option("#order", "")
    page.select_option("#against", "differs")
    assert page.locator("#count").inner_text() == "100 of 10,000 samples match"
    page.locator("#list .row").first.click()
    assert "generation of the other output" in page.locator("#detail").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it(open_page: Open, scheme: str) -> None:
    page = open_page("large", width=360, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert len(drawn_charts(page)) == CHARTS
    page.locator("#list .row").nth(1).click()
    detail = page.locator("#detail")
    assert detail.bounding_box() == {"x": 0, "y": 0, "width": 360, "height": 850}
    page.click("#detail .close")
    assert not detail.is_visible()


def test_hostile_rows_are_text(open_page: Open) -> None:
    page = open_page("hostile")
    assert page.locator("#detail h3").inner_text() == HOSTILE
    assert page.locator("#detail .generation").inner_text() == f"🥾 {HOSTILE}"
    assert page.locator("#detail img, #list img, main img").count() == 0
    assert page.locator("script:not([type])").count() == 3
    page.locator("[data-chart=workers] .plot").hover()


def test_a_job_that_has_just_begun(open_page: Open) -> None:
    page = open_page("begun")
    assert "0 of 2 shards" in page.locator(".notes").inner_text()
    assert drawn_charts(page) == []
