"""The report in a headless Chromium: light and dark, narrow and wide, on paper."""

import shutil
import sys

import pytest
from sweep_cases import finish

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    """The system's Chromium, or Playwright's own."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="pip install -r requirements-sweeps.txt"
    )
    with sync_api.sync_playwright() as playwright:
        try:
            chromium = playwright.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox"]
            )
        except sync_api.Error:
            pytest.skip("there is no Chromium here: playwright install chromium")
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def report(uninterrupted):
    finish([sys.executable, "sweep.py", "report", f"--workdir={uninterrupted}"])
    return (uninterrupted / "report.html").as_uri()


@pytest.mark.parametrize("width", [360, 390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_and_can_be_read(browser, report, scheme, width):
    """Nothing overflows, nothing is fetched, and text has enough contrast."""
    page = browser.new_page(
        viewport={"width": width, "height": 800}, color_scheme=scheme
    )
    fetched, errors = [], []
    page.on("request", lambda request: fetched.append(request.url))
    page.on("console", lambda message: errors.append(message.text))
    page.goto(report)
    assert fetched == [report] and errors == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("svg").count() >= 2
    drawn = page.evaluate(
        "[...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect())"
        ".map(box => [box.left, box.right])"
    )
    assert all(left >= 0 and right <= width for left, right in drawn)
    if width < 400:
        assert font_size(page) >= 7
    arm = page.locator("td").first  # stays when its table is scrolled
    arm.evaluate("cell => cell.textContent = 'gated_elementwise, equal parameters'")
    assert arm.bounding_box()["width"] < width / 2
    for selector in ("h1", "td", "p > em", "svg text"):
        assert contrast(page, selector) >= 4.5, (selector, scheme)
    page.close()


def font_size(page) -> float:
    """Return the size of the smallest text in the figures, in pixels."""
    return page.evaluate(
        """Math.min(...[...document.querySelectorAll("svg text")].map(text => {
          const svg = text.closest("svg");
          const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
          return scale * parseFloat(getComputedStyle(text).fontSize);
        }))"""
    )


def contrast(page, selector: str) -> float:
    """Return WCAG's contrast ratio of the first such text and the page."""
    text, ground = page.evaluate(
        """selector => {
          const element = document.querySelector(selector);
          const style = getComputedStyle(element);
          const own = element.closest("svg") ? style.fill : style.color;
          return [own, getComputedStyle(document.body).backgroundColor];
        }""",
        selector,
    )

    def luminance(color):
        parts = [int(c) / 255 for c in color[4:-1].split(",")]
        linear = [
            c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted([luminance(text), luminance(ground)])
    return (light + 0.05) / (dark + 0.05)


def test_the_page_prints_on_a4(browser, report):
    """On paper it is light, and no table or figure is wider than the page."""
    page = browser.new_page(viewport={"width": 680, "height": 960}, color_scheme="dark")
    page.goto(report)
    page.emulate_media(media="print")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(255, 255, 255)"
    widest = page.evaluate(
        "Math.max(...[...document.querySelectorAll('svg, table')]"
        ".map(e => e.getBoundingClientRect().width))"
    )
    assert widest <= 680
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.close()
