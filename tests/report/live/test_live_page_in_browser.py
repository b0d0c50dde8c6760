"""Live page of a run in a real browser: it grows with the run, comes back after a break, and breaks no rule."""

import time

import pytest

from dure.doctor.findings import diagnose
from dure.records.events import Evaluated, Warned
from dure.records.step_record import Metric
from tests.report.conftest import IN_BROWSER
from tests.report.live.watched_runs import append, going_on, new_run, start, watched

HOSTILE = "</script><img src=x onerror=\"document.title = 'taken'\"><script>document.title = 'taken'</script>"
SETUP = """
window.losses = () => {
    for (const shown of Bokeh.documents) for (const model of shown.all_models)
        if (model.type == "LinearAxis" && model.axis_label == "training loss") {
            const { data } = [...shown.all_models].find((one) => one.type == "ColumnDataSource");
            return Array.from(data.get ? data.get("y") : data.y);
        }
    return [];
};
window.isSettled = (num) =>
    window.Bokeh !== undefined && losses().length == num && Bokeh.documents.every((each) => each.is_idle);
"""
PATIENCE_SECONDS = 30.0

pytestmark = IN_BROWSER


@pytest.fixture
def run(tmp_path):
    run = new_run(tmp_path / "run")
    run.append_event(start(not_preserved=(HOSTILE,)))
    run.append_event(Warned(message=HOSTILE))
    for rank in range(2):
        append(run, rank, range(1, 31))
    with going_on(run):
        yield run


@pytest.fixture
def page(browser, request):
    """Return a page with what the browser said, and what it asked for from elsewhere than loopback."""
    width, scheme = getattr(request, "param", (1280, "light"))
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    shown = context.new_page()
    shown.said = []
    shown.on("console", lambda line: shown.said.append(line.text) if line.type in ("warning", "error") else None)
    shown.on("pageerror", lambda error: shown.said.append(str(error)))
    local = ("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:")
    shown.on("request", lambda asked: shown.said.append(asked.url) if not asked.url.startswith(local) else None)
    shown.add_init_script(SETUP)
    yield shown
    context.close()


def wait_until(page, expression):
    """Wait for a value of true. (`wait_for_function` calls `eval`, which the page's policy forbids.)"""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"{expression}: {page.said}"
        page.wait_for_timeout(50)


def opened(page, server, num_steps=30):
    page.goto(server.address)
    wait_until(page, f"isSettled({num_steps})")
    return page


@pytest.mark.parametrize("page", [(1280, "light"), (390, "dark")], indirect=True)
def test_page_when_the_run_grows_then_its_charts_grow_without_errors_and_requests(page, run):
    with watched(run, diagnose(run).findings) as server:
        opened(page, server)
        assert page.evaluate("losses()") == pytest.approx([1 / step for step in range(1, 31)])
        for rank in range(2):
            append(run, rank, range(31, 41))
        wait_until(page, "isSettled(40)")
        at = {
            "step": 40,
            "samples_seen": 320,
            "epochs": 3.2,
            "train_loss": None,
            "seconds": 0.1,
            "seconds_since_last": 0.1,
        }
        metrics = {HOSTILE: Metric(value=0.5, count=1)}
        run.append_event(Evaluated(metrics=metrics, is_best=True, best_metric="accuracy", **at))
        page.get_by_role("heading", name="Evaluation: </script>").wait_for()
        titles = page.locator("h2").all_inner_texts()
        assert titles[:4] == ["Findings", "Training loss", f"Evaluation: {HOSTILE}", "Throughput"]
        append(run, 2, range(1, 41))  # another rank: two charts are drawn again
        page.locator("th[scope=row]").get_by_text("2", exact=True).wait_for(state="attached")
        assert page.title() == "run - dure"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.locator("canvas").count() >= 7
        assert page.said == []


@pytest.mark.parametrize("page", [(1280, "light"), (390, "dark")], indirect=True)
def test_page_breaks_no_rule_of_axe(page, run):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs pip install 'dure[browser]'")
    with watched(run, diagnose(run).findings) as server:
        opened(page, server)
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        found = axe.Axe().run(page)
        assert found.violations_count == 0, found.generate_report()


def test_page_when_the_server_is_started_again_then_connects_again(page, run):
    with watched(run) as server:
        token, port = server.token, server.port
        opened(page, server)
    page.get_by_text("The connection to dure watch is lost").wait_for()
    for rank in range(2):
        append(run, rank, range(31, 36))
    with watched(run, token=token, port=port):
        wait_until(page, "isSettled(35)")
        page.get_by_text("The connection to dure watch is lost").wait_for(state="hidden")
        assert page.locator("canvas").count() >= 5
        titles = page.locator("h2").all_inner_texts()
        assert len(titles) == len({*titles})


def test_page_when_the_run_is_resumed_then_its_charts_go_back(page, run):
    with watched(run) as server:
        opened(page, server)
        run.undo_records_after(160)
        wait_until(page, "isSettled(20)")
        assert page.said == []


def test_open_table_when_the_run_grows_then_stays_open_and_focused(page, run):
    with watched(run) as server:
        opened(page, server)
        page.locator("summary", has_text="events").focus()
        page.keyboard.press("Enter")
        table = page.get_by_role("region", name="Events as a table")
        table.focus()
        run.append_event(Warned(message="something new"))
        table.get_by_text("something new").wait_for()
        assert table.is_visible()
        assert table.evaluate("(one) => one == document.activeElement")


def test_axes_when_the_scheme_changes_then_are_painted_again(page, run):
    color = "[...Bokeh.documents[0].all_models].find((model) => model.type == 'LinearAxis').axis_label_text_color"
    with watched(run) as server:
        opened(page, server)
        before = page.evaluate(color)
        page.emulate_media(color_scheme="dark")
        wait_until(page, f"{color} != '{before}'")


def test_page_when_its_token_is_of_another_start_then_says_what_to_open(page, run):
    with watched(run) as server:
        answer = page.goto(server.address + "x")
        assert answer.status == 403
        assert "open the address that dure watch has printed" in page.inner_text("body")
