"""Tests of the page of a comparison, without a browser."""

import re

import pytest

from dure.cli.app import main
from dure.report.compared.page import write_comparison
from tests.report.compared.compared_runs import scaling, strategies

TITLE = "Toy <b> under several strategies"


def _page(path, found, **more):
    write_comparison(*found, path, title=TITLE, **more)
    return path.read_text()


def test_page_when_strategies_are_compared_then_has_each_with_its_numbers(tmp_path):
    text = _page(tmp_path / "page.html", strategies())
    assert [*re.findall(r'<h2 id="(\w+)"', text)] == ["table", "rates", "parts", "memory", "loss", "time", "preserved"]
    row = re.search(r'<th scope="row">ddp x 2</th>(.*?)</tr>', text).group(1)
    assert re.findall(r">([^<>]+)</td>", row)[:5] == ["160 ± 6%", "1.52", "76%", "20%", "976.6 KiB"]
    assert "ddp x 2: rank 0: 300.0 MiB, rank 1: 280.0 MiB" in text
    assert "staleness: pushes are applied to weights of later steps" in text
    assert re.search(r"<b>ddp x 2</b>: nothing is declared", text)


def test_page_when_texts_are_hostile_then_they_are_shown_and_do_not_run(tmp_path):
    text = _page(tmp_path / "page.html", strategies())
    assert "<script>document.title" not in text
    assert text.count("&lt;script&gt;document.title") == 2
    assert "\x1b" not in text
    assert "Toy &lt;b&gt;" in text
    assert "default-src 'none'" in text


def test_page_when_processes_are_compared_then_begins_with_the_curve_and_where_to_stop(tmp_path):
    text = _page(tmp_path / "page.html", scaling(), where_to_stop="stop at 2: it is enough")
    assert "<p>Stop at 2: it is enough.</p>" in text
    assert [*re.findall(r'<h2 id="(\w+)"', text)][:3] == ["table", "scaling", "rates"]


def test_page_when_written_then_is_private_and_replaces_an_earlier_one(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("earlier")
    tmp_path.chmod(0o700)
    assert "earlier" not in _page(path, strategies())[:100]
    assert path.stat().st_mode & 0o077 == 0
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("html", ["nowhere/page.html", "."])
def test_compare_when_the_page_cannot_be_written_then_nothing_is_measured(html, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "toy.py:Toy", "--html", html]) == 2
    assert f"{html} cannot be written" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []
