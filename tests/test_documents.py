"""The reader of what others wrote: its limits, and that nothing of it makes it raise anything else."""

import os
import sys
from pathlib import Path

import pytest

from dure import documents
from dure.documents import DocumentInvalid, parse_json, read_json, read_toml
from dure.records.jsonl import last_record, read_lines

DEEP = 200_000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * DEEP + "]" * DEEP, "nested more than 100 deep"),
        ('{"a":' * DEEP + "1" + "}" * DEEP, "nested more than 100 deep"),
        ("[" * 101 + "]" * 101, "nested more than 100 deep"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "has the key 'c' twice"),
        ("1" * 5000, "is no JSON: Exceeds the limit"),
        ("[1,", "is no JSON"),
        ("", "is no JSON"),
        (b"\xff\xfe{}", "is not UTF-8 text"),
        (b'{"a": "\xed\xa0\x80"}', "is not UTF-8 text"),
    ],
    ids=range(9),
)
def test_json_when_it_is_hostile_then_is_refused_in_words(text: str | bytes, said: str) -> None:
    with pytest.raises(DocumentInvalid, match=said):
        parse_json(text)


def test_json_when_as_deep_as_it_may_be_then_is_read() -> None:
    assert parse_json("[" * 100 + "]" * 100)
    assert parse_json('["' + "[" * 500 + '"]') == ["[" * 500]


def test_json_when_repeats_are_allowed_then_the_last_counts() -> None:
    assert parse_json('{"a": 1, "a": 2}', may_repeat_keys=True) == {"a": 2}


def test_file_when_larger_than_its_limit_then_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with path.open("wb") as file:
        file.truncate(documents.MOST_BYTES + 1)
    with pytest.raises(DocumentInvalid, match=r"has more than 64\.0 MiB"):
        read_json(path)


def test_file_when_it_is_a_pipe_or_endless_then_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(DocumentInvalid, match="is not a regular file"):
            read_json(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"a = " + b"[" * 20_000 + b"]" * 20_000, "nested more than 100 deep"),
        (b"a = " + b"[" * 150 + b"]" * 150, "nested more than 100 deep"),
        (b"a = " + b"1" * 5000, "cannot be read: Exceeds the limit"),
        (b"a = [{b = 0x" + b"f" * 5000 + b"}]", "has an integer of more than 1024 bits"),
        (b".".join([b"a"] * 50_000) + b" = 1", "^is nested more than 100 deep"),
        (b"a = {" + b" . ".join([b"b"] * 50_000) + b" = 1}", "^is nested more than 100 deep"),
        (b"a = 1\na = 2", "is not valid TOML"),
        (b"a = '\xff'", "is not UTF-8"),
        (b"#" * (documents.MOST_TOML_BYTES + 1), "has more than 1.0 MiB"),
    ],
    ids=range(9),
)
def test_toml_when_it_is_hostile_then_is_refused_in_words(tmp_path: Path, text: bytes, said: str) -> None:
    (tmp_path / "a.toml").write_bytes(text)
    with pytest.raises(DocumentInvalid, match=said):
        read_toml(tmp_path / "a.toml")


def test_toml_when_a_text_has_many_sentences_then_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(f'a = """\n{"One more. " * 1000}"""\nb = [{"0.5, " * 1000}]\n')
    assert len(read_toml(tmp_path / "a.toml")["b"]) == 1000


def test_lines_when_some_are_hostile_then_the_others_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dure.records.jsonl.MOST_LINE_BYTES", 2**20)
    path = tmp_path / "rank0.jsonl"
    bad = [b"[" * DEEP, b'{"a":' * DEEP, b"\xff", b"1" * 5000, b"3", b'"' + b"x" * 2**21 + b'"', b"null"]
    path.write_bytes(b"\n".join([b'{"step": 1}', *bad, b'{"step": 2}']) + b"\n")
    assert list(read_lines(path)) == [{"step": 1}, {"step": 2}]
    assert last_record(path) == {"step": 2}


def test_depth_when_measured_then_pythons_own_stack_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "getrecursionlimit", lambda: 10)
    wide = "[" + ",".join(["[]"] * 10_000) + "]"
    assert len(parse_json(wide)) == 10_000
