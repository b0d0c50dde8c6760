"""What ranks print: nothing can be forged, nothing is too long, nothing waits."""

import os
import time
from pathlib import Path

import pytest

from dure.launch import log_pump
from dure.launch.log_pump import LINE_LIMIT_BYTES, LogFile, LogPump, Stream, cleaned


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"loss 0.5", "loss 0.5"),
        ("손실 0.5 ✓".encode(), "손실 0.5 ✓"),
        (b"a\x07b\x1b[2Jc", "a\\x07b\\x1b[2Jc"),
        (b"\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m\x1b[0m"),
        (b"10%\r20%\r30%", "30%"),
        (b"windows\r", "windows"),
        ("a\u2028[rank 1] b\x85c\u202ed".encode(), "a\\u2028[rank 1] b\\x85c\\u202ed"),
        (b"\xff\xfe", "\\xff\\xfe"),
    ],
)
def test_line_when_shown_then_has_no_control_characters(line, shown):
    assert cleaned(line) == shown


class Shown:
    def __init__(self, folder: Path):
        self.path = folder / "console"
        self.log = folder / "rank0.log"
        self.descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT)
        self.stream = Stream("[rank 0] ", self.descriptor, LogFile(self.log))

    def after(self, *data: bytes) -> list[str]:
        for one in data:
            self.stream.take(one)
        self.stream.take_unfinished()
        return self.path.read_text().splitlines()


@pytest.fixture
def shown(tmp_path):
    one = Shown(tmp_path)
    yield one
    os.close(one.descriptor)


def test_lines_when_cut_anywhere_then_are_whole(shown):
    assert shown.after(b"one\ntw", b"o\nthr", b"ee") == ["[rank 0] one", "[rank 0] two", "[rank 0] three"]


def test_line_when_it_claims_to_be_anothers_then_says_whose_it_is(shown):
    assert shown.after(b"x\n[rank 1] y\n") == ["[rank 0] x", "[rank 0] [rank 1] y"]
    assert shown.log.read_text() == "x\n[rank 1] y\n"


def test_line_when_ten_megabytes_long_then_is_cut_and_said_how_much(shown):
    (line,) = shown.after(*[b"x" * 2**16] * 160, b"\n")
    assert len(line) < LINE_LIMIT_BYTES + 100
    assert line.endswith(f" … {160 * 2**16 - LINE_LIMIT_BYTES:,} more bytes")


def test_progress_bar_when_it_never_ends_a_line_then_only_its_last_state_is_kept(shown):
    assert shown.after(*(f"\r{number}%".encode() for number in range(1000))) == ["[rank 0] 999%"]
    assert len(shown.stream.rest) == 0


def test_log_when_it_grows_then_is_rotated(tmp_path, monkeypatch):
    monkeypatch.setattr(log_pump, "ROTATE_BYTES", 1000)
    log = LogFile(tmp_path / "rank0.log")
    for number in range(100):
        log.write(f"{number:04d} " + "x" * 44 + "\n")
    os.close(log.descriptor)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.log", "rank0.log.1"]
    assert (tmp_path / "rank0.log").read_text().splitlines()[-1].startswith("0099")
    assert (tmp_path / "rank0.log").stat().st_size <= 1000


@pytest.mark.alone
def test_pump_when_ranks_talk_then_it_keeps_up(tmp_path, capfd):
    pump = LogPump([tmp_path / "rank0.log", tmp_path / "rank1.log"], with_prefix=True)
    lines = b"".join(b"step %d loss 0.5\n" % number for number in range(20_000))
    began = time.monotonic()
    for out, _ in pump.descriptors:
        os.write(out, lines[: len(lines) // 2])
        os.write(out, lines[len(lines) // 2 :])
    os.write(pump.descriptors[1][1], b"oh\n")
    pump.close()
    # a million lines a minute are 17,000 a second
    assert time.monotonic() - began < 10
    shown = capfd.readouterr()
    assert shown.out.count("[rank 1] step") == shown.out.count("[rank 0] step") == 20_000
    assert shown.err == "[rank 1] oh\n"
    assert (tmp_path / "rank1.log").read_text().count("\n") == 20_001
