"""Links, files and tables that the pages mention are there and up to date."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(p for d in ("docs", "benchmarks", "examples") for p in (ROOT / d).rglob("*.md"))])
ARCHITECTURE = ROOT / "docs/architecture.md"

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)
FOLDERS = ("src/", "tests/", "docs/", "examples/", "benchmarks/")


def anchors(text: str) -> set[str]:
    """Return the anchors that a page's headings give, as the forges make them."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(FENCE.sub("", text)))
    return {heading.strip().replace(" ", "-") for heading in plain}


def dead_links(page: Path) -> list[str]:
    """Return a page's relative links that lead nowhere."""
    dead = []
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_when_it_links_then_the_target_is_there(page: Path) -> None:
    assert dead_links(page) == []


def test_dead_links_when_file_or_anchor_is_missing_then_both_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One Two\n[a](gone.md) [b](#one-two) [c](#three) [d](page.md) [e](https://example.org/x)\n")
    assert dead_links(page) == ["gone.md", "#three"]


def test_architecture_when_it_names_a_file_then_it_is_there() -> None:
    words = re.findall(r"`([^`\s]+)`", ARCHITECTURE.read_text(encoding="utf-8"))
    files = {word.split(":")[0] for word in words if word.startswith(FOLDERS) or word.endswith(".py")}
    missing = [name for name in files if not any((base / name).exists() for base in (ROOT, ROOT / "src/dure"))]
    assert files, "it walks a batch through the code with file names"
    assert sorted(missing) == []


def test_page_of_strategies_when_the_table_has_changed_then_was_made_anew() -> None:
    from dure.cli.strategies import markdown_page
    from dure.strategies.table import STRATEGIES

    page = (ROOT / "docs/strategies.md").read_text(encoding="utf-8")
    assert page == markdown_page(list(STRATEGIES.values())), "run `dure strategies --markdown > docs/strategies.md`"


def test_every_strategy_has_a_script_among_the_examples() -> None:
    from dure.strategies.table import STRATEGIES

    scripts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py"))
    assert [name for name in STRATEGIES if f'"{name}"' not in scripts] == []


def test_every_script_of_a_strategy_is_in_the_list_of_the_examples() -> None:
    page = (ROOT / "examples/README.md").read_text(encoding="utf-8")
    assert [path.name for path in (ROOT / "examples").glob("strategy_*.py") if f"`{path.name}`" not in page] == []
