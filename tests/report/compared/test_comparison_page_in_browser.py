"""Page of a comparison in a real browser: without errors and requests, wide and narrow, light and dark."""

import pytest

from dure.report.compared.page import write_comparison
from tests.report.compared.compared_runs import scaling, strategies
from tests.report.conftest import IN_BROWSER

pytestmark = IN_BROWSER


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    write_comparison(*strategies(), folder / "strategies.html", title="Toy under several strategies")
    write_comparison(*scaling(), folder / "scaling.html", title="Toy on more", where_to_stop="stop at 2: enough")
    return folder


@pytest.fixture(params=[("strategies", 1200, "light"), ("strategies", 375, "dark"), ("scaling", 375, "light")])
def opened(browser, files, request):
    name, width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    shown = context.new_page()
    shown.said = []
    shown.on("console", lambda line: shown.said.append(line.text) if line.type in ("warning", "error") else None)
    shown.on("pageerror", lambda error: shown.said.append(str(error)))
    shown.on("request", lambda asked: shown.said.append(asked.url) if not asked.url.startswith("file:") else None)
    shown.goto((files / f"{name}.html").as_uri())
    shown.wait_for_function("Bokeh.documents.length && Bokeh.documents.every((each) => each.is_idle)")
    yield shown
    context.close()


def test_page_when_opened_then_is_drawn_without_errors_and_requests(opened):
    assert opened.said == []
    assert opened.title().startswith("Toy")
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert opened.locator("canvas").count() >= 5


def test_page_when_opened_then_breaks_no_rule_of_axe(opened):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs pip install 'dure[browser]'")
    found = axe.Axe().run(opened)
    assert found.violations_count == 0, found.generate_report()


def test_page_when_printed_then_its_charts_are_in_it(opened):
    opened.emulate_media(media="print")
    assert len(opened.pdf()) > 20_000
