"""Record of a failure: what is written is read, and what is no failure is refused in a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from dure.documents import DocumentInvalid
from dure.failures.record import CodeLine, failure_file, failure_from_json, failure_to_json, read_failure
from tests.record_cases import LINE, failure_of

WHOLE = failure_to_json(failure_of(user_line=LINE, advice="wait", microbatch_size=3))


def test_failure_when_written_and_read_then_it_is_the_same() -> None:
    failure = failure_of(user_line=LINE, message="no file \udcff", advice="wait", go_back_to=32)
    assert failure_from_json(json.loads(json.dumps(failure_to_json(failure)))) == failure


def test_failure_when_its_message_is_huge_then_the_beginning_is_read() -> None:
    assert failure_from_json({**WHOLE, "message": "x" * (2**22 + 1)}).message == "x" * 2**22


def test_failure_when_it_is_of_a_newer_dure_then_what_is_known_is_read() -> None:
    assert failure_from_json({**WHOLE, "version": 2, "mood": "bad"}) == failure_from_json(WHOLE)
    with pytest.raises(DocumentInvalid, match="is of version 2, newer than 1, and holds other fields"):
        failure_from_json({**WHOLE, "version": 2, "rank": "the first"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rank", -1), ("rank", True), ("rank", 2**31), ("time", float("nan")), ("time", 10**400), ("time", "x"),
        ("exit_code", 256), ("exit_code", 1.5), ("message", None), ("origin", "moon"),
        ("is_ours", 1), ("user_line", {"file": "x"}), ("user_line", []), ("step", {}), ("traceback", [["x"]]),
    ],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_failure_when_a_field_is_none_of_its_kind_then_it_is_named(name: str, value: Any) -> None:
    with pytest.raises(DocumentInvalid, match=f"holds other fields than it should \\({name}"):
        failure_from_json({**WHOLE, name: value})


@pytest.mark.parametrize("found", [None, 3, "x", [], {}, {"rank": 1}], ids=repr)
def test_failure_when_it_is_no_record_then_it_is_refused(found: Any, tmp_path: Path) -> None:
    with pytest.raises(DocumentInvalid, match="holds other fields than it should"):
        failure_from_json(found)
    (tmp_path / "logs").mkdir()
    (tmp_path / failure_file(1)).write_text(json.dumps(found))
    assert read_failure(tmp_path, 1) is None


@pytest.mark.parametrize("text", [None, ""])
def test_line_when_its_text_cannot_be_read_then_only_its_place_is_shown(text: str | None) -> None:
    line = CodeLine(file="gone.py", line=6, function="main", text=text)
    assert str(line) == "gone.py:6 in main"
