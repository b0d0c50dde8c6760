"""Table of rules: each finds its bad example and leaves its good one alone, and the page is made of it."""

import re
from pathlib import Path

import pytest

from dure.scripts.lint.page import markdown_page
from dure.scripts.lint.rules.table import RULES
from tests.scripts.lint.projects import rules_in

PAGE = Path(__file__).parents[4] / "docs/lint.md"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_rule_when_its_bad_example_is_read_then_it_finds_it(rule) -> None:
    assert rule.id in rules_in(rule.bad)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_rule_when_its_good_example_is_read_then_no_rule_finds_anything(rule) -> None:
    assert rules_in(rule.good) == []


def test_page_when_the_table_has_changed_then_it_was_made_again() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown_page(), "run `dure lint --rules > docs/lint.md`"


def test_rules_when_listed_then_their_numbers_are_unique_and_in_order() -> None:
    ids = [rule.id for rule in RULES]
    assert ids == sorted(set(ids))
    assert all(re.fullmatch(r"DURE\d{3}", name) for name in ids)
