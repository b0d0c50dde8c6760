"""Ranks' lines where Python's `sys.stderr` leads somewhere else than descriptor 2, as in a notebook."""

import contextlib
import io
import os
import sys

import pytest

from dure.launch.logs.log_pump import LogFile, Stream
from dure.launch.logs.rank_logs import RankLogs, Relay, Voice
from dure.terminal import is_notebook, own_descriptor
from tests.training.session.test_session import Small, train


def test_descriptor_of_stderr_when_it_is_replaced_then_there_is_none():
    assert own_descriptor(io.StringIO()) is None
    assert own_descriptor(None) == 2
    with os.fdopen(os.dup(2), "w") as other:
        assert own_descriptor(other) is None
    with os.fdopen(2, "w", closefd=False) as same:
        assert own_descriptor(same) == 2


def test_relay_when_lines_come_in_parts_then_whole_characters_are_written():
    stream = io.StringIO()
    relay = Relay(stream)
    data = "epoch 1 … 두레\n".encode()
    for begin in range(0, len(data), 5):
        os.write(relay.writing, data[begin : begin + 5])
        relay.pass_on()
    relay.close()
    assert stream.getvalue() == "epoch 1 … 두레\n"


def test_relay_when_its_stream_is_closed_then_lines_are_lost_and_nothing_else():
    stream = io.StringIO()
    stream.close()
    relay = Relay(stream)
    os.write(relay.writing, b"lost\n")
    relay.pass_on()
    relay.close()


def test_logs_when_more_is_said_than_a_pipe_holds_then_all_of_it_is_relayed(tmp_path):
    stream = io.StringIO()
    relay = Relay(stream)
    consoles = (relay.writing, relay.writing)
    logs = RankLogs(lambda rank: Voice(log=tmp_path / "rank0.log", consoles=consoles), range(1), relay)
    logs.start()
    with contextlib.closing(logs):
        for number in range(300):
            os.write(logs.descriptors_of(0)[0], f"{number:03d} {'x' * 996}\n".encode())
            if number % 100 == 50:
                logs.catch_up()
                assert stream.getvalue().endswith(f"{number:03d} {'x' * 996}\n")
    assert [line[:3] for line in stream.getvalue().splitlines()] == [f"{number:03d}" for number in range(300)]


def test_run_when_stderr_is_redirected_in_python_then_its_talk_goes_there(tmp_path, capfd):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        train(Small, tmp_path, start="fork", quiet=False, name="run")
    assert "Small: single on 1 x cpu" in said.getvalue()
    assert capfd.readouterr().err == ""


class OutStream(io.StringIO):
    """Stands for the stream of a kernel, which is known by its module."""


OutStream.__module__ = "ipykernel.iostream"


def test_progress_when_it_is_shown_in_a_notebook_then_blanks_stand_for_what_cannot_be_erased(tmp_path, monkeypatch):
    stream = OutStream()
    assert is_notebook(stream)
    monkeypatch.setattr(sys, "stderr", stream)
    train(Small, tmp_path, quiet=False)
    assert "\x1b[K" not in stream.getvalue()
    begin, line, blanks, said = stream.getvalue().rstrip("\n").rpartition("\n")[2].split("\r")[-4:]
    assert (begin, blanks) == ("", " " * len(blanks))
    assert said.startswith("epoch 1  train loss ")
    assert len(blanks) >= len(line.replace("\x1b[36m", "").replace("\x1b[0m", ""))


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_live_line_when_nothing_erases_then_blanks_do_and_not_each_state_is_kept(pipe, tmp_path, monkeypatch):
    stream = Stream("", pipe[1], LogFile(tmp_path / "rank0.log"), has_live_line=True, can_erase=False)
    stream.take(b"\r10%")
    stream.take(b"\r20%")  # too soon
    monkeypatch.setattr("dure.launch.logs.log_pump._REDRAW_SECONDS", 0.0)
    stream.take(b"\r30% ok")
    stream.take(b"\r\x1b[K")
    stream.take(b"done\n")
    assert os.read(pipe[0], 1000).decode() == "\r10%\r   \r30% ok\r      \r\r\rdone\n"
