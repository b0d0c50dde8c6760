"""The leak check itself: what it must find."""

import os
import socket
import subprocess
import sys
import threading

import psutil
import pytest

from tests import leaks


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "GRACE_SECONDS", 0.05)


def test_leaks_when_nothing_is_left_then_none_is_found() -> None:
    assert leaks.find_leaks(leaks.take_snapshot()) == []


def test_leaks_when_a_process_runs_on_then_it_is_named_and_ended() -> None:
    before = leaks.take_snapshot()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        found = leaks.find_leaks(before)
        leaks.clean_up(before)
        assert not psutil.pid_exists(child.pid)
    assert found == [f"process {child.pid} is still running: {sys.executable} -c import time; time.sleep(60)"]


def test_leaks_when_a_socket_listens_then_its_port_is_named() -> None:
    before = leaks.take_snapshot()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert leaks.find_leaks(before) == [f"127.0.0.1:{server.getsockname()[1]} is still listening"]


def test_leaks_when_the_environment_changed_then_it_is_named_and_put_back() -> None:
    before = leaks.take_snapshot()
    os.environ["DURE_LEFT_BEHIND"] = "1"
    found = leaks.find_leaks(before)
    leaks.clean_up(before)
    assert found == ["environment variable DURE_LEFT_BEHIND was changed"]
    assert "DURE_LEFT_BEHIND" not in os.environ


def test_leaks_when_a_thread_runs_on_then_it_is_named() -> None:
    before, stop = leaks.take_snapshot(), threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()
    found = leaks.find_leaks(before)
    stop.set()
    thread.join()
    assert found == ["thread forgotten is still running"]


def test_leaks_when_a_process_group_is_left_then_it_is_destroyed() -> None:
    import torch.distributed as dist

    before = leaks.take_snapshot()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = leaks.find_leaks(before)
    leaks.clean_up(before)
    assert "the default process group was not destroyed" in found
    assert not dist.is_initialized()
