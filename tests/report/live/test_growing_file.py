"""Reader of a file that grows."""

import os

import pytest

from dure.report.live import growing_file
from dure.report.live.growing_file import GrowingFile


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rank0.jsonl"


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def lines(file):
    gain = file.read()
    return [line.decode() for line in gain.lines], gain.is_restarted


def test_lines_when_they_are_appended_then_each_is_read_once_and_a_torn_one_when_it_is_complete(path):
    file = GrowingFile(path)
    assert lines(file) == ([], False)
    append(path, "a\nb\nhalf")
    assert lines(file) == (["a", "b"], False)
    assert file.rest_bytes == 4
    assert lines(file) == ([], False)
    append(path, " a line\n\nc\n")
    assert lines(file) == (["half a line", "c"], False)
    assert (file.rest_bytes, file.offset) == (0, path.stat().st_size)


def test_file_when_it_is_shortened_then_its_lines_are_read_from_the_beginning(path):
    file = GrowingFile(path)
    append(path, "a\nb\nc\n")
    lines(file)
    os.truncate(path, 2)
    assert lines(file) == (["a"], True)
    append(path, "d\n")
    assert lines(file) == (["d"], False)


def test_file_when_it_is_shortened_and_has_grown_again_then_that_is_noticed(path):
    file = GrowingFile(path)
    append(path, "a\nb\nc\n")
    lines(file)
    os.truncate(path, 2)
    append(path, "B\nC\nd\n")
    assert lines(file) == (["a", "B", "C", "d"], True)


@pytest.mark.parametrize(("text", "found"), [("a\nb\nc\n", (["c"], False)), ("a\nB\nc\n", (["a", "B", "c"], True))])
def test_file_when_it_is_replaced_then_a_copy_that_has_grown_goes_on_and_another_file_does_not(
    path, tmp_path, text, found
):
    file = GrowingFile(path)
    append(path, "a\nb\n")
    lines(file)
    append(tmp_path / "new", text)
    (tmp_path / "new").rename(path)
    assert lines(file) == found


def test_file_when_it_is_out_of_reach_then_goes_on_where_it_was_if_it_is_the_same(path, tmp_path):
    file = GrowingFile(path)
    append(path, "a\n")
    lines(file)
    path.rename(tmp_path / "away")
    assert lines(file) == ([], False)
    (tmp_path / "away").rename(path)
    append(path, "b\n")
    assert lines(file) == (["b"], False)
    path.unlink()
    append(path, "c\n")
    assert lines(file) == (["c"], True)


def test_file_when_it_is_long_then_each_reading_is_bounded(path, monkeypatch):
    monkeypatch.setattr(growing_file, "_BLOCK_BYTES", 16)
    append(path, "".join(f"{number:06d}\n" for number in range(10)))
    file = GrowingFile(path)
    found, left = [], [70]
    while left[-1]:
        gain = file.read()
        found += gain.lines
        left.append(gain.left_bytes)
    assert len(found) == 10
    assert left == sorted(left, reverse=True)


def test_line_when_it_is_longer_than_a_block_then_is_read_and_one_that_no_record_has_is_left_out(path, monkeypatch):
    monkeypatch.setattr(growing_file, "_BLOCK_BYTES", 16)
    monkeypatch.setattr(growing_file, "MOST_LINE_BYTES", 64)
    append(path, f"{'a' * 40}\n{'b' * 200}\nc\n")
    file = GrowingFile(path)
    found, num_too_long = [], 0
    for _ in range(40):
        gain = file.read()
        found += gain.lines
        num_too_long += gain.num_too_long
    assert found == [b"a" * 40, b"c"]
    assert num_too_long == 1


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_file_when_something_else_has_its_name_then_it_is_empty_and_nothing_waits(path, make):
    make(path)
    assert lines(GrowingFile(path)) == ([], False)
