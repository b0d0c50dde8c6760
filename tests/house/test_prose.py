"""Words that docstrings, comments and pages do not use: each has a plainer one."""

import io
import itertools
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.house.rooms import ROOT
from tests.house.test_docstrings import docstrings, statements

BANNED = {
    "anew": "again, from the beginning",
    "whoever": "the rank, process, reader or client that is meant",
    "somebody": "a user, a peer, another process",
    "anybody": "any rank, any reader",
    "everybody": "all ranks, all nodes",
    "nobody": "no rank, no process, no reader",
    "but for": "except, without, up to",
    "beside": "in addition to, during, next to, compared with",
}
"""Words, and what says it better. Those in messages to users are not looked at: a test matches each of them."""
PATTERN = re.compile(r"\b(" + "|".join(BANNED).replace(" ", r"\s+") + r")\b", re.IGNORECASE)
GENERATED = {"what-works.md"}
"""Pages made of messages to users."""
PAGES = sorted(page for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")) if page.name not in GENERATED)
MODULES = sorted((ROOT / "src").rglob("*.py"))


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring, and of each comment with those directly below it."""
    for node in statements(source):
        yield from docstrings(node)
    comments = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.string[:1] == "#"]
    for _, together in itertools.groupby(enumerate(comments), lambda pair: pair[1].start[0] - pair[0]):
        lines = [token for _, token in together]
        yield lines[0].start[0], "\n".join(token.string.lstrip("# ") for token in lines)


def banned(texts: Iterable[tuple[int, str]]) -> list[str]:
    """Return the banned words of some texts, each with the line of its text and with what says it better."""
    found = [(line, " ".join(word.lower().split())) for line, text in texts for word in PATTERN.findall(text)]
    return [f"{line}: {word!r}, better: {BANNED[word]}" for line, word in sorted(found)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_when_it_is_read_then_it_has_none_of_the_banned_words(page: Path) -> None:
    assert banned([(1, page.read_text(encoding="utf-8"))]) == []


def test_modules_when_read_then_docstrings_and_comments_have_none_of_the_banned_words() -> None:
    found = {
        str(path.relative_to(ROOT)): words
        for path in MODULES
        if (words := banned(prose(path.read_text(encoding="utf-8"))))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ('"""Begin anew."""', "anew"),
        ('class A:\n    size: int = 0\n    """Size for whoever asks."""', "whoever"),
        ("x = 1  # Somebody wakes it", "somebody"),
        ("# the same, but\n# for rounding\n", "but for"),
        ('def f():\n    """Return all but\n    for one."""', "but for"),
    ],
)
def test_banned_word_when_it_is_in_prose_then_it_is_found(source: str, word: str) -> None:
    assert [f"{word!r}, better: {BANNED[word]}"] == [found.partition(": ")[2] for found in banned(prose(source))]


@pytest.mark.parametrize("source", ['draws_anew = "begun anew"  # again', 'raise ValueError("killed by somebody")'])
def test_banned_word_when_it_is_in_a_name_or_a_message_then_it_passes(source: str) -> None:
    assert banned(prose(source)) == []


def test_glossary_when_it_is_read_then_each_word_is_explained_once_in_one_sentence() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", (ROOT / "docs/glossary.md").read_text("utf-8"), re.M)
    words = [word for word, meaning, _ in rows if word not in ("word", "---")]
    meanings = [meaning for word, meaning, _ in rows if word not in ("word", "---")]
    assert len(words) == len(set(words)) > 50
    assert [meaning for meaning in meanings if not meaning.endswith(".")] == []
