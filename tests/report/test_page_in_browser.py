"""Page of a run in a real browser: without errors and requests, wide and narrow, in the light and in the dark."""

import shutil
from pathlib import Path

import pytest

from dure.doctor.findings import diagnose
from dure.records.events import Warned
from dure.records.run_dir import RunDir
from dure.report.page import write_page
from tests.report.conftest import IN_BROWSER

SAMPLE = Path(__file__).parents[1] / "samples" / "run_folders" / "resumed"

pytestmark = IN_BROWSER


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser") / "run"
    shutil.copytree(SAMPLE, folder)
    run = RunDir(folder)
    run.append_event(Warned(message="</script><script>document.title = 'taken'</script>"))
    write_page(run, diagnose(run).findings, folder / "report.html")
    return folder / "report.html"


@pytest.fixture
def opened(browser, page_file, request):
    """Return the page with what the browser said and asked for while it was opened."""
    width, scheme = getattr(request, "param", (1200, "light"))
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    shown = context.new_page()
    shown.said = []
    shown.on("console", lambda line: shown.said.append(line.text) if line.type in ("warning", "error") else None)
    shown.on("pageerror", lambda error: shown.said.append(str(error)))
    shown.on("request", lambda asked: shown.said.append(asked.url) if not asked.url.startswith("file:") else None)
    shown.goto(page_file.as_uri())
    shown.wait_for_function("Bokeh.documents.length && Bokeh.documents.every((each) => each.is_idle)")
    yield shown
    context.close()


@pytest.mark.parametrize("opened", [(1200, "light"), (390, "dark")], indirect=True)
def test_page_when_opened_then_is_drawn_without_errors_and_requests(opened):
    assert opened.said == []
    assert opened.title() == "run - dure"
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert opened.locator("canvas").count() >= 5
    assert opened.get_by_text("document.title = 'taken'").count() == 1


@pytest.mark.parametrize("opened", [(1200, "light"), (390, "dark")], indirect=True)
def test_page_breaks_no_rule_of_axe(opened):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs pip install 'dure[browser]'")
    opened.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    found = axe.Axe().run(opened)
    assert found.violations_count == 0, found.generate_report()


def test_charts_hold_the_recorded_losses(opened):
    shown = opened.evaluate(
        "[...Bokeh.documents[0].all_models].filter((model) => model.type == 'ColumnDataSource')"
        ".map((source) => source.data.y && Array.from(source.data.y)).find((values) => values)"
    )
    recorded = [record.loss_sum / record.loss_count for record in RunDir(SAMPLE).records(0)]
    assert shown == pytest.approx(recorded)


def test_axes_when_the_scheme_changes_then_are_painted_again(opened):
    color = "[...Bokeh.documents[0].all_models].find((model) => model.type == 'LinearAxis').axis_label_text_color"
    before = opened.evaluate(color)
    opened.emulate_media(color_scheme="dark")
    opened.wait_for_function(f"(before) => {color} != before", arg=before)


def test_keyboard_reaches_and_opens_the_table_of_events(opened):
    opened.locator("summary", has_text="events").focus()
    opened.keyboard.press("Enter")
    assert opened.get_by_role("region", name="Events as a table").is_visible()
