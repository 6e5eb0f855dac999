"""Screenshots of a report, as docs/report.md shows them: `python -m infra.report_screenshots report.html DIR`.

Needs Chromium and the package playwright. Writes light.png, dark.png, phone-light.png, phone-dark.png and sample.png.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from infra.chromium import CHROMIUM, FLAGS

SIZES = {"": (1280, 1560), "phone-": (390, 1560)}


def main(page_file: str, folder: str) -> None:
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        for prefix, (width, height) in SIZES.items():
            for scheme in ("light", "dark"):
                save(shot(browser, page_file, width, height, scheme), target / f"{prefix}{scheme}.png")
        save(shot(browser, page_file, 1280, 900, "light", ".browser"), target / "sample.png")
        browser.close()


def shot(browser: Browser, page_file: str, width: int, height: int, scheme: str, only: str | None = None) -> bytes:
    """The top of the page, or one element of it."""
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.goto(Path(page_file).resolve().as_uri())
    page.wait_for_selector("body[data-ready=samples]")
    picture = page.locator(only).screenshot() if only else page.screenshot()
    page.close()
    return picture


def save(picture: bytes, path: Path) -> None:
    """With a palette, which is enough for a page and a third of the size."""
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(256).save(path, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
