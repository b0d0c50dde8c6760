"""Output of ranks: nothing can be forged, nothing is too long, nothing waits."""

import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import tty
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from dure.launch.logs import log_pump
from dure.launch.logs.log_pump import LINE_LIMIT_BYTES, LogFile, Stream, cleaned, fitted
from dure.launch.logs.rank_logs import RankLogs, Voice
from dure.process.stop_signals import STOP_SIGNALS
from tests.commands import wait_until


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"loss 0.5", "loss 0.5"),
        ("손실 0.5 ✓".encode(), "손실 0.5 ✓"),
        (b"a\x07b\x1b[2Jc", "a\\x07b\\x1b[2Jc"),
        (b"\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m\x1b[0m"),
        (b"10%\r20%\r30%", "30%"),
        (b"windows\r", "windows"),
        (b"\x1b[2Kerased\x1b[K", "erased"),
        ("a\u2028[rank 1] b\x85c\u202ed".encode(), "a\\u2028[rank 1] b\\x85c\\u202ed"),
        (b"\xff\xfe", "\\xff\\xfe"),
    ],
)
def test_line_when_shown_then_has_no_control_characters(line, shown):
    assert cleaned(line) == shown


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("123456789", "123456789"),
        ("1234567890", "12345678…"),
        ("손실손실손실", "손실손실…"),
        ("e\u0301" * 9, "e\u0301" * 9),
        ("\x1b[31m1234567890\x1b[0m", "\x1b[31m12345678\x1b[0m…"),
        ("\t\t", "        …"),
    ],
)
def test_line_when_to_be_written_over_then_fits_in_a_row_of_ten(line, shown):
    assert fitted(line, 10) == shown


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


def test_lines_when_the_console_is_full_and_does_not_wait_then_none_is_lost(tmp_path):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    stream = Stream("", writing, LogFile(tmp_path / "rank0.log"))
    with closing(os.fdopen(reading, "rb")) as console, ThreadPoolExecutor(1) as pool:
        read = pool.submit(lambda: (time.sleep(0.1), console.read())[1])
        stream.take(b"a line of the script\n" * 10_000)
        os.close(writing)
        assert read.result().count(b"a line of the script\n") == 10_000


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


def test_progress_bar_when_it_goes_on_and_on_then_it_is_shown_now_and_then(shown):
    begun = time.monotonic()
    for seconds in range(1, 31):
        shown.stream.take(f"\r{seconds}%".encode())
        shown.stream.since = begun + seconds  # it never stands still
        shown.stream.take_late(begun + seconds)
        if not shown.stream.rest:
            shown.stream.unseen_since = begun + seconds
    assert shown.path.read_text().splitlines() == ["[rank 0] 11%", "[rank 0] 22%"]


def test_progress_bar_when_it_returns_after_each_state_then_only_its_last_state_is_kept(shown):
    assert shown.after(*(f"{number}%\r".encode() for number in range(10_000))) == ["[rank 0] 9999%"]


def test_progress_bar_when_it_clears_its_place_then_nothing_is_left_of_it(shown):
    assert shown.after(b"\r50%", b"\r   \r", b"done\n", b"\r60%", b"\r   \r") == ["[rank 0] done"]


class LiveTerminal:
    """A terminal of twenty columns, and a stream that is shown there."""

    def __init__(self, folder: Path):
        self.own, self.ranks = os.openpty()
        tty.setraw(self.ranks)  # else each "\n" comes as two characters
        fcntl.ioctl(self.ranks, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
        self.log = folder / "rank0.log"
        self.stream = Stream("", self.ranks, LogFile(self.log), has_live_line=True)

    def after(self, data: bytes) -> str:
        self.stream.take(data)
        return self.said()

    def said(self) -> str:
        said = b""
        while select.select([self.own], [], [], 0.02)[0]:  # the kernel hands on what is written a moment later
            said += os.read(self.own, 2**16)
        return said.decode()


@pytest.fixture
def terminal(tmp_path):
    one = LiveTerminal(tmp_path)
    yield one
    os.close(one.own)
    os.close(one.ranks)


def test_live_line_when_a_bar_advances_then_each_state_is_shown_at_once_and_the_last_one_kept(terminal):
    assert terminal.after(b"10%") == "\r10%\x1b[K"
    assert terminal.after(b"\r20%") == "\r20%\x1b[K"
    assert terminal.after(b"\n") == "\r\x1b[K20%\n"
    assert terminal.after(b"done\n") == "done\n"
    assert terminal.log.read_text() == "20%\ndone\n"


def test_live_line_when_the_next_line_takes_its_place_then_it_is_gone(terminal):
    assert terminal.after(b"\r10%\r") == "\r10%\x1b[K"
    assert terminal.after(b"epoch 1\n20%") == "\r\x1b[Kepoch 1\n\r20%\x1b[K"
    assert terminal.log.read_text() == "epoch 1\n"


def test_live_line_when_it_has_control_characters_and_is_long_then_they_are_escaped_and_it_is_cut(terminal):
    assert terminal.after(b"\x1b[2J\x1b[31mred\x07" + b"x" * 20) == "\r\\x1b[2J\x1b[31mred\\x07xxxx\x1b[0m…\x1b[K"


def test_live_line_when_it_stands_still_then_it_is_not_ended(terminal):
    terminal.after(b"10%")
    terminal.stream.take_late(time.monotonic() + 60)
    assert terminal.said() == ""
    terminal.stream.take_unfinished()
    assert terminal.said() == "\r\x1b[K10%\n"


def test_log_when_it_grows_then_is_rotated(tmp_path, monkeypatch):
    monkeypatch.setattr(log_pump, "ROTATE_BYTES", 1000)
    log = LogFile(tmp_path / "rank0.log")
    for number in range(100):
        log.write(f"{number:04d} " + "x" * 44 + "\n")
    os.close(log.descriptor)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.log", "rank0.log.1"]
    assert (tmp_path / "rank0.log").read_text().splitlines()[-1].startswith("0099")
    assert (tmp_path / "rank0.log").stat().st_size <= 1000


@pytest.mark.parametrize("removed", ["rank0.log", ""])
def test_log_when_it_or_its_folder_is_removed_then_rotation_goes_on(removed, tmp_path, monkeypatch):
    monkeypatch.setattr(log_pump, "ROTATE_BYTES", 10)
    folder = tmp_path / "logs"
    folder.mkdir()
    log = LogFile(folder / "rank0.log")
    (folder / "rank0.log").unlink()
    if not removed:
        folder.rmdir()
    for number in range(3):
        log.write(f"line {number} of many\n")
    os.close(log.descriptor)
    assert not removed or (folder / "rank0.log").read_text() == "line 2 of many\n"


def test_log_when_its_folder_was_removed_before_the_first_output_then_that_is_shown(tmp_path, capfd):
    folder = tmp_path / "logs"
    folder.mkdir()
    with closing(shown_in_order(folder)) as logs:
        shutil.rmtree(folder)
        os.write(logs.descriptors_of(0)[0], b"hi\n")
    assert capfd.readouterr().err == "hi\n"


@pytest.mark.alone
def test_pump_when_ranks_talk_then_it_keeps_up(tmp_path, capfd):
    def voice_of(rank: int) -> Voice:
        return Voice(log=tmp_path / f"rank{rank}.log", consoles=(1, 2), prefix=f"[rank {rank}] ")

    logs = RankLogs(voice_of, range(2))
    lines = b"".join(b"step %d loss 0.5\n" % number for number in range(20_000))
    began = time.monotonic()
    for rank in range(2):
        os.write(logs.descriptors_of(rank)[0], lines[: len(lines) // 2])
        os.write(logs.descriptors_of(rank)[0], lines[len(lines) // 2 :])
    os.write(logs.descriptors_of(1)[1], b"oh\n")
    logs.close()
    # a million lines a minute are 17,000 a second
    assert time.monotonic() - began < 10
    shown = capfd.readouterr()
    assert shown.out.count("[rank 1] step") == shown.out.count("[rank 0] step") == 20_000
    assert shown.err == "[rank 1] oh\n"
    assert (tmp_path / "rank1.log").read_text().count("\n") == 20_001


def shown_in_order(folder: Path) -> RankLogs:
    return RankLogs(lambda rank: Voice(log=folder / f"rank{rank}.log", consoles=(2, 2)), range(1))


def test_pump_when_asked_to_catch_up_then_what_was_said_is_shown_in_its_order(tmp_path, capfd):
    with closing(shown_in_order(tmp_path)) as logs:
        out, err = logs.descriptors_of(0)
        os.write(out, b"one\n")
        logs.catch_up()
        assert capfd.readouterr() == ("", "one\n")
        os.write(err, b"two\n")
        os.write(out, b"thr")
        logs.catch_up()
        assert capfd.readouterr() == ("", "two\nthr\n")
    assert (tmp_path / "rank0.log").read_text() == "one\ntwo\nthr\n"


@pytest.mark.parametrize(("wanted", "shown"), [("", "red\n"), ("1", "\x1b[31mred\x1b[0m\x1b[0m\n")])
def test_pump_when_the_console_is_a_file_then_it_gets_colours_only_if_they_are_wanted(
    wanted, shown, tmp_path, capfd, monkeypatch
):
    monkeypatch.setenv("FORCE_COLOR", wanted)
    with closing(shown_in_order(tmp_path)) as logs:
        os.write(logs.descriptors_of(0)[0], b"\x1b[31mred\x1b[0m\n")
    assert capfd.readouterr().err == shown
    assert "\x1b[31mred" in (tmp_path / "rank0.log").read_text()


def test_pump_when_its_group_is_signalled_while_it_starts_then_all_is_shown(tmp_path, capfd):
    with closing(shown_in_order(tmp_path)) as logs:
        logs.start()
        for number in STOP_SIGNALS:
            os.kill(logs._pumps[0]._process.pid, number)  # its interpreter has not begun yet
        os.write(logs.descriptors_of(0)[0], b"last words\n")
    assert capfd.readouterr().err == "last words\n"


def test_pump_when_it_is_killed_then_another_shows_what_is_said_later(tmp_path, capfd):
    with closing(shown_in_order(tmp_path)) as logs:
        for text in ("one\n", "two\n"):
            os.write(logs.descriptors_of(0)[0], text.encode())
            logs.catch_up()
            assert capfd.readouterr().err == text
            logs._pumps[0]._process.kill()
            logs._pumps[0]._process.wait()
        os.write(logs.descriptors_of(0)[0], b"last words\n")
    assert capfd.readouterr().err == "last words\n"
    assert (tmp_path / "rank0.log").read_text() == "one\ntwo\nlast words\n"


def test_pump_when_it_is_stopped_then_the_end_is_not_held_up(tmp_path, capfd):
    logs = shown_in_order(tmp_path)
    os.write(logs.descriptors_of(0)[0], b"one\n")
    logs.catch_up()
    process = logs._pumps[0]._process
    process.send_signal(signal.SIGSTOP)
    closing_thread = threading.Thread(target=logs.close)
    closing_thread.start()
    closing_thread.join(10)
    has_ended = not closing_thread.is_alive()
    process.send_signal(signal.SIGCONT)  # so that a failure ends too
    closing_thread.join()
    assert has_ended
    assert capfd.readouterr().err == "one\n"


def test_pump_when_nothing_was_said_then_it_is_not_started(tmp_path):
    with closing(shown_in_order(tmp_path)) as logs:
        logs.go_on()
        logs.catch_up()
        assert logs.waiting_for
    assert (tmp_path / "rank0.log").read_text() == ""


def test_pump_when_a_child_of_a_rank_holds_the_pipe_then_the_end_is_not_held_up_for_long(tmp_path, capfd):
    logs = shown_in_order(tmp_path)
    out, _ = logs.descriptors_of(0)
    child = subprocess.Popen([sys.executable, "-c", "import time; print('hi', flush=True); time.sleep(60)"], stdout=out)
    select.select(logs.waiting_for, [], [])
    began = time.monotonic()
    logs.close()
    seconds = time.monotonic() - began
    child.kill()
    child.wait()
    assert seconds < 20
    assert capfd.readouterr().err == "hi\n"


@pytest.mark.parametrize("first", ["", "hi\n"])
def test_pump_when_a_program_is_left_running_then_it_can_still_write(first, tmp_path, capfd):
    logs = shown_in_order(tmp_path)
    out, _ = logs.descriptors_of(0)
    command = ["sh", "-c", f"printf '{first}'; read line; echo $line; echo $line"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out) as child:
        if first:
            select.select(logs.waiting_for, [], [])
        logs.close()
        child.communicate(b"late\n")
    assert child.returncode == 0
    assert capfd.readouterr().err == first
    wait_until(lambda: (tmp_path / "rank0.log").read_text() == f"{first}late\nlate\n", "the log of what it said")
